"""Which turns over a row need a test, against the columns that every thread has in each of them."""

from __future__ import annotations

import pytest

from fusegen.planner import candidates
from fusegen.planner.model import RowPlan
from fusegen.planner.rows.tails import Turns, guarded, in_blocks, single, turns_inside, whole
from fusegen.targets import H200
from tests.specs import ALL

COLS = (61, 768, 1001, 4104, 12291)


def plans(name: str, cols: int) -> list[RowPlan]:
    graph = ALL[name].graph
    found = candidates(graph.at(**{str(graph.shape[-1]): cols}), H200).plans
    return [p for p in found if isinstance(p, RowPlan) and not p.flat]


def right(plan: RowPlan, turns: Turns | None, limit: int) -> bool:
    """Do all threads have a vector that begins before `limit` in the turns that know it, and none where none has?"""
    tile = plan.tile
    passes = [
        [(v * tile.threads_per_row + lane) * tile.vector < limit for lane in range(tile.threads_per_row)]
        for v in range(tile.per_thread)
    ]
    if turns is None:
        return all(map(all, passes))
    known = all(map(all, passes[: turns.certain]))
    return known and not (turns.all and any(map(any, passes[turns.certain :])))


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("name", ["rmsnorm", "scale_causal_softmax", "bias_relu"])
def test_turns_that_ask_for_no_column(name: str, cols: int) -> None:
    for plan in plans(name, cols):
        if plan.tile.col_tiles > 1:  # blocks have other columns in the same turn
            assert whole(plan) in (None, Turns())
            continue
        width, reach = plan.tile.vector, cols - plan.tile.vector + 1
        assert right(plan, guarded(plan), plan.vector_cols), plan.configuration
        if plan.tail == "element" and width > 1:
            assert right(plan, whole(plan), reach), plan.configuration
            assert right(plan, single(plan), reach), plan.configuration
        for head in range(width):  # columns before the first block
            assert right(plan, in_blocks(plan), reach - head), plan.configuration


@pytest.mark.parametrize("cols", COLS)
def test_turns_of_a_stream_that_read_nothing_behind_the_row(cols: int) -> None:
    for plan in plans("topk", cols):
        if plan.selection and plan.selection.by == "streaming":
            inside = turns_inside(plan)
            assert inside % plan.selection.streamed == 0
            assert inside * plan.tile.threads_per_row * plan.tile.vector <= cols
