"""Products of few tiles and a large K: parts of K are summed by many blocks, and added up in one order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32, i8, i32
from fusegen import ops as F
from fusegen.pipeline import compile_program
from fusegen.planner.model import Plan
from fusegen.planner.programs.deep_products import deep_products
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.steps import whole
from fusegen.targets import target
from fusegen.validation import validate

M, N, K, B = dims("M N K B")
TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")


@chain(M=40, N=72, K=8192)
def plain(x: bf16[M, K], w: bf16[N, K]) -> f32[M, N]:
    return x @ w.T


@chain(M=40, N=72, K=8192)
def behind(x: f16[M, K], w: f16[K, N], bias: f32[N], residual: f16[M, N]) -> f16[M, N]:
    return F.gelu(x @ w + bias) * 0.5 + residual


@chain(M=8192, N=40, K=136)
def gradient(x: bf16[M, K], dy: bf16[M, N]) -> bf16[N, K]:
    return dy.mT @ x


@chain(M=40, N=72, K=8192)
def of_views(x: bf16[M, 2 * K], w: bf16[N, 2 * K]) -> tuple[f32[M, N], bf16[M, N]]:
    z = x[:, :K] @ w[:, K:].T
    return z, F.relu(z)


CHAINS = {c.name: c for c in (plain, behind, gradient, of_views)}


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("name", CHAINS)
def test_parts_are_added_up(name: str, on: str) -> None:
    plan = fusegen.plan(CHAINS[name], on)
    if isinstance(plan, Plan) or len(plan.steps) == 1:
        assert on == "cuda:h200", "where clusters split K, one kernel may do"
        pytest.skip(f"one kernel is planned: {plan}")
    first, second = plan.steps
    (product,) = first.graph.products
    count = product.shape[0]
    assert isinstance(count, int)
    assert count > 1
    assert not second.graph.products
    assert [stored.name.endswith("_parts") for stored in plan.between] == [True]
    made = compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True)
    report = validate(made, quick=True)
    assert report.ok, report


@pytest.mark.parametrize("on", TARGETS)
def test_few_tiles_of_a_large_depth_take_much_less(on: str) -> None:
    spec = plain.at(M=128, N=128, K=65536)
    plan = fusegen.plan(spec, on)
    assert isinstance(plan, ProgramPlan)
    one = fusegen.planner.plan(spec.graph, target(on))
    assert plan.time_us < 0.6 * one.cost.time_us


@pytest.mark.parametrize("sizes", [{"M": 8192, "N": 8192, "K": 8192}, {"M": 128, "N": 128, "K": 512}], ids=str)
def test_what_fills_a_gpu_or_is_short_stays_one_kernel(sizes: dict[str, int]) -> None:
    assert isinstance(fusegen.plan(plain.at(**sizes), "hip:mi300x"), Plan)


@pytest.mark.usefixtures("emulated_only")
def test_parts_do_not_depend_on_the_batch() -> None:
    """Where one order of sums is asked for, however many parts there are, they are as many for all numbers of rows."""
    graph = replace(plain.graph, batch_invariant=True)
    plans: list[Any] = [fusegen.plan(graph.at(M=rows), "cuda:sm_80") for rows in (1, 40, 4096)]
    between = [plan.between if isinstance(plan, ProgramPlan) else () for plan in plans]
    assert len({tuple(str(stored.type) for stored in found) for found in between}) == 1
    report = validate(fusegen.compile(graph, "cuda:sm_80", on="emulator", validate=False), quick=True)
    assert report.ok, report
    assert any(case.bitwise for case in report.cases)


@chain(B=2, M=40, N=72, K=8192)
def batched(x: bf16[B, M, K], w: bf16[B, N, K]) -> f32[B, M, N]:
    return x @ w.mT


@chain(M=40, N=72, K=8192)
def whole_numbers(x: i8[M, K], w: i8[N, K]) -> i32[M, N]:
    return x @ w.T


@chain(M=40, N=72, K=8192)
def computed(x: bf16[M, K], w: bf16[N, K]) -> f32[M, N]:
    return F.relu(x) @ w.T


@chain(M=40, N=72, K=8192)
def reduced(x: bf16[M, K], w: bf16[N, K]) -> f32[M, 1]:
    return F.sum(x @ w.T)


@chain(M=40, N=72, K=8200)
def uneven(x: bf16[M, K], w: bf16[N, K]) -> f32[M, N]:
    return x @ w.T


@pytest.mark.parametrize("spec", [batched, whole_numbers, computed, reduced, uneven], ids=lambda c: c.name)
def test_other_products_have_no_parts(spec: Chain) -> None:
    assert not list(deep_products(whole(spec.graph), target("cuda:sm_80")))


@pytest.mark.usefixtures("emulated_only")
def test_neighbouring_parts_are_told_apart() -> None:
    """A part that is read twice, and one that is left out, are seen."""
    plan = fusegen.plan(plain, "cuda:sm_80")
    assert isinstance(plan, ProgramPlan)
    first, second = plan.steps
    made = compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True)
    assert validate(made, quick=True).ok
    wrong = [replace(b, view=b.view and replace(b.view, offset=tuple(0 for _ in b.view.offset))) for b in first.reads]
    shifted = [
        replace(b, view=replace(b.view, steps=tuple((0, *row[1:]) for row in b.view.steps))) if b.view else b
        for b in wrong
    ]
    broken = replace(plan, steps=(replace(first, reads=tuple(shifted)), second))
    made = compile_program(broken, on="emulator", validate=False, tuned=False, as_planned=True)
    assert not validate(made, quick=True).ok
