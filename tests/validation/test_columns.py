"""Columns that a kernel chose, held to the law: right ones pass however near the ties, every wrong one is found.

No kernel runs here: results come from the graph in f32 arithmetic, and are then spoilt as a bug would spoil them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.reference import reference
from fusegen.language.selection import take, top_columns
from fusegen.language.spec import Chain
from fusegen.language.types import size_of
from fusegen.planner.rewrites import simplify
from fusegen.validation.accumulation import Accumulation
from fusegen.validation.bounded import Bounded, exact
from fusegen.validation.bounds import leaf
from fusegen.validation.columns import compare_columns
from fusegen.validation.compare import figures, stored
from fusegen.validation.formulas import formula
from fusegen.validation.judging import judge
from fusegen.validation.patterns import PATTERNS, Room, patterns_for
from fusegen.validation.report import Case, Report
from tests.chains import random_chain
from tests.language.test_unfusing import values_for

M, N = dims("M N")
INF = np.inf
NAN = np.nan
Array = np.ndarray[Any, np.dtype[Any]]
K = 6


@chain(M=8, N=40)
def plain(x: f16[M, N]) -> tuple[f32[M, K], i32[M, K]]:
    return F.topk(x, K)


@chain(M=8, N=40)
def soft(x: bf16[M, N], mask: b8[M, N], t: f32) -> tuple[f32[M, K], i32[M, K], f32[M, 1]]:
    p, columns = F.topk(F.softmax(F.where(mask, x / t, -INF)), K)
    total = F.sum(p)
    return p / total, columns, total


@chain(M=8, N=40)
def any_order(x: f16[M, N]) -> tuple[f32[M, K], i32[M, K]]:
    return F.topk(x * 0.3, K, sorted=False)


@chain(M=8, N=40)
def router(x: f32[M, N], bias: f32[N]) -> tuple[f32[M, K], i32[M, K]]:
    score = F.sigmoid(x)
    _, columns = F.topk(score + bias, K)
    weights = F.take(score, columns)
    return weights / F.sum(weights) * 2.5, columns


@chain(M=8, N=40)
def values_alone(x: f16[M, N], y: f32[M, N]) -> tuple[f32[M, K], f32[M, K]]:
    best, columns = F.topk(F.exp(x * 0.3) + y * 0.001, K)
    return best, F.take(x, columns) + F.where(columns < 0, 1.0, 0.0)


CHAINS = {c.name: c for c in (plain, soft, any_order, router, values_alone)}


@np.errstate(all="ignore")
def simulated(graph: Graph, operands: list[Any]) -> list[Array]:
    """What a kernel would return: every op in f32."""
    table: dict[Node, Any] = {}
    wide = {"f32": np.float32, "i32": np.int64, "b8": np.bool_}
    for tensor, value in zip(graph.inputs, operands, strict=True):
        table[tensor.node] = np.asarray(value).astype(wide[tensor.node.dtype.name])
    for node in graph.nodes:
        if node in table:
            continue
        args = [table[a] for a in node.inputs]
        if node.op.name == "top_columns":
            found: Any = top_columns(args[0], size_of(node.shape[-1], graph.sizes))
        elif node.op.name == "take":
            found = take(args[0], args[1], node.missing)
        elif node.op.kind is Kind.LEAF:
            found = leaf(node, graph, graph.sizes).value
        else:
            found = formula(node.op.ref, node.op.arity)(*args)
        table[node] = np.asarray(found).astype(wide[node.dtype.name])
    return [table[t.node].astype(t.dtype.numpy) for t in graph.outputs]


def hows(graph: Graph) -> dict[Node, Accumulation]:
    return {n: Accumulation("sum", True, serial=graph.cols, levels=0, vector=1) for n in graph.reductions}


def made(chain: Chain, seed: int, pattern: str = "normal") -> tuple[Graph, list[Any]]:
    """The simplified graph and operands whose rows are of that pattern."""
    graph = simplify(chain.graph)
    rng = np.random.default_rng(seed)
    make = next(p.make for p in PATTERNS if p.name == pattern)
    operands: list[Any] = []
    for tensor in graph.inputs:
        shape = tuple(size_of(s, graph.sizes) for s in tensor.shape)
        if tensor.dtype is b8:
            operands.append(rng.random(shape) < rng.choice([0.1, 0.7, 1.0], (shape[0], 1)))
        elif not shape:
            operands.append(0.7)
        elif len(shape) == 2:
            room = Room(rng, shape[0], shape[1], tensor.dtype, 1e4, K)
            operands.append(stored(make(room), tensor.dtype).astype(tensor.dtype.numpy))
        else:
            operands.append(rng.normal(size=shape).astype(tensor.dtype.numpy))
    return graph, operands


def complaints(graph: Graph, operands: list[Any], outputs: list[Array]) -> str:
    """What validation would say; empty where all is right."""
    values = reference(graph)(*operands)
    with np.errstate(all="ignore"):
        expected = values if isinstance(values, tuple) else (values,)
        compared, doubt = judge(graph, hows(graph), operands, outputs, expected)
    assert not doubt
    found = figures(compared)
    return str(found.worst) if found.wrong else ""


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("pattern", [p.name for p in PATTERNS])
def test_f32_arithmetic_is_right_on_rows_of_every_pattern(name: str, pattern: str) -> None:
    for seed in range(3):
        graph, operands = made(CHAINS[name], seed, pattern)
        assert not complaints(graph, operands, simulated(graph, operands))


@settings(max_examples=60)
@given(st.sampled_from(sorted(CHAINS)), st.integers(0, 2**32 - 1), st.sampled_from(PATTERNS), st.integers(K, 70))
def test_f32_arithmetic_is_right_at_any_length(name: str, seed: int, pattern: Any, cols: int) -> None:
    graph, operands = made(CHAINS[name].at(N=cols), seed, pattern.name)
    assert not complaints(graph, operands, simulated(graph, operands))


@pytest.mark.parametrize("seed", range(100))
def test_f32_arithmetic_is_right_for_random_chains(seed: int) -> None:
    graph = simplify(random_chain(seed, select=True).graph)
    operands = list(values_for(graph, seed).values())
    assert not complaints(graph, operands, simulated(graph, operands))


def test_most_of_it_is_bounded() -> None:
    """A bound of infinity would pass whatever is returned."""
    for name, one in CHAINS.items():
        graph, operands = made(one, 0)
        compared, _ = judge(graph, hows(graph), operands, simulated(graph, operands), reference(graph)(*operands))
        assert figures(compared).bounded == 1.0, name


@chain(M=4, N=40)
def doubled(x: f32[M, N]) -> i32[M, 3]:
    return F.topk(F.sigmoid(x + x), 3)[1]


LARGEST = np.float32(np.finfo(np.float32).max)
BEYOND = np.zeros((4, 40), np.float32)
BEYOND[:, [5, 9, 30]] = LARGEST * np.array([0.6, 0.2, 0.9], np.float32)  # times two: inf, a number, inf
BEYOND[2, [7, 8]] = -LARGEST  # -inf
BEYOND[3] = -LARGEST
BEYOND[3, 11] = 0.0


def test_keys_beyond_f32_are_infinities_that_tie() -> None:
    """Of keys that float64 tells apart, and f32 does not, the lowest column comes first; one that is -inf is masked."""
    graph = simplify(doubled.graph)
    (right,) = simulated(graph, [BEYOND])
    assert right.tolist() == [[5, 30, 9], [5, 30, 9], [5, 30, 9], [11, -1, -1]]
    assert reference(graph)(BEYOND)[0].tolist() == [30, 5, 9]
    compared, _ = judge(graph, hows(graph), [BEYOND], [right], [reference(graph)(BEYOND)])
    assert figures(compared).bounded == 1.0
    assert not complaints(graph, [BEYOND], [right])
    for row, columns in (0, [30, 5, 9]), (1, [5, 9, 30]), (2, [5, 30, 0]), (3, [11, 0, -1]):
        wrong = right.copy()
        wrong[row] = columns
        assert f"[{row}, " in complaints(graph, [BEYOND], [wrong]), columns


# ---------------------------------------------------------------- spoilt results


Spoil = Callable[[Array, Array, list[Any]], None]  # values and columns in place, and the operands


def swap(array: Array, a: int, b: int) -> None:
    array[:, [a, b]] = array[:, [b, a]]


def unsorted(values: Array, columns: Array, operands: list[Any]) -> None:
    swap(values, 1, 4)
    swap(columns, 1, 4)


def repeated(values: Array, columns: Array, operands: list[Any]) -> None:
    values[:, 3], columns[:, 3] = values[:, 2], columns[:, 2]


def none_where_one_was_due(values: Array, columns: Array, operands: list[Any]) -> None:
    columns[:, -1] = -1


def all_none(values: Array, columns: Array, operands: list[Any]) -> None:
    columns[:] = -1


def off_by_one(values: Array, columns: Array, operands: list[Any]) -> None:
    columns += 1


def one_off_by_one(values: Array, columns: Array, operands: list[Any]) -> None:
    columns[-1, 3] += 1


def past_the_row(values: Array, columns: Array, operands: list[Any]) -> None:
    columns[2, 0] = 40


def below_zero(values: Array, columns: Array, operands: list[Any]) -> None:
    columns[2, 0] = -2


def best_left_out(values: Array, columns: Array, operands: list[Any]) -> None:
    for row in columns:
        others = np.setdiff1d(np.arange(40), row)
        row[:-1] = row[1:]
        row[-1] = others[operands[0][0, others].argmin()]


def values_of_a_neighbour(values: Array, columns: Array, operands: list[Any]) -> None:
    swap(values, 0, 1)


def values_of_another_row(values: Array, columns: Array, operands: list[Any]) -> None:
    values[:] = np.roll(values, 1, axis=0)


def rows_exchanged(values: Array, columns: Array, operands: list[Any]) -> None:
    columns[:] = np.roll(columns, 1, axis=0)


SPOILT = (
    unsorted, repeated, none_where_one_was_due, all_none, off_by_one, one_off_by_one, past_the_row, below_zero,
    best_left_out, values_of_a_neighbour, values_of_another_row, rows_exchanged,
)  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "soft", "any_order", "router"])
@pytest.mark.parametrize("spoil", SPOILT, ids=lambda s: s.__name__)
def test_a_spoilt_result_is_found(name: str, spoil: Spoil) -> None:
    graph, operands = made(CHAINS[name], 1)
    operands = [np.ones_like(o) if getattr(o, "dtype", None) == np.bool_ else o for o in operands]
    outputs = simulated(graph, operands)
    assert not complaints(graph, operands, outputs)
    spoil(outputs[0], outputs[1], operands)
    right = name == "any_order" and spoil is unsorted
    assert bool(complaints(graph, operands, outputs)) != right


def test_any_order_is_that_of_columns_and_values_alike() -> None:
    graph, operands = made(any_order, 1)
    values, columns = simulated(graph, operands)
    mixed = np.random.default_rng(0).permutation(K)
    assert not complaints(graph, operands, [values[:, mixed], columns[:, mixed]])
    assert complaints(graph, operands, [values[:, mixed], columns])


def test_the_order_is_kept_where_the_columns_are_not_returned() -> None:
    @chain(M=8, N=40)
    def spec(x: f16[M, N]) -> f32[M, K]:
        return F.topk(x, K, sorted=False)[0]

    graph = simplify(spec.graph)
    assert graph.selection is not None
    assert graph.selection.ordered


@pytest.mark.parametrize("pattern", ["ties", "constant", "two values", "zeros"])
@pytest.mark.parametrize("name", ["plain", "soft", "any_order", "router"])
def test_swapped_ties_are_found_however_inexact_the_keys(name: str, pattern: str) -> None:
    """The same bits in, the same key out: a higher column for a lower one is wrong in any arithmetic."""
    graph, operands = made(CHAINS[name], 1, pattern)
    operands[1:2] = [np.ones_like(o) for o in operands[1:2]]
    values, columns, *rest = simulated(graph, operands)
    x = operands[0].astype(np.float32)
    other = np.array([np.setdiff1d(np.flatnonzero(x[row] == x[row, c[-1]]), c)[-1:] for row, c in enumerate(columns)])
    assert other.shape == (8, 1), "every row has another of the last one's value"
    later = columns.copy()
    later[:, -1] = other[:, 0]
    said = complaints(graph, operands, [values, later, *rest])
    assert ("was due" in said) or ("the same key and comes first" in said), said
    if name != "any_order" and pattern == "constant":
        swapped = columns.copy()
        swap(swapped, 2, 3)
        assert complaints(graph, operands, [values, swapped, *rest])


def test_a_masked_column_is_never_right_and_missing_places_are_last() -> None:
    graph, operands = made(soft, 0)
    operands[1][:] = False
    operands[1][:, 5:9] = True
    values, columns, total = simulated(graph, operands)
    assert (columns[:, 4:] == -1).all()
    for spoil, said in (
        (lambda c: c.__setitem__((slice(None), 4), 20), "masked"),
        (lambda c: swap(c, 3, 4), "not masked"),
        (lambda c: c.__setitem__((0, 5), c[0, 0]), "already"),
    ):
        spoilt = columns.copy()
        spoil(spoilt)
        assert said in complaints(graph, operands, [values, spoilt, total])
    nothing = values.copy()
    nothing[0, 5] = 0.25  # a probability where there is no column
    assert complaints(graph, operands, [nothing, columns, total])


@pytest.mark.parametrize("name", ["plain", "router"])
def test_nan_comes_first(name: str) -> None:
    graph, operands = made(CHAINS[name], 0)
    operands[0][:, [7, 3]] = NAN
    operands[0][:, 20] = INF
    values, columns = simulated(graph, operands)
    assert (columns[:, :2] == [3, 7]).all()
    swapped = columns.copy()
    swap(swapped, 0, 1)
    assert complaints(graph, operands, [values, swapped])
    below = [a[:, [2, 0, 1, 3, 4, 5]] for a in (values, columns)]
    assert complaints(graph, operands, below)


def test_values_alone_are_bounded_by_every_choice_that_may_be_right() -> None:
    graph, operands = made(values_alone, 3)
    values, taken = simulated(graph, operands)
    assert not complaints(graph, operands, [values, taken])
    for spoil in (lambda a, b: swap(a, 0, 1), lambda a, b: swap(b, 0, 1), lambda a, b: a.__imul__(1.001)):
        spoilt = [values.copy(), taken.copy()]
        spoil(*spoilt)
        assert complaints(graph, operands, spoilt)
    twin = [operands[0].copy(), operands[1].copy()]
    first = top_columns(np.exp(twin[0].astype(np.float64) * 0.3) + twin[1] * 0.001, 1)[:, 0]
    rows = np.arange(8)
    twin[0][rows, (first + 1) % 40] = np.nextafter(twin[0][rows, first], np.float16(-np.inf))
    step = np.exp(0.3 * twin[0][rows, first].astype(float)) - np.exp(
        0.3 * twin[0][rows, (first + 1) % 40].astype(float)
    )
    twin[1][rows, (first + 1) % 40] = twin[1][rows, first] + step * 1000  # nearly the same key from other operands
    assert not complaints(graph, twin, simulated(graph, twin))


# ---------------------------------------------------------------- intervals


def verdict(columns: list[int], value: list[float], error: float, ordered: bool = True) -> str:
    tensor = plain.graph.outputs[1]
    law = Bounded(np.array([value]), np.full((1, len(value)), error)) if error else exact(np.array([value]))
    wanted = top_columns(law.value, len(columns))
    found = compare_columns(tensor, np.array([columns], np.int32), wanted, law, (), ordered)
    at = np.argwhere(found.wrong)
    assert found.note is not None
    return found.note(*map(int, at[0])) if len(at) else ""


def test_near_ties_may_come_in_either_order_and_far_ones_may_not() -> None:
    row = [1.0, 1.05, 0.5, 2.0]
    assert not verdict([3, 1, 0], row, 0.1)
    assert not verdict([3, 0, 1], row, 0.1)
    assert verdict([0, 3, 1], row, 0.1) == "is 3 (key 2), where column 1 (key 1.05) was due"
    assert not verdict([3, 0], row, 0.1)
    assert verdict([3, 2], row, 0.1) == "is 2 (key 0.5), where column 1 (key 1.05) was due"
    assert verdict([3, 0], row, 0.01) == "is 0 (key 1), where column 1 (key 1.05) was due"


def test_what_is_allowed_pairwise_may_be_wrong_together() -> None:
    """0 before 1 and 1 before 2 each may be, within 0.6; all three together would need 0 at once above and below."""
    assert not verdict([1, 2, 0], [1.0, 2.0, 3.0], 0.6)
    assert not verdict([2, 0, 1], [1.0, 2.0, 3.0], 0.6)
    assert verdict([0, 1, 2], [1.0, 2.0, 3.0], 0.6) == "is 2 (key 3), where column 0 (key 1) was due"


def test_a_tie_that_needs_a_smaller_key_leaves_no_room_for_its_equal() -> None:
    """Column 1 must be below 1.0, so column 2, exactly 1.0, can't follow it."""
    tensor = plain.graph.outputs[1]
    law = Bounded(np.array([[0.0, 0.95, 1.0, 1.0]]), np.array([[0.0, 0.05, 0.0, 0.0]]))
    wanted = top_columns(law.value, 3)
    for columns, right in (([2, 3, 1], True), ([1, 2, 3], True), ([3, 1, 2], False), ([2, 1, 3], False)):
        found = compare_columns(tensor, np.array([columns], np.int32), wanted, law, (), True)
        assert (not found.wrong.any()) is right, columns


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_whatever_keys_within_their_bounds_give_is_right(seed: int, k: int, ordered: bool) -> None:
    rng = np.random.default_rng(seed)
    value = rng.choice([-INF, 0.0, 1.0, 1.0, 2.0, 2.5, INF, NAN], (3, 8))
    error = np.where(np.isfinite(value), rng.choice([0.0, 0.0, 0.5, 1.0], (3, 8)), 0.0)
    moved = value + np.where(error > 0, rng.uniform(-1, 1, (3, 8)) * error, 0.0)
    columns = top_columns(moved, k)
    if not ordered:
        count = (columns >= 0).sum(-1)
        for row, n in zip(columns, count, strict=True):
            row[:n] = rng.permutation(row[:n])
    law = Bounded(value, error)
    found = compare_columns(plain.graph.outputs[1], columns.astype(np.int32), top_columns(value, k), law, (), ordered)
    assert not found.wrong.any()


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_what_no_keys_within_their_bounds_give_is_wrong(seed: int, k: int) -> None:
    """Of exact keys one answer is right; every other one is found."""
    rng = np.random.default_rng(seed)
    value = rng.choice([-INF, 0.0, 1.0, 1.0, 2.0, NAN], (1, 6))
    right = top_columns(value, k)
    other = rng.integers(-1, 6, (1, k))
    found = compare_columns(plain.graph.outputs[1], other.astype(np.int32), right, exact(value), (), True)
    assert found.wrong.any() == (other != right).any()


# ---------------------------------------------------------------- what is said


def test_a_wrong_column_is_named_with_its_key_and_the_one_that_was_due() -> None:
    graph, operands = made(plain, 1)
    values, columns = simulated(graph, operands)
    due, last = columns[3, [2, 5]]
    values[3, 2], columns[3, 2] = values[3, 5], last
    expected = reference(graph)(*operands)
    keys = [f"column {c} (key {operands[0][3, c]:.9g})".removeprefix("column " * int(c == last)) for c in (last, due)]
    found = figures(judge(graph, {}, operands, [values, columns], expected)[0])
    assert found.worst is not None
    case = Case("normal", "unit scale", "8x40", found.elements, worst=found.worst, problem=str(found.worst))
    assert f"columns[3, 2] is {keys[0]}, where {keys[1]} was due" in str(case)
    again = Report("plain", "here", 0, (case,))
    assert Report.from_json(json.loads(json.dumps(again.to_json()))) == again


def test_figures_of_columns_are_not_mixed_with_those_of_values() -> None:
    """A column number is no magnitude: the relative error is that of the values."""
    graph, operands = made(soft, 0)
    outputs = simulated(graph, operands)
    found = figures(judge(graph, hows(graph), operands, outputs, reference(graph)(*operands))[0])
    assert found.elements == sum(o.size for o in outputs)
    assert 0 < found.relative_l2 < 1e-6
    assert found.max_abs < 1e-6


def test_columns_of_which_no_key_is_known_are_not_judged() -> None:
    """But for what no selection gives, whatever its keys."""
    key = Bounded(np.zeros((3, 4)), np.array([[np.inf] * 4, [np.inf] * 4, [0.0, 0.0, np.inf, np.inf]]))
    tensor = plain.graph.outputs[1]
    found = compare_columns(tensor, np.array([[3], [4], [1]], np.int32), np.zeros((3, 1), int), key, (), True)
    assert np.isinf(found.allowed).tolist() == [[True], [False], [False]]
    assert found.wrong.tolist() == [[False], [True], [True]]
    assert figures([found]).wrong == 2


def test_no_rows_are_right() -> None:
    for one in CHAINS.values():
        graph, operands = made(one, 0)
        few = [o[:0] if getattr(o, "ndim", 0) == 2 else o for o in operands]
        assert not complaints(graph, few, simulated(graph, few))


def test_the_patterns_of_selections_are_asked_for_by_selections_alone() -> None:
    own = {p.name for p in PATTERNS if p.needs == "selection"}
    assert own <= {p.name for p in patterns_for(simplify(plain.graph))}

    @chain(M=4, N=8)
    def other(x: f32[M, N]) -> f32[M, N]:
        return F.softmax(x)

    assert not own & {p.name for p in patterns_for(other.graph)}


def test_patterns_hold_what_they_say() -> None:
    room = Room(np.random.default_rng(0), 6, 40, plain.graph.inputs[0].dtype, 1e4, K)
    by_name = {p.name: p.make(room) for p in PATTERNS if p.needs == "selection"}
    assert ((by_name["k - 1 left"] > -INF).sum(-1) == K - 1).all()
    assert ((by_name["k left"] > -INF).sum(-1) == K).all()
    assert (np.diff(by_name["descending"]) <= 0).all()
    assert (top_columns(by_name["best last"], K) == 39 - np.arange(K)).all()
    assert (by_name["two values"].sum(-1) < K).all()
    assert ((by_name["k - 1 above"] > 0).sum(-1) == K - 1).all()
    assert np.isnan(by_name["some NaN"]).any()


@chain(M=2, N=3)
def rounded_keys(x: i32[M, N]) -> i32[M, 1]:
    return F.argmax(F.cast(F.cast(x, f32) * 1.0, i32))


def test_a_key_next_to_what_is_masked_may_be_masked() -> None:
    """f32 rounds -(2^31) + 48 to -(2^31), which is how i32 says that a column is masked."""
    graph = simplify(rounded_keys.graph)
    x = np.full((2, 3), -(2**31) + 48, np.int32)
    x[1, 2] = 7
    assert not complaints(graph, [x], [np.array([[-1], [2]], np.int32)])
    assert "[1, 0]" in complaints(graph, [x], [np.array([[-1], [-1]], np.int32)])
