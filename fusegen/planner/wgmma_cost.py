"""How long a plan by wgmma should take: rounds of tiles at the rate of the tensor cores, and what they wait for.

The constants are fitted to one H200 and 3 shapes (see rules/wgmma.py), where they put the candidates in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusegen.graph import Extent, Kind, Node
from fusegen.planner.model import Cost, Traffic
from fusegen.planner.product_cost import floors, product_traffic
from fusegen.planner.wgmma import WgmmaPlan
from fusegen.products import Split, split
from fusegen.types import f32, size_of

# Of the data sheet's DRAM rate, what tiles that are mostly empty reach: SwiGLU at 8 x 14336 x 4096 took 80 us in halves
# and 104 by turns, and its bytes are those of a copy of 56 us.
STREAM_SHARE = 0.6
RATE = 0.83  # of the data sheet's matrix rate, inside a round: 776 TFLOP/s at 4096^3, whose rounds are 0.97 full
TURNS = 1.02  # 128 x 128 tiles against 128 x 256: more goes through shared memory
HOT_US = 400.0  # launches this long are held down by the power limit
HOT_HALVES = 1.04  # and there larger tiles in halves take more of it
# A left factor by way of registers: 4096 x 6144 x 4096 took, of the bare product's time, 1.00 behind an RMSNorm without
# a gain, 1.02 with one of the factor's type and 1.07 with one of f32, 1.05 behind a bias, 1.75 behind a bias and GELU.
SCALED = 1.02
PREPARED = 0.06  # for each issue slot of an element
CLUSTERS = 1.005
# f32 is twice as many bytes for as many products, and half as many of them a second: what brings less is faster. 4096^3
# took 395 us by turns, 368 in clusters and 333 in halves, whatever else; 8192^3 3132, 3269 and 3763, in clusters 3293,
# and by 16 rows of tiles besides 3083. cuBLAS took 333 and 2662.
TURNS_F32 = 1.12
CLUSTERS_F32 = 0.99
GROUPS_F32 = 0.995
# Blocks that run together take lines of both factors from the L2 cache, fewest where their tiles are as high as wide.
# Halves take a quarter more by 8 rows of tiles than by 16: RMSNorm's products took 0.4 to 0.6 % longer. A tenth more
# showed nothing.
SPREAD = 0.02
SPREAD_FREE = 1.1
STORED = 6.5  # issue slots, in time, to store an element; 128 x 256 of them took 1800 to 2500 cycles, all in all
START_US = 6.0  # launch, first slices from DRAM, last boxes stored
GHZ = 1.7  # of an SM among products
SPECIAL = 8  # issue slots that one exponential or division keeps its unit for
UNKNOWN = Cost(Traffic((), 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0), 0.0, 0.0, "memory", 0, 0, 0)  # of a plan not yet costed
REGISTERS = 168  # of a thread as launched; two groups then take more from the third


def estimate(plan: WgmmaPlan) -> Cost:
    """What the planner ranks by."""
    graph, target, tile = plan.graph, plan.target, plan.tile
    parts = split(plan.hoisted)
    moved = product_traffic(graph, target, plan.band, tile.group)
    dims = [size_of(graph.shape[axis], graph.sizes) for dim in plan.row_dims for axis in dim.axes]
    extents = (dims[0], graph.rows // max(1, dims[0])) if plan.batched else (graph.rows,)
    rounds = -(-plan.tiles(*extents) * tile.cluster // target.sms)
    per_sm = target.product_tflops(plan.dtype) * 1e6 * RATE / target.sms  # operations per us
    products = 2 * tile.rows * tile.cols * plan.depth / per_sm * preparing(plan, parts)
    issued = STORED + slots(plan, parts.epilogue) / len(plan.spans)  # an element passes its own span's alone
    epilogue = tile.rows * plan.width * issued / (target.f32_lanes * GHZ * 1e3)
    turns = tile.schedule == "turns"
    f32_factors = plan.dtype is f32
    slower = TURNS_F32 if f32_factors else TURNS
    time = rounds * products * slower + epilogue if turns else rounds * (products + epilogue)
    if time > HOT_US and not turns:
        time *= HOT_HALVES
    if tile.cluster > 1:
        time *= CLUSTERS_F32 if f32_factors else CLUSTERS
    if f32_factors and tile.group > 8:
        time *= GROUPS_F32
    time *= 1.0 + SPREAD * max(0.0, spread(plan, *extents) - SPREAD_FREE)
    limits = floors(target, moved, plan.dtype)
    return Cost(
        traffic=moved,
        floor_us=max(limits["memory"], limits["products"]),
        time_us=START_US + max(time, limits["memory"] / STREAM_SHARE),
        bound="compute" if limits["products"] > limits["memory"] else "memory",
        in_flight_bytes=tile.stages * tile.stage_bytes,
        registers=REGISTERS,
        blocks_per_sm=1,
    )


def spread(plan: WgmmaPlan, *extents: int) -> float:
    """Lines of the factors that blocks take together, next to those of a square as large."""
    area = plan.blocks(*extents) * plan.tile.rows * plan.tile.cols
    height = min(plan.tile.group * plan.band, -(-extents[-1] // plan.band) * plan.band)
    return (height + area / height) / (2.0 * math.sqrt(area))


def preparing(plan: WgmmaPlan, parts: Split) -> float:
    """What the products' time is multiplied by where the left factor goes through registers."""
    if plan.fragments is None or not plan.fragments.changes:
        return 1.0
    return SCALED if plan.fragments.scale else 1.0 + PREPARED * slots(plan, parts.lefts[0].body)


def slots(plan: WgmmaPlan, nodes: Iterable[Node]) -> float:
    """Issue slots that `nodes` take for one element."""
    listed = [n for n in nodes if n.op.kind is Kind.MAP and plan.hoisted.extents[n] is Extent.ELEMENT]
    special = sum(SPECIAL / 4 for n in listed if n.op.flops >= 4)
    return sum(n.op.issued for n in listed) + special
