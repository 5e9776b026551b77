"""How long a plan of products should take: what candidates are ranked by.

Two limits that overlap: bytes, at the rate that a copy reaches; and tiles, wave after wave, at the rate at which warps
multiply what they load. Streams have a third, how soon what they ask for is there. The constants are fitted to what
an H200 took (cold L2, medians of 7 to 15, bf16, 4.25 TB/s of copy rate); those of streams to 142 candidates of 8 shapes
of 1 to 64 rows, which they meet within 4 % (rms). On other GPUs they stand for want of measurements; what is taken from
a target are its facts. Products by MFMA have a cost of their own, by documents: `products.mfma_cost`.

Streams are bound by how near to each other the bytes lie that are on their way: the L2 cache is full of what others
wrote, and writes some of it back while it takes in what is read. So blocks of few columns stream faster: NEAR_BYTES and
FAR_SHARE. Streams are near to what their way of reading costs. What else was tried is in docs/measurements.md,
"Products of few rows".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from fusegen.language.graph import Graph
from fusegen.language.types import F8, DType, f32, size_of
from fusegen.planner.model import Access, Cost
from fusegen.planner.products.gemm import GemmTile, run_of, shared_bytes, tile_elements
from fusegen.planner.products.mfma_cost import mfma_us
from fusegen.planner.products.product_cost import again_read, floors, group_count, product_traffic, tiles_down
from fusegen.planner.products.product_work import ProductWork
from fusegen.planner.rows.duration import COPY_SHARE, LAUNCH_US, resident_blocks
from fusegen.planner.time import overlapped
from fusegen.targets.atoms import F32_BITS, Atom
from fusegen.targets.base import Target
from fusegen.targets.compute_unit import unit_of

# ---- bytes
# A launch that finds the L2 full of what others wrote pushes out as much as it reads: 8 x 4096 x 4096 took 16.2 us for
# 33.7 MB, of which a copy's rate makes 8.
PUSHED_OUT_SHARE = 0.9
# where the L2 is told that the right factors are read once: 64 rows took 19.6 us, not 23.0
PUSHED_OUT_EVICT_FIRST_SHARE = 0.45
# time of a right factor that is read so many bytes at a time; from 128 on 1
SEGMENT_FACTOR = {16: 1.6, 32: 1.25, 64: 1.07}
# Lines of the factors that all blocks take from the L2 cache (fitted to plans by wgmma). They take longer where they
# don't start at sectors: 1024 x 1024 x 1000 took 12.4 us, and 1024^3 9.3.
L2_GBS = 18000.0
ASKEW_FACTOR = 3.1
SECTOR_BYTES = 32
# Of groups of rows that take several tiles, what each further tile adds to the time of the bytes: it reads the group's
# right factor again, from the L2 cache. 1024 rows in 64 groups of random lengths took 159 us in tiles of 16 x 32, and
# 143 of 32 x 32; 2048 rows 168 in those and 152 by wgmma (H200, SwiGLU of 1024 columns, K 2048, bf16).
AGAIN_SHARE = 0.3
# And where slice-K groups share K, by the slices of each: a tile's first ones are waited for, and its sums added up. Of
# 512 to 2048 rows in 64 groups, 2048 columns and a K of 1024, and SwiGLU of 1024 and 2048, candidates took 2 % longer
# than without it with 16 slices a slice-K group, 6 % with 8, 10 to 20 % with 4 (H200, bf16).
FEW_SLICES_SHARE = 0.45
# ---- multiplying
# of the data sheet's rate, where that takes warpgroups: 6.03 cycles an instruction on an H200, not 4
MMA_SYNC_SHARE = 0.66
# of 8-bit floats there, which become halves before they are multiplied (NVIDIA/cutlass#1986): predicted, not measured
BY_HALVES_SHARE = 0.5
PROMOTED_REGISTERS = (
    16  # for sums of an instruction on their way to a thread's own: without them ptxas spilled 20 bytes
)
SUMS_US = 2.5  # from the last product of a tile of 128 x 256 to its end, where no other block hides it,
THROUGH_US = 1.5  # and more where sums go through shared memory
# Where copies are interleaved with the products these take longer, and slices are waited for less. At 4096 and 16384
# rows of 4096 x 4096, bf16 and f16, by turns, launches took 0.966 to 0.974 of one that is not persistent, with slices
# of 64, and 0.977 to 0.996 with slices of 32. The estimate has the start of one tile in it, and that of others the
# start of each.
PERSISTENT_FACTOR = 1.015
PERSISTENT_SLICE_US = 0.02
# of the SMs, that clusters of more than 2 find side by side: 32 of 4 took two waves of 132 SMs
CLUSTER_ROOM_SHARE = 0.95
# An element that one thread loads by itself on its way to shared memory; it waits for each slice's. Of 9 candidates at
# 333 x 1001 x 1003 and one at 2048 x 4095 x 4097, bf16: 23.2 and 534 us at best, cuBLAS 22.9 and 549.
ELEMENT_US = 0.023
ADD_US = 1.35  # adding up the sums of a cluster's blocks
CLUSTER_US = 2.2  # more for each doubling of a cluster of streams
OVERLAP_EXPONENT = 2.5  # the norm's exponent
# ---- streams
STREAM_US = 6.7  # launch, the first loads' way through a cold GPU, the last sums' way out; an empty kernel took 3.3
# as PUSHED_OUT_SHARE where the L2 is not told: 8 x 4096 x 4096 took 17.1 us, and 14.7 where it is
STREAMED_OUT_SHARE = 0.3
TOGETHER_BYTES = 1024  # bytes of a row of the right factor that a block's slice-K groups read side by side,
APART_SHARE = 0.012  # and what each halving of them adds to the time of the bytes
# of right factors that a block reads: with more, blocks that run side by side read far apart,
NEAR_BYTES = 128 * 1024
FAR_SHARE = 0.02  # and each doubling adds to the time of the bytes
SHARED_GBS = 90.0  # at which one SM gets both factors, where other blocks have brought the left one to the L2
LATENCY_US = 0.92  # from a load to its data, with all SMs loading
BLOCK_US = 3.3  # a block's time before its first slice and behind its last
SLICE_US = 0.12  # a slice-K group's time for a slice, and more
PIECE_US = 0.016  # for every 16 x 8 sums of 64 products, of 32 as tf32
PREPARED_US = 0.34  # and for every 8 x 64 elements of the left operand that it prepares
# Where right factors are codes: fitted to candidates of 4 and 8 bits and 1 to 16 rows on an H100, 9 shapes, which they
# meet within 5 % (rms). Of the same candidates what comes first took 1.8 % more than the best in the mean, and 2.9 %
# without them; others were not timed. 8 bits took 34.1 us in rings of 4 for 8 groups, which came first, and 31.9 in
# rings of 3 for 4; one row of 7168 x 20480 in 4 bits takes 38.9, and took 37.1 before (docs/measurements.md).
WIDENED_US = 0.05  # more for 16 columns of a slice of 128 codes, to widen them
# Where a warp has sums of so many elements twice, of a group of codes and of all, registers spill: on an H200, 64 rows
# of 8192 x 8192 in tiles of 64 x 32 took 67 us where 33 were said, 4096 rows 3840 where 1706 were, and 32 rows in tiles
# of 32 x 64 31 where 20 were.
SPILLED_SUMS, SPILLED_ROWS, SPILLED_FACTOR, FEWER_SPILLED_FACTOR = 2048, 32, 2.0, 1.55
CROWDED_BYTES = 64 * 1024  # on their way to an SM: with more, reads are slower,
CROWDED_SHARE = 0.06  # and each doubling adds to the time of the bytes
ROUND_US = 1.0  # for every round of blocks behind the first, whose first slices nothing hides
STREAM_OVERLAP_EXPONENT = 5.0
# Of an SM, in grouped products: for 16 columns of 128 codes, for each row and each further scale of these, for a slice,
# and for a warp before its first slice and behind its last. Fitted to 72 candidates of 6 chains with codes of 4 bits,
# one row to 16 an expert, on an H200, which they meet within 12 % (rms); what comes first took 0.1 % more than the best
# in the mean, 1 % at most. Before, slices of 64 were chosen where those of 128 took 10 to 12 % less.
WIDEN_CYCLES, ROW_CYCLES, SCALE_CYCLES = 26.0, 3.0, 15.5
WIDEN_SLICE_CYCLES, WIDEN_WARP_CYCLES = 40.0, 300.0
MORE_ROWS_FACTORS = {16: 1.0, 32: 1.5, 64: 2.4}  # up to so many rows: an SM has fewer warps then
# A lane holds a column's scales of a slice, and of the next one: MXFP4 of 8 rows took 150 us in slices that have two
# and 171 in slices of four.
MOST_SCALES, SCALES_FACTOR = 2, 1.12


@dataclass(frozen=True, slots=True)
class AtomPace:
    """How fast tiles of one kind of instruction are."""

    share: float  # of the instruction's rate, what warps of 64 x 64 in tiles of 128 x 256 reach
    fragment: float  # loading fragments of w elements takes fragment / w of the time of multiplying them,
    copied: float  # copying slices of w elements copied / w,
    prepared: float  # and preparing the left operand's slices for c columns prepared / c
    enough: float  # warps of an SM: with fewer, what each waits for is not hidden
    tile_us: float  # before a tile's first product, where no other block hides it
    first_us: float  # before the first tile's
    slice_us: float  # that a slice waits for, where no other block hides it
    count_us: float  # that a warp takes to find out how many elements of its chunks there are

    def burden(self, rows: int, cols: int, tile_rows: int, tile_cols: int, narrow: float = 1.0) -> float:
        """The time of multiplying, loading and copying, against that of multiplying, for a warp's part of a tile;
        `narrow` copies bring what one of 16 bytes would."""
        fragments = self.fragment * (1 / rows + 1 / cols)
        return 1 + fragments + self.copied * narrow * (1 / tile_rows + 1 / tile_cols)


# Fitted, with ADD_US, SUMS_US and OVERLAP_EXPONENT, to measurements of gelu(x @ w.T + bias), bf16, on an H200: up to 15
# tiles of each of 35 shapes, of 65 to 16384 rows and K from 256 to 14336. It meets them within 6 % (rms), and what
# comes first took 1.4 % more than the best tile in the mean. Loading fragments is in `share`. Where the power limit
# slows the GPU down, tiles take up to 18 % longer. `prepared` is of 8 normed and gated chains.
MMA_PACE = AtomPace(
    share=1.0,
    fragment=0.0,
    copied=48.0,
    prepared=50.0,
    enough=3.3,
    tile_us=1.1,
    first_us=5.0,
    slice_us=0.056,
    count_us=0.0012,
)
TF32_PACE = replace(MMA_PACE, share=0.87)  # 219 TFLOP/s at 4096^3 where lines run along K, 190 elsewhere
WMMA_PACE = AtomPace(  # of RDNA: assumed, and held against nothing
    share=0.37,
    fragment=32.0,
    copied=0.0,
    prepared=60.0,
    enough=5.6,
    tile_us=2.5,
    first_us=1.2,
    slice_us=0.0,
    count_us=0.0,
)


def lying(access: Access, graph: Graph) -> float:
    """How much longer lines of a factor take from the L2 cache, if it lies as its shape says."""
    return ASKEW_FACTOR if size_of(access.shape[access.line], graph.sizes) * access.dtype.bytes % SECTOR_BYTES else 1.0


def gemm_registers(tile: GemmTile, atom: Atom, dtype: DType, products: int) -> int:
    """Registers of one thread: its sums, two turns of fragments, addresses, and what a deep slice, whose loop is
    unrolled whole, loads ahead."""
    sums = products * tile.accumulators(atom)
    fragments = (tile.warp_rows + products * tile.warp_cols) * atom.k * dtype.bytes // (2 * atom.threads)
    if atom.repeated:
        fragments *= atom.threads // atom.rows
    promoted = PROMOTED_REGISTERS if atom.sum_bits < F32_BITS else 0
    return 56 + promoted + sums + fragments * max(1, tile.k // (4 * atom.k))


def estimate(graph: Graph, target: Target, work: ProductWork) -> Cost:
    """The time of one launch at the graph's sizes, and what bounds it."""
    tile = work.tile
    moved = product_traffic(graph, target, tile.rows, tile.group)
    run = run_of(tile, work.atom, work.along)
    room = shared_bytes(tile, work.dtype, work.products, work.statistics, run, work.share)
    needed = gemm_registers(tile, work.atom, work.dtype, work.products) + work.unscaled
    registers = min(target.registers_per_thread, needed)
    resident = max(1, resident_blocks(target, tile.warps * tile.slice_k * target.warp, registers, room))
    blocks = tiles_down(graph, tile.rows) * work.across * tile.cluster
    segment = int(work.dtype.bytes * work.share * (tile.k if work.along else tile.cols))
    share = SEGMENT_FACTOR.get(segment, 1.0) / (target.dram_gbs * COPY_SHARE * 1e3)
    if not work.by_group:  # else in what widening takes
        share *= 1 + AGAIN_SHARE * again_read(graph, tile.rows)
        if tile.slice_k > 1 and group_count(graph) > 1:
            share *= 1 + FEW_SLICES_SHARE * tile.k * tile.split_k / work.k
    unit = unit_of(target)
    if unit is not None:
        time_us = mfma_us(target, unit, work, blocks, resident, moved.ideal)
    else:
        own_us = partial(streams_us, grouped=group_count(graph) > 1) if tile.slice_k > 1 else tiles_us
        time_us = own_us(target, work, blocks, resident, moved.ideal, share)
    least = floors(target, moved, work.dtype)
    return Cost(
        traffic=moved,
        floor_us=max(least.values()),
        time_us=time_us,
        bound="memory" if least["memory"] >= least["products"] else "compute",
        in_flight_bytes=resident * room,
        registers=registers,
        blocks_per_sm=resident,
    )


def tiles_us(target: Target, work: ProductWork, blocks: int, resident: int, nbytes: int, share: float) -> float:
    """A launch of tiles; `nbytes` counted once, each of which takes `share` us."""
    pushed = (PUSHED_OUT_EVICT_FIRST_SHARE if work.evict_first else PUSHED_OUT_SHARE) * min(nbytes, target.l2_bytes)
    memory = (nbytes + pushed) * share
    products = multiply_us(target, work, blocks, resident) + (ADD_US if work.tile.split_k > 1 else 0.0)
    tile = work.tile
    slices = (tile.rows + tile.cols * work.products) * work.k * work.dtype.bytes / tile.cluster
    lines = blocks * slices * work.askew / (L2_GBS * 1e3) if work.askew > 1.0 else 0.0  # else in what products take
    return LAUNCH_US / 2 + overlapped((memory, products, lines), OVERLAP_EXPONENT)


def multiply_us(target: Target, work: ProductWork, blocks: int, resident: int) -> float:
    """Tiles, wave after wave; the last wave has as many on an SM as it needs."""
    tile = work.tile
    own = pace_of(work)
    instructions = MMA_SYNC_SHARE if target.wgmma or target.tcgen05 else 1.0  # the data sheet's rate is others'
    if target.wgmma and work.dtype in F8:
        instructions *= BY_HALVES_SHARE
    rate = own.share * instructions * target.product_tflops(work.dtype) * 1e6 / target.sms  # flop per us of one SM
    share = own.burden(64, 64, 128, 256) / own.burden(
        tile.warp_rows, tile.warp_cols * work.products, tile.rows, tile.cols * work.products, work.narrow
    )
    flops = 2.0 * tile.rows * tile.cols * work.products * work.k / tile.cluster
    prepared = own.prepared / (tile.cols * work.products) if work.prepared else 0.0
    slices = -(-work.k // (tile.k * tile.cluster))
    tile_us = flops / (rate * share) * (1 + prepared) + slices * work.counted * tile.warps * own.count_us
    sms = int(target.sms * CLUSTER_ROOM_SHARE) if tile.cluster > 2 else target.sms
    full, rest = divmod(blocks, sms * resident)
    last = -(-rest // sms)
    waves = resident * full * wave_share(resident, tile, own) + last * wave_share(last, tile, own)
    sums = 0.0 if own is WMMA_PACE else sums_us(work)
    first, ends, slice_us = own.first_us, own.tile_us + sums, own.slice_us
    if tile.persistent:  # the next tile's first slices come while this one's last ones are multiplied
        first, ends, slice_us = own.first_us + own.tile_us, sums, PERSISTENT_SLICE_US
        tile_us *= PERSISTENT_FACTOR
    by_element = -(-blocks // (sms * resident)) * slices * work.elements * ELEMENT_US
    alone = full / resident + (1 / last if rest else 0.0)
    waiting = alone * slices * slice_us + ends * (full + bool(rest)) / max(1, resident - 1)
    return first + waves * tile_us + waiting + by_element


def pace_of(work: ProductWork) -> AtomPace:
    if work.atom.kind != "mma":
        return WMMA_PACE
    return TF32_PACE if work.dtype is f32 else MMA_PACE


def sums_us(work: ProductWork) -> float:
    """From a tile's last product to its end."""
    tile = work.tile
    each = SUMS_US if run_of(tile, work.atom, work.along) else SUMS_US + THROUGH_US
    return each * tile.rows * tile.cols * work.products / (128 * 256)


def wave_share(blocks: int, tile: GemmTile, own: AtomPace) -> float:
    """How much longer tiles take where their warps are too few to hide what each waits for."""
    return max(1.0, own.enough / max(1, blocks * tile.warps))


def widening_us(target: Target, work: ProductWork, blocks: int) -> float:
    """What the SMs take for all codes of grouped products, which each tile widens for itself."""
    tile = work.tile
    slices = blocks / tile.cluster * work.k / tile.k
    pieces = slices * tile.k / 128 * tile.cols / 16 * work.products
    cycles = pieces * (WIDEN_CYCLES + ROW_CYCLES * tile.rows + SCALE_CYCLES * max(0.0, work.scales - 1))
    cycles += slices * WIDEN_SLICE_CYCLES + blocks / tile.cluster * tile.slice_k * WIDEN_WARP_CYCLES
    cycles *= next(factor for rows, factor in MORE_ROWS_FACTORS.items() if tile.rows <= rows)
    if work.scales * tile.k > MOST_SCALES * 128:
        cycles *= SCALES_FACTOR
    return cycles * 2 * target.f32_lanes / (target.fp32_tflops * 1e6)


def streams_us(
    target: Target, work: ProductWork, blocks: int, resident: int, nbytes: int, share: float, grouped: bool
) -> float:
    """A launch of streams: the bytes; those that one SM gets; what is on its way at a time; a slice-K group's slices in
    turn."""
    tile = work.tile
    size = work.dtype.bytes * work.share  # bytes of a right factor's element
    line = size * tile.k
    pushed = 0.0 if work.evict_first else STREAMED_OUT_SHARE * min(nbytes, target.l2_bytes)
    halvings = max(0.0, math.log2(TOGETHER_BYTES / (line * tile.slice_k)))
    doublings = max(0.0, math.log2(tile.cols * work.products * work.k * size / NEAR_BYTES))
    slices = -(-work.k // (tile.k * tile.split_k))  # of a slice-K group
    on_sm = min(resident, max(1.0, blocks / target.sms))
    rounds = -(-blocks // (target.sms * resident))
    crowded = later = widened = 0.0
    if work.share < 1.0:
        slice_bytes = tile_elements(tile, work.products, work.share) * work.dtype.bytes
        on_its_way = on_sm * tile.slice_k * (tile.stages - 1) * slice_bytes
        crowded = CROWDED_SHARE * max(0.0, math.log2(on_its_way / CROWDED_BYTES))
        later = ROUND_US * (rounds - 1)
        widened = WIDENED_US * tile.k / 128 * (tile.cols / 16 * work.products)
    # Not where groups have right factors of their own: gate and up of 64 tokens by 8 of 256 experts, 2048 columns and a
    # K of 7168, took 2869 us in one kernel that is said to read far apart, and 2967 in two that are not (H200)
    apart = 0.0 if grouped else APART_SHARE * halvings + FAR_SHARE * doublings
    memory = (nbytes + pushed) * share * (1 + apart + crowded)
    turns = slices * blocks / target.sms / (on_sm * (tile.stages - 1))
    brought = (tile.rows + tile.cols * work.products * work.share) * work.k * work.dtype.bytes / tile.cluster
    pieces = work.dtype.bytes * tile.k / 128 * tile.rows / 8 * (tile.cols / 16 * work.products)
    prepared = PREPARED_US * tile.k / 64 * tile.rows / 8 if work.prepared else 0.0
    group_us = BLOCK_US + slices * (SLICE_US + PIECE_US * pieces + prepared + widened)
    shared = brought * max(1.0, blocks / target.sms) / (SHARED_GBS * 1e3)
    limits = [memory, shared, turns * LATENCY_US, rounds * group_us]
    if work.by_group:
        limits.append(widening_us(target, work, blocks))
    added = CLUSTER_US * math.log2(tile.cluster)
    found = STREAM_US + added + later + overlapped(limits, STREAM_OVERLAP_EXPONENT)
    many = work.share < 1.0 and not work.by_group and tile.rows * tile.cols * work.products >= SPILLED_SUMS
    return found * (SPILLED_FACTOR if tile.rows > SPILLED_ROWS else FEWER_SPILLED_FACTOR) if many else found
