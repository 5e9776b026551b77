"""Reductions over several of the last axes as rows: by plain numpy, by kinds of plans, and arrays that are no such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f8e4m3, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import ArgumentError
from fusegen.pipeline import compile, plan
from fusegen.planner.model import RowPlan
from fusegen.planner.programs.axes_as_rows import ways_over_axes
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime import Program
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import validate
from tests.planner.test_groups import program_of
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

B, C, H, W = dims("B C H W")
Array = np.ndarray[Any, np.dtype[Any]]
TARGETS = (H200, MI300X)
SIZES = {"B": 3, "C": 4, "H": 5}


@chain(**SIZES, W=8)
def normed(x: bf16[B, C, H, W], gamma: bf16[C, H, W], beta: bf16[C, H, W]) -> bf16[B, C, H, W]:
    return F.layernorm(x, gamma, beta, over=(C, H, W))


@chain(**SIZES, W=7)
def by_channel(x: f16[B, C, H, W], gamma: f16[C, 1, 1], beta: f32[C, H, 1]) -> f16[B, C, H, W]:
    """Scales of channels, shifts of lines, and rows that are no whole number of 16 bytes."""
    return F.layernorm(x, gamma, beta, over=(C, H, W))


@chain(**SIZES, W=8)
def by_sample(x: f32[B, C, H, W], scale: bf16[B, C, 1, 1], shift: bf16[B, C, 1, 1]) -> bf16[B, C, H, W]:
    """What is computed of each sample's channels."""
    return F.layernorm(x, over=(C, H, W)) * (1.0 + scale) + F.silu(shift)


@chain(**SIZES, W=8)
def by_instance(x: bf16[B, C, H, W], gamma: f32[C, 1, 1]) -> bf16[B, C, H, W]:
    centered = x - F.mean(x, over=(H, W))
    return centered * F.rsqrt(F.mean(F.square(centered), over=(H, W)) + 1e-5) * gamma


@chain(**SIZES, W=7)
def whole_numbers(x: i32[B, C, H, W]) -> tuple[i32[B, C, 1, 1], i32[B, C]]:
    return F.sum(x, over=(H, W)), F.max(x, over=(H, W), keepdims=False)


@chain(**SIZES, W=8)
def masked(x: bf16[B, C, H, W], keep: b8[B, C, H, W]) -> bf16[B, C, H, W]:
    return F.softmax(F.where(keep, x, -float("inf")), axis=(-2, -1))


@chain(**SIZES, W=8)
def quantized(x: bf16[B, C, H, W]) -> tuple[f8e4m3[B, C, H, W], f32[B, 1, 1, 1]]:
    scale = F.amax(x, over=(C, H, W)) / 448.0
    return F.cast(x / scale, f8e4m3), scale


@chain(**SIZES, W=7)
def several(x: bf16[B, C, H, W], y: f32[B, C, H, W]) -> tuple[f32[B, 1, 1, 1], b8[B, 1, 1, 1], f32[B], f32[B, 1, 1, 1]]:
    """Of one row each: every kind of reduction."""
    over = (C, H, W)
    largest = F.logsumexp(x * y, over=over)[:, 0, 0, 0]
    return F.norm(x, over=over), F.any(y > x, over=over), largest, F.prod(y, over=over)


@chain(**SIZES, W=1)
def of_one_column(x: f32[B, C, 1, H, W]) -> f32[B, 1, 1, 1, 1]:
    """An axis of one element between those that are reduced."""
    return F.sum(x, axis=(-4, -2, -1))


ROWS = (normed, by_channel, by_sample, by_instance, whole_numbers, masked, quantized, several, of_one_column)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_axes_that_lie_together_are_one_kernel_s_rows(spec: Any, target: Target) -> None:
    made = compile(spec, target, on="emulator", validate=False)
    assert isinstance(made, Program)
    (step,) = made.plan.steps
    assert isinstance(step.plan, RowPlan)
    assert not any(node.over for node in step.graph.reductions)
    validate(made).raise_for_error()


@chain(B=6, C=4, H=5, W=8)
def batch(x: f32[B, C, H, W], gamma: f32[C, 1, 1]) -> tuple[f32[B, C, H, W], f32[1, C, 1, 1]]:
    """Statistics over samples as well, which are no part of a row."""
    mean = F.mean(x, axis=(0, 2, 3))
    return (x - mean) * F.rsqrt(F.var(x, axis=(0, 2, 3)) + 1e-5) * gamma, mean


@chain(B=6, C=4, H=5, W=8)
def every(x: f32[B, C, H, W]) -> f32[1, 1, 1, 1]:
    """The first axis stays the number of rows, which a call chooses."""
    return F.mean(F.square(x), axis=None)


@chain(B=6, C=4, H=5, W=8)
def by_place(x: f32[B, C, H, W], bias: f32[H, W]) -> f32[B, C, H, W]:
    """A value for each place of a channel, which no neighbours in a row share."""
    return F.softmax(x + bias, over=(C, H, W))


@chain(B=6, C=4, H=5, W=8)
def twice(x: f32[B, C, H, W]) -> f32[B, C, H, W]:
    """Rows of two lengths."""
    return F.softmax(F.softmax(x, over=(H, W)), over=(C, H, W))


@chain(B=2, C=3, H=4, W=1024)
def few(x: f32[B, C, H, W]) -> f32[B, 1, 1, 1]:
    return F.sum(x, over=(C, H, W))


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", [batch, every, by_place, twice, few], ids=lambda spec: spec.name)
def test_what_is_no_row_is_cut(spec: Any, target: Target) -> None:
    validate(compile(spec, target, on="emulator", validate=False)).raise_for_error()


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_rows_are_as_many_as_a_gpu_has_work_for(target: Target) -> None:
    """A block of MI300X alone would read 2 million columns, and 300 others none."""
    found = plan(normed.at(B=4, C=512, H=64, W=64), target)
    assert isinstance(found, ProgramPlan)
    assert len(found.steps) == (1 if target is H200 else 5)
    first = found.steps[0].graph
    assert first.cols >= 1024
    apart = ways_over_axes(found.graph)[-1]
    assert apart.axes_apart
    other = plan(apart, target)
    assert isinstance(other, ProgramPlan)
    assert other.time_us > found.time_us


def test_sums_over_all_axes_are_of_rows_first() -> None:
    """As of the sums of rows of one axis alone, a block would add up 2 million."""
    found = plan(every.at(B=32, C=512, H=64, W=64), H200)
    assert isinstance(found, ProgramPlan)
    assert [step.graph.cols for step in found.steps] == [512 * 64 * 64, 1]


@needs_compiler
@pytest.mark.parametrize("width", [8, 7, 1])
def test_against_plain_numpy(width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.normal(size=(3, 4, 5, width)).astype(np.float32)
    gamma, beta = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 1, 1), (4, 5, 1)))
    made = compile(by_channel.with_dtype(f32).at(W=width), H200, on="emulator", validate=False)
    wide = x.astype(np.float64)
    centered = wide - wide.mean((1, 2, 3), keepdims=True)
    wanted = centered / np.sqrt((centered**2).mean((1, 2, 3), keepdims=True) + 1e-5) * gamma + beta
    np.testing.assert_allclose(made(x, gamma, beta), wanted, rtol=2e-4, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (40, lambda p: p.rows_per_block > 1),
        (400, lambda p: p.staging == "shared"),
        (400, lambda p: p.staging == "stream"),
        (3000, lambda p: p.cluster > 1 and p.staging == "shared"),
        (500, lambda p: p.staging == "registers" and p.keeps == "inputs"),
        (7, lambda p: p.tile.vector == 1),
    ],
)
def test_every_kind_of_plan(size: int, wanted: Any) -> None:
    validate(program_of(by_channel.at(W=size), H200, wanted), quick=True).raise_for_error()


# ---------------------------------------------------------------- arrays that are no such rows


@needs_compiler
def test_arrays_whose_axes_lie_apart_are_taken_axis_by_axis() -> None:
    made = compile(normed, H200, on="emulator", validate=False)
    assert isinstance(made, Program)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 4, 5, 8)).astype(bf16.numpy)
    gamma, beta = rng.normal(size=(2, 4, 5, 8)).astype(bf16.numpy)
    wanted = made(x, gamma, beta).astype(np.float32)
    assert made.by_axes is None
    wide = np.zeros((3, 8, 5, 8), bf16.numpy)
    wide[:, ::2] = x
    np.testing.assert_allclose(made(wide[:, ::2], gamma, beta).astype(np.float32), wanted, rtol=1e-2, atol=1e-2)
    assert made.by_axes is not None
    assert len(made.by_axes.plan.steps) > 1
    made(x, gamma, beta, out=wide[:, ::2])
    np.testing.assert_allclose(wide[:, ::2].astype(np.float32), wanted, rtol=1e-2, atol=1e-2)
    assert not wide[:, 1::2].any()


@needs_compiler
def test_other_sizes_of_these_axes_are_taken_axis_by_axis() -> None:
    made = compile(whole_numbers, H200, on="emulator", validate=False)
    assert isinstance(made, Program)
    x = np.random.default_rng(3).integers(-9, 9, size=(2, 3, 9, 7)).astype(np.int32)
    total, largest = made(x)
    np.testing.assert_array_equal(total, x.sum((2, 3), keepdims=True))
    np.testing.assert_array_equal(largest, x.max((2, 3)))
    with pytest.raises(ArgumentError, match="compiled for W=7"):
        made(np.ones((2, 3, 9, 8), np.int32))
    made.one_length = True
    with pytest.raises(ArgumentError, match="compiled for H=5"):
        made(np.ones((2, 3, 11, 7), np.int32))


@needs_compiler
def test_wrong_arrays_are_refused_before_anything_is_compiled() -> None:
    made = compile(whole_numbers, H200, on="emulator", validate=False)
    assert isinstance(made, Program)
    with pytest.raises(ArgumentError, match="i32"):
        made(np.ones((2, 3, 9, 7), np.float32))
    assert made.by_axes is None


def test_sizes_of_these_axes_are_constants() -> None:
    found = plan(whole_numbers, H200)
    assert isinstance(found, ProgramPlan)
    assert found.fixed == {"H", "W"}
    apart = plan(ways_over_axes(whole_numbers.graph)[-1], H200)
    assert isinstance(apart, ProgramPlan)
    assert apart.fixed == {"W"}


def test_operands_keep_their_names() -> None:
    step = lowered(normed.graph)
    assert [t.name for t in step.graph.inputs] == ["x", "gamma", "beta"]
