"""Rotations whose angles are several arrays side by side: sections of a head, which all heads repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.language.spec import Chain
from fusegen.pipeline import compile
from fusegen.planner.programs.search import cheapest
from fusegen.runtime import Program
from fusegen.targets import H200, MI300X, Target
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

B, S, H, D = dims("B S H D")


@chain(B=1, S=4096, H=32, D=128)
def of_one_length(
    x: bf16[B, S, H, D], cos_t: f32[S, 1, D // 4], cos_h: f32[S, 1, D // 4], sin_t: f32[S, 1, D // 4],
    sin_h: f32[S, 1, D // 4],
) -> bf16[B, S, H, D]:  # fmt: skip
    return F.rope(x, F.concat([cos_t, cos_h]), F.concat([sin_t, sin_h]))


@chain(B=2, S=8192, H=24)
def of_two_lengths(
    x: bf16[B, S, H, 128], cos_t: f32[S, 1, 16], cos_h: f32[S, 1, 24], cos_w: f32[S, 1, 24], sin_t: f32[S, 1, 16],
    sin_h: f32[S, 1, 24], sin_w: f32[S, 1, 24],
) -> bf16[B, S, H, 128]:  # fmt: skip
    return F.rope(x, F.concat([cos_t, cos_h, cos_w]), F.concat([sin_t, sin_h, sin_w]))


@chain(B=2, S=8192, H=24)
def by_neighbours(
    x: bf16[B, S, H, 128], cos_t: f32[S, 1, 22], cos_h: f32[S, 1, 21], cos_w: f32[S, 1, 21], sin_t: f32[S, 1, 22],
    sin_h: f32[S, 1, 21], sin_w: f32[S, 1, 21],
) -> bf16[B, S, H, 128]:  # fmt: skip
    return F.rope(x, F.concat([cos_t, cos_h, cos_w]), F.concat([sin_t, sin_h, sin_w]), interleaved=True)


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_sections_of_one_length_are_rows(target: Target) -> None:
    """Four parts of each head, of which a thread has vectors: nothing goes through memory."""
    program = cheapest(of_one_length.graph, target)
    assert not program.between
    (step,) = program.steps
    assert {t.shape[-1] for t in step.graph.outputs} == {t.shape[-1] for t in step.graph.inputs}
    assert len(step.graph.outputs) == 4


@pytest.mark.parametrize("spec", [of_two_lengths, by_neighbours], ids=lambda spec: spec.name)
def test_sections_of_several_lengths_are_one_array(spec: Chain) -> None:
    """Cosines and sines go to memory, which is little beside the heads that read them in vectors."""
    program = cheapest(spec.graph, H200)
    assert len(program.between) == 2
    assert program.time_us < 2 * program.steps[-1].plan.cost.floor_us


@needs_compiler
@pytest.mark.parametrize("spec", [of_one_length, of_two_lengths, by_neighbours], ids=lambda spec: spec.name)
def test_against_plain_numpy(spec: Chain) -> None:
    """The program of the chain's own size, called with less."""
    rng = np.random.default_rng(0)
    made = compile(spec, H200, on="emulator", validate=False)
    assert isinstance(made, Program)
    sizes = {**spec.graph.sizes, "B": 2, "S": 5, "H": 3}
    shapes: list[tuple[int, ...]] = [(2, 5, 3, 128)]
    shapes += [(5, 1, size if isinstance(size := t.shape[-1], int) else 32) for t in spec.graph.inputs[1:]]
    assert sizes.get("D", 128) == 128
    x, *angles = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    x = x.astype(bf16.numpy)
    half = len(angles) // 2
    cos, sin = np.concatenate(angles[:half], -1), np.concatenate(angles[half:], -1)
    wide: Any = x.astype(np.float64)
    apart = spec is by_neighbours
    low, high = (wide[..., ::2], wide[..., 1::2]) if apart else np.split(wide, 2, -1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    wanted = np.stack(turned, -1).reshape(wide.shape) if apart else np.concatenate(turned, -1)
    np.testing.assert_allclose(made(x, *angles).astype(np.float64), wanted, rtol=1e-2, atol=1e-2)
