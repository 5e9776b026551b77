"""How long a plan by tcgen05 should take: by the data sheet, not measured.

The limits are those of `wgmma_cost`, whose constants are an H200's: rounds of tiles at the rate of the tensor cores,
what two warpgroups make of the sums meanwhile, the bytes that come from DRAM, and the lines of the factors that all
blocks take from the L2 cache. A narrow tile's left factor is read for few products: below 128 columns a slice is taken
to need as long as with 128. The tensor cores read both factors from shared memory, of which an SM has 128 bytes a cycle
(CUDA C++ Programming Guide, "Shared Memory", 32 banks of 32 bits): for a tile of 128 x 256 in bf16 three quarters of
that, and for 128 x 128 all of it. A pair's blocks read, and bring, half as much of the right factor.
"""

from __future__ import annotations

from fusegen.language.products import split
from fusegen.language.types import size_of
from fusegen.planner.model import Cost
from fusegen.planner.products.gemm_duration import L2_GBS
from fusegen.planner.products.product_cost import floors, product_traffic
from fusegen.planner.products.wgmma import LAUNCH_REGISTERS, WgmmaWork
from fusegen.planner.products.wgmma_cost import (
    CLUSTER_US,
    ISSUED_SLOTS,
    LOADED_US,
    NARROW_FACTOR,
    OVERLAP_EXPONENT,
    PUSHED_OUT_SHARE,
    SM_GHZ,
    START_US,
    STORED_SLOTS,
    WIDE_COLS,
    askew,
    counted,
    slots,
)
from fusegen.planner.rows.duration import COPY_SHARE
from fusegen.planner.tile import LINE_BYTES
from fusegen.planner.time import overlapped

RATE_SHARE = 0.8  # of the data sheet's: a guess, until a kernel has run
SHARED_BYTES = 128  # of shared memory, that an SM reads in a cycle
GROUPS = 2  # of warps that make something of sums, each of a tile of its own


def estimate(work: WgmmaWork) -> Cost:
    """What the planner ranks by."""
    graph, target, tile = work.graph, work.target, work.tile
    moved = product_traffic(graph, target, work.band, tile.group)
    dims = [size_of(graph.shape[axis], graph.sizes) for dim in work.row_dims for axis in dim.axes]
    extents = (dims[0], graph.rows // max(1, dims[0])) if work.batched else (graph.rows,)
    memory = moved.ideal + PUSHED_OUT_SHARE * min(moved.ideal, target.l2_bytes)
    waits = (
        multiplying(work, *extents),
        memory / (target.dram_gbs * COPY_SHARE * 1e3),
        counted(work, *extents) * lines(work) / (L2_GBS * 1e3),
        rounds(work, *extents) * work.steps * tile.stage_bytes / (SHARED_BYTES * SM_GHZ * 1e3),
    )
    limits = floors(target, moved, work.dtype)
    return Cost(
        traffic=moved,
        floor_us=max(limits["memory"], limits["products"]),
        time_us=START_US + CLUSTER_US * tile.pair + overlapped(waits, OVERLAP_EXPONENT),
        bound="compute" if limits["products"] > limits["memory"] else "memory",
        in_flight_bytes=tile.stages * tile.stage_bytes,
        registers=LAUNCH_REGISTERS,
        blocks_per_sm=1,
    )


def rounds(work: WgmmaWork, *extents: int) -> int:
    """Tiles that a block, or a pair, takes one after another."""
    return -(-counted(work, *extents) // (work.target.sms // work.tile.cluster))


def lines(work: WgmmaWork) -> float:
    """Bytes of the factors that a tile's blocks take from the L2 cache, lines that start between sectors as more."""
    left = work.tile.cluster * work.tile.rows * askew(work, work.left[0])
    rights = [askew(work, found) for output_group in work.output_groups for found in output_group.rights]
    return (left + work.width * sum(rights) / len(work.output_groups)) * LINE_BYTES * work.slices


def multiplying(work: WgmmaWork, *extents: int) -> float:
    """Rounds of tiles, in us, and what is made of the last one's sums; where that takes longer than products, it is
    what rounds take."""
    target, tile = work.target, work.tile
    per_sm = target.product_tflops(work.dtype) * 1e6 * RATE_SHARE / target.sms  # operations per us
    products = work.steps * 2 * tile.rows * tile.cols * work.line / per_sm
    if tile.cols < WIDE_COLS:
        products *= NARROW_FACTOR * WIDE_COLS / tile.cols
    issued = STORED_SLOTS + slots(work, split(work.hoisted).epilogue) / len(work.output_groups)
    made = ISSUED_SLOTS * tile.rows * work.finished * issued / (target.f32_lanes * SM_GHZ * 1e3)
    turns = rounds(work, *extents)
    time = max(turns * products + made, products + turns * made / GROUPS)
    late = any(
        found.access.strided and found.transport == "plain"
        for output_group in work.output_groups
        for found in output_group.loads
    )
    return time + LOADED_US * late
