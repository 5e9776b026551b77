"""Short last axes whose elements lie far apart: parts that are written by turns, element by element where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f8e4m3, f32, i32
from fusegen import ops as F
from fusegen.pipeline import compile
from fusegen.planner.programs.by_turns import by_turns
from fusegen.runtime import Program
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import validate
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

B, C, H, W = dims("B C H W")
TARGETS = (H200, MI300X)
SIZES = {"B": 2, "C": 3, "H": 5}
SHUFFLE = "b (c r s) h w -> b c (h r) (w s)"


@chain(**SIZES, W=16)
def shuffled(x: bf16[B, 4 * C, H, W]) -> bf16[B, C, 2 * H, 2 * W]:
    return F.rearrange(x, SHUFFLE, r=2, s=2)


@chain(**SIZES, W=7)
def by_threes(x: i32[B, 9 * C, H, W]) -> i32[B, C, 3 * H, 3 * W]:
    """Rows that are no whole number of vectors, three by turns."""
    return F.rearrange(x, SHUFFLE, r=3, s=3)


@chain(**SIZES, W=12)
def of_4_bytes(x: f8e4m3[B, 8 * C, H, W]) -> f8e4m3[B, C, 2 * H, 4 * W]:
    return F.rearrange(x, SHUFFLE, r=2, s=4)


@chain(**SIZES, W=16)
def among_others(
    x: bf16[B, 4 * C, H, W], bias: bf16[4 * C, 1, 1], y: f32[B, C, 2 * H, 2 * W]
) -> tuple[bf16[B, C, 2 * H, 2 * W], f32[B, C, 2 * H, 2 * W]]:
    """What is computed before and behind it, an operand of each channel, and two results."""
    z = F.silu(F.rearrange(x + bias, SHUFFLE, r=2, s=2)) * y
    return z, z + 1.0


ROWS = (shuffled, by_threes, of_4_bytes, among_others)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_parts_are_written_by_turns(spec: Any, target: Target) -> None:
    made = compile(spec, target, on="emulator", validate=False)
    assert isinstance(made, Program)
    (step,) = made.plan.steps
    assert str(step.graph.shape[-1]) == "W"
    validate(made).raise_for_error()


@needs_compiler
@pytest.mark.parametrize("width", [16, 9, 1])
def test_against_plain_numpy(width: int) -> None:
    x = np.arange(2 * 12 * 5 * width, dtype=np.float32).reshape(2, 12, 5, width)
    made = compile(shuffled.with_dtype(f32).at(W=width), H200, on="emulator", validate=False)
    wanted = x.reshape(2, 3, 2, 2, 5, width).transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, 10, 2 * width)
    np.testing.assert_array_equal(made(x), wanted)


@chain(**SIZES, W=16)
def reduced(x: f32[B, 4 * C, H, W]) -> f32[B, C, 2 * H, 1]:
    return F.sum(F.rearrange(x, SHUFFLE, r=2, s=2))


@chain(**SIZES, W=16)
def of_many(x: f32[B, 16 * C, H, W]) -> f32[B, C, H, 16 * W]:
    return F.rearrange(x, SHUFFLE, r=1, s=16)


@chain(**SIZES, W=16)
def in_order(x: f32[B, C, H, 2 * W]) -> f32[B, C, H * 2 * W]:
    """Neighbours stay neighbours."""
    return F.rearrange(x, "b c h (w s) -> b c (h w s)", s=2)


@pytest.mark.parametrize("spec", [reduced, of_many, in_order], ids=lambda spec: spec.name)
def test_others_stay_as_they_are(spec: Any) -> None:
    assert by_turns(spec.graph) is spec.graph
