"""Rows whose columns are reduced besides, by two kernels: each way to take rows is right, and mistakes are caught."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Program, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.language.graph import Graph
from fusegen.planner import candidates
from fusegen.planner.model import Source
from fusegen.planner.programs.column_parts import parted
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.search import cheapest
from fusegen.planner.programs.steps import step_of, whole
from fusegen.runtime import Kernel
from fusegen.runtime.finding import find
from fusegen.targets import target
from fusegen.validation import validate
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

M, N, B = dims("M N B")


@chain(M=700, N=512)
def norm_backward(dy: bf16[M, N], x: bf16[M, N], gamma: bf16[N], rstd: f32[M, 1]) -> tuple[bf16[M, N], f32[1, N]]:
    normed = x * rstd
    g = dy * gamma
    dx = rstd * (g - normed * F.mean(g * normed))
    dgamma = F.sum(dy * normed, over=M)
    return dx, dgamma


@chain(M=700, N=512)
def scaled_sum(x: f32[M, N], scale: f32[N]) -> bf16[1, N]:
    total = F.sum(x, over=M)
    return F.cast(total * scale, bf16)


@chain(B=5, M=140, N=96)
def extremes(x: f32[B, M, N]) -> tuple[f32[1, 1, N], f32[1, 1, N]]:
    return F.max(x, over=(B, M)), F.min(F.abs(x), over=(B, M))


@chain(M=700, N=99)
def softmax_and_sum(x: f32[M, N]) -> tuple[f32[M, N], f32[1, N]]:
    p = F.softmax(x)
    return p, F.sum(p, over=M)


@chain(M=700, N=1000)
def rows_alone(x: bf16[M, N], shift: f32[M, 1]) -> tuple[f32[M, 1], f32[1, N]]:
    total = F.sum(x)
    return total, F.sum(x - shift, over=M)


CHAINS = (norm_backward, scaled_sum, extremes, softmax_and_sum, rows_alone)


def two_kernels(graph: Graph, at: str, ring: bool, rows: int) -> ProgramPlan:
    """The program whose first kernel takes rows ahead or as they come, one row a block or several."""
    chosen = target(at)
    for both in parted(whole(graph), chosen):
        for plan in candidates(both.first.graph, chosen).plans:
            how: Any = plan
            if (how.in_turn.ring > 0) is ring and min(2, how.tile.rows_per_block) == rows:
                last = candidates(both.second.graph, chosen).need()[0]
                steps = (step_of(both.first, plan), step_of(both.second, last))
                return ProgramPlan(graph, chosen, steps, both.between)
    raise AssertionError(f"{graph.name} has no such plan on {at}")


def built(program: ProgramPlan, edit: tuple[str, str] | None = None) -> Program:
    """Compiled for the emulator; `edit`: the first kernel's text with a pattern replaced, as a mistake would."""
    device = find(program.target, "emulator")
    sources = [render(step.plan) for step in program.steps]
    if edit is not None:
        text, count = re.subn(edit[0], edit[1], sources[0].text)
        assert count, edit
        sources[0] = replace(sources[0], text=text)
    return Program(program, [kernel_of(source, device) for source in sources], device)


def kernel_of(source: Source, device: Any) -> Kernel:
    def variant(layout: Any) -> Any:
        raise AssertionError(f"{source.plan.name}: {layout}")

    return Kernel(source, None, device, variant)


def there_is(spec: Chain, ring: bool, rows: int, at: str) -> bool:
    """AMD's GPUs copy nothing to shared memory past registers, nor do single elements of a row of 99 go there; and rows
    of 96 have too few vectors for a block."""
    rings = at.startswith("cuda") and spec is not softmax_and_sum
    return (rings or not ring) and (rows > 1 or spec is not extremes)


WAYS = [
    pytest.param(spec, ring, rows, at, id=f"{spec.name}-{'ahead' if ring else 'as they come'}-{rows}-{at}")
    for spec in CHAINS for ring in (True, False) for rows in (1, 2) for at in ("cuda:h200", "hip:mi300x")
    if there_is(spec, ring, rows, at)
]  # fmt: skip


@pytest.mark.parametrize(("spec", "ring", "rows", "at"), WAYS)
def test_every_way_to_take_rows_is_right(spec: Chain, ring: bool, rows: int, at: str) -> None:
    report = validate(built(two_kernels(spec.graph, at, ring, rows)), quick=True)
    assert report.ok, str(report)


def test_other_sizes_and_layouts_of_a_gradient() -> None:
    spec = norm_backward.at(M=16384, N=1024)
    program: Any = fusegen.compile(spec, target="cuda:h200", on="emulator", validate=False)
    assert [step.plan.rule for step in program.plan.steps] == ["row_parts", "columns"]
    assert program.plan.steps[0].plan.in_turn.ring
    report = validate(program)
    assert report.ok, str(report)


def test_no_rows_sum_to_nothing() -> None:
    program: Any = built(two_kernels(norm_backward.graph, "cuda:h200", True, 1))
    dx, dgamma = program(*(np.zeros(shape, kind) for shape, kind in (
        ((0, 512), bf16.numpy), ((0, 512), bf16.numpy), ((512,), bf16.numpy), ((0, 1), np.float32),
    )))  # fmt: skip
    assert dx.shape == (0, 512)
    assert not dgamma.any()


@pytest.mark.parametrize("vendor", ["cuda:h200", "hip:mi300x"])
def test_rows_along_two_axes_by_whole_blocks_are_counted(vendor: str) -> None:
    """Slots of each expert: ids lie in rows and choices, and a kernel of a block a row asked for no number of rows."""

    @chain(M=37, N=512)
    def counts(ids: i32[M, 4]) -> f32[N]:
        return F.sum(F.one_hot(ids[..., None], N), axis=(0, 1), keepdims=False)

    program: Any = fusegen.compile(counts, vendor, on="emulator")
    assert program.plan.steps[0].plan.rule == "row_parts"
    ids = np.random.default_rng(9).integers(-1, 513, (37, 4), dtype=np.int32)
    wanted = np.bincount(ids[(ids >= 0) & (ids < 512)], minlength=512)
    np.testing.assert_array_equal(program(ids), wanted)


def test_rows_are_read_once() -> None:
    program = two_kernels(norm_backward.graph, "cuda:h200", True, 1)
    moved = {t.tensor: t.moved / t.ideal for t in program.steps[0].plan.cost.traffic.tensors}
    assert moved["x"] == moved["dy"] == 1.0


def test_rows_that_are_written_come_by_copies_of_8_bytes() -> None:
    """By three blocks an SM: four leave the L1 cache less room than they fill."""
    program = cheapest(SHIPPED["rmsnorm_backward"].graph, target("cuda:h200"))
    plan: Any = program.steps[0].plan
    assert (plan.in_turn.count, plan.tile.vector, plan.tile.threads) == (396, 4, 256)


def test_values_behind_the_sums_that_need_rows_stay_in_one_piece() -> None:
    @chain(M=700, N=96)
    def centered(x: f32[M, N]) -> f32[M, N]:
        return x - F.sum(x, over=M) / M

    assert not list(parted(whole(centered.graph), target("cuda:h200")))


MISTAKES = {
    "a row that has not arrived": (r"wait_copies<slots - 1>", "wait_copies<slots>"),
    "the place of another row": (r"slot = slot \+ 1 == slots \? 0 : slot \+ 1", "slot = 0"),
    "another thread's columns": (
        r"vectors \+ v\) \* row_threads \+ threadIdx.x\];", "vectors + v) * row_threads + lane / 2];"
    ),
    "a row is left out": (r"row < rows; row \+= step", "row + step < rows; row += step"),
    "a row twice": (r"row \+= step\) \{", "row += step - 1) {"),
    "sums of the last row alone": (r"_part\[v\]\[j\] \+= ", "_part[v][j] = "),
    "parts on top of each other": (r"first \* cols", "first / 2 * cols"),
    "one place for two rows' reductions": (r"turn \^= 1;", ""),
    "the scalar of the row before": (r"rstd_read = \*\(rstd_ptr \+ \(row \+ step\)", "rstd_read = *(rstd_ptr + (row)"),
}  # fmt: skip


@cache
def several_vectors() -> ProgramPlan:
    graph = norm_backward.graph.at(M=700, N=2048)
    chosen = target("cuda:h200")
    for both in parted(whole(graph), chosen):
        for plan in candidates(both.first.graph, chosen).plans:
            how: Any = plan
            if how.in_turn.ring == 2 and how.tile.per_thread == 2 and how.tile.threads == 128:
                last = candidates(both.second.graph, chosen).need()[0]
                steps = (step_of(both.first, plan), step_of(both.second, last))
                return ProgramPlan(graph, chosen, steps, both.between)
    raise AssertionError("no plan has several vectors a thread")


@pytest.mark.parametrize("edit", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_caught(edit: tuple[str, str]) -> None:
    assert not validate(built(several_vectors(), edit), quick=True).ok


def test_a_kernel_without_mistakes_passes() -> None:
    assert validate(built(several_vectors()), quick=True).ok
