"""What choosing k columns of a row takes: shared memory, comparisons, candidates, and time.

The expected candidates of a row in random order: those that reach the k-th largest of its g groups' largest keys,
g ln(g / (g - k)); where the row has several segments, of each one behind c columns the share k / c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.language.graph import Graph
from fusegen.planner.model import Cost, Selection, Tile, Traffic
from fusegen.planner.pieces import slots
from fusegen.planner.rows.duration import (
    COPY_SHARE,
    DIVISION_SLOTS,
    LAUNCH_US,
    MOVE_SLOTS,
    OVERLAP_EXPONENT,
    SINGLE_SLOTS,
    STEP_SLOTS,
    THREAD_SLOTS,
    Work,
    width_share,
)
from fusegen.planner.selections.large_k_cost import candidates_of
from fusegen.planner.selections.small_k_cost import cost_by, power_from, reaching, taken, waiting_us
from fusegen.planner.time import overlapped
from fusegen.planner.ways import InWarp, LargeK, OneByOne, Packed, SmallK, Streaming
from fusegen.targets.base import Target

# Fitted to the 50 of 56 candidates of 12 shapes that took up to 1.4 times as long as their best one, on an H200 (cold
# L2, medians of 7), whose times they predict to 9 % (rms of the logarithm); first choices took 0.5 % more than the best
# candidate in the mean, 4 % at worst. What warps and clusters wait for is of an earlier fit, and holds.
# ---- issue slots: instructions of a thread
LARGEST_SLOTS = 1.0  # an element and its vector's largest key
EXPONENTIAL_SLOTS = 3.6  # an element of an online softmax: multiply-add, power, sum, and its part of moving the pivot
EDGE_SLOTS = 8.0  # a vector that is joined from two blocks, by its text
NOTE_SLOTS = 5.0  # a vector's largest key: kept, and compared
TURN_SLOTS = 11.0
TIGHTEN_SLOTS = 100.0  # a threshold from the largest keys
LOOK_SLOTS = 15.0  # at an element of a noted vector
LIST_SLOTS = 95.0  # the vector's candidates
CUT_SLOTS = 120.0
CANDIDATE_SLOTS = 50.0  # each time that one is counted, moved or compared
# Of rows that share a warp. Fitted by hand on 2026-11-27, to the 27 candidates of three routers that a tuner tried on
# an H100 (65536 x 128 and x 32, k = 4; x 128, k = 8; bf16): of those up to 1.4 times as slow as the best one they
# predict 8 % amiss (rms of the logarithm), and that one first each time. And to 28 first choices on an H200
# (`benchmarks/topk.py --only routers`): 9 % amiss, if 1.5 us are added to all. Whole numbers, with which most of it is
# done, issue at half the rate of floats, as their bits and comparisons do.
# Where the largest is taken out k times:
ORDER_SLOTS = 6.0  # a key as an integer of its order
# two to find the largest and its column, one of which has to be tested for; two to take it out
TURN_ELEMENT_SLOTS = 6.0
TURN_STEP_SLOTS = 4.0  # two shuffles, and the better of each
TURN_PICK_SLOTS = 8.0
# Where lanes have several delegates:
KEY_SLOTS = 13.0  # kept in shared memory, made a delegate, compared with the bar
EXCHANGE_SLOTS = 3.0  # the larger and the lesser of two
OWN_CANDIDATE_SLOTS = 20.0  # found among a lane's keys
RANK_SLOTS = 14.0  # a candidate beside four others
# Where keys are words with their columns. Fitted to those of 458 candidates of 45 routers (65536 x 8 to x 384, k = 1 to
# 8; bf16 and f32) that took up to 1.5 times as long as the best one of their shape, on an H200 (cold L2, medians of
# 24): with 1.5 us added to all they predict 6 % amiss, and first choices take 1.5 % more than the best one in the mean,
# 11 % at worst. KEY_SLOTS is as large as makes f32 of 128 columns words, which took 16.1 and 16.6 us for k = 2 and 4
# where delegates took 19.7 and 20.6.
LANE_SLOTS = 19.0  # of a lane, whatever it holds
PAIR_SLOTS = 0.76  # a key, of which two are one word
GROUPED_SLOTS = 0.5  # kept in shared memory, made a delegate
WORD_SLOTS = 1.14  # a key's order, with its column, as one word
WORD_EXCHANGE_SLOTS = 1.77
CLIPPED_SLOTS = 3.8  # an f32: kept in shared memory, its order by more instructions, and looked at once more
OWN_PICK_SLOTS = 1.5  # one of the best in a lane's registers
GROUP_KEY_SLOTS = 4.0  # the largest two of a vector, and whether its group is one of the best
GROUP_SLOTS = 5.0  # two groups compared, or a vector's largest among those of its group
# ---- waiting of a block: cycles of an instruction, and microseconds
ALONE_CYCLES = 2.8  # when its scheduler has no other warp; each one that it has adds a cycle
NETWORK_CYCLES = 1.5  # the same of a network that sorts: several exchanges wait for none of each other
WORD_CYCLES = 1.46  # and where it sorts words
BLOCK_US = 0.00009  # a block more, of those that sort words: of an empty launch 0.00055, if nothing hides it
# Of an SM's shared memory and L1 cache, which are one, what rows take on their way and where they are kept: beyond this
# share of shared memory they wait for room. 65536 x 128, k = 2 in groups took 14.4 us by two lanes a row, without
# groups 12.1, by four lanes 11.3. Where lanes have delegates, so do rows that are read by less than a line at a time:
# 65536 x 128, k = 8, f32 took 28.0 us by four lanes a row and 21.8 by eight, x 256 34.5 by eight and by sixteen.
IN_FLIGHT_SHARE = 0.28
LINE_BYTES = 128
CROWDED_EXPONENT = 0.285
FIRST_LOAD_US = 0.2
TURN_US = 0.3  # its loads were issued a turn before
WARP_US = 0.15  # more of them for each warp that comes to the barriers
PICKED_US = 0.05  # a pass over the chosen columns
MEETING_US = 2.05  # of a cluster's blocks, three times
# Share of a block's instructions that no other block's loads hide: what the last ones do when nothing is left to read.
# Without it 4096 rows of 256 to 32000 columns were predicted to 0.83 of their times in the mean, and short ones of
# which few are chosen to 0.74.
LAST_SHARE = 0.7
CLUSTERED_FACTOR = 1.042  # waves of clusters take longer: blocks wait for room together, and for the first one to rank
SHUFFLE_US = 0.014
WARP_SELECT_US = 1.5  # all of a warp's work: one chain of rounds and comparisons

AGAIN_BYTES = 174  # of DRAM for a noted vector
UNEVEN_FACTOR = 1.15  # elements that pass a threshold, by those that would if a row's warps had groups alike
# that one noted key should stand for: fewer take more room, and of more all must be looked at
NOTED_ELEMENTS = 8
NOTE_WORDS = 32  # of a thread, in shared memory
# where an SM has 64 KiB: two waves to each of its SIMDs then have room
FEW_NOTE_WORDS = 8
LITTLE_SHARED_BYTES = 64 << 10
# Where shared memory is cut out of the L1 cache, loads on their way have little room beside blocks that take more than
# this share of it: 4096 x 50257, k = 256, bf16 took 155.7 us with 4 blocks of 47 KB on an SM, and 170.3 with 49 KB and
# nothing else changed; 4096 x 32000, k = 128, f32 154.7 with 33 KB and 174.0 with 50.
ROOMY_SHARE = 0.86
CROWDED_FACTOR = 1.08
BLOCK_BYTES = 1024  # that a block takes beside its own
# of a thread's vectors: random order marks one or two. Where more may be, those that are but tied come last
MANY_MARKS = 8
SLACK_PART = 8  # a threshold that an eighth more groups reach than need to will do
# at most, of the orders between a warp's least and its largest key: any bound that enough reach will do
BISECTIONS = 12
MOST_COMPARED_CANDIDATES = 64  # candidates of a bin, each with all others: of more, all are sorted
DELEGATES_FOR_EACH = 4  # chosen column of a row: then 1.15 candidates for each are likely
COMPARED_CANDIDATES = 4  # candidates of a warp that each one is compared with at a time


def groups_of(k: int, threads: int, turn: int) -> int:
    """Groups of a thread's elements: the threads of a row have four for each chosen column."""
    return min(turn, power_from(-(-4 * k // threads)))


def note_words(target: Target) -> int:
    """Noted keys of a thread at a time."""
    return NOTE_WORDS if target.shared_per_sm > LITTLE_SHARED_BYTES else FEW_NOTE_WORDS


def note_of(vector: int, turn: int, per_thread: int, words: int) -> int:
    """Vectors of a turn that share one noted key."""
    note = 1
    while note < turn and (note * vector < NOTED_ELEMENTS or per_thread > note * words):
        note *= 2
    return note


def segment_of(note: int, turn: int, per_thread: int, words: int) -> int:
    """Vectors of a thread whose noted keys have room."""
    return min(per_thread, max(turn, words * note // turn * turn))


def likely_of_warp(k: int, lanes: int) -> float:
    """Candidates of a row in random order: the keys that reach the k-th of its lanes' largest keys.

    A lane that has n keys above the bar in the mean has none there with the chance e^-n. The bar is where k lanes have
    some."""
    return lanes * -math.log1p(-(k - 0.5) / lanes)


def most_ranked(k: int) -> int:
    """Candidates that a warp ranks by comparing them: more than that are ties."""
    return max(64, 2 * k)


def most_ranked_of_delegates(k: int) -> int:
    """The same where lanes have several delegates: rows share a block, and each has room for so many."""
    return max(32, 2 * k)


def limit_of(k: int) -> int:
    """Candidates that a cut may leave: the bin of the k-th one holds others too."""
    return k + max(32, k // 4)


def entries_of(k: int, threads: int) -> int:
    """Candidates of a block: those that a cut leaves, and one for each lane, so that cuts are rare."""
    return power_from(limit_of(k) + threads)


def bins_of(k: int, threads: int) -> int:
    return max(threads, min(2048, max(256, power_from(2 * k))))


def merged_room(limit: int, warps: int, cluster: int) -> int:
    """Candidates of a whole cluster, as a power of two: they may have to be sorted."""
    return power_from(cluster * (limit + warps))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a row's selection is expected to take, keys in random order."""

    comparisons: float  # of elements with the threshold
    candidates: float  # that pass it
    cuts: int  # of the candidates to the best k


def expected(selection: Selection, tile: Tile, cols: int) -> Choice:
    """Of one row."""
    way, k = selection.way, selection.k
    if isinstance(way, SmallK):
        return Choice(cols, reaching(way, tile, cols), 0)
    if isinstance(way, LargeK):
        return Choice(cols, candidates_of(way, tile, cols), 0)
    if isinstance(way, OneByOne):
        return Choice(cols * k, cols, 0)
    if isinstance(way, Packed):
        return Choice(cols, k, 0)
    if isinstance(way, InWarp):
        return Choice(cols, min(cols, likely_of_warp(k, way.delegates * tile.threads_per_row)), 0)
    groups = tile.threads_per_row * way.groups
    seen = min(cols, way.segment * tile.threads_per_row * tile.vector)
    idle = cols <= (tile.threads_per_row - 32) * tile.vector  # warps without elements let everything pass
    if groups > k and not idle:
        passing = min(seen, -UNEVEN_FACTOR * groups * math.log1p(-k / groups))
    elif idle:
        passing = seen
    else:  # every element until the first cut, or what the lowest of as many groups as columns lets pass
        passing = min(seen, k * (1 + math.log(max(1.0, seen / k))))
    while seen < cols:
        more = min(cols - seen, way.segment * tile.threads_per_row * tile.vector)
        passing += UNEVEN_FACTOR * k * more / (seen + more)
        seen += more
    over = passing / tile.cluster - way.entries
    return Choice(cols, passing, math.ceil(max(0.0, over) / (way.entries - way.limit)))


def duration_of(target: Target, graph: Graph, work: Work, selection: Selection, moved: Traffic, registers: int) -> Cost:
    """The time of one launch: bytes, instructions and waiting, as `planner.duration` has them for other rules."""
    tile = work.tile
    choice = expected(selection, tile, graph.cols)
    thread = instructions(graph, work, selection, choice)
    alone_cycles = NETWORK_CYCLES if selection.delegates > 1 else ALONE_CYCLES
    if selection.packed:
        alone_cycles = WORD_CYCLES
    blocks = taken(target, work, moved, registers, thread, waits(work, selection), alone_cycles)
    again = read_again(target, graph, work, selection, choice, blocks.resident)
    memory_us = (moved.moved + again) / (target.dram_gbs * COPY_SHARE * 1e3 * width_share(work, chosen=True))
    waves = max(1.0, work.blocks / target.sms / blocks.resident)
    waits_us = waiting_us(waves, blocks)
    if tile.cluster > 1 and waves > 1:
        waits_us *= CLUSTERED_FACTOR
    one_memory = target.shared_per_sm > LITTLE_SHARED_BYTES  # of shared memory and the cache
    if one_memory and share_of_shared(target, work, blocks.resident) > ROOMY_SHARE:
        memory_us *= CROWDED_FACTOR
        waits_us *= CROWDED_FACTOR
    launch_us = LAUNCH_US
    if isinstance(selection.way, Packed):
        launch_us += BLOCK_US * work.blocks
    crowds = selection.packed or (selection.delegates > 1 and side_by_side_bytes(work) < LINE_BYTES)
    if one_memory and crowds:
        memory_us *= max(1.0, share_of_cache(target, work, blocks.resident) / IN_FLIGHT_SHARE) ** CROWDED_EXPONENT
    at_once = selection.streamed or tile.per_thread
    time_us = (
        launch_us + overlapped((memory_us, blocks.issue_us, waits_us), OVERLAP_EXPONENT) + LAST_SHARE * blocks.own_us
    )
    return cost_by(target, work, moved, registers, blocks, memory_us, time_us, at_once)


def share_of_shared(target: Target, work: Work, resident: int) -> float:
    """The part of an SM's shared memory that its blocks take."""
    return resident * (work.shared_bytes + BLOCK_BYTES) / target.shared_per_sm


def side_by_side_bytes(work: Work) -> int:
    """That the lanes of a row read at a time."""
    tile = work.tile
    widths = (tile.threads_per_row * tile.vector * a.dtype.bytes for a in work.accesses if a.strided)
    return min(widths, default=LINE_BYTES)


def share_of_cache(target: Target, work: Work, resident: int) -> float:
    """What the rows of an SM's blocks take of its shared memory, where they are kept, and on their way of the L1 cache:
    both are one memory."""
    tile = work.tile
    arriving = tile.threads * tile.per_thread * tile.vector * sum(a.dtype.bytes for a in work.accesses if a.strided)
    return resident * (work.shared_bytes + arriving) / target.shared_per_sm


def read_again(target: Target, graph: Graph, work: Work, selection: Selection, choice: Choice, resident: int) -> float:
    """Bytes of noted vectors that come from DRAM again: rows in flight evict each other from the L2 cache."""
    if not isinstance(selection.way, Streaming):
        return 0.0
    rows = min(work.blocks, resident * target.sms) / work.tile.cluster
    in_flight = rows * graph.cols * sum(load.access.dtype.bytes for load in selection.key_body.loads)
    missing = max(0.0, 1 - target.l2_bytes / max(1.0, in_flight))
    return missing * graph.rows * choice.candidates * selection.way.note * len(selection.key_body.loads) * AGAIN_BYTES


def instructions(graph: Graph, work: Work, selection: Selection, choice: Choice) -> float:
    """Of one thread."""
    tile = work.tile
    issued = slots(graph, tile.vector)
    element = LARGEST_SLOTS + (EDGE_SLOTS / tile.vector if work.ragged else 0.0)
    for row_pass in work.passes:
        element += MOVE_SLOTS * (len(row_pass.loads) + len(row_pass.stores))
        element += sum(issued.get(statement.name, 1) for statement in row_pass.body)
        element += sum(EXPONENTIAL_SLOTS if r.kind == "softmax" else 1 for r in row_pass.reductions)
    if tile.vector == 1:
        element += SINGLE_SLOTS * len(work.accesses)
    dims = max(1, *(len(a.strided) for a in work.accesses))
    thread = THREAD_SLOTS + DIVISION_SLOTS * (dims - 1) + element * tile.per_thread * tile.vector
    steps = math.log2(max(2, tile.threads_per_row))
    picked_passes = len(selection.picked)
    thread += picked_passes * (20 + STEP_SLOTS * steps) + STEP_SLOTS * steps * sum(
        len(s.reductions) for s in work.passes
    )
    way = selection.way
    if isinstance(way, OneByOne):
        elements = tile.per_thread * tile.vector
        lanes = math.log2(tile.threads_per_row)
        return (
            thread
            + ORDER_SLOTS * elements
            + selection.k * (TURN_ELEMENT_SLOTS * elements + TURN_STEP_SLOTS * lanes + TURN_PICK_SLOTS)
        )
    if selection.limit:
        groups = selection.limit.groups
        thread += GROUP_KEY_SLOTS * tile.per_thread * tile.vector
        thread += GROUP_SLOTS * (groups + graph.cols / tile.vector) / tile.threads_per_row + GROUP_SLOTS * groups
    if isinstance(way, Packed):
        return thread + of_words(way, selection.k, tile)
    if isinstance(way, InWarp) and way.delegates > 1:
        return thread + KEY_SLOTS * tile.per_thread * tile.vector + of_delegates(way, selection.k, tile, choice)
    if not isinstance(way, Streaming):
        stored = 2.0 * tile.per_thread * tile.vector  # tests of every element, and stores of a few
        return thread + stored + ranked(tile, choice) + 60
    turns = -(-tile.per_thread // way.turn)
    segments = -(-tile.per_thread // way.segment)
    vectors = math.ceil(choice.candidates * way.note / tile.threads_per_row)  # that a lane looks at
    held = min(choice.candidates / tile.cluster, way.entries) / tile.threads
    thread += NOTE_SLOTS * tile.per_thread / way.note + TURN_SLOTS * turns + segments * TIGHTEN_SLOTS
    thread += (LOOK_SLOTS * tile.vector + LIST_SLOTS) * vectors + choice.cuts * (CUT_SLOTS + 3 * CANDIDATE_SLOTS * held)
    return thread + 4 * CANDIDATE_SLOTS * held


def of_delegates(way: InWarp, k: int, tile: Tile, choice: Choice) -> float:
    """Instructions of one thread beside those on each key: the network, candidates, their ranks."""
    chosen, steps = power_from(k), tile.threads_per_row.bit_length() - 1
    depth = way.delegates.bit_length() - 1
    exchanges = way.delegates / 2 * depth * (depth + 1) / 2
    exchanges += steps * chosen / 2 * (chosen.bit_length() - 1)
    merged = steps * 2 * chosen  # a shuffle and the larger one
    return EXCHANGE_SLOTS * exchanges + merged + ranked(tile, choice) + 60


def ranked(tile: Tile, choice: Choice) -> float:
    """Instructions of one thread that find its candidates and compare each with all of the row."""
    own = choice.candidates / tile.threads_per_row
    found = OWN_CANDIDATE_SLOTS * (own + 2 * math.sqrt(own))  # the lane of a warp that has most
    return found + math.ceil(own) * RANK_SLOTS * math.ceil(choice.candidates / COMPARED_CANDIDATES)


def of_words(way: Packed, k: int, tile: Tile) -> float:
    """Instructions of one thread that make words of its keys, sort them, and merge the best with other lanes'."""
    keys, lanes = tile.per_thread * tile.vector, tile.threads_per_row
    found = LANE_SLOTS + PAIR_SLOTS * keys
    if way.group > 1:
        found += GROUPED_SLOTS * keys + sorting(way, keys / way.group) + merging(way, lanes)
        keys = way.own(lanes) * way.group
    found += (WORD_SLOTS + CLIPPED_SLOTS * way.clipped) * keys + sorting(way, keys) + merging(way, lanes)
    return found + OWN_PICK_SLOTS * min(k, way.own(lanes))


def sorting(way: Packed, words: float) -> float:
    """So many words at a time, of which the best stay (Batcher's odd-even merge sort, and a bitonic merge)."""
    best, depth, turns = way.sorted, way.sorted.bit_length() - 1, math.ceil(words / way.sorted)
    exchanges = best / 4 * depth * (depth - 1) + best - 1
    return turns * WORD_EXCHANGE_SLOTS * exchanges + (turns - 1) * merging_once(best)


def merging(way: Packed, lanes: int) -> float:
    """The best of all lanes: a shuffle for each of a lane's, but where it keeps a half."""
    if lanes == 1:
        return 0.0
    steps = lanes.bit_length() - 1
    parted = way.sorted + lanes / 2 + merging_once(way.sorted // 2) if way.parted(lanes) else 0.0
    whole = steps - 1 if way.parted(lanes) else steps
    return whole * (way.sorted + merging_once(way.sorted)) + parted


def merging_once(best: int) -> float:
    return best + WORD_EXCHANGE_SLOTS * best / 2 * max(0, best.bit_length() - 1)


def waits(work: Work, selection: Selection) -> float:
    """Microseconds of a block that runs alone."""
    tile = work.tile
    picked = PICKED_US * len(selection.picked)
    way = selection.way
    if isinstance(way, OneByOne):
        return FIRST_LOAD_US + SHUFFLE_US * selection.k * 2 * math.log2(tile.threads_per_row) + picked
    if selection.packed or selection.delegates > 1:
        return FIRST_LOAD_US + picked
    if not isinstance(way, Streaming):
        return FIRST_LOAD_US + WARP_SELECT_US + 0.03 * selection.k + picked
    turns = -(-tile.per_thread // way.turn)
    alone = len(work.passes) * (FIRST_LOAD_US + TURN_US * turns) + WARP_US * tile.threads / 32 + picked
    if tile.cluster > 1:
        alone += 3 * MEETING_US + 0.25 * math.log2(tile.cluster)
    return alone
