"""The law of a selection: which columns are chosen, in which order, and what a chain makes of them.

The numpy meaning is held to an obvious one in plain Python, the search for the key and the sinking of takes to the
meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.database import graph_digest
from fusegen.emitting.sources import spelled
from fusegen.errors import SpecError
from fusegen.language.graph import Extent, Graph
from fusegen.language.ordering import Key, key_of, order_by_keys
from fusegen.language.reference import reference, reference_source
from fusegen.language.selection import take, top_columns
from fusegen.language.spec import Chain
from fusegen.pipeline import compile as compile_chain
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.cost import traffic
from fusegen.planner.heading import selected
from fusegen.planner.matching import NoMatch
from fusegen.planner.rewrites import simplify, sink_takes
from fusegen.planner.rows.elementwise import elementwise
from fusegen.planner.rows.rowwise import rowwise
from fusegen.reporting.explaining import selection
from fusegen.runtime.arguments import compiled_sizes
from fusegen.targets import H200
from fusegen.tuning import wire
from tests.chains import random_chain
from tests.language.test_unfusing import values_for
from tests.tools import needs_compiler

B, M, N, K = dims("B M N K")
INF = math.inf
NAN = math.nan
FLOATS = st.sampled_from([-INF, -INF, -2.0, -0.0, 0.0, 0.5, 1.0, 1.0, 3.0, INF, NAN])


def wrong_type(value: Any) -> Any:
    """`value`, where the type checker would rightly object."""
    return value


def obvious(row: list[float], k: int) -> list[int]:
    """k times: the first NaN, else the first of the largest; -1 once only -inf is left."""
    left = dict(enumerate(row))
    found = []
    for _ in range(k):
        best = -1
        for column, value in left.items():
            if value == -INF:
                continue
            if best < 0 or (value != value and left[best] == left[best]) or value > left[best]:
                best = column
        left.pop(best, None)
        found.append(best)
    return found


@given(st.lists(FLOATS, min_size=1, max_size=40), st.data())
def test_columns_are_those_of_the_obvious_loop(row: list[float], data: Any) -> None:
    k = data.draw(st.integers(1, len(row)))
    assert top_columns(np.array([row]), k).tolist() == [obvious(row, k)]


@given(st.lists(FLOATS, min_size=4, max_size=20))
def test_a_kept_prefix_does_not_depend_on_k(row: list[float]) -> None:
    longest = top_columns(np.array(row), len(row))
    for k in range(1, len(row)):
        assert top_columns(np.array(row), k).tolist() == longest[:k].tolist()


def test_take_at_minus_one_gives_what_is_missing_and_rows_broadcast() -> None:
    x = np.array([[1.0, 2.0, 3.0]])
    columns = np.array([[[2, 0], [1, -1]]])
    np.testing.assert_array_equal(take(x, columns, -INF), [[[3, 1], [2, -INF]]])
    np.testing.assert_array_equal(take(x > 1, columns, False), [[[True, False], [True, False]]])


# ---------------------------------------------------------------- the graph


def by_hand(x: Any) -> Any:
    e = F.exp(x - F.max(x))
    return e / F.sum(e)


def best_of(function: Callable[[Any], Any]) -> Chain:
    @chain(M=4, N=16)
    def spec(x: f32[M, N], r: f32[M, 1], g: f32[N], s: f32) -> tuple[f32[M, 4], i32[M, 4], f32[M, 4], f32[M, 4]]:
        values, columns = F.topk(function({"x": x, "r": r, "g": g, "s": s}), 4)
        rest = r * s + F.exp(r)  # every operand is used
        return values, columns, values * 0.0 + rest, F.take(x + g, columns)

    return spec


def key(function: Callable[[Any], Any]) -> Key:
    graph = best_of(function).graph
    assert graph.selection is not None
    return key_of(graph.selection.inputs[0])


def test_the_iteration_space_ignores_what_is_picked() -> None:
    @chain(B=2, M=3, N=50, K=7)
    def spec(x: bf16[B, M, N], w: f32[N]) -> tuple[f32[B, M, K], i32[B, M, K], f32[B, M, 1], f32[B, M, 1]]:
        top = F.max(x)
        p, columns = F.topk(F.softmax(x * w), K)
        return p / F.sum(p), columns, F.sum(p), top

    graph = spec.graph
    assert graph.shape == (B, M, N)
    assert (graph.rows, graph.cols, graph.picks) == (6, 50, 7)
    assert {t.name for t in graph.outputs if t.node in graph.picked} == {"out0", "columns", "out2"}
    assert {graph.extents[n] for n in graph.picked} == {Extent.PICKED, Extent.ROW}
    assert graph.at(K=50).picks == 50
    assert [n.op.name for n in graph.selections] == ["top_columns"]


def test_argmax_is_one_column_a_row() -> None:
    @chain(M=4, N=3)
    def spec(x: f32[M, N]) -> i32[M, 1]:
        return F.argmax(F.softmax(x))

    x = np.array([[0.0, 2.0, 2.0], [-INF, -INF, -INF], [1.0, NAN, INF], [-1.0, -1.0, -2.0]])
    assert reference(spec.graph)(x).tolist() == [[1], [-1], [1], [0]]
    assert [n.op.name for n in simplify(spec.graph).nodes] == ["input", "top_columns"], "no softmax is left to compute"


def test_probabilities_that_underflow_keep_the_order_of_their_logits() -> None:
    @chain(M=1, N=4)
    def spec(x: f32[M, N]) -> tuple[f32[M, 4], i32[M, 4]]:
        return F.topk(F.softmax(x), 4)

    p, columns = reference(spec.graph)(np.array([[-2000.0, 0.0, -INF, -1000.0]]))
    assert columns.tolist() == [[1, 3, 0, -1]]
    assert p.tolist() == [[1, 0, 0, 0]]


STEPS: dict[str, tuple[Callable[[Any], Any], str, float]] = {
    "itself": (lambda v: v["x"], "x", -INF),
    "softmax": (lambda v: F.softmax(v["x"]), "x", 0),
    "log_softmax": (lambda v: F.log_softmax(v["x"] * 0.5), "x", -INF),
    "sigmoid": (lambda v: F.sigmoid(v["x"] - 2.0), "x", 0),
    "a softmax by hand": (lambda v: by_hand(v["x"]), "x", 0),
    "a softmax by hand that may overflow": (lambda v: F.exp(v["x"]) / F.sum(F.exp(v["x"])), "x", 0),
    "log of a softmax": (lambda v: F.log(F.softmax(v["x"])), "x", -INF),
    "root of a softmax": (lambda v: F.sqrt(F.softmax(v["x"])), "x", 0),
    "by a count": (lambda v: v["x"] / (F.sum(F.cast(v["x"] > 0, f32)) + 1.0) - F.row_index(v["x"]), "x", -INF),
    # what is masked makes the row's mean -inf, and its mean square inf
    "rmsnorm": (lambda v: F.rmsnorm(v["x"]), "mul", -INF),
    "layernorm": (lambda v: F.layernorm(v["x"]), "mul", -INF),
    "over a root": (lambda v: v["x"] / F.sqrt(F.var(v["x"]) + 1e-5), "div", -INF),
    # an operand may be inf or NaN
    "shifted": (lambda v: v["x"] + v["r"], "add", -INF),
    "softmax of what is shifted": (lambda v: F.softmax(v["x"] + v["r"]), "add", 0),
    "log_softmax of what is shifted": (lambda v: F.log_softmax(v["x"] - v["s"]), "sub", -INF),
    "sigmoid of what is shifted": (lambda v: F.sigmoid(v["x"] - v["r"]), "sub", 0),
    "stretched": (lambda v: v["x"] * F.exp(v["r"]), "mul", -INF),
    "over at least something": (lambda v: v["x"] / F.maximum(v["r"], 0.1), "div", -INF),
    "plus inf": (lambda v: v["x"] + INF, "add", -INF),
    "number first": (lambda v: 3.0 + 2.0 * v["x"], "x", -INF),
    "of a mask": (lambda v: F.softmax(F.where(v["x"] > 0, v["x"], -INF)), "where", 0),
    "of a softcap": (lambda v: F.softmax(30.0 * F.tanh(v["x"] / 30.0)), "tanh", 0),
    "by a scalar of unknown sign": (lambda v: F.softmax(v["x"] / v["s"]), "div", 0),
    "times a row value of unknown sign": (lambda v: v["x"] * v["r"], "mul", -INF),
    "times a square, which may be 0": (lambda v: v["x"] * F.square(v["r"]), "mul", -INF),
    "times 0": (lambda v: v["x"] * 0.0, "mul", -INF),
    "negative": (lambda v: v["x"] * -1.0, "mul", -INF),
    "number less": (lambda v: 1.0 - v["x"], "sub", -INF),
    "by column": (lambda v: F.sigmoid(v["x"]) + v["g"], "add", -INF),
    "a softmax plus something": (lambda v: F.softmax(v["x"]) + v["r"], "add", -INF),
    "exp of exp": (lambda v: F.exp(F.exp(v["x"])), "exp", -INF),
    "log of who knows": (lambda v: F.log(v["x"]), "log", -INF),
    "rounded": (lambda v: F.cast(v["x"], bf16), "round_bf16", -INF),
    "relu": (lambda v: F.relu(v["x"]), "relu", -INF),
    "square": (lambda v: F.square(v["x"]), "square", -INF),
}


@pytest.mark.parametrize("name", STEPS)
def test_key(name: str) -> None:
    function, wanted, missing = STEPS[name]
    found = key(function)
    assert (found.node.op.name.replace("input", "x"), found.limit) == (wanted, missing)
    assert found.bare == ("by hand" in name)


def test_the_law_is_the_key_whatever_pass_has_run() -> None:
    """top_columns(x) means its key: the reference of the graph as it was written says so too."""
    for name, (function, _, _) in STEPS.items():
        graph = best_of(function).graph
        texts = {reference_source(g) for g in (graph, order_by_keys(graph), order_by_keys(order_by_keys(graph)))}
        assert len(texts) == 1, name


@cache
def before_and_after(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    graph = order_by_keys(best_of(STEPS[name][0]).graph)
    return reference(graph), reference(sink_takes(graph))


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_sinking_takes_keeps_every_bit(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.choice([-INF, -1.0, 0.0, 0.25, 2.0, 7.5, INF, NAN], (4, 16), p=[0.3, 0.1, 0.1, 0.2, 0.1, 0.1, 0.05, 0.05])
    x[0] = -INF
    operands = (x, rng.normal(size=(4, 1)), rng.normal(size=16), float(rng.normal()))
    before, after = (run(*operands) for run in before_and_after(name))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


# ---------------------------------------------------------------- the formula itself, in float64


def selected_by_hand(value: Any, logits: Any, k: int, limit: float) -> tuple[Any, Any]:
    """The best k by the contract: NaN first, then descending; equals by what is below a softmax, NaN first, then by
    column. Never -inf, nor what such a logit makes, unless it makes NaN of a row of nothing else."""
    columns = np.full((*value.shape[:-1], k), -1)
    values = np.full(columns.shape, float(limit))
    for at in np.ndindex(value.shape[:-1]):
        row = [(float(v), float(z), c) for c, (v, z) in enumerate(zip(value[at], logits[at], strict=True))]
        alone = all(z == -INF for _, z, _ in row) and all(v != v for v, _, _ in row)
        left = [(v, z, c) for v, z, c in row if v != -INF and (z != -INF or alone)]
        left.sort(key=lambda found: [(part == part, -part if part == part else 0.0) for part in found[:2]])
        for rank, (v, _, c) in enumerate(left[:k]):
            columns[*at, rank], values[*at, rank] = c, v
    return values, columns


def probabilities(z: Any) -> Any:
    """F.softmax's, by docs/numerics.md: NaN stays in its row, a row of nothing but -inf has zeros."""
    top = z.max(-1, keepdims=True)
    e = np.exp(z - np.where(top == -INF, 0.0, top))
    total = e.sum(-1, keepdims=True)
    return np.where(total == 0, 0.0, e / total)


def of_logits(z: Any) -> tuple[Any, Any]:
    return probabilities(z), z


def alone(z: Any) -> tuple[Any, Any]:
    return z, z


def without_guard(z: Any) -> tuple[Any, Any]:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True), z


FORMULAS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], tuple[Any, Any]], float]] = {
    "softmax": (lambda x, m: F.softmax(x + m), lambda x, m: of_logits(x + m), 0),
    "log_softmax": (
        lambda x, m: F.log_softmax(x - m), lambda x, m: (np.log(probabilities(x - m)), x - m), -INF
    ),
    "sigmoid": (lambda x, m: F.sigmoid(x + m), lambda x, m: (1 / (1 + np.exp(-(x + m))), x + m), 0),
    "exp": (lambda x, m: F.exp(x - m), lambda x, m: (np.exp(x - m), x - m), 0),
    "root": (lambda x, m: F.sqrt(F.softmax(x + m)), lambda x, m: (np.sqrt(probabilities(x + m)), x + m), 0),
    "by hand": (lambda x, m: by_hand(x + m), lambda x, m: without_guard(x + m), 0),
    "sum": (lambda x, m: x + m, lambda x, m: alone(x + m), -INF),
    "difference": (lambda x, m: x - m, lambda x, m: alone(x - m), -INF),
    "product": (lambda x, m: x * F.exp(m), lambda x, m: alone(x * np.exp(m)), -INF),
    "quotient": (lambda x, m: x / F.maximum(m, 0.5), lambda x, m: alone(x / np.maximum(m, 0.5)), -INF),
    "logarithm": (lambda x, m: F.log(F.exp(m) * F.exp(x)), lambda x, m: alone(np.log(np.exp(m) * np.exp(x))), -INF),
    "less its mean": (lambda x, m: x - F.mean(x + m), lambda x, m: alone(x - (x + m).mean(-1, keepdims=True)), -INF),
    "over its root": (
        lambda x, m: x / F.sqrt(F.sum(F.square(x + m)) + 1.0),
        lambda x, m: alone(x / np.sqrt(((x + m) ** 2).sum(-1, keepdims=True) + 1)), -INF,
    ),
}  # fmt: skip
SHAPES: dict[str, Any] = {"a row's": f32[M, 1], "a column's": f32[N], "everybody's": f32[1, 1], "a scalar": f32}
SPECIAL = [-INF, -INF, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0, INF, NAN]


@cache
def by_reference(name: str, shape: str) -> list[Callable[..., Any]]:
    def spec(x, m):  # type: ignore[no-untyped-def]
        values, columns = F.topk(FORMULAS[name][0](x, m), 5)
        return values, columns

    spec.__annotations__ = {"x": f32[M, N], "m": SHAPES[shape], "return": tuple[f32[M, 5], i32[M, 5]]}
    graph = chain(M=4, N=6)(spec).graph
    return [reference(graph), reference(simplify(graph))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_law_is_the_formula_where_something_is_not_finite(name: str, shape: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.choice([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0], (4, 6))
    at = rng.random((4, 6)) < rng.choice([0.0, 0.2, 0.6], (4, 1))
    x = np.where(at, rng.choice(SPECIAL, (4, 6)), x)
    x[0] = rng.choice([-INF, x[0, 0]])
    m = rng.choice(SPECIAL, {"a row's": (4, 1), "a column's": (6,), "everybody's": (1, 1), "a scalar": ()}[shape])
    _, formula, limit = FORMULAS[name]
    with np.errstate(all="ignore"):
        values, columns = selected_by_hand(*formula(x, m), 5, limit)
    for run in by_reference(name, shape):
        got_values, got_columns = run(x, m)
        np.testing.assert_array_equal(got_columns, columns)
        np.testing.assert_allclose(got_values, values, rtol=1e-12)


# ---------------------------------------------------------------- random chains


# steps of random chains: of x, a row vector g, one value a row r, and a mask
PIECES: tuple[Callable[..., Any], ...] = (
    lambda x, g, r, m: x + r,
    lambda x, g, r, m: r - x,
    lambda x, g, r, m: x - 0.25,
    lambda x, g, r, m: x * 0.5,
    lambda x, g, r, m: -3.0 * x,
    lambda x, g, r, m: x * F.exp(r),
    lambda x, g, r, m: x * F.abs(r),
    lambda x, g, r, m: x * r,
    lambda x, g, r, m: x / (F.square(r) + 0.1),
    lambda x, g, r, m: x / F.maximum(r, 0.5),
    lambda x, g, r, m: x / F.clip(r, -1.0, 0.5),
    lambda x, g, r, m: x / F.sum(F.exp(x * 0.125)),
    lambda x, g, r, m: F.exp(x * 0.25),
    lambda x, g, r, m: F.sigmoid(x),
    lambda x, g, r, m: F.log(x),
    lambda x, g, r, m: F.sqrt(x),
    lambda x, g, r, m: F.tanh(x),
    lambda x, g, r, m: F.relu(x),
    lambda x, g, r, m: F.silu(x),
    lambda x, g, r, m: F.square(x),
    lambda x, g, r, m: F.softmax(x),
    lambda x, g, r, m: F.log_softmax(x),
    lambda x, g, r, m: F.rmsnorm(x),
    lambda x, g, r, m: x / F.sqrt(F.var(x) + 1e-5),
    lambda x, g, r, m: F.where(m, x, -INF),
    lambda x, g, r, m: F.where(r > 0, x, -x),
    lambda x, g, r, m: x + g,
    lambda x, g, r, m: x * F.exp(g),
    lambda x, g, r, m: F.cast(x, f16),
)


@settings(max_examples=400)
@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_the_values_of_random_chains_fall_in_the_order_of_their_keys(steps: list[int], seed: int) -> None:
    """And what is masked by its key is nothing by its value: -inf, or the 0 of something positive."""

    @chain(M=6, N=12)
    def spec(x: f32[M, N], g: f32[N], r: f32[M, 1], m: b8[M, N]) -> tuple[f32[M, N], f32[M, N], i32[M, N]]:
        y = x
        for step in steps:
            y = PIECES[step](y, g, r, m)
        values, columns = F.topk(y, N)
        return y + F.where(m, r + g, r + g) * 0.0, values, columns

    rng = np.random.default_rng(seed)
    x, g, r, m = rng.normal(size=(6, 12)) * 2, rng.normal(size=12), rng.normal(size=(6, 1)), rng.random((6, 12)) < 0.7
    for graph in (spec.graph, simplify(spec.graph)):
        whole, values, columns = reference(graph)(x, g, r, m)
        take_node = next(n for n in spec.graph.nodes if n.op.name == "take")
        assert take_node.missing in (0, -INF)
        for row, (every, best, at) in enumerate(zip(whole, values, columns, strict=True)):
            chosen = at[at >= 0]
            assert len(set(chosen)) == len(chosen)
            np.testing.assert_array_equal(best[len(chosen) :], take_node.missing)
            if np.isnan(every).any():
                continue
            np.testing.assert_array_equal(best[: len(chosen)], every[chosen], err_msg=f"row {row}")
            with np.errstate(invalid="ignore"):
                rises = np.diff(best[: len(chosen)])
            assert not (rises > 1e-12 * np.abs(best[1 : len(chosen)])).any(), (row, best)
            np.testing.assert_array_equal(np.delete(every, chosen), take_node.missing)


@pytest.mark.parametrize("seed", range(150))
def test_random_chains_mean_the_same_when_simplified(seed: int) -> None:
    graph = random_chain(seed, select=True).graph
    values = values_for(graph, seed)
    with np.errstate(all="ignore"):
        before, after = (reference(g)(*values.values()) for g in (graph, simplify(graph)))
    for tensor, one, other in zip(graph.outputs, before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=tensor.name)


def test_every_take_that_is_left_is_of_an_operand_or_of_the_key() -> None:
    for name, (function, _, _) in STEPS.items():
        graph = simplify(best_of(function).graph)
        assert graph.selection is not None
        found = graph.selection.inputs[0]
        takes = [n for n in graph.nodes if n.op.name == "take"]
        assert takes, name
        for node in takes:
            assert node.inputs[1] is graph.selection
            assert node.inputs[0] is found or node.inputs[0].op.name == "input"
            assert node.missing == (-INF if node.inputs[0] is found else 0)


def test_whole_numbers_are_ordered_as_they_are_and_the_least_is_masked() -> None:
    @chain(M=2, N=4)
    def spec(x: i32[M, N]) -> tuple[i32[M, 3], i32[M, 3], i32[M, 3]]:
        values, columns = F.topk(x, 3)
        return values, columns, F.take(x, columns)

    x = np.array([[2**24, 2**24 + 1, -2, 2**24 + 1], [-(2**31), 1 - 2**31, -(2**31), 2**31 - 1]])
    for graph in (spec.graph, simplify(spec.graph)):
        values, columns, taken = reference(graph)(x)
        assert columns.tolist() == [[1, 3, 0], [3, 1, -1]]
        assert values.tolist() == [[2**24 + 1, 2**24 + 1, 2**24], [2**31 - 1, 1 - 2**31, -(2**31)]]
        assert taken.tolist() == [values[0].tolist(), [2**31 - 1, 1 - 2**31, 0]]


def test_sums_of_whole_numbers_are_no_step_for_an_order() -> None:
    @chain(M=1, N=3)
    def spec(x: i32[M, N], r: i32[M, 1]) -> i32[M, 1]:
        return F.argmax(x + r)

    for graph in (spec.graph, simplify(spec.graph)):  # they wrap
        assert reference(graph)(np.array([[2**31 - 1, 5, 0]]), np.array([[1]])).tolist() == [[1]]


def test_indices_and_masks_are_taken_too() -> None:
    @chain(B=2, M=3, N=6)
    def spec(x: f32[B, M, N], keep: b8[M, N], n: i32[B, 1, N]) -> tuple[i32[B, M, 4], b8[B, M, 4], i32[B, M, 4]]:
        _, columns = F.topk(F.causal(x), 4)
        at = F.take(F.col_index(x) + F.row_index(x), columns, missing=-7)
        return at, F.take(keep, columns), F.take(n, columns)

    x = np.arange(36.0).reshape(2, 3, 6)
    keep = np.arange(18).reshape(3, 6) % 2 == 0
    n = np.arange(12).reshape(2, 1, 6)
    for graph in (spec.graph, simplify(spec.graph)):
        at, kept, counts = reference(graph)(x, keep, n)
        assert at[1].tolist() == [[0, -7, -7, -7], [2, 1, -7, -7], [4, 3, 2, -7]]
        assert kept[0].tolist() == [
            [True, False, False, False],
            [False, True, False, False],
            [True, False, True, False],
        ]
        assert counts[1].tolist() == [[6, 0, 0, 0], [7, 6, 0, 0], [8, 7, 6, 0]]


# ---------------------------------------------------------------- what is said of it


def test_it_is_explained_in_the_words_of_the_spec() -> None:
    @chain(B=4, N=32, K=8)
    def spec(logits: bf16[B, N], bias: f32[N]) -> tuple[f32[B, K], i32[B, K]]:
        scaled = logits * 0.5
        p, columns = F.topk(F.softmax(F.where(scaled > 0, scaled, -INF)), K, sorted=False)
        return p / F.sum(p) + F.take(bias, columns), columns

    graph = simplify(spec.graph)
    line = spec.graph.where.line
    assert selection(graph) == [
        "8 of 32 columns of each row, in any order, by where",
        "not by softmax, which rises with where along a row: the order is the same, and what is rounded to a tie is "
        "still in it",
        f"sum (line {line + 4}), div (line {line + 4}), take (line {line + 4}), add (line {line + 4}): computed for "
        "the columns chosen alone",
        "bias: read again at the columns chosen, 8 elements a row",
    ]
    assert selected(graph) == "8 of 32 columns a row by where, in any order; NaN before all, ties by column, -inf never"
    assert selection(simplify(chain(B=2, N=3)(nothing_chosen).graph)) == []


def nothing_chosen(x: f32[B, N]) -> f32[B, N]:
    return x + 1.0


def test_a_selection_costs_a_comparison_an_element_and_the_rest_a_step_for_what_it_keeps() -> None:
    @chain(B=4, N=32)
    def spec(x: bf16[B, N]) -> tuple[f32[B, 8], i32[B, 8]]:
        best, columns = F.topk(x, 8)
        return F.exp(best), columns

    graph = simplify(spec.graph)
    moved = traffic(graph, (), again_from_l2=False, again=0.0)
    assert moved.flops == 4 * (32 + 8 + 8 * 4)
    assert {t.tensor: t.moved for t in moved.tensors} == {"x": 256, "exp": 128, "columns": 128}
    assert moved.per_element_unfused == 256 + (64 + 128) + (64 + 128)  # between operators, values are stored as x is


# ---------------------------------------------------------------- what a spec may not ask for


def wrong(function: Callable[..., Any], **sizes: int) -> str:
    with pytest.raises(SpecError) as caught:
        chain(**(sizes or {"M": 8, "N": 16}))(function)
    assert "test_selection.py:" in str(caught.value)
    return str(caught.value)


def refused(call: Callable[[Any], Any]) -> str:
    def spec(x: f32[M, N]) -> f32[M, 4]:
        found: f32[M, 4] = call(x)
        return found

    return wrong(spec)


def test_k_is_a_constant_that_rows_have_room_for() -> None:
    assert "1 to 1024" in refused(lambda x: F.topk(x, 0)[0])
    assert "1 to 1024" in refused(lambda x: F.topk(x, 2000)[0])
    assert "a constant of the kernel" in refused(lambda x: F.topk(x, True)[0])
    assert "a constant of the kernel" in refused(lambda x: F.topk(x, wrong_type(F.max(x)))[0])
    assert "no row to choose from" in refused(lambda x: F.topk(F.max(x), 4)[0])
    assert "b8" in refused(lambda x: F.topk(x > 0, 4)[0])

    def too_many(x: f32[M, N]) -> f32[M, 17]:
        return F.topk(x, 17)[0]

    assert "the rows of too_many have 16 columns" in wrong(too_many)

    def by_rows(x: f32[M, N]) -> f32[M, M]:
        return F.topk(x, M)[0]

    assert "counts rows" in wrong(by_rows)

    def unnamed(x: f32[M, N]) -> f32[M, 1]:
        return F.sum(F.topk(x, K)[0])

    assert "which the signature does not name" in wrong(unnamed)

    @chain(M=8, N=16, K=4)
    def spec(x: f32[M, N]) -> f32[M, K]:
        return F.topk(x, K)[0]

    with pytest.raises(SpecError, match="k is K=17"):
        spec.at(K=17)


def test_k_may_be_the_number_of_rows_as_well() -> None:
    @chain(N=16)
    def spec(x: f32[4, N]) -> f32[4, 4]:
        return F.topk(x, 4)[0]

    assert (spec.graph.rows, spec.graph.cols, spec.graph.picks) == (4, 16, 4)


def test_what_is_chosen_has_a_mean() -> None:
    @chain(M=2, N=16, K=4)
    def spec(x: f32[M, N]) -> tuple[f32[M, K], f32[M, 1]]:
        best, _ = F.topk(x, K)
        return F.layernorm(best), F.mean(best)

    x = np.arange(32.0).reshape(2, 16)
    normed, mean = reference(spec.graph)(x)
    assert mean.tolist() == [[13.5], [29.5]]
    np.testing.assert_allclose(normed.var(-1), 1, rtol=1e-4)
    assert spec.at(K=2).graph.picks == 2
    with pytest.raises(SpecError, match="k is K=4, but the rows of spec have 3"):
        spec.at(N=3)
    with pytest.raises(SpecError, match="at most 1024"):
        spec.at(N=5000, K=1025)
    assert spec.at(N=1, K=1).graph.picks == 1


def test_what_follows_a_selection_is_of_the_columns_chosen() -> None:
    @chain(M=2, N=16)
    def followed(x: f32[M, N]) -> tuple[f32[M, 4], i32[M, 4]]:
        values, columns = F.topk(x, 4)
        return F.take(x, columns) / F.sum(values), columns

    x = np.arange(32.0).reshape(2, 16)
    np.testing.assert_allclose(reference(followed.graph)(x)[0].sum(-1), 1)

    assert "16 and 4 differ" in refused(lambda x: x + F.topk(x, 4)[0]).replace("N", "16")

    def shape(x: f32[M, N]) -> f32[M, 5]:
        return F.topk(x, 4)[0]

    assert "has shape [M, 4], declared is [M, 5]" in wrong(shape)


def taken_again(values: Any, columns: Any) -> Any:
    return F.take(values, columns)


def g_of(x: Any) -> Any:
    return F.square(x) - 1.0


def test_take_wants_columns_of_a_selection_and_a_row_of_that_length() -> None:
    assert "wanted one column a row" in refused(lambda x: F.take(x, F.cast(x, i32)))
    assert "found columns of f32, wanted i32" in refused(lambda x: F.take(x, F.topk(x, 4)[0]))
    assert "rows of N" in refused(lambda x: F.take(F.max(x), F.topk(x, 4)[1]))
    assert "rows of N" in refused(lambda x: F.take(F.topk(x, 4)[0], F.topk(x, 4)[1]))
    assert "the columns chosen alone" in refused(lambda x: taken_again(*F.topk(x, 4)))
    assert "missing='a'" in refused(lambda x: F.take(x, F.topk(x, 4)[1], wrong_type("a")))
    assert "missing=0.5" in refused(lambda x: F.take(F.cast(x, i32), F.topk(x, 4)[1], 0.5))


@needs_compiler
def test_what_one_selection_chose_is_taken_at_what_another_one_chooses_of_it() -> None:
    """As a sampler's token: the best of the k likeliest, by their columns. It was refused, as rows of other lengths."""

    @chain(M=6, N=40)
    def spec(x: f32[M, N], noise: f32[M, 8]) -> tuple[i32[M, 1], f32[M, 1]]:
        values, columns = F.topk(x, 8)
        best = F.argmax(values + noise)
        return F.take(columns, best), F.take(noise, best)

    rng = np.random.default_rng(6)
    x, noise = rng.standard_normal((6, 40)), rng.standard_normal((6, 8))
    own = np.argsort(-x, kind="stable")[:, :8]
    best = np.argmax(np.take_along_axis(x, own, 1) + noise, 1)[:, None]
    token, drawn = reference(spec.graph)(x, noise)
    np.testing.assert_array_equal(token, np.take_along_axis(own, best, 1))
    np.testing.assert_array_equal(drawn, np.take_along_axis(noise, best, 1))
    program = compile_chain(spec, "cuda:h200", on="emulator", validate=False)
    np.testing.assert_array_equal(program(x.astype(np.float32), noise.astype(np.float32))[0], token)


def test_rules_of_whole_rows_refuse_a_selection() -> None:
    @chain(M=8, N=16)
    def spec(x: f16[M, N]) -> f16[M, 4]:
        return F.topk(F.softmax(x), 4)[0]

    for rule in (elementwise, rowwise):
        with pytest.raises(NoMatch, match=r"topk at .* chooses columns"):
            next(rule(spec.graph, H200, CONTIGUOUS))


# ---------------------------------------------------------------- where graphs go


def variants() -> dict[str, Graph]:
    def made(k: int = 4, missing: float = 0.0, ordered: bool = True) -> Graph:
        @chain(M=4, N=16)
        def spec(x: f32[M, N], g: f32[N]) -> tuple[f32[M, k], i32[M, k], f32[M, k]]:
            p, columns = F.topk(F.softmax(x), k, sorted=ordered)
            return p, columns, F.take(g, columns, missing)

        return simplify(spec.graph)

    return {"one": made(), "other k": made(k=5), "other missing": made(missing=1.0), "any order": made(ordered=False)}


def test_what_is_remembered_of_a_graph_tells_selections_apart() -> None:
    graphs = variants()
    assert len({graph_digest(g) for g in graphs.values()}) == len(graphs)
    plan = candidates(chain(M=4, N=16)(nothing_chosen_of_rows).graph, H200).plans[0]
    assert len({spelled(replace(plan, graph=g)) for g in graphs.values()}) == len(graphs)


def test_k_is_a_size_that_the_kernel_is_compiled_for() -> None:
    @chain(M=4, N=16, K=3)
    def spec(x: f32[M, N]) -> f32[M, K]:
        return F.topk(x, K)[0]

    plan = candidates(chain(M=4, N=16)(nothing_chosen_of_rows).graph, H200).plans[0]
    assert compiled_sizes(replace(plan, graph=simplify(spec.graph), flat=False)) == {"N": 16, "K": 3}


def nothing_chosen_of_rows(x: f32[M, N]) -> f32[M, N]:
    return x + 1.0


def test_a_selection_travels_whole() -> None:
    for graph in variants().values():
        there = wire.unpacked(wire.packed(graph))
        assert reference_source(there) == reference_source(graph)
        assert graph_digest(there) == graph_digest(graph)
        assert there.selection.ordered is graph.selection.ordered  # type: ignore[union-attr]
        assert [n.op.name for n in there.written.nodes] == [n.op.name for n in graph.written.nodes]
        assert selection(there) == selection(graph), "its key is a node of both graphs"
