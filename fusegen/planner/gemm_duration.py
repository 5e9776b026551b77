"""How long a plan of products should take: what candidates are ranked by.

Two limits that overlap: bytes, at the rate that a copy reaches; and tiles, wave after wave, at the rate at which warps
multiply what they load. The constants are fitted to some 700 candidates of 14 shapes measured on an H200 (cold L2,
medians of 10, bf16, 4.25 TB/s of copy rate): 1 to 16384 rows of 4096 x 4096, gated and normed chains among them. On
other GPUs they stand for want of measurements; what is taken from a target are its facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.graph import Graph
from fusegen.planner.duration import COPY_SHARE, LAUNCH_US, resident_blocks
from fusegen.planner.gemm import MMA, Atom, GemmTile, shared_bytes
from fusegen.planner.model import Cost
from fusegen.planner.product_cost import floors, product_traffic
from fusegen.targets.base import Target

# ---- bytes
# A launch that finds the L2 full of what others wrote pushes out as much as it reads: 8 x 4096 x 4096 took 16.2 us for
# 33.7 MB, of which a copy's rate makes 8.
PUSHED_OUT = 0.9
SEGMENT = {16: 1.6, 32: 1.25, 64: 1.07}  # time of a right factor that is read so many bytes at a time; from 128 on 1
# ---- multiplying
MATRIX_SHARE = 0.37  # of the data sheet's rate, what warps of 64 x 64 reach: 345 TFLOP/s on an H200, all told
FRAGMENT = 22.0  # loading fragments of w elements takes FRAGMENT / w of the time of multiplying them
ENOUGH = 5.6  # warps of an SM: with fewer, what each waits for is not hidden
PREPARED = 60.0  # preparing the left operand's slices for c columns takes PREPARED / c of the time of multiplying them
TILE_US = 2.5  # before a tile's first product and behind its last, where no other block hides it
# ---- streams
WARP_GBS = 9.0  # what one warp takes from memory through its own ring
WARP_PREPARED_GBS = 5.0  # the same where it prepares the left operand
FIRST_US = 1.2  # from the first load to the first product
ADD_US = 0.6  # adding up the teams' sums
CLUSTER_US = 2.2  # more for each doubling of a cluster
OVERLAP = 4.0  # the norm's exponent


@dataclass(frozen=True, slots=True)
class Work:
    """What `estimate` needs of a candidate."""

    tile: GemmTile
    atom: Atom
    products: int
    across: int  # tiles side by side
    depth: int
    along: bool  # the right factors' neighbours in memory differ in depth
    prepared: bool  # has the left operand a prologue?
    statistics: int


def gemm_registers(tile: GemmTile, atom: Atom, products: int) -> int:
    """Registers of one thread: its sums, two turns of fragments, addresses, and what a deep slice, whose loop is
    unrolled whole, loads ahead."""
    lanes = 32 if atom == MMA else 64
    sums = products * tile.warp_rows * tile.warp_cols // lanes
    fragments = (tile.warp_rows + products * tile.warp_cols) * atom.depth * 2 // (2 * lanes)
    return 56 + sums + fragments * max(1, tile.depth // (4 * atom.depth))


def estimate(graph: Graph, target: Target, work: Work) -> Cost:
    """The time of one launch at the graph's sizes, and what bounds it."""
    tile = work.tile
    moved = product_traffic(graph, target, tile.rows, tile.group)
    room = shared_bytes(tile, work.products, work.statistics)
    registers = min(target.registers_per_thread, gemm_registers(tile, work.atom, work.products))
    resident = max(1, resident_blocks(target, tile.warps * tile.teams * target.warp, registers, room))
    blocks = -(-max(1, graph.rows) // tile.rows) * work.across * tile.cluster
    segment = 2 * (tile.depth if work.along else tile.cols)
    pushed = PUSHED_OUT * min(moved.ideal, target.l2_bytes)  # fitted with each byte counted once
    memory_us = (moved.ideal + pushed) / (target.dram_gbs * COPY_SHARE * 1e3) * SEGMENT.get(segment, 1.0)
    working_us = streams_us if tile.teams > 1 else multiply_us
    tiles_us = working_us(target, work, blocks, resident)
    tiles_us += FIRST_US + (ADD_US if tile.shares > 1 else 0.0)
    least = floors(target, moved)
    return Cost(
        traffic=moved,
        floor_us=max(least.values()),
        time_us=LAUNCH_US / 2
        + CLUSTER_US * math.log2(tile.cluster)
        + (memory_us**OVERLAP + tiles_us**OVERLAP) ** (1 / OVERLAP),
        bound="memory" if least["memory"] >= least["products"] else "compute",
        in_flight_bytes=resident * room,
        registers=registers,
        blocks_per_sm=resident,
    )


def multiply_us(target: Target, work: Work, blocks: int, resident: int) -> float:
    """Tiles, wave after wave; the last wave has as many on an SM as it needs."""
    tile = work.tile
    rate = MATRIX_SHARE * target.matrix_tflops * 1e6 / target.sms  # flop per us of one SM
    fragments = FRAGMENT * (1 / tile.warp_rows + 1 / (tile.warp_cols * work.products)) * 32 / 22
    share = (1 + FRAGMENT * (2 / 64) * 32 / 22) / (1 + fragments)
    flops = 2.0 * tile.rows * tile.cols * work.products * work.depth / tile.cluster
    prepared = PREPARED / (tile.cols * work.products) if work.prepared else 0.0
    tile_us = flops / (rate * share) * (1 + prepared)
    full, rest = divmod(blocks, target.sms * resident)
    last = -(-rest // target.sms)
    time = full * resident * wave_share(work, resident) * tile_us + last * wave_share(work, last) * tile_us
    return time + TILE_US * (full + bool(rest)) / max(1, resident - 1)


def wave_share(work: Work, blocks: int) -> float:
    """How much longer tiles take where their warps are too few to hide what each waits for."""
    return max(1.0, ENOUGH / max(1, blocks * work.tile.warps))


def streams_us(target: Target, work: Work, blocks: int, resident: int) -> float:
    """What the warps of the busiest SM take, each from its own ring."""
    tile = work.tile
    gbs = WARP_PREPARED_GBS if work.prepared else WARP_GBS
    bytes_each = 2.0 * (tile.rows + tile.cols * work.products) * work.depth / tile.shares
    rounds = max(1.0, blocks / (target.sms * resident))
    return bytes_each * rounds / (gbs * 1e3) / min(1.0, 2 * (tile.stages - 1) / tile.stages / 1.3)
