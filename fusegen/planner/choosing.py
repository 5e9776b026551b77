"""What choosing k columns of a row takes: shared memory, comparisons, candidates, and time.

The expected candidates of a row in random order: of the first tile of n columns those that reach the k-th largest of
its groups' largest keys, k and a few more; after c columns and a cut, the share k / c of what follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.graph import Graph
from fusegen.naming import value_names
from fusegen.planner.duration import (
    COPY_SHARE,
    DIVISION,
    ISSUE,
    LAUNCH_US,
    MOVE,
    OVERLAP,
    SINGLE,
    SM_GBS,
    STEP,
    THREAD,
    Work,
    resident_blocks,
    width_share,
)
from fusegen.planner.model import Cost, Selection, Tile, Traffic
from fusegen.targets.base import Target

# Fitted to 155 candidates of 15 shapes on an H200 (cold L2, medians of 9), whose times they predict to 15 % (rms of the
# logarithm); first choices took 5 % more than the best candidate in the mean.
# ---- instructions of a thread
LARGEST = 1.4  # an element and its vector's largest key
EXPONENTIAL = 6.5  # an element of an online softmax: difference, product, power, sum, and its part of the rescaling
EDGE = 24.0  # a vector that is joined from two blocks, by its text; no such rows were among the fitted
NOTE = 1.7  # a vector, by comparison, vote and count
TURN = 47.0
LOOK = 48.0  # into noted vectors, and
LOOK_ELEMENT = 32.0  # an element of one of them
CUT = 120.0
RANK = 440.0  # the candidates left at the row's end
CANDIDATE = 43.0  # each time that one is counted, moved or compared
# ---- waiting of a block: cycles of an instruction, and microseconds
ALONE_CYCLES = 4.3  # when its scheduler has no other warp; each one that it has adds a cycle
FIRST_LOAD_US = 0.9
TURN_US = 0.28  # its loads were issued a turn before
WARP_US = 0.024  # more of it for each warp that comes to the barrier
PICKED_US = 0.1  # a walk over the chosen columns
MEETING_US = 2.4  # of a cluster's blocks, three times
TEAM_US = 0.43  # all of a team's work: one chain of rounds and comparisons

ENTRY = 8  # bytes of a candidate
WORD = 4
LEAST_ROOM = 64  # candidates of a warp beside those that a cut leaves: a lane may find 16 at a time


def groups_of(k: int, warps: int, cluster: int, warp: int, turn: int) -> int:
    """Into how many groups a thread parts its elements of a turn: one, unless a warp would need most of its threads."""
    return 1 if 2 * -(-k // warps) <= warp else turn


def limit_of(k: int) -> int:
    """Candidates that a cut may leave: a bin that holds the k-th one also holds others."""
    return k + max(32, k // 4)


def entries_of(k: int, warps: int) -> int:
    """Candidates that a block has room for: what a cut leaves, and a few for each lane, so that cuts are rare."""
    return power_from(limit_of(k) + LEAST_ROOM * warps)


def bins_of(k: int, threads: int) -> int:
    return max(threads, min(2048, max(256, power_from(2 * k))))


def notes_of(warp: int, turn: int) -> int:
    """Vectors that a warp may note: those of a turn, and two for each lane, so that lanes are busy when it looks."""
    return warp * (turn + 2)


def merged_room(limit: int, warps: int, cluster: int) -> int:
    """Candidates of a whole cluster, as a power of two: they may have to be sorted."""
    return power_from(cluster * (limit + warps))


def power_from(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


def picker_bytes(selection: Selection, tile: Tile, warp: int, cols: int) -> int:
    """Of the struct Picker in templates/parts/picking.j2."""
    if selection.by == "team":
        return ENTRY * tile.rows_per_block * (cols + selection.k)
    warps = tile.threads // warp
    words = warps * (selection.notes + 2) + selection.bins + 1 + 5
    entries = 2 * selection.entries + selection.k
    if tile.cluster > 1:
        words += tile.cluster + 1
        entries += 2 * merged_room(selection.limit, warps, tile.cluster) + tile.cluster
    return -(-(ENTRY * entries + WORD * words) // 16) * 16


@dataclass(frozen=True, slots=True)
class Choice:
    """What a row's selection is expected to take, keys in random order."""

    comparisons: float  # of elements with the threshold
    candidates: float  # that pass it
    cuts: int  # of the candidates to the best k


def expected(selection: Selection, tile: Tile, cols: int) -> Choice:
    """Of one row."""
    k = selection.k
    if selection.by == "team":
        return Choice(cols, min(cols, 1.3 * k + 2), 0)
    own = -(-cols // tile.cluster)
    turn = min(own, tile.threads * tile.vector * selection.turn)
    passing = min(1.0, 1.35 * k / tile.cluster / turn)  # of an element, until a cut raises the threshold
    candidates = held = 0.0
    cuts = seen = 0
    while seen < own:
        more = min(turn, own - seen)
        candidates += passing * more
        held += passing * more
        seen += more
        if held > (selection.entries + selection.limit) / 2:
            cuts += 1
            held = min(held, selection.limit)
            passing = min(passing, min(1.0, k / seen))
    return Choice(cols, candidates * tile.cluster, cuts)


def fits(selection: Selection, tile: Tile, target: Target, cols: int) -> bool:
    return picker_bytes(selection, tile, target.warp, cols) + 1024 <= target.shared_bytes


def duration_of(target: Target, graph: Graph, work: Work, selection: Selection, moved: Traffic, registers: int) -> Cost:
    """The time of one launch: bytes, instructions and waiting, as `planner.duration` has them for other rules."""
    tile = work.tile
    resident = max(1, resident_blocks(target, tile.threads, registers, work.shared_bytes))
    memory_us = moved.moved / (target.dram_gbs * COPY_SHARE * 1e3 * width_share(work))
    choice = expected(selection, tile, graph.cols)
    per_us = target.fp32_tflops * 1e6 / 2
    thread = instructions(graph, work, selection, choice, target.warp)
    issue_us = ISSUE * work.blocks * tile.threads * thread / per_us
    there = min(resident, -(-work.blocks // target.sms)) * tile.threads / target.warp  # warps of an SM
    cycles = ALONE_CYCLES + there / target.schedulers_per_sm
    alone_us = waits(work, selection) + moved.moved / work.blocks / (SM_GBS * 1e3)
    alone_us += thread * cycles * target.sms * target.f32_lanes / per_us
    waiting_us = max(1.0, work.blocks / target.sms / resident) * alone_us
    norm = (memory_us**OVERLAP + issue_us**OVERLAP + waiting_us**OVERLAP) ** (1 / OVERLAP)
    first = sum(load.access.dtype.bytes for load in work.stages[-1].loads)
    at_once = tile.per_thread if selection.by == "team" else selection.turn
    return Cost(
        traffic=moved,
        floor_us=max(moved.ideal / (target.dram_gbs * 1e3), moved.flops / (target.fp32_tflops * 1e6)),
        time_us=LAUNCH_US + norm,
        bound="memory" if memory_us >= issue_us else "compute",
        in_flight_bytes=resident * tile.threads * at_once * tile.vector * first,
        registers=registers,
        blocks_per_sm=resident,
    )


def instructions(graph: Graph, work: Work, selection: Selection, choice: Choice, warp: int) -> float:
    """Of one thread."""
    tile = work.tile
    issued = {name: node.op.issued for node, name in value_names(graph).items()}
    element = LARGEST + (EDGE / tile.vector if work.ragged else 0.0)
    for stage in work.stages:
        element += MOVE * (len(stage.loads) + len(stage.stores))
        element += sum(issued.get(statement.name, 1) for statement in stage.body)
        element += sum(EXPONENTIAL if r.kind == "softmax" else 1 for r in stage.reductions)
    if tile.vector == 1:
        element += SINGLE * len(work.accesses)
    dims = max(1, *(len(a.strided) for a in work.accesses))
    thread = THREAD + DIVISION * (dims - 1) + element * tile.per_thread * tile.vector
    steps = math.log2(max(2, tile.threads_per_row))
    walks = len(selection.picked)
    thread += walks * (20 + STEP * steps) + STEP * steps * sum(len(s.reductions) for s in work.stages)
    if selection.by == "team":
        stored = 2.0 * tile.per_thread * tile.vector  # tests of every element, and stores of a few
        return thread + stored + 60
    turns = -(-tile.per_thread // selection.turn)
    lanes = tile.threads_per_row
    looks = choice.candidates / lanes
    held = min(choice.candidates, 1.5 * selection.limit) / tile.threads
    thread += NOTE * tile.per_thread + TURN * turns + looks * (LOOK + LOOK_ELEMENT * tile.vector)
    thread += choice.cuts * (CUT + 3 * CANDIDATE * held)
    return thread + RANK + 4 * CANDIDATE * held


def waits(work: Work, selection: Selection) -> float:
    """Microseconds that a block takes when nothing else runs."""
    tile = work.tile
    picked = PICKED_US * len(selection.picked)
    if selection.by == "team":
        return FIRST_LOAD_US + TEAM_US + 0.03 * selection.k + picked
    turns = -(-tile.per_thread // selection.turn)
    before = (len(work.stages) - 1) * (FIRST_LOAD_US + TURN_US * turns)
    alone = FIRST_LOAD_US + turns * (TURN_US + WARP_US * tile.threads / 32) + before
    alone += picked
    if tile.cluster > 1:
        alone += 3 * MEETING_US + 0.25 * math.log2(tile.cluster)
    return alone
