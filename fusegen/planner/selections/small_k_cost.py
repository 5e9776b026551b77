"""Register-resident top-k for small k: sizes, expected candidates, time.

Every warp says what order `want` of its threads' largest keys reach. What `need` warps reach, at least want * need >= k
keys reach: that is the bar, and what reaches it is a candidate. A fifth of the warps may say less, so that the bar does
not follow the poorest of them: of 50257 keys in random order, with k = 50 and 64 warps, some 95 reach it, where some
260 would reach what all warps do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.language.graph import Graph
from fusegen.planner.model import Cost, Tile, Traffic
from fusegen.planner.pieces import slots
from fusegen.planner.rows.duration import (
    COPY_SHARE,
    DIVISION_SLOTS,
    FILLED_SHARE,
    ISSUE_FACTOR,
    MOVE_SLOTS,
    SM_GBS,
    STEP_SLOTS,
    Work,
    resident_blocks,
    side_steps,
)
from fusegen.planner.time import floor_us, overlapped
from fusegen.planner.ways import SmallK
from fusegen.targets.base import Target


@dataclass(frozen=True, slots=True)
class Pace:
    """What is fitted of blocks that hold their rows."""

    element: float  # instructions for a key,
    exponential: float  # for one of the sum,
    joined: float  # for a vector from the pieces that it lies across,
    thread: float  # and of a thread whatever it holds
    alone_cycles: float  # of one, when its scheduler has no other warp; each one that it has adds a cycle
    launch_us: float
    overlap: float  # the norm's exponent


LEFT_OUT_SHARE = 0.2  # of the warps
MOST_ELEMENTS = 64  # of a thread: as many as bits that mark its candidates
# Each warp's order is compared with all others': 1 x 50257 took 9.4 us with 64 warps, 10.1 with 128.
MOST_WARPS = 64
TURN_ELEMENTS = 12

# Fitted to 140 candidates of 19 shapes on an H200 (cold L2, medians of 11), whose times they predict to 14 % (rms of
# the logarithm); first choices took 1.8 % more than the best candidate in the mean, 7.5 % at worst.
PACE = Pace(
    element=3.3,  # largest key, mark, and a place in shared memory
    exponential=3.4,
    joined=20.0,
    thread=300.0,  # what warps say, the bar, and ranks
    alone_cycles=4.9,
    launch_us=3.5,
    overlap=1.5,  # blocks of one row wait for each other, and rarely anything else is left to do
)
CANDIDATE_SLOTS = 325.0  # instructions to its place in the first block
# ---- waiting of a block, in microseconds
FIRST_LOAD_US = 1.0
WARP_US = 0.023  # a warp of the row, whose order is compared with the others'
RANK_US = 0.2  # a candidate of each thread, in the first block
MEETING_US = 0.24  # of a cluster's blocks, for each doubling


def small_k_of(k: int, tile: Tile, target: Target) -> SmallK:
    warps = tile.threads_per_row // target.warp
    want = math.ceil(k / ((1 - LEFT_OUT_SHARE) * warps))
    limit = max(256, 4 * power_from(k))
    room = max(k, min(limit, 2 * limit // tile.cluster))
    return SmallK(
        warps=warps,
        want=want,
        need=-(-k // want),
        turn=max(1, TURN_ELEMENTS // tile.vector),
        room=room,
        limit=limit,
        aim=(k + room) // 2,
        bins=max(tile.threads, min(2048, max(256, 2 * power_from(k)))),
    )


def power_from(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


def reaching(small_k: SmallK, tile: Tile, cols: int) -> float:
    """Expected candidates of a row in random order. Of a warp that has `mean` keys above the bar a thread has one with
    the chance 1 - exp(-mean / warp); with the chance need / warps, `want` threads or more have."""
    warp = tile.threads_per_row // small_k.warps
    wanted = (small_k.need - 0.5) / small_k.warps
    low, high = 0.0, 8.0 * warp
    for _ in range(30):
        mean = (low + high) / 2
        one = -math.expm1(-mean / warp)
        fewer = sum(math.comb(warp, n) * one**n * (1 - one) ** (warp - n) for n in range(small_k.want))
        low, high = (mean, high) if 1 - fewer < wanted else (low, mean)
    return min(float(cols), high * small_k.warps)


def duration_of(target: Target, graph: Graph, work: Work, small_k: SmallK, moved: Traffic, registers: int) -> Cost:
    """The time of one launch: bytes, instructions and waiting, as `planner.duration` has them for other rules."""
    tile = work.tile
    candidates = reaching(small_k, tile, graph.cols)
    thread = instructions(graph, work, PACE) + CANDIDATE_SLOTS * candidates / tile.threads_per_row
    waits_us = FIRST_LOAD_US + WARP_US * small_k.warps + RANK_US * candidates / tile.threads
    waits_us += MEETING_US * math.log2(tile.cluster)
    return cost_of(target, work, moved, registers, thread, waits_us, PACE)


def cost_of(
    target: Target, work: Work, moved: Traffic, registers: int, thread: float, waits_us: float, pace: Pace
) -> Cost:
    """Of blocks that hold their rows; each thread has `thread` instructions, each block waits for `waits_us`."""
    tile = work.tile
    blocks = taken(target, work, moved, registers, thread, waits_us, pace.alone_cycles)
    share = min(side_steps(access) for access in work.accesses)
    memory_us = moved.moved / (target.dram_gbs * COPY_SHARE * 1e3 * share)
    waves = max(1.0, work.blocks / (target.sms * FILLED_SHARE.get(tile.cluster, 1.0)) / blocks.resident)
    limits_us = (memory_us, blocks.issue_us, waiting_us(waves, blocks))
    time_us = pace.launch_us + overlapped(limits_us, pace.overlap)
    return cost_by(target, work, moved, registers, blocks, memory_us, time_us, tile.per_thread)


@dataclass(frozen=True, slots=True)
class Taken:
    """What the blocks of a launch take, in microseconds."""

    resident: int  # blocks of an SM
    issue_us: float  # all their instructions, of all schedulers
    own_us: float  # its instructions, of one block,
    alone_us: float  # and all that it takes when nothing else runs


def taken(
    target: Target, work: Work, moved: Traffic, registers: int, thread: float, waits_us: float, alone_cycles: float
) -> Taken:
    """Of blocks whose threads have `thread` instructions, of `alone_cycles` each where a scheduler has one warp, and
    which wait for `waits_us` besides."""
    threads = work.tile.threads
    resident = max(1, resident_blocks(target, threads, registers, work.shared_bytes))
    per_us = target.fp32_tflops * 1e6 / 2
    there = min(resident, -(-work.blocks // target.sms)) * threads / target.warp  # warps of an SM
    cycles = alone_cycles + there / target.schedulers_per_sm
    own_us = thread * cycles * target.sms * target.f32_lanes / per_us
    alone_us = waits_us + moved.moved / work.blocks / (SM_GBS * 1e3) + own_us
    return Taken(resident, ISSUE_FACTOR * work.blocks * threads * thread / per_us, own_us, alone_us)


def waiting_us(waves: float, blocks: Taken) -> float:
    """Of waves of blocks, between as many and as many whole ones: the last starts before those before it have ended."""
    return (waves + math.ceil(waves)) / 2 * blocks.alone_us


def cost_by(
    target: Target, work: Work, moved: Traffic, registers: int, blocks: Taken, memory_us: float, time_us: float,
    at_once: int,
) -> Cost:  # fmt: skip
    """The cost, where a thread has `at_once` vectors in flight."""
    tile = work.tile
    first = sum(load.access.dtype.bytes for load in work.passes[-1].loads)
    return Cost(
        traffic=moved,
        floor_us=floor_us(target, moved),
        time_us=time_us,
        bound="memory" if memory_us >= blocks.issue_us else "instruction",
        in_flight_bytes=blocks.resident * tile.threads * at_once * tile.vector * first,
        registers=registers,
        blocks_per_sm=blocks.resident,
    )


def instructions(graph: Graph, work: Work, pace: Pace) -> float:
    """Of one thread, whatever the number of candidates."""
    tile, [row_pass] = work.tile, work.passes
    issued = slots(graph, tile.vector)
    element = pace.element + MOVE_SLOTS * len(row_pass.loads) + sum(issued.get(s.name, 1) for s in row_pass.body)
    element += sum(pace.exponential if r.kind == "softmax" else 1 for r in row_pass.reductions)
    element += pace.joined / tile.vector * sum(load.access.mode == "misaligned" for load in row_pass.loads)
    dims = max(1, *(len(a.strided) for a in work.accesses))
    others = sum(r.kind != "softmax" for r in row_pass.reductions)
    return (
        pace.thread
        + DIVISION_SLOTS * (dims - 1)
        + others * STEP_SLOTS * math.log2(tile.threads_per_row)
        + element * tile.per_thread * tile.vector
    )
