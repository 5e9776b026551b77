"""Attention by wgmma whose rows keep the pivot of an earlier tile where no logit is far above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner.attention.wgmma import WgmmaAttentionPlan
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200
from fusegen.validation import validate
from tests.emitting.test_attention import needs_emulator
from tests.emitting.test_attention_wgmma import causal, kernel, plans
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

B, H, S, T, D = dims("B H S T D")


@chain(B=1, H=2, S=140, T=500, D=64)
def full(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT * 0.125) @ v


@chain(B=1, H=2, S=140, T=500, D=64)
def halves(q: f16[B, H, S, D], k: f16[B, H, T, D], v: f16[B, H, T, D]) -> f16[B, H, S, D]:
    return F.softmax(q @ k.mT * 0.125) @ v


@chain(B=1, H=2, S=140, T=500, D=64)
def with_sums(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]
) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:
    scores = q @ k.mT * 0.125
    return F.softmax(scores) @ v, F.logsumexp(scores)


@chain(B=1, H=2, S=140, T=500, D=64)
def with_tops(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]
) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:
    scores = q @ k.mT * 0.125
    return F.softmax(scores) @ v, F.max(scores)


@chain(B=1, H=2, S=140, T=500, D=64)
def with_totals(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]
) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:
    scores = q @ k.mT * 0.125
    e = F.exp(scores - F.max(scores))
    total = F.sum(e)
    return e @ v / total, total


@chain(B=1, H=2, S=140, T=500, D=64)
def undivided(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> f32[B, H, S, D]:
    scores = q @ k.mT * 0.125
    return F.exp(scores - F.max(scores)) @ v


@chain(B=1, H=2, S=140, T=500, D=64)
def with_one_more(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    """As softmax with a sink that is as large as the largest logit."""
    scores = q @ k.mT * 0.125
    e = F.exp(scores - F.max(scores))
    return e @ v / (F.sum(e) + 1.0)


def operands(spec: Chain, logits: np.ndarray[Any, np.dtype[Any]]) -> list[Any]:
    """Queries and keys whose logits are these, one value a key, in all rows; values of 1 in each column of its own."""
    rng = np.random.default_rng(3)
    kind = spec.graph.inputs[0].dtype.numpy
    q, k = np.zeros((1, 2, 140, 64), kind), np.zeros((1, 2, 500, 64), kind)
    q[..., 0] = 8
    k[..., 0] = logits
    return [q, k, rng.standard_normal((1, 2, 500, 64)).astype(kind)]


def law(given: list[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    q, k, v = (np.asarray(a, np.float64) for a in given)
    logits = q @ k.swapaxes(-1, -2) * 0.125
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def run(plan: WgmmaAttentionPlan, *edits: tuple[str, str]) -> Any:
    made = render(plan)
    text = made.text
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    other = replace(made, text=text)
    return Kernel(other, None, finding.find(H200, "emulator"), lambda layout: (other, None))


def first(found: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """The bits of the first output."""
    return np.asarray(found[0] if isinstance(found, tuple) else found).view(np.uint16)


@needs_emulator
@pytest.mark.parametrize("spec", [full, halves], ids=lambda spec: spec.name)
@pytest.mark.parametrize("step", [0.0, 0.5, 5.0, 5.5, 5.625, 20.0, -5.0, -30.0])
def test_logits_that_grow_or_shrink_from_tile_to_tile_are_right(spec: Chain, step: float) -> None:
    """By less than a pivot may be passed, by more, and just by as much."""
    for plan in plans(spec)[:2]:
        given = operands(spec, np.arange(500) // plan.tile.keys * step)
        found = np.asarray(run(plan)(*given), np.float64)
        assert np.linalg.norm(found - law(given)) <= 4e-3 * np.linalg.norm(law(given))


@needs_emulator
def test_a_rows_bits_hang_on_no_other_row() -> None:
    """A row keeps its pivot or not by its own logits, whether or not others of its warp raise theirs."""
    rng = np.random.default_rng(5)
    for spec in (full, causal):
        plan = plans(spec)[0]
        sizes = spec.graph.sizes
        shapes = [[sizes[str(size)] for size in tensor.shape] for tensor in spec.graph.inputs]
        q, k, v = (rng.standard_normal(shape).astype(bf16.numpy) for shape in shapes)
        alone = first(run(plan)(q, k, v))
        louder = q.copy()
        louder[..., 1::2, :] *= np.asarray(30, bf16.numpy)
        beside = first(run(plan)(louder, k, v))
        assert (alone[..., ::2, :] == beside[..., ::2, :]).all()
        assert (alone[..., 1::2, :] != beside[..., 1::2, :]).any()


@needs_emulator
def test_a_warp_that_asks_nobody_has_the_same_bits() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(bf16.numpy) for n in (140, 500, 500))
    plan = plans(full)[0]
    usual = np.asarray(run(plan)(q, k, v)).view(np.uint16)
    asked = np.asarray(run(plan, ("if (raised) {", "if (true) {"))(q, k, v)).view(np.uint16)
    assert (usual == asked).all()


@needs_emulator
@pytest.mark.parametrize(
    "spec", [full, halves, with_sums, with_totals, undivided, with_one_more], ids=lambda spec: spec.name
)
def test_late_pivots_are_validated(spec: Chain) -> None:
    report = validate(kernel(spec))
    assert report.ok, str(report)[:2000]


def test_pivots_that_results_hang_on_are_each_tiles() -> None:
    """Where the logarithm of a sum is added to them, or products are divided by a sum, any pivot will do."""
    assert all(plan.late == 8 for spec in (full, with_sums, causal) for plan in plans(spec))
    for spec in (with_tops, with_totals, undivided, with_one_more):
        assert not any(plan.late for plan in plans(spec)), spec.name


def test_logits_that_grow_with_their_columns_raise_pivots_in_each_tile() -> None:
    assert not any(plan.late for plan in plans(SHIPPED["alibi_attention"]))
