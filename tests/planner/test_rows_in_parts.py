"""Rows that are reduced whole and taken apart behind that: one kernel of their parts, judged and by plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.pipeline import compile
from fusegen.planner.programs.rows_in_parts import rows_in_parts
from fusegen.runtime import Program
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import validate
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

B, S, H, D = dims("B S H D")
TARGETS = (H200, MI300X)
SIZES = {"B": 2, "S": 5, "H": 3}


@chain(**SIZES, D=64)
def turned(x: bf16[B, S, H, D], gain: bf16[D], cos: f32[S, 1, D // 2], sin: f32[S, 1, D // 2]) -> bf16[B, S, H, D]:
    return F.rope(F.rmsnorm(x) * gain, cos, sin)


@chain(**SIZES, D=22)
def by_neighbours(x: f16[B, S, H, D], gain: f32[D], cos: f32[S, 1, D // 2], sin: f32[S, 1, D // 2]) -> f16[B, S, H, D]:
    """Pairs are neighbours, and halves are no whole vectors."""
    return F.rope(F.layernorm(x, gain), cos, sin, interleaved=True)


@chain(B=2, S=5, D=48)
def gated(x: f32[B, S, D], keep: i32[D]) -> tuple[bf16[B, S, D // 3], f32[B, S, 1]]:
    """Three parts of a softmax, one value a row beside them, and an operand of one value a column."""
    weights = F.softmax(F.where(keep > 0, x, -float("inf")))
    first, second, third = F.split(weights, 3)
    return first * second + third, F.max(x)


@chain(B=2, S=5, D=48)
def smallest(x: i32[B, S, D]) -> i32[B, S, D // 2]:
    """Whole numbers, of every kind of reduction that has parts."""
    low, high = F.split(x * F.min(x) + F.prod(x) - F.sum(x) * F.max(x), 2)
    return low * high


ROWS = (turned, by_neighbours, gated, smallest)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_parts_are_reduced_together(spec: Any, target: Target) -> None:
    made = compile(spec, target, on="emulator", validate=False)
    assert isinstance(made, Program)
    assert len(made.plan.steps) == 1
    validate(made).raise_for_error()


@needs_compiler
@pytest.mark.parametrize("size", [64, 22, 2])
def test_against_plain_numpy(size: int) -> None:
    rng = np.random.default_rng(size)
    x, gain = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 5, 3, size), (size,)))
    angles = rng.uniform(0, 6, size=(5, 1, size // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    made = compile(turned.with_dtype(f32).at(D=size), H200, on="emulator", validate=False)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain
    low, high = np.split(normed, 2, -1)
    wanted = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    np.testing.assert_allclose(made(x, gain, cos, sin), wanted, rtol=2e-4, atol=2e-5)


@chain(B=2, S=5, D=48)
def uneven(x: f32[B, S, D]) -> f32[B, S, 16]:
    """Parts of two lengths, which no one row has."""
    weights = F.softmax(x)
    return weights[..., :16] * F.sum(weights[..., 16:])


@chain(B=2, S=5, D=48)
def some(x: f32[B, S, D]) -> f32[B, S, 16]:
    """A part alone: what is left is summed, and no part of a result."""
    return F.softmax(x)[..., :16]


@chain(B=2, S=5, D=48)
def before(x: f32[B, S, D]) -> f32[B, S, 1]:
    """Taken apart before it is reduced, in rows of one length as they are."""
    low, high = F.split(x, 2)
    return F.sum(low * high)


@pytest.mark.parametrize("spec", [uneven, some, before], ids=lambda spec: spec.name)
def test_other_rows_stay_whole(spec: Any) -> None:
    assert rows_in_parts(spec.graph) is spec.graph
