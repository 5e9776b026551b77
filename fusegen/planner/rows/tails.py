"""Which of a thread's turns over a row ask whether its vector lies there, and which know it.

Turn v of a thread is its v-th vector. Where a loop is unrolled, nothing is left of a test in the turns that all threads
pass, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.planner.model import RowPlan


@dataclass(frozen=True, slots=True)
class Turns:
    """Those whose vectors are among the row's first so many. Every thread passes in the first `certain` ones; in the
    others a test decides, or, where that is `all`, none passes."""

    certain: int = 0
    all: bool = False


def turns_of(plan: RowPlan, vectors: int) -> Turns:
    """Of the row's first `vectors`."""
    tile = plan.tile
    if plan.flat or tile.col_tiles > 1 or not plan.unrolled or vectors < tile.threads_per_row:
        return Turns()
    certain, rest = divmod(vectors, tile.threads_per_row)
    return Turns(certain, all=not rest)


def guarded(plan: RowPlan) -> Turns | None:
    """When a vector is worth a look; None where all of them are."""
    return None if plan.tail == "none" else turns_of(plan, -(-plan.vector_cols // plan.tile.vector))


def whole(plan: RowPlan) -> Turns | None:
    """When every element of a vector lies in the row; None where they always do."""
    if plan.tail != "element" or plan.tile.vector == 1:
        return None
    return turns_of(plan, plan.cols // plan.tile.vector)


def single(plan: RowPlan) -> Turns | None:
    """When an element of a vector lies in the row; None where they always do."""
    found = whole(plan)
    return found and Turns(found.certain)  # one of the vector behind may


def in_blocks(plan: RowPlan) -> Turns:
    """When all of an aligned block lies in the row, whose first columns may lie before the first block."""
    width = plan.tile.vector
    certain = (plan.cols - width + 1) // width
    found = turns_of(plan, certain)
    return found if certain == plan.cols // width else Turns(found.certain)


def turns_inside(plan: RowPlan) -> int:
    """Vectors of a thread, by whole turns of a selection that streams, that lie in the row for every thread, with all
    that is read for them."""
    assert plan.selection is not None
    across = [a.vector_bytes // a.dtype.bytes for a in plan.accesses if a.mode == "misaligned" and not a.output]
    turn = plan.selection.streamed
    columns = turn * plan.tile.threads_per_row * plan.tile.vector
    return max(0, plan.cols - max(across, default=0)) // columns * turn
