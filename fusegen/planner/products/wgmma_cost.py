"""How long a plan by wgmma should take: rounds of tiles at the rate of the tensor cores, and what they wait for.

Three limits that overlap: products and what is made of them; the bytes that come from DRAM; and the lines of the
factors that all blocks take from the L2 cache. The constants are fitted to 312 candidates of 57 chains and shapes, of
65 to 16384 rows, bf16 and f16, on one H200 (cold L2, medians of 15), which they meet within 5 % (rms): the first choice
took 0.2 % more than the best of those measured in the mean, and 4 % at worst. f32's are of 3 shapes
(docs/measurements.md, "f32 by tf32").

Where lines start between sectors of 32 bytes, blocks by themselves take no more than 6 TB/s of them from the L2 cache.
In shares of the bare product, x @ w.T alone, and with bias and residual (*), medians of 15 to 21, L2 cold, in turns:

                                              2048 x 4096 x 1000   4096 x 4096 x 4104   2048 x 1000 x 1000 *
    128 x 256 tiles, cooperative                    1.33                 1.48                 1.34
    in clusters of two                           1.01                 1.04                 1.36
    128 x 128 tiles, cooperative                    1.70                                      1.34
    in clusters of two                                                                     1.24
    128 x 256, the producer warps copy 16 bytes a lane
    by cp.async                                  1.30                 1.52

4096^3 took 1.00 with those warps' copies, 0.985 with tensor copies; by 8 bytes a lane 4096 x 4096 x 4100 took 405 us
ping-pong and by 4 bytes 4096 x 4096 x 4098 534, where mma.sync takes 383 and 697, and cuBLAS 550 and 537.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusegen.language.graph import Extent, Kind, Node
from fusegen.language.products import Split, split
from fusegen.language.types import f32, size_of
from fusegen.planner.model import Cost
from fusegen.planner.products.gemm_duration import L2_GBS, lying
from fusegen.planner.products.parts import Operand
from fusegen.planner.products.product_cost import floors, group_count, product_traffic, tiles_down
from fusegen.planner.products.wgmma import LAUNCH_REGISTERS, WgmmaWork
from fusegen.planner.products.wgmma_tiles import CONSUMERS
from fusegen.planner.rows.duration import COPY_SHARE
from fusegen.planner.tile import LINE_BYTES
from fusegen.planner.time import overlapped

START_US = 5.6  # launch, first slices from DRAM, last boxes stored
OVERLAP_EXPONENT = 3.0  # the norm's exponent
# ---- products
RATE_SHARE = 1.0  # of the data sheet's matrix rate, which the SMs' clocks exceed
# 8 bits: of 43 plans at 4096^3, 8192^3, 4096 x 14336 x 4096 and 4096 x 7168 x 16384 on an H100 (docs/measurements.md,
# "Products of 8 bits"). A promoted slice is waited for before it is added, of a tile of two parts twice. Whole numbers
# draw less power, but two tiles by turns take more of it; and by 16 rows of tiles, turns meet in the L2 cache.
PROMOTED_FACTOR = {1: 1.10, 2: 1.13}  # by parts of a tile's rows
SCALED_WIDE_FACTOR = 1.025  # of 128 x 192, next to 256 x 128, where blocks are scaled: 1.00 to 1.035 of five products
# Of two halves of columns, 128 x 256: where blocks are scaled 0.988, 0.971 and 0.975 of the time of 256 x 128, where by
# 1.13 and 1.025 1.023, 1.017 and 1.023 would have been said (4096 x 28672 x 4096, and groups of 8 x 1024 and 4 x 8192
# rows, N = 4096 and K = 7168; one H200, medians of 9 to 11 by turns, L2 cold). By rows and columns 1.015 and 1.0 (4096
# x 14336 x 4096, and 8192^3).
SCALED_ACROSS_FACTOR, ACROSS_FACTOR = 1.11, 1.14
# In clusters of two, groups of 1024 and 8192 rows took 0.982 to 0.994 in tiles of 128 rows, and 1.015 and 1.054 of 256.
PROMOTED_GROUPS_CLUSTERS_FACTOR = {1: 0.985, 2: 1.03}  # by parts
PINGPONG_F8_FACTOR = 1.03
PINGPONG_WHOLE_FACTOR = 1.13
COOPERATIVE_WHOLE_FACTOR = 0.95
PINGPONG_GROUPS_FACTOR = 1.15
PINGPONG_CLUSTERS_FACTOR = 1.07
NARROW_FACTOR = 1.12  # tiles of fewer than 128 columns: the left factor's lines are read for few products
WIDE_COLS = 128
STORED_SLOTS = 6.5  # issue slots, in time, to store an element; 128 x 256 of them took 1800 to 2500 cycles, all in all
ISSUED_SLOTS = 2.2  # and each of them by warps that wait for it
LOADED_US = 6.0  # an operand that is read by pairs once its tile is summed: 4 times in turn from DRAM
HOT_US = 400.0  # launches this long are held down by the power limit
HOT_FACTOR = 1.02
HOT_COOPERATIVE_FACTOR = 1.04  # and there larger tiles, cooperative take more of it
# In groups of rows more still: of 4 to 512 groups and a K of 4096 to 8192, 13 pairs of plans, cooperative tiles took
# 1.00 to 1.05 of what was said next to ping-pong ones, 1.02 in the mean; of a K up to 3072 0.98 to 1.01. GLM-5's
# gate and up with SwiGLU, 1024 rows of each of 256 experts, took 20.5 ms so and 19.9 ping-pong, as one product 19.6 and
# 19.8. All of these took 1.14 to 1.25 of their estimates, whose constants are from shorter runs: launches of 10 ms hold
# the clock lower, of all plans alike, and none of that is in here (docs/grouped.md, "How it runs").
HOT_GROUPED_COOPERATIVE_FACTOR = 1.053
# Where groups are of different lengths, as routers make them, blocks drift apart in launches of 10 ms, and no longer
# share lines in the L2 cache: most by ping-pong tiles, which ask for a third more of them, and by 16 rows of tiles. Of
# 128 to 512 experts, groups 0.7 to 1.3 times as long as their mean, TFLOP/s on one H200 (benchmarks/grouped.py;
# docs/grouped.md, "How it runs"), of each kind by the usual 8 rows of tiles and by 16:
#
#     rows an expert, N, K                    cooperative 128 x 256    ping-pong 128 x 128
#      1024, 6144, 2048 (10.7 ms)               613   611                596   572
#      1024, 16384, 5120, SwiGLU (35 ms)        624   618                486   440
#      1024, 2048, 4096 (14 ms)                 629   612                472   393
#      2048, 4096, 6144 (40 ms)                 643   645                590   427
#      4096, 4096, 6144 (79 ms)                 661   648                614
#      8192, 4096, 6144 (160 ms)                655   631                567   388
#      1024, 4096, 1024 (6.8 ms)                586   596                646   645
#      8192, 6144, 7168, 4 experts (4.3 ms)     670   670                683   635
#
# Where K is less than 4096 that holds of short groups alone: 256 experts, N = 6144 and K = 2048, by 8 rows of tiles, in
# two runs on other H200s:
#
#     rows an expert          cooperative 128 x 256    ping-pong 128 x 128
#      1024                     609   610                599   571
#      2048                     636   597                648   605
#      4096                           628                      639
#      8192                           615                      624
#
# So ping-pong tiles take longer in launches that are estimated at 7 ms and more, and so do tiles by more rows than the
# usual, which in clusters make no difference (0.98 to 1.02). Of equally long groups ping-pong tiles took up to 3 %
# less. At K = 1024 none has been seen that long.
APART_US, APART_FACTOR = 7000.0, 1.10
APART_K, APART_SHORT_K, APART_SHORT_ROWS = 4096, 2048, 1536  # from K on; from a lesser one, groups of fewer rows
APART_ORDER_FACTOR = 1.016  # the mean of the first six
# ---- a left factor by way of registers. In tiles of 256 columns 4096 x 6144 x 4096 took, of the bare product's time,
# 1.00 behind an RMSNorm without a gain, 1.02 with one of the factor's type and 1.07 with one of f32, 1.05 behind a
# bias, 1.75 behind a bias and GELU. Narrow ones wait for what is prepared.
SCALED_FACTOR = 1.02
PREPARED_US = 0.30  # a slice of one that is scaled by a vector of its type
COMPUTED_US, SLOT_US = 0.34, 0.04  # of others, and for each issue slot of an element
# ---- rows that an index names, which threads copy by 16 bytes: a row's line of a slice takes so long. What is written
# so stands in the way of what wgmma reads, which shows little: gate and up with SwiGLU of 4096 to 65536 rows in 8 to
# 256 groups, drawn at random, took 0.97 to 1.08 of the time behind rows that lie as they are multiplied, 1.004 in the
# mean of 14, in tiles of 128 x 256; of 65536 to 262144 rows 1.00 to 1.09. In those of 128 x 128 they took 1.04 to 1.67
# (H200; docs/grouped.md, "Routing, sorting, combining"; benchmarks/gathered_rows.py).
COPIED_ROW_US = 0.0034
GATHERED_FACTOR = 1.01
# Of these 14, and 13 more in whose groups rows lie so, ping-pong tiles of two products took 0.97 to 1.16 of the time of
# cooperative ones where groups have less than 2048 rows, 1.03 in the mean, and 0.94 to 0.98 of longer ones; they were
# said to take 0.96 to 1.00. An operand as large as the result, which the other group's products should hide, cost three
# of them 1.06 to 1.09.
PINGPONG_PAIR_FACTOR, PAIR_ROWS = 1.05, 2048
PINGPONG_OPERAND_FACTOR = 1.06
# ---- sums over groups of K, both factors across it: specs/grouped_weight_grad.py on one H200, us, L2 cold, medians of
# 15 by turns (benchmarks/weight_gradients.py), with torch._grouped_mm among them:
#
#     T, N, K, E                128 x 128 ping-pong, in clusters    128 x 256 cooperative, in clusters    torch
#     16384, 2048, 4096, 16           466               423               400               396           419
#      8192, 4096, 7168, 8            859               787               772               769           790
#     65536, 2048, 2048, 64           910               892               883               874           933
#      4096, 1024, 2048, 64            93                93                98                96           133
#
# Slices of 128 x 128 take half as long again as those of products along K, where blocks take 9.0 to 9.7 TB/s of lines
# from the L2 cache; in clusters, which ask it for a quarter less, up to a tenth less than that. So it is the lines, at
# least in part; what shared memory's reads across lines have to do with it has not been told apart. Launches of some
# 800 us are held down by more than others, and torch's are too. A group's last slice is brought whole, of which half
# is the group's in the mean. Clearing the rest of it shows nowhere.
INNER_REST = 0.5
INNER_WIDE_COLS = 256
INNER_FACTOR, INNER_CLUSTERS_FACTOR = 1.49, 1.44
INNER_WIDE_FACTOR, INNER_WIDE_CLUSTERS_FACTOR = 1.04, 1.02
INNER_HOT_FACTOR = 1.08  # of wide tiles: the others wait more, and draw less power
# ---- right factors of codes, summed turned round: of 32 candidates of 4 and 8 bits, 16 to 2048 rows of 8192 x 8192, on
# one H200, which they meet within 4 % (rms; 10 % at worst). A slice of 64 columns takes so long, and longer with each
# row. Widening and barriers limit it, and not its copies; four consumers hide more of that.
CODED_COLUMNS = 64
CODED_SLICE_US, CODED_ROW_US = {4: 0.0724, 8: 0.0793}, {4: 0.00086, 8: 0.00102}
NARROW_ROW_US = 0.0005  # rows are read from shared memory for 64 columns, and not for 128
FOUR_CONSUMERS_SHARE = 0.65
TURNED_US, TURNED_ROW_US = 0.9, 0.004  # until sums have turned round, and been added up
# ---- memory
PUSHED_OUT_SHARE = 0.56  # a launch that finds the L2 full of what others wrote pushes out as much as it reads
# ---- blocks that share a tile
MET_US = 1.5  # until all have multiplied, and their sums are where they are added up
EXCHANGED_US = 2.2  # and for each 128 columns
CLUSTERS_FACTOR = 1.005
CLUSTER_US = 1.0  # until both blocks find room, and end: without it 1000^3 went to clusters, where it took no less
# f32 is twice as many bytes for as many products, and half as many of them a second: what brings less is faster. 4096^3
# took 395 us ping-pong, 368 in clusters and 333 cooperative, whatever else; 8192^3 3132, 3269 and 3763, in clusters
# 3293, and by 16 rows of tiles besides 3083. cuBLAS took 333 and 2662.
PINGPONG_F32_FACTOR = 1.12
CLUSTERS_F32_FACTOR = 0.99
GROUPS_F32_FACTOR = 0.995
# Blocks that run together take lines of both factors from the L2 cache, fewest where their tiles are as high as wide.
# Cooperative tiles take a quarter more by 8 rows of tiles than by 16: RMSNorm's products took 0.4 to 0.6 % longer. A
# tenth more showed nothing.
SPREAD_SHARE = 0.02
SPREAD_FREE_FACTOR = 1.1
USUAL_ORDER = 8  # rows of tiles that are taken together
SM_GHZ = 1.7  # of an SM among products
SPECIAL_SLOTS = 8  # issue slots that one exponential or division keeps its unit for


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
    )
    limits = floors(target, moved, work.dtype)
    return Cost(
        traffic=moved,
        floor_us=max(limits["memory"], limits["products"]),
        time_us=START_US + overlapped(waits, OVERLAP_EXPONENT) * turns_factor(work),
        bound="compute" if limits["products"] > limits["memory"] else "memory",
        in_flight_bytes=tile.stages * tile.stage_bytes,
        registers=LAUNCH_REGISTERS,
        blocks_per_sm=1,
    )


def multiplying(work: WgmmaWork, *extents: int) -> float:
    """Rounds of tiles, and what is made of the sums, in us."""
    target, tile, parts = work.target, work.tile, split(work.hoisted)
    per_sm = target.product_tflops(work.dtype) * 1e6 * RATE_SHARE / target.sms  # operations per us
    each = 2 * tile.held_rows * tile.cols * work.line / per_sm  # of a slice
    if tile.cols < WIDE_COLS:
        each *= NARROW_FACTOR
    if work.promote:
        each *= promoted_factor(work)
    products = mean_steps(work) * (coded(work) if work.coding else preparing(work, parts, each))
    # an element passes its own output group's alone
    issued = STORED_SLOTS + slots(work, parts.epilogue) / len(work.output_groups)
    epilogue = ISSUED_SLOTS * tile.held_rows * work.finished * issued / (target.f32_lanes * SM_GHZ * 1e3)
    rounds = -(-counted(work, *extents) * tile.blocks // target.sms)
    turns, f32_factors = tile.schedule == "pingpong", work.dtype is f32
    slower = PINGPONG_F32_FACTOR if turns and f32_factors else narrow_factor(work) if work.dtype.narrow else 1.0
    slower *= inner_factor(work)
    loads = (load for output_group in work.output_groups for load in output_group.loads)
    loaded = LOADED_US if any(load.access.strided and load.transport == "plain" for load in loads) else 0.0
    if turns:  # a group multiplies while the other one makes something of its sums
        time = rounds * max(products * slower, (products * slower + epilogue + loaded) / 2) + epilogue + loaded
    else:
        time = rounds * (products * slower + epilogue) + loaded
    if time > HOT_US:
        cooperative = HOT_GROUPED_COOPERATIVE_FACTOR if work.segments else HOT_COOPERATIVE_FACTOR
        time *= HOT_FACTOR if turns else HOT_FACTOR * cooperative
        if work.segments and time > APART_US:
            time *= APART_FACTOR if turns and drifts(work) else 1.0
            time *= APART_ORDER_FACTOR if tile.group > USUAL_ORDER and tile.cluster == 1 else 1.0
        time *= INNER_HOT_FACTOR if work.inner_segments and tile.cols >= INNER_WIDE_COLS else 1.0
    if tile.cluster > 1:
        time = CLUSTER_US + time * clusters_factor(work)
    if f32_factors and tile.group > 8:
        time *= GROUPS_F32_FACTOR
    if work.coding:
        time += TURNED_US + TURNED_ROW_US * tile.rows
    elif tile.split_k > 1:
        time += MET_US + EXCHANGED_US * tile.cols / WIDE_COLS
    return time * (1.0 + SPREAD_SHARE * max(0.0, spread(work, *extents) - SPREAD_FREE_FACTOR))


def promoted_factor(work: WgmmaWork) -> float:
    """How much longer slices take whose sums are promoted."""
    if work.tile.across > 1:
        return SCALED_ACROSS_FACTOR if work.block_scales else ACROSS_FACTOR
    wide = work.block_scales is not None and work.width > WIDE_COLS
    return PROMOTED_FACTOR[work.tile.parts] * (SCALED_WIDE_FACTOR if wide else 1.0)


def coded(work: WgmmaWork) -> float:
    """The time of a slice whose codes are widened, where the consumers that share slices have as many."""
    tile, coding = work.tile, work.coding
    assert coding is not None
    time = CODED_SLICE_US[coding.code.bits] + CODED_ROW_US[coding.code.bits] * tile.rows
    time *= tile.cols / CODED_COLUMNS
    if tile.cols == CODED_COLUMNS:
        time += NARROW_ROW_US * tile.rows
    return time * (FOUR_CONSUMERS_SHARE if tile.consumers > CONSUMERS else 1.0)


def turns_factor(work: WgmmaWork) -> float:
    """How much longer ping-pong tiles of groups take that have two products, or operands as large as the result."""
    if work.tile.schedule != "pingpong" or work.segments is None:
        return 1.0
    loads = (load for output_group in work.output_groups for load in output_group.loads)
    factor = PINGPONG_PAIR_FACTOR if work.products > 1 and mean_rows(work) < PAIR_ROWS else 1.0
    large = any(load.access.strided and load.access.by_column for load in loads)
    return factor * (PINGPONG_OPERAND_FACTOR if large else 1.0)


def drifts(work: WgmmaWork) -> bool:
    """Whether ping-pong tiles of groups no longer share lines in long launches."""
    return work.k >= (APART_SHORT_K if mean_rows(work) < APART_SHORT_ROWS else APART_K)


def mean_rows(work: WgmmaWork) -> int:
    """Rows of a group."""
    return math.ceil(work.graph.rows / group_count(work.graph))


def counted(work: WgmmaWork, *extents: int) -> int:
    """Tiles of the launch; of grouped products, of groups that are equally long."""
    return tiles_down(work.graph, work.band) * work.tiles_across if work.segments else work.tiles(*extents)


def mean_steps(work: WgmmaWork) -> float:
    """Slices of a block, one after another; of groups of K that are equally long, with what the last one spares."""
    return work.steps if work.inner_segments is None else work.k / work.line + INNER_REST


def inner_factor(work: WgmmaWork) -> float:
    """How much longer slices of groups of K take."""
    if work.inner_segments is None:
        return 1.0
    clusters = work.tile.cluster > 1
    if work.tile.cols >= INNER_WIDE_COLS:
        return INNER_WIDE_CLUSTERS_FACTOR if clusters else INNER_WIDE_FACTOR
    return INNER_CLUSTERS_FACTOR if clusters else INNER_FACTOR


def clusters_factor(work: WgmmaWork) -> float:
    """How much longer, or less long, tiles take in clusters."""
    if work.dtype is f32:
        return CLUSTERS_F32_FACTOR
    if work.promote and work.segments:
        return PROMOTED_GROUPS_CLUSTERS_FACTOR[work.tile.parts]
    return CLUSTERS_FACTOR


def narrow_factor(work: WgmmaWork) -> float:
    """How much longer, or less long, products of 8 bits take than by the data sheet's rate."""
    tile, whole = work.tile, work.tile.atom.sum_type is not f32
    if tile.schedule == "cooperative":
        return COOPERATIVE_WHOLE_FACTOR if whole else 1.0
    factor = PINGPONG_WHOLE_FACTOR if whole else PINGPONG_F8_FACTOR
    factor *= PINGPONG_GROUPS_FACTOR if tile.group > 8 else 1.0
    return factor * (PINGPONG_CLUSTERS_FACTOR if tile.cluster > 1 else 1.0)


def lines(work: WgmmaWork) -> float:
    """Bytes of the factors that the tiles of a cluster take from the L2 cache; where lines start between sectors, they
    take as long as more. What one block brings to all others then is brought once; of other lines that was no faster:
    at 4096 x 4096 x 4104, x @ w.T took 282 us, and 194 in clusters of two."""
    cluster = work.tile.cluster
    left = work.tile.rows * askew(work, work.left[0])
    each = [
        max(1.0, askew(work, found) / cluster) for output_group in work.output_groups for found in output_group.rights
    ]
    share = work.coding.code.bits / work.dtype.bits if work.coding else 1.0
    return cluster * (left + share * work.width * sum(each) / len(work.output_groups)) * LINE_BYTES * work.slices


def askew(work: WgmmaWork, operand: Operand) -> float:
    """How much longer lines of a factor take, if it lies as its shape says."""
    return lying(operand.access, work.graph)


def spread(work: WgmmaWork, *extents: int) -> float:
    """Lines of the factors that blocks take together, next to those of a square as large. Tiles of two groups of rows
    have none of a right factor in common: there more rows of tiles at a time than the usual ones share nothing more. By
    16, ping-pong tiles of 1024 rows an expert took 1.03 to 1.6 of the time by 8."""
    area = work.block_count.of(*extents) * work.tile.rows * work.tile.cols
    height = min(work.tile.group * work.band, -(-extents[-1] // work.band) * work.band)
    sharing = height
    if work.segments:
        sharing = min(height, max(mean_rows(work), USUAL_ORDER * work.band))
    return (height + area / sharing) / (2.0 * math.sqrt(area))


def preparing(work: WgmmaWork, parts: Split, each: float) -> float:
    """The time of a slice whose products alone take `each` us: half of it, another group's, hides what is prepared."""
    found = work.prologue
    if work.gathers:
        return max(each * GATHERED_FACTOR, COPIED_ROW_US * work.tile.rows)
    if found is None:
        return each
    if found.scale or not found.changes:
        return max(each * (SCALED_FACTOR if found.scale else 1.0), each / 2 + PREPARED_US)
    return each / 2 + COMPUTED_US + SLOT_US * slots(work, parts.lefts[0].body)


def slots(work: WgmmaWork, nodes: Iterable[Node]) -> float:
    """Issue slots that `nodes` take for one element."""
    listed = [n for n in nodes if n.op.kind in (Kind.MAP, Kind.BIAS) and work.hoisted.extents[n] is Extent.ELEMENT]
    special = sum(SPECIAL_SLOTS / 4 for n in listed if n.op.flops >= 4)
    return sum(n.op.issued for n in listed) + special
