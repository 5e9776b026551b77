"""Chains of one row, and of values that a row has one of: what no leading axis, or no axis, makes hard."""

from __future__ import annotations

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, compiler, toolchain
from fusegen.errors import NoPlan
from fusegen.language.spec import Chain
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation import validate

M, N, K = dims("M N K")


@chain(N=4097)
def spread(x: f16[N], least: bf16[1]) -> f32[1]:
    return F.maximum(F.var(F.softmax(x)), least)


@chain(M=5, N=1000, K=4)
def raised(x: f32[M, N], bias: bf16[M, 1]) -> f32[M, K]:
    values, _ = F.topk(x + bias, K)
    return values + bias


@chain(M=3, N=18)
def outer(x: f32[M, 1], v: f16[1, N], w: f16[N, 1]) -> f32[M, N]:
    h = F.cast(F.silu(x), f16)
    return F.maximum(h @ v, h @ w.mT)


@pytest.mark.parametrize("name", ["cuda:a100", "cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("spec", [spread, raised], ids=lambda c: c.name)
def test_they_are_right(spec: Chain, name: str) -> None:
    """Every way to keep a row: the last vector of one that stands alone may reach beyond its end."""
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"the emulator can't run here: {error}")
    graph, gpu = spec.graph, target(name)
    ways: dict[tuple[object, ...], RowPlan] = {}
    for made in candidates(graph, gpu).plans:
        assert isinstance(made, RowPlan)
        ways.setdefault((made.rule, made.staging, made.copies, bool(made.bulk)), made)

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(candidates(graph, gpu, layout).plans[0]), None

    for made in ways.values():
        report = validate(Kernel(render(made), None, finding.find(gpu, "emulator"), variant), quick=True)
        assert report.ok, f"{made.configuration}: {report}"[:2000]


@pytest.mark.parametrize("name", ["cuda:a100", "cuda:h200", "hip:mi300x"])
def test_a_product_of_one_column_of_row_values_is_refused(name: str) -> None:
    with pytest.raises(NoPlan, match=r"gemm: the left factor is computed .* write x \* w in place of x @ w"):
        candidates(outer.graph, target(name)).need()


def no_variant(layout: Layout) -> tuple[Source, None]:
    raise AssertionError(f"the arrays fit the plan, and {layout} was asked for")


@chain(M=6, N=257)
def of_products(x: f32[M, N]) -> f32[M, 1]:
    return F.var(x * 3.0)


@pytest.mark.parametrize("fuses", ["off", "fast"])
@pytest.mark.parametrize("name", ["cuda:a100", "hip:mi300x"])
def test_no_variance_is_negative_however_products_are_fused(
    name: str, fuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x * 3 - mean may be one rounding or two, as a GPU's compiler likes: what a row of one value leaves of it is
    nothing, or the square of that rounding. A thread without values is part of it too: the square of what is far from
    its mean of 0 would be infinite."""
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"the emulator can't run here: {error}")
    monkeypatch.setattr(toolchain, "_COMMON", (*toolchain._COMMON, f"-ffp-contract={fuses}"))
    gpu, cols = target(name), 257
    rows = np.repeat(np.array([[1.1], [-777.7], [23456.7], [3e-5], [0.0], [1e17]], np.float32), cols, 1)
    plans = [plan for plan in candidates(of_products.graph, gpu).plans if isinstance(plan, RowPlan)]
    online = [plan for plan in plans if plan.passes[0].reductions[0].kind == "welford"]
    assert online
    for plan in online:
        kernel = Kernel(render(plan), None, finding.find(gpu, "emulator"), no_variant)
        found = np.asarray(kernel(rows))
        assert np.all(found >= 0), plan.configuration
        assert np.all(found <= (2.0**-23 * 3 * rows[:, :1]) ** 2), plan.configuration
        assert fuses == "fast" or not found[:-1].any(), plan.configuration
        assert np.all(np.asarray(kernel(np.full_like(rows, 1e20)))[:, 0] < 1e33), "no NaN"
        report = validate(kernel, cases=["normal", "constant"])
        assert report.ok, f"{plan.configuration}\n{report}"
