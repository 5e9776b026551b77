"""The order in which rows follow one another: what several rows share stays in the L2 cache."""

from __future__ import annotations

import pytest

import fusegen
from fusegen import b8, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.planner import plan
from fusegen.planner.rows.row_order import missed
from fusegen.targets import H200, MI300X, Target
from tests.tools import needs_both

pytestmark = pytest.mark.usefixtures("emulated_only")

B, H, S, N = dims("B H S N")


@chain(B=8, H=16, S=1024, N=1024)
def biased(scores: bf16[B, H, S, N], bias: bf16[H, S, N]) -> bf16[B, H, S, N]:
    """A bias that all sequences share."""
    return F.softmax(scores + bias)


@chain(B=8, H=16, S=1024, N=1024)
def biased_causal(scores: bf16[B, H, S, N], bias: bf16[H, S, N]) -> bf16[B, H, S, N]:
    """The same, with the row's index in it."""
    return F.softmax(F.causal(scores + bias))


@chain(B=4, H=16, S=4096, N=4096)
def masked(scores: bf16[B, H, S, N], mask: b8[B, 1, S, N]) -> bf16[B, H, S, N]:
    """A mask that all heads share."""
    return F.softmax(F.where(mask, scores, -float("inf")))


@chain(B=64, H=64, S=4096, N=32)
def short(x: f32[B, H, S, N], y: bf16[H, S, N]) -> f32[B, H, S, N]:
    """Rows of 64 bytes."""
    return x + y


def axes_of(found: fusegen.language.spec.Chain, target: Target = H200) -> list[tuple[int, ...]]:
    return [dim.axes for dim in plan(found.graph, target).row_dims]


def test_what_would_leave_the_cache_comes_last() -> None:
    assert axes_of(biased) == [(1, 2), (0,)]
    assert axes_of(biased_causal) == [(1,), (2,), (0,)]
    assert axes_of(masked) == [(0,), (2,), (1,)]
    assert axes_of(short) == [(0,), (1, 2)], "rows that are no whole lines stay neighbours"


def test_what_the_cache_holds_stays_in_the_shapes_order() -> None:
    assert axes_of(biased.at(H=1)) == [(0,), (1, 2)]
    assert axes_of(masked.at(S=1024, N=1024)) == [(0,), (1,), (2,)]
    assert axes_of(biased, MI300X) == axes_of(biased), "its Infinity Cache is not counted"


def test_explain_says_what_it_saves() -> None:
    made = plan(biased.graph, H200)
    first = made.decisions[0]
    assert first.subject == "bias"
    assert first.bytes_saved == 7 * 2 * 16 * 1024 * 1024
    assert "along B, follow one another" in first.verdict
    assert missed(biased.graph, H200, made.row_dims) == 0
    assert not any("follow one another" in d.verdict for d in plan(biased.at(H=1).graph, H200).decisions)


@needs_both
@pytest.mark.parametrize("found", [biased, biased_causal, masked], ids=lambda c: c.name)
def test_rows_in_another_order_compute_the_same(found: fusegen.language.spec.Chain) -> None:
    kernel = fusegen.compile(found, H200, on="emulator", validate=False, tuned=False)
    fusegen.validate(kernel, cases=["rows", "layout", "normal", "apart"]).raise_for_error()
