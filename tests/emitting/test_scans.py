"""Running sums and products: every way, every regime, against numpy of their own; and broken ones, which are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import NoPlan, SpecError
from fusegen.language.spec import Chain
from fusegen.pipeline import compile
from fusegen.planner.model import RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.runtime.program import Program
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate
from fusegen.validation.running import running_sum_error
from tests.row_plans import row_plans

Array = np.ndarray[Any, np.dtype[Any]]
M, N, K = dims("M N K")


@chain(M=4, N=200)
def every_way(x: bf16[M, N], y: i32[M, N]) -> tuple[f32[M, N], f32[M, N], i32[M, N], i32[M, N]]:
    near_1 = 1 + x * 0.01
    return (
        F.cumsum(x), F.cumprod(near_1, reverse=True),
        F.cumsum(y, exclusive=True), F.cumprod(y, exclusive=True, reverse=True),
    )  # fmt: skip


def operands(rows: int, cols: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(cols)
    return rng.standard_normal((rows, cols)).astype(bf16.numpy), rng.integers(
        -(2**31), 2**31, (rows, cols), np.int64
    ).astype(np.int32) | 1


def check(found: tuple[Array, ...], x: Array, y: Array) -> None:
    """By Python's loops, one element after another."""
    for row in range(len(x)):
        total, product, before, behind = 0.0, 1.0, 0, 1
        for col in range(x.shape[1]):
            total += float(x[row, col])
            assert found[0][row, col] == pytest.approx(total, abs=1e-5 * x.shape[1])
            assert int(found[2][row, col]) % 2**32 == before % 2**32
            before += int(y[row, col])
        for col in reversed(range(x.shape[1])):
            product *= 1 + float(x[row, col]) * 0.01
            assert found[1][row, col] == pytest.approx(product, rel=1e-7 * (x.shape[1] - col) + 3e-7)
            assert int(found[3][row, col]) % 2**32 == behind % 2**32
            behind *= int(y[row, col])


@pytest.mark.parametrize(
    ("target", "cols"), [(H200, 2), (H200, 33), (H200, 1001), (MI300X, 7), (MI300X, 200), (MI300X, 4100), (A100, 500)]
)
def test_every_way_in_rows_of_every_length(target: Target, cols: int) -> None:
    x, y = operands(3, cols)
    check(compile(every_way.at(M=3, N=cols), target, on="emulator")(x, y), x, y)


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_every_number_of_threads_goes_by_columns(target: Target) -> None:
    """One thread a row, parts of a warp, warps, and several turns of vectors of each."""
    x, y = operands(3, 300)
    tiles: dict[tuple[int, int], RowPlan] = {}
    for plan in row_plans(every_way.at(M=3, N=300).graph, target):
        tiles.setdefault((plan.tile.threads_per_row, min(2, plan.tile.per_thread)), plan)
    assert {(target.warp, 2), (2 * target.warp, 2), (4 * target.warp, 1)} <= tiles.keys()
    for plan in tiles.values():
        check(kernel_of(render(plan))(x, y), x, y)


@chain(M=6, N=300)
def below_half(x: f32[M, N]) -> tuple[f32[M, N], f32[M, 1]]:
    """What comes behind a running sum: elementwise steps and reductions."""
    p = F.softmax(x)
    c = F.cumsum(p)
    return F.where(c - p < 0.5, p, 0.0), F.sum(c)


def test_what_comes_before_and_behind_is_one_kernel() -> None:
    x = 3 * np.random.default_rng(0).standard_normal((6, 300)).astype(np.float32)
    kept, total = compile(below_half, H200, on="emulator")(x)
    e = np.exp(x.astype(np.float64))
    p = e / e.sum(-1, keepdims=True)
    running = p @ np.triu(np.ones((300, 300)))
    np.testing.assert_allclose(total[:, 0], running.sum(-1), rtol=1e-5)
    np.testing.assert_allclose(kept, np.where(running - p < 0.5, p, 0), rtol=1e-5, atol=1e-7)


def test_a_nan_or_an_infinity_counts_from_its_place_on() -> None:
    @chain(M=4, N=40)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        return F.cumsum(x), F.cumprod(x, reverse=True)

    x = np.ones((4, 40), np.float32)
    x[0, 7], x[1, 5], x[1, 20], x[2, 3] = np.nan, np.inf, -np.inf, 0
    sums, products = compile(spec, MI300X, on="emulator")(x)
    assert sums[0, :7].tolist() == list(range(1, 8))
    assert np.isnan(sums[0, 7:]).all()
    assert sums[1, 4:7].tolist() == [5, np.inf, np.inf]
    assert np.isnan(sums[1, 20:]).all()
    assert products[2].tolist() == [0] * 4 + [1] * 36


def test_what_a_mask_hides_is_no_part_of_it() -> None:
    @chain(M=24, N=64)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        keep = F.col_index(x) <= F.row_index(x)
        return F.where(keep, F.cumsum(x, reverse=True), 0.0), F.cumsum(F.where(keep, x, 1.0))

    x = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    of_all, of_kept = compile(spec, H200, on="emulator")(x)
    upper, keep = np.triu(np.ones((64, 64))), np.tril(np.ones((24, 64))) == 1
    np.testing.assert_allclose(of_all, np.where(keep, x.astype(float) @ upper.T, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_kept, np.where(keep, x, 1).astype(float) @ upper, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- cut, viewed, refused


@chain(M=32, N=64, K=64)
def of_a_product(x: bf16[M, K], w: bf16[N, K]) -> f32[M, N]:
    return F.cumsum(x @ w.T)


@chain(M=8, N=64)
def of_chosen(x: f32[M, N]) -> f32[M, 4]:
    return F.cumsum(F.topk(x, 4)[0])


@chain(M=8, N=64)
def taken(x: f32[M, N]) -> f32[M, 4]:
    return F.take(F.cumsum(x), F.topk(x, 4)[1])


@chain(M=8, N=64)
def summed_over_rows(x: f32[M, N]) -> f32[1, N]:
    return F.sum(F.cumsum(x), over=M)


@chain(M=8, N=64)
def of_views(x: f32[M, N]) -> f32[N, M // 2]:
    return F.cumsum(x[::2].T * 2)[:, ::-1]


CUT: dict[str, tuple[Chain, int, Callable[..., Array]]] = {  # in so many steps
    "of a product": (of_a_product, 2, lambda x, w: np.cumsum(x @ w.T, -1)),
    "of what was chosen": (of_chosen, 2, lambda x: np.cumsum(-np.sort(-x, -1)[:, :4], -1)),
    "taken": (taken, 2, lambda x: np.take_along_axis(np.cumsum(x, -1), np.argsort(-x, -1)[:, :4], -1)),
    "over rows": (summed_over_rows, 2, lambda x: np.cumsum(x, -1).sum(0, keepdims=True)),
    "of views": (of_views, 1, lambda x: np.cumsum(2 * x[::2].T, -1)[:, ::-1]),
}


@pytest.mark.parametrize("name", CUT)
def test_beside_other_axes_it_is_a_program(name: str) -> None:
    spec, steps, meaning = CUT[name]
    rng = np.random.default_rng(1)
    sizes = {"M": spec.graph.sizes["M"], "N": spec.graph.sizes["N"], "K": 64}
    arrays = [rng.standard_normal([sizes[str(s)] for s in t.shape]).astype(t.dtype.numpy) for t in spec.graph.inputs]
    program = compile(spec, H200, on="emulator")
    assert isinstance(program, Program)
    assert len(program.plan.steps) == steps
    np.testing.assert_allclose(program(*arrays), meaning(*(a.astype(float) for a in arrays)), rtol=1e-4, atol=1e-4)


def test_rows_longer_than_a_blocks_registers_are_refused() -> None:
    @chain(M=3, N=200000)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return F.cumsum(x)

    said = r"cumsum at .* runs along rows of 200000, and the registers of a block hold at most 32768 elements"
    with pytest.raises(NoPlan, match=said):
        compile(spec, H200)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x: F.cumsum(x, axis=7), "cumsum: axis=7 is no axis"),
        (lambda x: F.cumprod(x > 0), "cumprod: found a mask"),
        (lambda x: F.cumsum(F.sum(x)), r"cumsum: the last axis of \[M, 1\] has size 1"),
        (lambda x: F.cumsum(cast(Any, 3)), "cumsum: found 3 where a traced value is wanted"),
    ],
)
def test_what_is_refused(body: Callable[..., Any], said: str) -> None:
    def spec(x: f32[M, N]) -> f32[M, N]:
        return body(x)

    with pytest.raises(SpecError, match=said):
        chain(M=2, N=6)(spec)


# ---------------------------------------------------------------- the checker, checked


def test_bounds_grow_along_the_row_and_hold() -> None:
    x = np.random.default_rng(0).standard_normal((50, 3000)).astype(np.float32)
    x[0] = 0.1  # of which every sum is rounded alike
    by_threads = np.empty_like(x)  # as 16 lanes of 4 elements do it, turn by turn
    for row in range(50):
        total = np.float32(0)
        for start in range(0, 3000, 64):
            part = x[row, start : start + 64]
            by_threads[row, start : start + 64] = total + np.cumsum(part, dtype=np.float32)
            total = total + part.sum(dtype=np.float32)
    wrong = np.abs(by_threads - np.cumsum(x.astype(np.float64), -1))
    allowed = running_sum_error(x.astype(np.float64), np.zeros(x.shape), False, 64 + 47)
    assert (wrong <= allowed).all()
    assert (allowed[:, 0] == 0).all()
    assert (np.diff(allowed, axis=-1) >= 0).all()
    assert wrong[0].max() > allowed[0].max() / 100


BROKEN = {
    "a step of lanes left out": ("step < 32", "step < 16"),
    "the lane before counted twice": ("place > 0 ? before : 0.0f", "before"),
    "warps out of order": ("if (w == warp) own[v]", "if (w == (warp ^ 1)) own[v]"),
    "turns that start anew": ("float total = 0.0f;\n", "float total = 0.0f; float parts_before = 0.0f;\n"),
    "a missing barrier": ("__syncthreads();", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_scans_are_caught(name: str) -> None:
    @chain(M=4, N=1000)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return F.cumsum(x)

    plan = next(p for p in row_plans(spec.graph, H200) if p.warps_per_row > 1 and p.tile.per_thread > 1)
    source = render(plan)
    assert validate(kernel_of(source), quick=True).ok
    text, broken = BROKEN[name]
    if name == "turns that start anew":
        text, broken = "total = total + parts[", "total = 0.0f + parts["
    assert source.text.count(text) >= 1
    assert not validate(kernel_of(replace(source, text=source.text.replace(text, broken))), quick=True).ok


def kernel_of(source: Source) -> Kernel:
    return Kernel(source, None, finding.find(source.plan.target, "emulator"), lambda layout: (source, None))


def test_layouts_give_the_same_bits() -> None:
    """An operand whose rows lie apart, or whose elements do."""
    x = np.random.default_rng(0).standard_normal((5, 2 * 300)).astype(np.float32)
    kernel = compile(below_half.at(M=5, N=300), H200, on="emulator", validate=False)
    one, two = kernel(np.ascontiguousarray(x[:, :300])), kernel(x[:, :300])
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
