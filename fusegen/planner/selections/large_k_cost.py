"""Register-resident top-k for large k: sizes, expected candidates, time.

Every warp parts its keys into groups, two for each column that it is to choose, and says what order its share of their
largest keys reach. The least that a warp says is the bar: k keys reach it, since a warp's share of the groups do in
each warp. What reaches it is a candidate.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.planner.model import Cost, Tile, Traffic
from fusegen.planner.rows.duration import Work
from fusegen.planner.selections.small_k_cost import Pace, cost_of, instructions, power_from
from fusegen.planner.ways import LargeK
from fusegen.targets.base import Target

# of a row for each one that is chosen: 4096 x 8192, k = 32, took 55 us, and 51 as it streams by
SPARSEST_COLUMNS = 128
GROUPS_A_COLUMN = 2  # for each column that is chosen: with four, 32768 x 1000, k = 100, f32 took 95 us, with two 73
# An eighth more groups may reach a warp's order than need to, or four: a try less is worth more than a candidate less
SLACK_PART = 8
FEW_GROUPS = 4
USEFUL_SHARE = 0.75  # of a warp's groups: where more than that would have to reach the bar, it is no use
MOST_ELEMENTS = 64  # of a thread: 32768 x 8192, k = 512, f32 took 428 us with as many, 465 with half of them
ROOM_FACTOR = 1.25  # of the candidates of a row in random order
BESIDE_CANDIDATES = 32  # beside them
MOST_BINS = 1024
# Tries of a bar by interpolation. Keys that are distributed evenly or normally need 3 to 5; after that, ties are looked
# for and the rest is halved, by turns.
GUESSES = 6  # on the H200 ties were timed with 4
COMPARED_CANDIDATES = 4  # candidates of a bin that each one is compared with at a time

# The expected largest of n normally distributed numbers, in standard deviations: by so much the poorest of n warps lies
# below their mean.
POOREST_DEVIATIONS = {1: 0.0, 2: 0.56, 4: 1.03, 8: 1.42, 16: 1.77}

# Fitted to the 215 of 276 candidates of 88 shapes on an H200 (cold L2, medians of 9) that took up to 1.5 times as long
# as their shape's best one, whose times they predict to 9 % (rms of the logarithm). First choices among them and those
# of planner/choosing.py took 1.2 % more than the best one in the mean, 16 % at worst.
PACE = Pace(
    element=4.6,  # its part of a group's largest key, of counting what reaches the bar, and of packing it
    exponential=4.0,
    joined=20.0,
    thread=370.0,
    alone_cycles=5.3,
    launch_us=5.5,
    overlap=6.0,
)
# ---- more instructions of a thread
GROUP_SLOTS = 20.0  # tried against some bars
BIN_SLOTS = 12.6
CANDIDATE_SLOTS = 30.0
CHOSEN_SLOTS = 42.0
# ---- waiting of a block, in microseconds
FIRST_LOAD_US = 0.1
WARP_US = 0.08  # each one that comes to the barriers


def large_k_of(k: int, cols: int, tile: Tile, target: Target) -> LargeK | None:
    """None where a bar would be of use, but some warp has too few keys for its share."""
    warps, elements = tile.threads // target.warp, tile.per_thread * tile.vector
    want = -(-k // warps)
    enough = want + max(min(want, FEW_GROUPS), want // SLACK_PART)
    groups = min(elements, power_from(-(-GROUPS_A_COLUMN * k // tile.threads)))
    if want > USEFUL_SHARE * min(groups * target.warp, least_of_a_warp(cols, tile, target.warp)):
        if k <= USEFUL_SHARE * cols:
            return None
        groups = want = enough = 0
    bins = max(tile.threads, min(MOST_BINS, max(256, 2 * power_from(k))))
    large_k = LargeK(warps=warps, groups=groups, want=want, enough=enough, limit=cols, aim=0, bins=bins)
    found = candidates_of(large_k, tile, cols)
    limit = max(k, min(cols, -(-int(ROOM_FACTOR * found + BESIDE_CANDIDATES) // 8) * 8))
    return replace(large_k, limit=limit, aim=(k + limit) // 2)


def least_of_a_warp(cols: int, tile: Tile, warp: int) -> int:
    """Elements of the block's last warp, which has the fewest."""
    before = tile.threads - warp
    each = (cols - (v * tile.threads + before) * tile.vector for v in range(tile.per_thread))
    return sum(min(max(0, n), warp * tile.vector) for n in each)


def candidates_of(large_k: LargeK, tile: Tile, cols: int) -> float:
    """Expected candidates of a row in random order: the keys that reach the poorest warp's order."""
    if not large_k.groups:
        return float(cols)
    of_warp = large_k.groups * tile.threads // large_k.warps
    share = min(1.0, (large_k.want + large_k.enough) / 2 / of_warp)
    share += POOREST_DEVIATIONS.get(large_k.warps, 2.0) * math.sqrt(share * (1 - share) / of_warp)
    in_group = max(1.0, cols / (large_k.groups * tile.threads))
    return cols * float(1 - (1 - min(0.999, share)) ** (1 / in_group))


def duration_of(target: Target, graph: Graph, work: Work, large_k: LargeK, moved: Traffic, registers: int) -> Cost:
    """The time of one launch: bytes, instructions and waiting, as `planner.duration` has them for other rules."""
    tile = work.tile
    candidates = candidates_of(large_k, tile, graph.cols)
    more = (
        GROUP_SLOTS * large_k.groups
        + (BIN_SLOTS * large_k.bins + CANDIDATE_SLOTS * candidates + CHOSEN_SLOTS * graph.picks) / tile.threads
    )
    waits_us = FIRST_LOAD_US + WARP_US * tile.threads / target.warp
    return cost_of(target, work, moved, registers, instructions(graph, work, PACE) + more, waits_us, PACE)
