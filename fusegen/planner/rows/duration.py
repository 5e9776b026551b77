"""How long a plan should take: what candidates are ranked by.

Three limits, each of which a launch can't undercut: the bytes at the rate that a copy reaches; the instructions at the
rate that the schedulers issue them; and blocks one after another, since a block must wait for its loads, its own
instructions and its reductions, and an SM holds only so many at a time. They overlap but not wholly: their p-norm.

The constants are fitted to 651 candidates of 28 chains and shapes, of the 731 measured on an H200 that are in
benchmarks/data/h200_candidates.json (the others could not be told apart; cold L2, medians of 15, 4.23 TB/s of copy
rate). There the first choice took 2.5 % more than the best candidate in the mean and 17 % at worst, and times of
candidates worth choosing are predicted to 14 % (rms of the logarithm). What rows cost that start anywhere is fitted to
216 others of 19 such chains and shapes (medians of 9 to 15, 4.22 to 4.25 TB/s), where the first choice took 2 % more
than the best one measured in the mean and 9 % at worst; what they cost by bulk copies to 765 candidates of 70 chains
and shapes (medians of 9, 4.25 TB/s), by which the first choice took 2 % more than the best in the mean and 14 % at
worst. Registers, what waits and what clusters, copies and masks cost were fitted again to 2878 candidates of 223 chains
and shapes, most of them of benchmarks/heldout.py (medians of 15, 4.22 TB/s; those of its cases are in
benchmarks/data/h200_heldout_candidates.json): there the first choice takes 1.7 % more than the best one measured in the
mean and 17 % at worst. What several rows of a block, rows brought by bulk copies and threads without a vector cost was
fitted once more to 1672 candidates of 182 chains and shapes, 60 of them measured anew (medians of 9, 4.25 TB/s): the
first choice takes 1.2 % more than the best one measured in the mean and 15 % at worst, in a launch of 6 us; and over
the 32 of benchmarks/tune_shipped.py, which was run with these constants, 0.8 % and 3.1 %. On other GPUs they stand for
want of measurements; what is taken from a target are its facts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusegen.language.graph import Graph
from fusegen.language.scans import Largest, ScanWay, Sorted
from fusegen.language.types import b8, bf16
from fusegen.planner.cost import shares_read
from fusegen.planner.model import Access, Cost, Load, RowPass, Staging, Tile, Traffic
from fusegen.planner.parts import Scan
from fusegen.planner.pieces import VECTOR_BYTES, WORD_BYTES, one_named, slots, words_of
from fusegen.planner.rows.counted import counted_slots, registers_share
from fusegen.planner.rows.in_place import turned
from fusegen.planner.tile import in_shared_memory
from fusegen.planner.time import floor_us, overlapped
from fusegen.targets.base import Target

# ---- bytes
COPY_SHARE = 0.88  # of the data sheet's DRAM rate, what a plain device copy reaches: 4.2 of 4.8 TB/s on an H200
RATE_SHARE_BY_BYTES = {16: 1.0, 8: 0.96, 4: 0.84, 2: 0.8, 1: 0.5}  # share of the rate by bytes of one access
# the same beside a choice of columns, as that was fitted
CHOSEN_RATE_SHARE_BY_BYTES = {16: 1.0, 8: 0.87, 4: 0.5, 2: 0.8, 1: 0.5}
BULK_ROW_BYTES = 42  # bytes more for what a bulk copy moves, a row or several: its ends fill no sector
BULK_ALONE_FACTOR = 1.05  # where an SM holds one such row, and nothing hides what that waits for
TWICE_SHARE = 0.45  # a vector of two accesses leaves every other 16 bytes to the second
# bias_relu 65536 x 4096 in f16 by 8 single elements a thread: 763 us, by vectors 254; f32 copies lose nothing
APART_SHARE = 0.5
SIDE_BY_SIDE_BYTES = 18  # bytes that the threads of a row should find next to each other
# Fewer bytes side by side than WHOLE_BYTES cost as much as APART_BYTES more of them: rmsnorm 262144 x 128 took 36.4 us
# by 16 threads a row and 256 B side by side, 36.7 by half of them, 39.2 by a quarter, 41.3 by an eighth.
WHOLE_BYTES = 256
APART_BYTES = 9  # the fit to whole chains; head_layernorm of 64 took 110 us by 32 B and 77 by 64 B
APART_MISALIGNED_BYTES = 32  # where rows start anywhere and are written, a run lies across one more sector
NAMED_FACTOR = 1.06  # a thread waits for an index, and then for one vector of the row that it names
FROM_L2_SHARE = 0.16  # time of a byte from the L2 cache, in that of one from DRAM
# The same of a row that is partly kept: with 7 of 8 vectors a softmax at 4096 x 131072 took 568 us, by clusters 560.
FROM_L2_PARTLY_SHARE = 1.0
# Of a byte of what some rows share, which each block asks for where it is used: adaLN's modulation of 16 x 1024 x 3072
# in bf16 took 62.9 to 64.8 us so, and 55.1 to 58.7 where scale and shift were asked for before the row; a LayerNorm 53.
SHARED_LATE_SHARE = 0.12
PACKED_AHEAD_FACTOR = 1.05  # before the row, which stays as read: 60.2 us, with values 56.4; 86.8 and 77.6 at N=4096
# By asynchronous copies, where the same bytes could have stayed in registers: add_rmsnorm 16384 x 4096 took 140 us so
# and 134 to 136 in registers, 16384 x 8192 266.6 and 262.4, a causal softmax of 32 x 4096 x 4096 414 and 404.
COPIED_FACTOR = 1.05
# computed values on their way to shared memory: a loop that is not unrolled whole waits for its loads
ROLLED_FACTOR = 1.11
ALONE_FACTOR = 1.04  # where an SM holds one block, whose registers hold its row
# a loop over a row that a mask ends: alibi_softmax of 16 x 4096 x 4096 took 235 us so and 210 unrolled
MASKED_FACTOR = 1.1
# Of a byte that all rows share, where what the blocks of an SM keep in shared memory leaves its L1 cache no room for
# it: layernorm_affine 8192 x 16384 in bf16 took 146 us with seven blocks of 33 KB and 136 with four.
PAST_L1_SHARE = 0.06
# persistent: a softmax of 500 x 262144 took 306 us so and 285 by clusters of 16 that end with their row
IN_TURN_FACTOR = 1.03
# Clusters: cross_entropy_backward 4096 x 32000 in f32 took 273 us by those of two and 258 by blocks. With 1.1, which
# the held-out chains alone ask for, log_softmax 1024 x 131072 goes to blocks, which took 255 us, and clusters 206.
CLUSTERED_FACTOR = 1.05
BRANCHED_FACTOR = 1.34  # and where each load has a branch of its own, they wait for one another
# The same where nothing but sums is written: those of 10001 bf16 took 169 us so and 155 with all loads ahead.
BRANCHED_SUMS_FACTOR = 1.2
# Threads without a vector in the last turn: RMSNorm's gradient by 768 columns took 83 us with 64 threads and two turns,
# of which a half is empty in one, and 75 with 32 and three; layernorm_affine 16384 x 5120 95 with 256 and 86 with 128.
IDLE_SHARE = 0.1
# Rows that start anywhere, copied to shared memory by blocks of which an SM holds two at most, and so hides less of
# what each waits for: log_softmax took 453 us at 4096 x 50257 with 1024 threads and 379 with 512, at 4096 x 32001 269
# and 232.
CROWDED_FACTOR = 1.2
# ---- issue slots: instructions that a thread issues
ISSUE_FACTOR = 0.9
MOVE_SLOTS = 1.0  # a conversion and its share of an access, for one element of an operand
ONLINE_SLOTS = {"softmax": 6, "welford": 36}  # beside the op's own
SHARED_ACCESS_SLOTS = 1.69
SINGLE_SLOTS = 7.0  # an element that is moved alone: address, test and predicated access
# of an element's instructions: once more in a vector that the row ends in, for all lanes of its warp
ROW_END_SHARE = 0.6
# Vectors across blocks, by the instructions of their text: pieces are selected, shifted and joined. A stored vector
# goes to shared memory and is joined from there; or it is handed to the next lane as well, and the first of the lanes
# that share a row goes value by value. In a pass by blocks nothing of that is done, but for what every row shares.
JOINED_SLOTS = 12.0  # a vector
STAGED_SLOTS = 20.0
PARTED_SLOTS = 25.0
FIRST_LANE_SLOTS = 20.0  # one a warp
BY_BLOCKS_SLOTS = 5.0
PLACED_SLOTS = 40.0  # copied to shared memory, to where a row's block lies
ACROSS_THREAD_SLOTS = 55.0  # of a row whose vectors are shifted into place, once a thread: its ends
# of a row whose blocks are copied to shared memory: turns, ends, and waiting for each vector
COPIES_THREAD_SLOTS = 400.0
EDGE_SLOTS = 30.0  # of a row, whose ends fill no block: a turn of the threads that share it
LYING_SLOTS = 24.0  # of a thread, to find out how each tensor's row lies
THREAD_SLOTS = 30.0
DIVISION_SLOTS = 60.0  # of a row's number by a dimension
STEP_SLOTS = 2.0  # of a reduction across lanes
# of running sums, counted in their text: the sum with an element and the one with what comes before it; a step across
# lanes, with its test; another warp's sum
SCAN_SLOTS = 2.0
SCAN_STEP_SLOTS = 4.0
SORTED_SLOTS = 6.0  # of each step, an element: half a comparison, and both ways to shared memory
LARGEST_SLOTS = 3.0  # of each step, an element: a comparison, a choice, a sum
SCAN_WARP_SLOTS = 4.0
# Rows by bulk copies, whose elements are read and written one by one in shared memory
BULK_READ_SLOTS = 5.0  # beside MOVE_SLOTS
BULK_WRITE_SLOTS = 0.3
BULK_CONFLICT_SLOTS = 1.9  # each time more that an access goes to the same bank
BULK_VECTOR_SLOTS = 2.5  # of what all rows share
# Each line of the L1 cache more that a warp's rows of another operand lie in: windows of 49 x 49 with a bias took 55 us
# with two threads a row and 49 with four.
LINE_SLOTS = 1.0
BULK_UNTIL_SLOTS = 6.2  # to find whether a vector lies beyond a mask's limit
BULK_THREAD_SLOTS = 23.0
BULK_TENSOR_SLOTS = 3.1
# ---- waiting, in microseconds
LAUNCH_US = 2.0  # a launch that does nothing, as seen from its stream
LOAD_US = 0.66  # from a load to its value, once a turn of loads
LATER_US = 0.3  # the same of what a later pass reads
# Before the first load, where threads of a block divide the numbers of rows of their own.
NUMBER_US = 0.25
TURN_US = 0.022  # a vector of a row that a mask ends: its test stands between it and the next one, in each pass
BULK_US = 0.8  # from asking for a row to its values
TURNS_EXPONENT = 0.75  # n turns of loads take n^0.75 times as long as one
REDUCTION_US = 0.1
# More for each warp that comes to a reduction's barrier, where no other block hides it: LayerNorm took 5.1 us at
# 1 x 5120 with 1024 threads, 4.6 with 512 and 4.3 with 256.
WARP_US = 0.02
# Until a block's tiles in shared memory are complete: as for a reduction, whose threads wait for one another too. What
# those tiles cost is not fitted: on an H200 39.3 and 74.4 us were said where 43.6 and 77.5 were taken.
TILE_US = REDUCTION_US
CLUSTER_US = 1.19  # more for a reduction across a cluster
GATHERING_US = 0.78  # a cluster starts when all of its blocks find room: so much for each doubling
# Share of the SMs that clusters fill, whose blocks must lie in one part of the GPU: cuOccupancyMaxActiveClusters of an
# H200, with one block an SM, gave 15 clusters of 8 blocks and 7 of 16.
FILLED_SHARE = {8: 120 / 132, 16: 112 / 132}
SLOT_CYCLES = 6.3  # of an instruction in a warp that waits for it
BULK_SLOT_CYCLES = 5.2  # the same of rows by bulk copies
SM_GBS = 121.0  # what one SM moves when it has the memory for itself
OVERLAP_EXPONENT = 3.6  # the norm's exponent
# ---- registers
DIM_REGISTERS = 4  # of a thread, for each row dimension beside the first
LATER_READS_SHARE = 0.5  # of what a later pass reads, the share that waits in registers with what is kept
LATE_READS_SHARE = 0.25  # the same where each vector is read where it is used
LOOPED_SHARE = 0.49  # of what the turns of a loop read that is not unrolled whole, the share that waits at a time
PACKED_REGISTERS = 0.2  # for an element, of what is made of vectors that stay as they were read
BOOL_BYTES = 2  # of a register, for an element of a mask

WARP = BANKS = 32  # of GPUs that have bulk copies
BANK_BYTES = 4
UNROLLED_VECTORS = 4  # vectors in flight in a loop that is not unrolled whole


@dataclass(frozen=True, slots=True)
class Work:
    """What `estimate` needs of a candidate beside its traffic."""

    tile: Tile
    staging: Staging
    passes: tuple[RowPass, ...]
    accesses: tuple[Access, ...]
    copies: bool
    shared_bytes: int  # dynamic and static, but for votes and barriers, without which the constants were fitted
    kept_bytes: int  # for one element
    ragged: bool  # a row is no whole number of vectors
    blocks: int  # in the launch
    flat: bool = False  # one array without rows
    bulk: bool = False  # rows come to shared memory and leave it by bulk copies
    packed: bool = False  # registers hold what was read as it was read
    times_moved: Mapping[str, float] = field(default_factory=dict)  # bytes of the sectors that a tensor takes, for its
    counted: Mapping[str, float] = field(default_factory=dict)  # see `rows.counted`

    @property
    def turned(self) -> frozenset[str]:
        """The tensors that go through tiles in shared memory, since they lie turned round."""
        return turned(self.passes)

    @property
    def whole(self) -> bool:
        """Are all vectors of a thread in flight at once?"""
        return self.unrolled or self.copies

    @property
    def unrolled(self) -> bool:
        """Are all turns of a thread's loops laid out one after another?"""
        return self.staging in ("registers", "none")

    @property
    def in_shared(self) -> bool:
        return in_shared_memory(self.staging)

    @property
    def held(self) -> int:
        """Vectors of a thread that stay in registers as they were read, beside those in shared memory."""
        return self.tile.per_thread - self.tile.kept if self.staging == "persistent" else 0


def estimated_registers(work: Work) -> int:
    """Registers of one thread.

    A row in registers takes what waits in its passes where that is most: what is kept, and what is read before its use.
    What is kept as it was read is kept as f32 all the same, unless it is left packed. Over 525 kernels of 150 chains
    and shapes NVRTC 13 used within 15 % of this (rms of the logarithm); before, without what later passes read, it used
    115 for the LayerNorm of 1000 columns that was taken for 48. Pieces take more room than the vector that they make,
    and stay until the last of them is joined, while what is kept as it was read has its place already.
    """
    elements = work.tile.per_thread * work.tile.vector
    if work.unrolled:
        dims = max(1, *(len(access.strided) for access in work.accesses))
        rows = DIM_REGISTERS * (dims - 1) + sum(not access.by_column for access in work.accesses)
        here = work.tile.vector * max(map(words_here, work.passes), default=0)
        return max(32, math.ceil((14 if work.bulk else 16) + rows + elements * words_held(work) + here))
    if work.bulk:
        return 32
    loaded_by_pass = [row_pass.loads if work.in_shared else row_pass.reads for row_pass in work.passes]
    loaded = max(
        sum(held_bytes(load, work.ragged) for load in loads if load.access.by_column) for loads in loaded_by_pass
    )
    vectors = min(UNROLLED_VECTORS, work.tile.per_thread)
    held = math.ceil(work.held * work.tile.vector * work.kept_bytes / 4)
    return max(32, math.ceil(16 + vectors * work.tile.vector * max(0.5, LOOPED_SHARE * loaded / WORD_BYTES))) + held


def words_here(row_pass: RowPass) -> int:
    """Values of an element that wait for what is made of its group."""
    return (
        max((sum(keep.here for keep in stage.keeps) for stage in row_pass.stages), default=0) if row_pass.groups else 0
    )


def words_held(work: Work) -> float:
    """Registers that an element of a row takes up where the passes have the most."""
    last = last_taken(work.passes)
    share = registers_share(work.accesses, work.counted, work.tile) if len(work.passes) == 1 else 1.0
    kept: dict[str, float] = {}  # words of each value that waits between two passes
    ahead = most = 0.0
    for number, row_pass in enumerate(work.passes):
        alive = sum(words for value, words in kept.items() if last.get(value, 0) >= number)
        for load in row_pass.loads:
            if load.when == "keep":
                kept[load.value] = load.access.dtype.bytes / WORD_BYTES if work.packed else 1
        kept |= dict.fromkeys((keep.value for keep in (*row_pass.keeps, *row_pass.scans_kept)), 1)
        after = sum(words for value, words in kept.items() if last.get(value, 0) > number)
        if not work.bulk:
            reads = {load: share * read_words(load, work) for load in row_pass.reads}
            ahead += sum(words for load, words in reads.items() if load.when == "ahead")
            waiting = sum(words for load, words in reads.items() if load.when != "ahead")
            alive += waiting * (LATE_READS_SHARE if row_pass.late else LATER_READS_SHARE if number else 1.0)
        most = max(most, ahead + max(alive, after))
    return most + (PACKED_REGISTERS if work.packed else 0.0)


def read_words(load: Load, work: Work) -> float:
    """Registers that one element of a pass's operand waits in; a warp of its own is asked for nothing between two
    passes, and its bf16 are made f32 as soon as they are there."""
    access = load.access
    if not access.by_column or access.group:
        return 0.0
    if access.dtype is bf16 and load.when != "keep" and work.tile.row_threads <= WARP:
        return 1.0
    return held_bytes(load, work.ragged) / WORD_BYTES


def last_taken(passes: Sequence[RowPass]) -> dict[str, int]:
    """The pass that takes up a kept value for the last time."""
    last: dict[str, int] = {}
    for number, row_pass in enumerate(passes):
        taken = [
            *(keep.value for keep in row_pass.takes),
            *(load.value for load in row_pass.loads if load.when == "kept"),
        ]
        last.update(dict.fromkeys(taken, number))
    return last


def kept_words(passes: Sequence[RowPass]) -> int:
    """Values of an element that wait in registers between two passes, where the most do: one that is taken up for the
    last time makes room for one that is kept, element by element."""
    last = last_taken(passes)
    most, kept = 0, set[str]()
    for number, row_pass in enumerate(passes):
        kept |= {keep.value for keep in (*row_pass.keeps, *row_pass.scans_kept)} | {
            load.value for load in row_pass.loads if load.when == "keep"
        }
        most = max(most, sum(last.get(value, 0) > number for value in kept))
    return most


def held_bytes(load: Load, ragged: bool) -> float:
    """Bytes of registers that one element of a pass's operand waits in."""
    access = load.access
    size = BOOL_BYTES if access.dtype is b8 else access.dtype.bytes
    if not ragged:
        return size
    pieces = WORD_BYTES * words_of(access) / access.vector if access.mode == "misaligned" else size
    return pieces + (size if load.when == "keep" else 0)


def resident_blocks(target: Target, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one SM holds at a time."""
    unit = target.register_unit
    per_warp = -(-registers // unit) * unit * target.warp
    warps = -(-threads // target.warp)
    by_registers = target.registers_per_sm // (per_warp * warps)
    by_threads = target.threads_per_sm // threads
    by_shared = (
        target.shared_per_sm // (shared_bytes + target.shared_reserved) if shared_bytes else target.blocks_per_sm
    )
    return min(by_registers, by_threads, by_shared, target.blocks_per_sm)


def estimate(target: Target, work: Work, moved: Traffic, graph: Graph) -> Cost:
    """The time of one launch of `work` at the graph's sizes, and what bounds it."""
    tile = work.tile
    registers = estimated_registers(work)
    resident = max(1, resident_blocks(target, tile.threads, registers, work.shared_bytes))
    vectors = tile.per_thread if work.whole else min(UNROLLED_VECTORS, tile.per_thread)
    reads = work.passes[0].reads if work.passes else ()
    first = sum(load.access.dtype.bytes for load in reads if load.when != "ahead")
    from_l2 = sum(t.ideal * t.times - t.moved for t in moved.tensors)
    share = FROM_L2_PARTLY_SHARE if work.in_shared else FROM_L2_SHARE
    parts_of_sectors = sum(t.moved * (work.times_moved.get(t.tensor, 1.0) - 1) for t in moved.tensors)
    memory_us = moved.moved + from_l2 * share + parts_of_sectors
    memory_us /= target.dram_gbs * COPY_SHARE * 1e3 * width_share(work)
    writes = any(store.access.by_column for row_pass in work.passes for store in row_pass.stores)
    if shared_by_rows(work, graph.cols) > target.shared_per_sm - resident * work.shared_bytes:
        again = PAST_L1_SHARE * work.blocks * tile.rows_per_block * shared_by_rows(work, graph.cols)
        memory_us += again / (target.dram_gbs * COPY_SHARE * 1e3)
    if work.bulk:
        ends = rows_moved(work) * graph.rows / tile.rows_per_block
        memory_us += ends * BULK_ROW_BYTES / (target.dram_gbs * COPY_SHARE * 1e3)
        if work.in_shared and resident == 1:
            memory_us *= BULK_ALONE_FACTOR
    elif work.in_shared:
        memory_us *= COPIED_FACTOR if work.copies else ROLLED_FACTOR
    if work.staging == "persistent":
        memory_us *= IN_TURN_FACTOR
    elif resident == 1 and not work.in_shared and not work.bulk:
        memory_us *= ALONE_FACTOR
    if any(row_pass.until for row_pass in work.passes) and not work.unrolled and not work.bulk:
        memory_us *= MASKED_FACTOR
    named = tile.per_thread == 1 < tile.vector and work.staging == "none" and one_named(work.accesses)
    memory_us *= CLUSTERED_FACTOR if tile.cluster > 1 else NAMED_FACTOR if named else 1.0
    if work.packed and any(load.when == "ahead" and load.access.strided for load in reads):
        memory_us *= PACKED_AHEAD_FACTOR
    if work.ragged and tile.vector > 1 and not work.whole and not work.bulk:
        memory_us *= BRANCHED_FACTOR if writes else BRANCHED_SUMS_FACTOR
    if work.unrolled and not work.ragged and not work.flat and work.passes:
        memory_us *= 1 + IDLE_SHARE * (
            1 - graph.cols / (tile.threads_per_row * tile.per_thread * tile.vector * tile.col_tiles)
        )
    memory_us *= CROWDED_FACTOR if work.ragged and work.copies and 2 * tile.threads >= target.threads_per_sm else 1.0
    thread = instructions(graph, work)
    per_us = target.fp32_tflops * 1e6 / 2  # instructions of one lane; an fma counts for two flops
    issue_us = ISSUE_FACTOR * work.blocks * tile.threads * thread / per_us
    reductions = sum(len(row_pass.reductions) + sum(map(meetings, row_pass.scans)) for row_pass in work.passes)
    alone_us = thread * (BULK_SLOT_CYCLES if work.bulk else SLOT_CYCLES) * target.sms * target.f32_lanes / per_us
    several = max(len(access.strided) for access in work.accesses) > 1 and tile.rows_per_block > 1
    alone_us += NUMBER_US * several
    alone_us += TURN_US * tile.per_thread * sum(bool(row_pass.until) for row_pass in work.passes)
    alone_us += moved.moved / work.blocks / (SM_GBS * 1e3)
    alone_us += reductions * (REDUCTION_US + (CLUSTER_US if tile.cluster > 1 else 0))
    alone_us += TILE_US * bool(work.turned)
    # its loads are under way while the row before is written; its clusters gather once
    if work.staging != "persistent":
        alone_us += BULK_US if work.bulk else LOAD_US * turns_of_loads(work) ** TURNS_EXPONENT
        alone_us += LATER_US * sum(any(map(from_memory, row_pass.loads)) for row_pass in work.passes[1:])
        alone_us += GATHERING_US * math.log2(tile.cluster)
    waiting_us = max(1.0, work.blocks / (target.sms * FILLED_SHARE.get(tile.cluster, 1.0)) / resident) * alone_us
    beside = max(1.0, min(resident, work.blocks / target.sms))  # blocks of an SM
    barriers_us = (
        reductions * WARP_US * tile.row_threads / target.warp / beside if tile.row_threads > target.warp else 0.0
    )
    late_us = SHARED_LATE_SHARE * asked_late(work, graph.cols) / (target.dram_gbs * COPY_SHARE * 1e3)
    return Cost(
        traffic=moved,
        floor_us=floor_us(target, moved),
        time_us=LAUNCH_US + overlapped((memory_us, issue_us, waiting_us), OVERLAP_EXPONENT) + barriers_us + late_us,
        bound="memory" if memory_us >= issue_us else "instruction",
        in_flight_bytes=resident * tile.threads * vectors * tile.vector * first,
        registers=registers,
        blocks_per_sm=resident,
    )


def shared_by_rows(work: Work, cols: int) -> float:
    """Bytes of the vectors that every row shares, as far as a block reads them."""
    vectors = (a for a in work.accesses if a.by_column and not (a.strided or a.output or a.group))
    return sum(a.dtype.bytes for a in vectors) * cols / (work.tile.cluster * work.tile.col_tiles)


def asked_late(work: Work, cols: int) -> float:
    """Bytes that all blocks ask for in later passes of what some rows share, as those of one sample do."""
    whole = max(len(access.strided) for access in work.accesses)
    late = {load.access for row_pass in work.passes[1:] for load in row_pass.loads if from_memory(load)}
    some = sum(a.dtype.bytes for a in late if 0 < len(a.strided) < whole and not a.group)
    return some * work.blocks * cols / work.tile.cluster


def from_memory(load: Load) -> bool:
    return load.when == "now" and load.access.by_column


def turns_of_loads(work: Work) -> float:
    """How often a thread waits for memory in its first pass: once, where all loads are issued before the first use."""
    if work.whole:
        return 1
    return -(-work.tile.per_thread // UNROLLED_VECTORS)


def instructions(graph: Graph, work: Work) -> float:
    """Instructions of one thread: of its elements, of its row's addresses and of its part of each reduction."""
    tile = work.tile
    issued = slots(graph, tile.vector)
    element = 0.0
    for row_pass in work.passes:
        share = min(shares_read(graph, work.passes).values(), default=1.0) if row_pass.until else 1.0
        element += MOVE_SLOTS * (share * sum(load.when != "ahead" for load in row_pass.loads) + len(row_pass.stores))
        element += share * sum(issued.get(statement.name, 1) for statement in row_pass.body)
        element += share * sum(ONLINE_SLOTS.get(r.kind, 1) for r in row_pass.reductions)
        element += sum(scan_slots(scan) for scan in row_pass.scans)
        if work.in_shared and not work.bulk:
            element += SHARED_ACCESS_SLOTS * share * (len(row_pass.takes) + len(row_pass.keeps))
    element += 2 * SHARED_ACCESS_SLOTS * len(work.turned) + counted_slots(work.accesses, work.counted, tile)
    if work.bulk:
        element += sum(brought(row_pass, tile, graph.cols) for row_pass in work.passes)
    elif tile.vector == 1:
        element += SINGLE_SLOTS * sum(access.by_column for access in work.accesses)
    elif work.ragged:
        element += SINGLE_SLOTS * sum(access.mode == "element" and access.by_column for access in work.accesses)
        element += sum(shifting(row_pass, tile) for row_pass in work.passes) / tile.vector
        if work.copies:
            kept = sum(load.when == "keep" for row_pass in work.passes for load in row_pass.loads)
            element += PLACED_SLOTS * kept / tile.vector
        if not tile.remainder and not all(row_pass.blocks_of for row_pass in work.passes):
            element += ROW_END_SHARE * element * min(1.0, 2 / (tile.per_thread * max(1.0, tile.row_threads / 32)))
    reductions = sum(len(row_pass.reductions) for row_pass in work.passes)
    steps = math.log2(tile.threads_per_row) if tile.threads_per_row > 1 else 0
    element += sum(of_groups(row_pass, issued, tile) for row_pass in work.passes) / tile.vector
    dims = max(1, *(len(a.strided) for a in work.accesses))
    thread = THREAD_SLOTS + reductions * (STEP_SLOTS * steps + 20) + DIVISION_SLOTS * (dims - 1)
    every = [scan for row_pass in work.passes for scan in row_pass.scans]
    searched = sum(scan.way.steps for scan in every if isinstance(scan.way, Largest))
    thread += searched * (STEP_SLOTS * steps + 20)
    scans = sum(isinstance(scan.way, ScanWay) for scan in every)
    if scans:  # each turn of vectors goes through the lanes, then past all warps
        lanes = math.log2(min(tile.threads_per_row, WARP))
        thread += scans * tile.per_thread * (SCAN_STEP_SLOTS * (lanes + 1) + SCAN_WARP_SLOTS * tile.row_threads / WARP)
    thread += LYING_SLOTS * sum(access.mode == "misaligned" for access in work.accesses)
    if work.bulk:
        return (
            thread + BULK_THREAD_SLOTS + BULK_TENSOR_SLOTS * rows_moved(work) + element * tile.per_thread * tile.vector
        )
    if work.ragged and work.copies:
        thread += COPIES_THREAD_SLOTS
    elif work.ragged and reductions and tile.vector > 1 and work.whole:
        thread += ACROSS_THREAD_SLOTS
    warps = max(1.0, tile.row_threads / 32)  # of a row, in one of which single values stand in for all lanes
    if work.ragged and any(store.staged or row_pass.blocks_of for row_pass in work.passes for store in row_pass.stores):
        thread += EDGE_SLOTS * math.ceil(2 * (tile.vector - 1) / tile.threads_per_row) / warps
    if tile.remainder:
        thread += (element + EDGE_SLOTS) / warps
    taken = tile.per_thread * tile.vector
    if work.ragged and tile.vector > 1:  # turns that lie behind the row's end are passed over
        taken = min(taken, math.ceil(graph.cols / (tile.threads_per_row * tile.col_tiles)))
    return thread + element * taken


def scan_slots(scan: Scan) -> float:
    """Instructions of an element for what is made of it and others of its row."""
    if isinstance(scan.way, Sorted):
        return SORTED_SLOTS * meetings(scan)
    return LARGEST_SLOTS * scan.way.steps if isinstance(scan.way, Largest) else SCAN_SLOTS


def meetings(scan: Scan) -> int:
    """How often all threads of a row wait for each other."""
    if isinstance(scan.way, Sorted):
        rounds = scan.places.bit_length() - 1
        return rounds * (rounds + 1) // 2
    return scan.way.steps if isinstance(scan.way, Largest) else 1


def of_groups(row_pass: RowPass, issued: Mapping[str, float], tile: Tile) -> float:
    """Instructions for each vector of a thread of what a pass makes of its group."""
    found = 0.0
    for step in row_pass.groups:
        levels = math.log2(max(1, step.size // tile.vector))
        found += len(step.reductions) * (tile.vector + STEP_SLOTS * levels) + MOVE_SLOTS * len(step.stores)
        found += sum(issued.get(statement.name, 1) for statement in step.body)
    return found


def brought(row_pass: RowPass, tile: Tile, cols: int) -> float:
    """Instructions for each element of a row that bulk copies move, beside those of other rows."""
    accesses = [*(load.access for load in row_pass.loads), *(store.access for store in row_pass.stores)]
    sizes = [access.dtype.bytes for access in accesses if access.mode == "bulk"]
    conflicts = BULK_CONFLICT_SLOTS * sum(wavefronts(tile, cols, size) - 1 for size in sizes)
    reads = sum(load.access.mode == "bulk" for load in row_pass.loads)
    vectors = sum(load.access.mode != "bulk" and load.access.by_column for load in row_pass.reads)
    if row_pass.blocks_of:
        vectors += len(row_pass.stores)
    writes = sum(store.staged for store in row_pass.stores)
    tests = BULK_UNTIL_SLOTS / tile.vector if row_pass.until else 0.0
    beside = sum(load.access.mode == "element" and len(load.access.strided) > 0 for load in row_pass.reads)
    conflicts += LINE_SLOTS * beside * (max(1, WARP // tile.threads_per_row) - 1)
    return (
        BULK_READ_SLOTS * reads
        + BULK_WRITE_SLOTS * writes
        + BULK_VECTOR_SLOTS * vectors / tile.vector
        + tests
        + conflicts
    )


def wavefronts(tile: Tile, cols: int, size: int) -> int:
    """How often shared memory must be asked for one element of each thread of a warp, of `size` bytes: its banks hold
    neighbouring words, and one of them gives one word at a time."""
    apart = (
        tile.threads // WARP * cols if tile.threads_per_row < WARP else 0
    )  # rows of a warp (see fusegen.emitting.rows.bulk_rows)
    lanes = ((lane // tile.threads_per_row * apart + lane % tile.threads_per_row * tile.vector) for lane in range(WARP))
    words = {lane * size // BANK_BYTES for lane in lanes}
    return max(Counter(word % BANKS for word in words).values())


def rows_moved(work: Work) -> int:
    """Tensors whose rows bulk copies move."""
    return sum(access.mode == "bulk" for access in work.accesses)


def shifting(row_pass: RowPass, tile: Tile) -> float:
    """Instructions for each vector of a row that starts anywhere, beside those of other vectors."""
    misaligned = [load.access for load in row_pass.loads if load.access.mode == "misaligned"]
    if row_pass.blocks_of:
        shared = [load for load in row_pass.loads if load.access.mode == "vector"]
        return BY_BLOCKS_SLOTS * len(misaligned) + JOINED_SLOTS * len(shared)
    stores = [store for store in row_pass.stores if store.access.mode == "misaligned"]
    staged = sum(store.staged for store in stores)
    firsts = 32 / min(32, tile.row_threads)
    return (
        JOINED_SLOTS * len(misaligned)
        + STAGED_SLOTS * staged
        + (PARTED_SLOTS + FIRST_LANE_SLOTS * firsts) * (len(stores) - staged)
    )


def side_steps(access: Access) -> float:
    """What is left where a thread's next instruction reads beside its last one, between those of its neighbours."""
    if access.vector * access.together * access.dtype.bytes > VECTOR_BYTES:
        return TWICE_SHARE
    return APART_SHARE if access.mode == "element" and access.vector > 1 and access.dtype.bytes < 4 else 1.0


def width_share(work: Work, chosen: bool = False) -> float:
    """Share of the copy rate by what one instruction moves: narrow accesses spend issue slots instead of bytes, and a
    thread whose vector takes two instructions leaves every other 16 bytes to the second."""
    if work.bulk:
        return 1.0
    whole = max(len(a.strided) for a in work.accesses)  # what rows or neighbours share comes from a cache
    moving = [a for a in work.accesses if a.by_column and len(a.strided) == whole and not a.group]
    moving = moving or list(work.accesses)
    bytes_all = sum(a.dtype.bytes for a in moving)
    by_width = CHOSEN_RATE_SHARE_BY_BYTES if chosen else RATE_SHARE_BY_BYTES
    shares = [
        (a.dtype.bytes, by_width[a.vector_bytes] * (1.0 if a.tensor in work.turned else side_steps(a))) for a in moving
    ]
    straight = [a for a in moving if a.tensor not in work.turned] or moving
    side_by_side = work.tile.threads_per_row * work.tile.vector * max(a.dtype.bytes * a.together for a in straight)
    runs = (work.tile.rows_per_block * a.dtype.bytes for a in moving if a.tensor in work.turned)
    side_by_side = min(side_by_side, *runs) if work.turned else side_by_side
    misaligned = work.ragged and work.tile.vector > 1 and any(access.output and access.by_column for access in moving)
    more = APART_MISALIGNED_BYTES if misaligned else APART_BYTES
    next_to = (1 + more / WHOLE_BYTES) / (1 + more / side_by_side)
    return (
        sum(size * share for size, share in shares)
        / max(1, bytes_all)
        * min(1.0, side_by_side / SIDE_BY_SIDE_BYTES, next_to)
    )
