"""Columns chosen of a row's best groups alone: kernels against plain numpy, whatever the row holds; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import NoPlan, SpecError
from fusegen.language.nodes import GroupLimit
from fusegen.language.selection import in_best_groups, top_columns
from fusegen.planner import candidates
from fusegen.planner.model import RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200, target
from fusegen.validation import validate
from fusegen.validation.bounded import Bounded
from fusegen.validation.columns import in_best_groups as keys_in_best_groups
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x")
M, N, K = dims("M N K")
Array = np.ndarray[Any, np.dtype[Any]]
SPECIAL = (0.0, -0.0, 1.0, 2.0, 0.5, -1.0, float("inf"), -float("inf"), float("nan"))


@chain(M=7, N=64, K=5)
def grouped(x: f32[M, N]) -> tuple[f32[M, K], i32[M, K]]:
    return F.topk(x, K, groups=8, best_groups=3, by=2)


@chain(M=7, N=60, K=4)
def by_largest(x: f16[M, N]) -> tuple[f32[M, K], i32[M, K]]:
    return F.topk(x, K, groups=3, best_groups=1, by=1)


@chain(M=9, N=160, K=6)
def halves(logits: bf16[M, N], bias: f32[N]) -> tuple[f32[M, K], i32[M, K]]:
    """DeepSeek-V2's 160 experts of 8 groups, 20 each."""
    p = F.softmax(logits)
    _, experts = F.topk(p + bias, K, groups=8, best_groups=3, by=1)
    return F.take(p, experts), experts


def obvious(row: list[float], k: int, limit: GroupLimit) -> list[int]:
    """By sorting, in words."""
    size = len(row) // limit.groups

    def before(x: float) -> tuple[bool, float]:
        return (x == x, -x if x == x else 0.0)  # NaN first, then from the largest down

    def score(group: int) -> float:
        largest = sorted(row[group * size : (group + 1) * size], key=before)[: limit.by]
        return sum(largest)

    best = sorted(range(limit.groups), key=lambda group: before(score(group)))[: limit.best]
    columns = [c for c in range(len(row)) if c // size in best and row[c] != -float("inf")]
    found = sorted(columns, key=lambda c: before(row[c]))[:k]
    return found + [-1] * (k - len(found))


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(st.sampled_from(SPECIAL) | st.integers(-3, 3).map(float), min_size=12, max_size=12),
    groups=st.sampled_from([2, 3, 4, 6]), k=st.integers(1, 12), by=st.integers(1, 2), data=st.data(),
)  # fmt: skip
def test_the_meaning_is_the_obvious_one(row: list[float], groups: int, k: int, by: int, data: st.DataObject) -> None:
    limit = GroupLimit(groups, data.draw(st.integers(1, groups)), by)
    with np.errstate(all="ignore"):
        kept = in_best_groups(np.array([row]), groups, limit.best, by)
        assert top_columns(kept, k).tolist() == [obvious(row, k, limit)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(TARGETS))
def test_kernels_choose_as_is_obvious(seed: int, name: str) -> None:
    """Few different numbers, so that groups tie and rows have NaN, infinities and nothing."""
    rng = np.random.default_rng(seed)
    pool = np.array([*SPECIAL, *rng.integers(-4, 4, 12)], np.float32)
    x = rng.choice(pool, (7, 64), p=rng.dirichlet(np.ones(len(pool)) * 0.3))
    _, columns = compiled(name)(x)
    limit = GroupLimit(8, 3, 2)
    with np.errstate(all="ignore"):
        assert columns.tolist() == [obvious(row, 5, limit) for row in x.tolist()]


KERNELS: dict[str, Any] = {}


def compiled(name: str) -> Any:
    return KERNELS.setdefault(name, fusegen.compile(grouped, name, on="emulator"))


def kernel_of(plan: RowPlan, source: Source | None = None) -> Kernel:
    """Calls that lie otherwise are none of these tests' matter."""
    made = source or render(plan)
    return Kernel(made, None, finding.find(plan.target, "emulator"), lambda layout: (made, None))


def plans_of(found: Any, name: str) -> list[RowPlan]:
    return [plan for plan in candidates(found.graph, target(name)).plans if isinstance(plan, RowPlan)]


@pytest.mark.by_values("one", "name")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("one", [grouped, by_largest, halves], ids=lambda one: one.name)
def test_every_plan_is_right(one: Any, name: str) -> None:
    plans = plans_of(one, name)
    assert plans
    for plan in plans:
        report = validate(kernel_of(plan), quick=True)
        assert report.ok, f"{plan.configuration}\n{report}"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("rank += picker.scores[at][other] > entry", "rank += picker.scores[at][other] >= entry"),
        ("in_best[at][own_group] = rank < 3", "in_best[at][own_group] = rank < 4"),
        ("entry_of(most_here + next_here, own_group)", "entry_of(most_here, own_group)"),
        ("entry_of(most_here + next_here, own_group)", "entry_of(most_here + next_here, 7 - own_group)"),
        ("larger(larger(next_here, picker.seconds", "larger(larger(most_here, picker.seconds"),
        ("if (!picker.in_best", "if (picker.in_best"),
    ],
)
def test_a_wrong_choice_of_groups_is_caught(text: str, instead: str) -> None:
    plan = plans_of(grouped, "cuda:h200")[0]
    source = render(plan)
    assert text in source.text
    wrong = kernel_of(plan, replace(source, text=source.text.replace(text, instead)))
    assert not validate(wrong, quick=True).ok


def test_groups_in_doubt_are_told_from_sure_ones() -> None:
    keys = np.array([[4.0, 1.0, 3.0, 2.0, 9.0, 0.0]])
    limit = GroupLimit(3, 1, 2)
    exact = keys_in_best_groups(Bounded(keys, np.zeros_like(keys)), limit)
    assert exact.value.tolist() == [[-np.inf] * 4 + [9.0, 0.0]]
    assert not exact.error.any()
    near = keys_in_best_groups(Bounded(keys[:, :4], np.full((1, 4), 0.1)), GroupLimit(2, 1, 2))
    assert np.isinf(near.error).all()  # 5 and 5, more or less
    tied = keys_in_best_groups(Bounded(np.array([[1.0, 3.0, 3.0, 1.0]]), np.zeros((1, 4))), GroupLimit(2, 1, 2))
    assert tied.value.tolist() == [[1.0, 3.0, -np.inf, -np.inf]]
    assert not tied.error.any()


def test_deepseeks_router_is_one_kernel() -> None:
    for name in TARGETS:
        found = plans_of(SHIPPED["moe_router_deepseek"], name)
        assert found, name
        assert found[0].cost.time_us < 3 * found[0].cost.floor_us  # 41.1 us on an H200, of 15.9 at copy rate


def test_what_is_refused() -> None:
    def refused(said: str, x: Any = f32, **how: Any) -> None:
        with pytest.raises(SpecError, match=said):

            @chain(M=4, N=64)
            def wrong(x: x[M, 64]) -> i32[M, 4]:
                return F.topk(x, 4, **how)[1]

    refused("a row of 64 is not 7 groups", groups=7, best_groups=2)
    refused("best_groups=None; groups, best_groups and by are integers", groups=8)
    refused("wanted best_groups up to 8", groups=8, best_groups=9)
    refused("wanted by=1 or by=2", groups=8, best_groups=2, by=3)
    refused("found keys of i32, wanted floats", i32, groups=8, best_groups=2)
    with pytest.raises(NoPlan, match="a row is held by one warp at most"):
        candidates(grouped.at(N=4096).graph, H200).need()
    with pytest.raises(NoPlan, match="has no 8 groups"):
        candidates(grouped.at(N=60).graph, H200).need()
