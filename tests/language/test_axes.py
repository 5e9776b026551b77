"""Reductions over axes of rows: what they mean, by numpy, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusegen import Program, b8, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.errors import ArgumentError, NoPlan, SpecError
from fusegen.language.reference import reference
from fusegen.language.trace import Value
from fusegen.pipeline import compile
from fusegen.planner import candidates
from fusegen.planner.programs.lowering import lowered
from fusegen.targets import target

Array = np.ndarray[Any, np.dtype[Any]]
B, S, M, N = dims("B S M N")
RNG = np.random.default_rng(5)


def logsumexp(x: Array, axis: tuple[int, ...]) -> Array:
    return np.asarray(np.log(np.exp(x).sum(axis, keepdims=True)))


MEANINGS: dict[str, tuple[Callable[..., Value], Callable[..., Array]]] = {
    "sum": (F.sum, lambda x, axis: x.sum(axis, keepdims=True)),
    "max": (F.max, lambda x, axis: x.max(axis, keepdims=True)),
    "min": (F.min, lambda x, axis: x.min(axis, keepdims=True)),
    "mean": (F.mean, lambda x, axis: x.mean(axis, keepdims=True)),
    "var": (F.var, lambda x, axis: x.var(axis, keepdims=True)),
    "std": (F.std, lambda x, axis: x.std(axis, keepdims=True)),
    "amax": (F.amax, lambda x, axis: np.abs(x).max(axis, keepdims=True)),
    "norm": (F.norm, lambda x, axis: np.sqrt((x * x).sum(axis, keepdims=True))),
    "logsumexp": (F.logsumexp, logsumexp),
    "softmax": (F.softmax, lambda x, axis: np.exp(x - logsumexp(x, axis))),
    "log_softmax": (F.log_softmax, lambda x, axis: x - logsumexp(x, axis)),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_axes_are_those_of_numpy(name: str) -> None:
    function, meaning = MEANINGS[name]
    whole = name in ("softmax", "log_softmax")
    x = RNG.standard_normal((3, 5, 7))

    @chain(B=3, S=5, N=7)
    def middle(x: f32[B, S, N]) -> f32[B, S if whole else 1, N]:
        return function(x, over=S)

    @chain(B=3, S=5, N=7)
    def rows(x: f32[B, S, N]) -> f32[B if whole else 1, S if whole else 1, N]:
        return function(x, over=(B, S))

    @chain(B=3, S=5, N=7)
    def by_number(x: f32[B, S, N]) -> f32[B if whole else 1, S, N]:
        return function(x, axis=0)

    @chain(B=3, S=5, N=7)
    def every(x: f32[B, S, N]) -> f32[B if whole else 1, S if whole else 1, N if whole else 1]:
        return function(x, axis=None)

    @chain(B=3, S=5, N=7)
    def last(x: f32[B, S, N]) -> f32[B, S, N if whole else 1]:
        return function(x, over=N)

    for made, axis in ((middle, (1,)), (rows, (0, 1)), (by_number, (0,)), (every, (0, 1, 2)), (last, (2,))):
        np.testing.assert_allclose(reference(made.graph)(x), meaning(x, axis), rtol=1e-12)


def test_of_no_rows() -> None:
    @chain(M=2, N=3)
    def none(x: f32[M, N]) -> tuple[f32[1, N], f32[1, N], f32[1, N], f32[1, N]]:
        return F.sum(x, over=M), F.max(x, over=M), F.min(x, over=M), F.mean(x, over=M)

    found = reference(none.graph)(np.zeros((0, 3)))
    for got, want in zip(found, (0.0, -np.inf, np.inf, np.nan), strict=True):
        np.testing.assert_array_equal(got, np.full((1, 3), want))
    assert none.at(M=0).graph.rows == 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda x: F.sum(x, over=B), "over=B is no axis of [M, N]"),
        (
            lambda x: F.sum(x, over="M"),  # type: ignore[arg-type]
            "over=M is no axis of [M, N]",
        ),
        (lambda x: F.sum(x, axis=2), "axis=2 is no axis of [M, N], which has 2"),
        (lambda x: F.sum(x, axis=(0, 0)), "axis=(0, 0) names an axis twice"),
        (lambda x: F.sum(x, axis=()), "axis=() names no axis"),
        (lambda x: F.mean(x, axis=0, over=M), "both say what to reduce; give one of them"),
        (lambda x: F.max(x, x), "of two values take F.maximum(x, y)"),
        (lambda x: F.topk(x, 2, axis=7)[0], "topk: axis=7 is no axis"),
    ],
)
def test_what_is_no_axis_is_refused(what: Callable[[Value], Value], said: str) -> None:
    with pytest.raises(SpecError) as caught:

        @chain(M=2, N=3)
        def wrong(x: f32[M, N]) -> f32[1, N]:
            return what(x)

    assert said in str(caught.value)
    assert "test_axes.py:" in str(caught.value)


def test_two_axes_of_one_dim_go_by_number() -> None:
    with pytest.raises(SpecError, match="N is two axes of \\[N, N\\]; say which one by axis="):

        @chain(N=3)
        def square(x: f32[N, N]) -> f32[1, N]:
            return F.sum(x, over=N)

    @chain(N=3)
    def columns(x: f32[N, N]) -> f32[1, N]:
        return F.sum(x, axis=0)

    np.testing.assert_array_equal(reference(columns.graph)(np.eye(3)), np.ones((1, 3)))


def refusal(made: Any) -> str:
    with pytest.raises(NoPlan) as caught:
        candidates(made.graph, target("cuda:h200")).need()
    return str(caught.value)


def test_one_kernel_reduces_rows_or_columns() -> None:
    @chain(M=8, N=16)
    def grads(dy: f32[M, N], x: f32[M, N]) -> f32[1, N]:
        return F.sum(dy * (x - F.mean(x)), over=M)

    @chain(M=8, N=16)
    def every(x: f32[M, N]) -> f32[1, 1]:
        return F.sum(x, axis=None)

    @chain(B=2, S=4, N=16)
    def apart(x: f32[B, S, N]) -> tuple[f32[1, S, N], f32[B, 1, N]]:
        return F.sum(x, over=B), F.sum(x, over=S)

    @chain(M=8, S=4, N=16)
    def product(x: f32[M, S], w: f32[S, N]) -> f32[1, N]:
        return F.sum(F.matmul(x, w, precision="tf32"), over=M)

    for made, said in (
        (grads, "reduces over N, and sum at"),
        (every, "a program cuts here"),
        (apart, "reduces over S, and sum at"),
        (product, "multiplies matrices, and sum at"),
    ):
        assert said in refusal(made)


def test_row_values_are_operands() -> None:
    @chain(M=8, N=16)
    def grads(dy: f32[M, N], x: f32[M, N], mean: f32[M, 1]) -> f32[1, N]:
        return F.sum(dy * (x - mean), over=M)

    assert candidates(grads.graph, target("cuda:h200")).need()[0].rule == "columns"


def test_the_last_axis_is_reduced_as_before() -> None:
    @chain(M=8, N=16)
    def one(x: f32[M, N]) -> f32[M, 1]:
        return F.var(x, axis=-1)

    @chain(M=8, N=16)
    def other(x: f32[M, N]) -> f32[M, 1]:
        return F.var(x, over=N)

    assert not any(node.over for node in (*one.graph.nodes, *other.graph.nodes))


def test_columns_of_views() -> None:
    """What is before a reduction may be a view; what is reduced may be declared without the axes that became 1."""

    @chain(M=8, N=16)
    def gated(x: f32[M, 2 * N]) -> f32[N]:
        gate, up = F.split(x, 2)
        return F.sum(gate * up, over=M)

    x = RNG.standard_normal((5, 32))
    np.testing.assert_allclose(reference(gated.graph)(x), (x[:, :16] * x[:, 16:]).sum(0), rtol=1e-12)
    step = lowered(gated.graph).graph
    assert [str(t.type) for t in step.inputs] == ["f32[M, N]", "f32[M, N]"]
    assert candidates(step, target("cuda:h200")).need()[0].rule == "columns"


def test_a_mean_that_a_program_divides_is_of_the_rows_that_it_was_compiled_for() -> None:
    """A later step than that which sums has the number of rows as a constant; a call with other rows is refused."""

    @chain(M=8, N=16)
    def weighted(x: f32[M, N]) -> f32[1, N]:
        return F.softmax(F.mean(x, over=M))

    program = compile(weighted, "cuda:h200", on="emulator")
    assert isinstance(program, Program)
    assert "M" in program.plan.fixed
    with pytest.raises(ArgumentError, match="compiled for M=8"):
        program(np.ones((5, 16), np.float32))


# ---------------------------------------------------------------- axes of what is no reduction, and axes that go


@chain(B=3, M=5, N=8)
def along_the_middle(
    x: f32[B, M, N], gamma: f32[M, 1]
) -> tuple[f32[B, M, N], f32[B, M, N], f32[B, 2, N], i32[B, 2, N], i32[B, 1, N], f32[B, M, N]]:
    values, places = F.topk(x, 2, axis=1)
    return (
        F.layernorm(x, gamma, axis=1), F.rmsnorm(x, over=(M, N)), values, places, F.argmin(x, axis=1),
        F.cumsum(x, axis=1),
    )  # fmt: skip


@chain(B=3, M=5, N=8)
def without_axes(x: f32[B, M, N], keep: b8[B, M, N]) -> tuple[f32[B, N], f32[M], f32[B, M], b8[B, N]]:
    return (
        F.sum(x, axis=1, keepdims=False), F.max(x, over=(B, N), keepdims=False), F.std(x, keepdims=False),
        F.any(keep, over=M, keepdims=False),
    )  # fmt: skip


def test_functions_along_other_axes() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    gamma = np.arange(5, dtype=np.float32)[:, None]
    norm, root, values, places, least, total = compile(along_the_middle, "cuda:h200", on="emulator")(x, gamma)
    wide = np.float64(x)
    centered = wide - wide.mean(1, keepdims=True)
    np.testing.assert_allclose(
        norm, centered / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * gamma, rtol=1e-5, atol=1e-6
    )
    mean = (wide * wide).mean((1, 2), keepdims=True)
    np.testing.assert_allclose(root, wide / np.sqrt(mean + 1e-6), rtol=1e-5, atol=1e-6)
    order = np.argsort(-x, 1)[:, :2]
    assert np.array_equal(places, order)
    assert np.array_equal(values, np.take_along_axis(x, order, 1))
    assert np.array_equal(least, x.argmin(1, keepdims=True))
    np.testing.assert_allclose(total, wide.cumsum(1), rtol=1e-5, atol=1e-6)


def test_axes_that_go() -> None:
    x = np.random.default_rng(1).standard_normal((3, 5, 8)).astype(np.float32)
    total, largest, spread, held = compile(without_axes, "hip:mi300x", on="emulator")(x, x > 1.5)
    np.testing.assert_allclose(total, x.sum(1), rtol=1e-5, atol=1e-6)
    assert np.array_equal(largest, x.max((0, 2)))
    np.testing.assert_allclose(spread, np.float64(x).std(-1), rtol=1e-5)
    assert np.array_equal(held, (x > 1.5).any(1))
