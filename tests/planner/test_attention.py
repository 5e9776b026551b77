"""What is found of attention in a graph: its softmax, however written, and the ends of its masks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import Chain, bf16, chain, dims, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.graph import Node
from fusegen.language.naming import value_names
from fusegen.planner import candidates
from fusegen.planner.attention.masks import End, Interval, Least, Sum, direction, mask_of
from fusegen.planner.attention.recognition import recognized
from fusegen.targets import A100, TARGETS
from fusegen.validation.accumulation import accumulations
from fusegen.validation.bounded import Bounded
from fusegen.validation.bounds import analyse_nodes
from tests import attentions, free_attentions

S, T, D = dims("S T D")
ROWS, KEYS = 37, 53


@pytest.mark.parametrize("spec", attentions.ALL, ids=lambda spec: spec.name)
def test_scales_of_rows_stand_behind_the_second_product(spec: Chain) -> None:
    found = recognized(spec.graph)
    names = value_names(found.lowered)
    assert found.product.inputs[0] is found.weights
    assert found.exps in found.lowered.ancestors(found.weights)
    assert (found.total is None) is (spec.name == "unnormalised")
    assert found.total not in set(found.lowered.ancestors(found.weights)), names[found.weights]
    assert found.plain_pivot is (spec.name not in ("sink", "base_2", "unnormalised"))


@pytest.mark.parametrize(("spec", "reason"), attentions.REFUSED, ids=lambda value: getattr(value, "name", ""))
def test_what_one_pass_over_keys_cannot_hold(spec: Chain, reason: str) -> None:
    found = candidates(spec.graph, A100)
    assert not [plan for plan in found.plans if plan.rule == "attention"]
    said = next(str(r) for r in (f"{r.reason}" for r in found.refusals if r.rule in ("attention", "one kernel")))
    assert re.search(reason, said), said


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_target_has_a_candidate_that_fits_it(target: Any) -> None:
    for spec in attentions.ALL:
        offered = candidates(spec.graph, target)
        plans = [p for p in offered.plans if p.rule == "attention"]
        if spec is attentions.wide and target.arch in ("gfx1100", "gfx1201"):
            reasons = {r.rule: r.reason for r in offered.refusals}
            assert reasons["attention"] == (
                "keys of 256 numbers and values of 256: no tile of them fits shared memory and registers of "
                f"{target.arch}"
            )
            continue
        assert plans, spec.name
        assert all(p.shared_bytes + p.static_shared_bytes <= target.shared_bytes for p in plans)
        assert len({p.configuration for p in plans}) == len(plans)


@pytest.mark.parametrize(
    ("spec", "way"),
    [(attentions.lse, "up"), (attentions.window, "up"), (attentions.document, "any"), (attentions.bias, "level"),
     (attentions.prefix, "up"), (attentions.chunks, "up")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_ends_move_with_the_rows(spec: Chain, way: str) -> None:
    found = recognized(spec.graph)
    assert direction(mask_of(found), found.lowered) == way


def test_a_causal_kernel_plans_for_half_of_the_scores() -> None:
    full, half = (
        candidates(spec.at(S=4096, T=4096, D=64).graph, A100).plans[0].cost
        for spec in (attentions.plain, attentions.sink)
    )
    assert 0.4 < half.traffic.product_flops / (full.traffic.product_flops * 2) < 0.6  # of four heads beside two


# ---------------------------------------------------------------- random masks, against numpy


Mask = Callable[[Any, Any, Any], Any]
NUMBER = st.integers(-60, 60)


def leaves() -> st.SearchStrategy[tuple[str, Mask]]:
    """Conditions on a row, a column and one number of a row, as text and as a function of values or arrays."""
    return st.one_of(
        st.builds(lambda n: (f"col <= row + {n}", lambda row, col, end: col <= row + n), NUMBER),
        st.builds(lambda n: (f"row - col < {n}", lambda row, col, end: row - col < n), NUMBER),
        st.builds(lambda n: (f"{n} < col", lambda row, col, end: col > n), NUMBER),
        st.builds(lambda n: (f"col < {n}", lambda row, col, end: col < n), NUMBER),
        st.just(("col >= end", lambda row, col, end: col >= end)),
        st.just(("col < end", lambda row, col, end: col < end)),
        st.builds(
            lambda n: (f"col // {n} == row // {n}", lambda row, col, end: col // n == row // n), st.integers(1, 40)
        ),
        st.builds(lambda n: (f"col // {n} <= row // {n}", lambda row, col, end: col // n <= row // n),
                  st.integers(1, 40)),
        st.just(("col % 3 == row % 3", lambda row, col, end: col % 3 == row % 3)),
    )  # fmt: skip


def joined(inner: st.SearchStrategy[tuple[str, Mask]]) -> st.SearchStrategy[tuple[str, Mask]]:
    def both(a: tuple[str, Mask], b: tuple[str, Mask]) -> tuple[str, Mask]:
        return f"({a[0]}) & ({b[0]})", lambda *at: a[1](*at) & b[1](*at)

    def either(a: tuple[str, Mask], b: tuple[str, Mask]) -> tuple[str, Mask]:
        return f"({a[0]}) | ({b[0]})", lambda *at: a[1](*at) | b[1](*at)

    def denied(a: tuple[str, Mask]) -> tuple[str, Mask]:
        return f"~({a[0]})", lambda *at: ~a[1](*at)

    return st.one_of(st.builds(both, inner, inner), st.builds(either, inner, inner), st.builds(denied, inner))


MASKS = st.recursive(leaves(), joined, max_leaves=5)


def masked(mask: Mask) -> Chain:
    def attention(q, k, v, end):  # type: ignore[no-untyped-def]
        s = q @ k.mT
        return F.softmax(F.where(mask(F.row_index(s), F.col_index(s), end), s, -inf)) @ v

    attention.__annotations__ = {
        "q": bf16[S, D], "k": bf16[T, D], "v": bf16[T, D], "end": i32[S, 1], "return": bf16[S, D],
    }  # fmt: skip
    return chain(S=ROWS, T=KEYS, D=16)(attention)


Values = Mapping[Node, Bounded]


def at_rows(end: End, values: Values) -> np.ndarray[Any, Any]:
    if isinstance(end, Sum):
        total = np.full(ROWS, end.plus)
        for node, times in end.terms:
            total = total + times * np.broadcast_to(values[node].value, (ROWS, 1))[:, 0].astype(np.int64)
        return total
    inner = [at_rows(e, values) for e in end.of]
    return np.asarray((np.minimum if isinstance(end, Least) else np.maximum).reduce(inner))


def held_in(interval: Interval, values: Values) -> np.ndarray[Any, Any]:
    """Which columns of each row are in the interval."""
    cols = np.arange(KEYS)
    inside = np.full((ROWS, KEYS), not interval.nowhere)
    if interval.first is not None:
        inside &= cols >= at_rows(interval.first, values)[:, None]
    if interval.end is not None:
        inside &= cols < at_rows(interval.end, values)[:, None]
    return inside


@settings(max_examples=150, deadline=None)
@given(MASKS, st.integers(0, 2**32 - 1))
def test_nothing_is_left_out_that_a_row_may_see(mask: tuple[str, Mask], seed: int) -> None:
    """Of masks made of any comparisons: what is not needed is -inf, and settled conditions hold where it is free."""
    text, holds = mask
    used = masked(lambda row, col, end: holds(row, col, end) & (row + end > -(2**20)))  # every operand is asked for
    plan = candidates(used.graph, A100).plans[0]
    found = recognized(plan.graph)
    known = mask_of(found)
    rng = np.random.default_rng(seed)
    operands = [rng.standard_normal((n, 16)).astype(bf16.numpy) for n in (ROWS, KEYS, KEYS)]
    end = rng.integers(-10, KEYS + 10, (ROWS, 1)).astype(np.int32)
    values = analyse_nodes(found.lowered, [*operands, end], accumulations(plan))
    seen = np.broadcast_to(values[found.logits].value, (ROWS, KEYS)) > -inf
    assert not (seen & ~held_in(known.needed, values)).any(), text
    free = held_in(known.free, values)
    for node in known.settled:
        assert np.broadcast_to(values[node].value, (ROWS, KEYS))[free].all(), text


def test_what_is_hidden_says_as_much_as_what_is_kept() -> None:
    """`col > row` hidden, as torch's masked_fill writes it, was no mask of a causal kernel, and ended in a KeyError."""

    @chain(S=512, T=512, D=64)
    def kept(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
        s = q @ k.mT
        return F.softmax(F.where((F.col_index(s) <= F.row_index(s)) & (F.row_index(s) < 400), s, -inf)) @ v

    @chain(S=512, T=512, D=64)
    def hid(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
        s = q @ k.mT
        return F.softmax(F.where((F.col_index(s) > F.row_index(s)) | ~(F.row_index(s) < 400), -inf, s)) @ v

    one, other = (mask_of(recognized(spec.graph)) for spec in (kept, hid))
    assert len(one.settled) == len(other.settled) == 1
    assert (one.needed.first is None, one.needed.end is None) == (other.needed.first is None, other.needed.end is None)
    assert one.free.end is not None
    assert other.free.end is not None
    plans = [candidates(spec.graph, A100).plans[0] for spec in (kept, hid)]
    assert plans[0].cost.time_us == pytest.approx(plans[1].cost.time_us, rel=0.05)


@pytest.mark.parametrize("target", ["cuda:h200", "hip:gfx942"])
def test_what_a_head_has_one_of(target: str) -> None:
    """What no axis of rows moves, and what is made of that alone: it is no array of a thread's rows."""

    def found(spec: Chain) -> set[str]:
        plan = attentions.attention_plans(spec, target)[0]
        text = render(plan).text
        for name in plan.head_values:
            assert f"{name}_here" not in text
        return set(plan.head_values)

    assert found(attentions.alibi) == {"slope"}
    assert found(attentions.dropped) == {"seed", "offset"}
    assert found(attentions.prefix) == {"n_value"}
    assert found(free_attentions.retained) == {"log_rate", "exp_", "neg"}
    assert found(attentions.document) == set()
    assert found(attentions.plain) == set()
