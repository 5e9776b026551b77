"""Lanes with several delegates, sorted by a network: every number of lanes and delegates chooses the best."""

from __future__ import annotations

import pytest

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.validation import validate
from tests.emitting.test_topk import TARGETS, kernel, plans_of

pytestmark = pytest.mark.usefixtures("emulated_only")

M, V, K = dims("M V K")


@chain(M=13, V=40, K=3)
def ranked(x: bf16[M, V]) -> tuple[f32[M, K], i32[M, K]]:
    return F.topk(x, K)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("name", TARGETS)
def test_lanes_with_several_delegates_choose_the_best(name: str, k: int) -> None:
    """Of short rows, of ties, of NaN and of what is masked, by every number of lanes and delegates."""
    tried = set()
    for cols in (24, 64, 129):
        for plan in plans_of(ranked, name, V=cols, K=k):
            assert plan.selection is not None
            lanes = (plan.tile.threads_per_row, plan.selection.delegates)
            if plan.selection.delegates > 1 and lanes not in tried:
                tried.add(lanes)
                report = validate(kernel(plan), quick=True)
                assert report.ok, f"{plan.configuration}\n{report}"
    assert tried or k in (1, 13)
