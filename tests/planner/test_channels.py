"""Values by channels in rows that are normalized together: against plain numpy, by every kind of plan, and broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.pipeline import compile
from fusegen.planner.model import RowPlan
from fusegen.planner.programs.lowering import lowered
from fusegen.runtime import Program
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import validate
from tests.planner.test_groups import program_of
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

B, C, S, H, W = dims("B C S H W")
Array = np.ndarray[Any, np.dtype[Any]]
TARGETS = (H200, MI300X)


@chain(B=3, C=3, S=40)
def norm(x: bf16[B, 4 * C, S], gamma: bf16[4 * C], beta: bf16[4 * C]) -> bf16[B, 4 * C, S]:
    return F.silu(F.groupnorm(x, 4, gamma, beta))


@chain(B=2, C=3, H=4, W=6)
def images(x: f32[B, 2 * C, H, W], gamma: f32[2 * C], residual: f32[B, 2 * C, H, W]) -> f32[B, 2 * C, H, W]:
    """Two axes behind the channels, and another operand of the whole shape."""
    return F.groupnorm(x, 2, gamma) + residual


@chain(B=2, C=3, S=40)
def of_one_group(x: bf16[B, C, S], gamma: f32[C], beta: f32[C]) -> bf16[B, C, S]:
    """Scales that all rows share; what is made of them is made of each."""
    return F.groupnorm(x, 1, 1.0 + gamma, F.exp(beta))


@chain(B=2, C=3, S=40)
def by_sample(x: bf16[B, 2 * C, S], scale: bf16[B, 2 * C], shift: bf16[B, 2 * C]) -> bf16[B, 2 * C, S]:
    """Scales and shifts of each sample's channels, as of a diffusion model's time."""
    rows = F.rearrange(x, "b (g c) s -> b g (c s)", g=2)
    mean = F.mean(rows)
    rstd = F.rsqrt(F.mean(F.square(rows - mean)) + 1e-5)
    channels = F.rearrange(x, "b (g c) s -> b g c s", g=2)
    normed = (channels - mean[..., None]) * rstd[..., None]
    scales, shifts = (F.rearrange(v, "b (g c) -> b g c", g=2)[..., None] for v in (scale, shift))
    return F.rearrange(normed * (1.0 + scales) + shifts, "b g c s -> b (g c) s")


@chain(B=2, C=3, S=40)
def by_place(x: bf16[B, 2 * C, S], bias: f32[S], gamma: bf16[2 * C]) -> bf16[B, 2 * C, S]:
    """A value for each place within a channel, which no group of neighbours shares."""
    return F.groupnorm(x, 2, gamma) + bias


SPECS = (norm, images, of_one_group, by_sample)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_and_their_channels_are_one_kernel(spec: Any, target: Target) -> None:
    made = compile(spec, target, on="emulator", validate=False)
    assert isinstance(made, Program)
    (step,) = made.plan.steps
    assert isinstance(step.plan, RowPlan)
    assert step.graph.repeated
    validate(made).raise_for_error()


@needs_compiler
def test_a_value_for_each_place_takes_two_kernels() -> None:
    made = compile(by_place, H200, on="emulator", validate=False)
    assert isinstance(made, Program)
    assert len(made.plan.steps) == 2
    validate(made, quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize("size", [40, 35, 7, 1])
def test_against_plain_numpy(size: int) -> None:
    """Channels of whole vectors, those that a vector lies across, and those of one place."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=(2, 8, size)).astype(np.float32)
    gamma, beta = rng.normal(size=(2, 8)).astype(np.float32)
    kernel = compile(norm.with_dtype(f32).at(B=2, C=2, S=size), H200, on="emulator", validate=False)
    groups = x.astype(np.float64).reshape(2, 4, 2 * size)
    centered = groups - groups.mean(-1, keepdims=True)
    normed = (centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    normed = normed * gamma[:, None] + beta[:, None]
    np.testing.assert_allclose(kernel(x, gamma, beta), normed / (1 + np.exp(-normed)), rtol=2e-4, atol=2e-5)
    # scales that are apart, and the rows of another array
    apart = np.stack([gamma, np.full_like(gamma, np.nan)], axis=-1)[:, 0]
    np.testing.assert_array_equal(kernel(x, apart, beta), kernel(x, gamma, beta))


@needs_compiler
@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (400, lambda p: p.staging == "shared"),
        (400, lambda p: p.staging == "stream"),
        (40, lambda p: p.rows_per_block > 1),
        (16000, lambda p: p.cluster > 1 and p.staging == "shared"),
        (24000, lambda p: p.tile.kept < p.tile.per_thread and p.staging == "shared"),
        (500, lambda p: p.staging == "registers" and p.keeps == "inputs"),
        (7, lambda p: p.tile.vector == 1),
    ],
)
def test_every_kind_of_plan(size: int, wanted: Callable[[RowPlan], bool]) -> None:
    spec = norm.at(B=1, C=3, S=size)
    validate(program_of(spec, H200, wanted), quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize(
    ("size", "old", "new"),
    [
        (40, r"col / (gamma_part_cols)\)", r"(col / \1 ^ 1))"),  # the scale of another channel
        (40, r"col / (beta_part_cols)\)", r"(col + 8) / \1)"),  # the next one's, a vector early
        (40, r"beta_part_row = beta_part_ptr \+ axis1_at", "beta_part_row = beta_part_ptr + 0 * axis1_at"),
        (36, r"\(col \+ j\) / Cols", "col / Cols"),  # of the vector's first element
        (36, r"(gamma_part_cols = )36", r"\g<1>40"),
    ],
)
def test_a_broken_kernel_is_found(size: int, old: str, new: str) -> None:
    def wanted(plan: RowPlan) -> bool:
        return plan.staging == "registers" and plan.tile.vector == 8

    spec = norm.at(B=1, C=4, S=size)
    assert validate(program_of(spec, H200, wanted), quick=True).ok
    assert not validate(program_of(spec, H200, wanted, (old, new)), quick=True).ok


def test_sizes_of_channels_are_constants() -> None:
    """Rows of one length may have channels of several."""
    step = lowered(norm.graph)
    assert {str(size) for size in step.graph.fixed} >= {"C", "C_times_S"}
