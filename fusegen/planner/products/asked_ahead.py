"""Weights of groups that the L2 cache is asked for while the kernels before a grouped product run.

Which weights a block of a grouped product needs is known once it has read where groups end, behind the wait for the
kernels that say so. But where groups have some rows each, about as many as a tile, the first block has the first
group's, and so on; and what a block asks for in vain is what another one needs. So the blocks that a GPU holds at first
ask for the first slices that they would have if every group had one row of tiles. Nothing is computed from that: a
group that has no rows, or several rows of tiles, costs time, and no result changes.

So the kernels before have to leave the memory idle. A mixture's layer of 256 tokens and 64 experts (D 2048, H 1024,
H200, cold L2, medians of 15) took 222.5 us; where gate and up asked for 13, 30, 46, 63 and 93 MB of 537 while the
router ran, 221.5, 219.6, 218.6, 215.0 and 211.6. 64 tokens, 4 rows a group, took 211.4, and 209.2, 208.0, 205.6, 203.6
and 199.1; 8 tokens, whose rows are of 25 groups, 96.2, 95 to 94 of up to 60 MB, and 96.5 of 120. Where the product
behind it asked too, while gate and up's last tiles were computed, 128 tokens took 212.4 for 210.8, 64 211.4 for
205.9. wgmma's kernels of 512 tokens, which have bytes enough on their way, took 0 to 14 us more where their first
blocks asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.products.parts import Operand, ProductPlan

EMPTY_SHARE = 0.65  # of the groups that may have no rows: weights are asked for in vain
CACHES = 1.5  # as many bytes of groups that have rows as so many L2 caches hold: the first are read while the last come


@dataclass(frozen=True, slots=True)
class Asked:
    """The first `blocks` blocks, of which `down` have tiles one below the other and the next ones those beside these,
    ask for the first `run` elements of each of their columns, where a launch has `least_rows` rows or more."""

    blocks: int
    down: int
    run: int
    least_rows: int


def asked_ahead(plan: ProductPlan, tile_k: int, down: int) -> Asked | None:
    """What the first blocks of a plan ask for, each of which has one tile, `down` rows of tiles at a time; None of
    other products, and where weights don't lie so or are not there yet. `tile_k`: elements of a slice."""
    if not plan.segments or not plan.target.bulk_copies or not (plan.waits and plan.dependent and plan.dependent.idle):
        return None
    if len(plan.output_groups) > 1 or len(plan.row_dims) > 1:
        return None
    rights, groups = plan.output_groups[0].rights, plan.segments.count
    if not all(r.access.tensor in plan.early and lies_in_lines(r) for r in rights):
        return None
    blocks = min(plan.cost.blocks_per_sm * plan.target.sms, groups // down * down * plan.tiles_across)
    if blocks == 0 or plan.graph.rows < (least := fewest_rows(groups)):
        return None
    slice_bytes = plan.tile.cols * tile_k * VECTOR_BYTES * len(rights) // rights[0].width
    room = CACHES * plan.target.l2_bytes * with_rows(groups, plan.graph.rows)
    run = min(int(room / (blocks * slice_bytes)) * tile_k, plan.k // rights[0].width * rights[0].width)
    return Asked(blocks, down, run, least) if run else None


def lies_in_lines(right: Operand) -> bool:
    """Has each column of a group neighbours in K, from a multiple of 16 bytes on, and moves with nothing but groups?"""
    whole = right.width * right.access.dtype.bytes == VECTOR_BYTES
    by_group = right.access.group_axis is not None and len(right.batch) == 1
    return whole and by_group and right.along and not right.step and right.coding is None


def with_rows(groups: int, rows: int) -> float:
    """The share of the groups that have any, of so many rows, each as likely in any group."""
    return 1.0 if groups == 1 else -math.expm1(rows * math.log1p(-1 / groups))


def fewest_rows(groups: int) -> int:
    """Of so many no more than EMPTY_SHARE of the groups have none."""
    return 1 if groups == 1 else math.ceil(math.log(EMPTY_SHARE) / math.log1p(-1 / groups))
