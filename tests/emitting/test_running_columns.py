"""Running sums along an axis that is not the last one: every candidate, in the checking emulator, against numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import ArgumentError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.pipeline import compile as compile_chain
from fusegen.pipeline import compile_program
from fusegen.planner import candidates
from fusegen.planner.columns.plan import ColumnsPlan
from fusegen.planner.model import Source
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.scans_over_rows import over_rows
from fusegen.planner.programs.search import cheapest
from fusegen.planner.programs.steps import step_of
from fusegen.runtime import Kernel, finding
from fusegen.runtime.cache import compiled
from fusegen.runtime.program import Program
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate

Array = np.ndarray[Any, np.dtype[Any]]
B, S, H, D = dims("B S H D")


@chain(B=2, S=300, H=40)
def plain(x: bf16[B, S, H]) -> bf16[B, S, H]:
    return F.cumsum(x, axis=1)


@chain(B=2, S=300, H=40)
def fused(x: f16[B, S, H], gain: f32[H], keep: b8[B, S, 1]) -> tuple[f32[B, S, H], f16[B, S, H]]:
    """What comes before and behind, of values of a column and of a row; sums and products in one walk."""
    p = F.where(keep, F.exp(x) * gain, 0.0)
    c = F.cumsum(p, axis=1, exclusive=True)
    return F.silu(c + p), x * F.cumprod(1 + 0.01 * x, axis=1)


@chain(S=300, H=6)
def backward(x: f32[S, H], y: i32[S, H]) -> tuple[f32[S, H], i32[S, H], i32[S, H]]:
    """From the last row on, of the first of several axes, whose rows are counted."""
    late = F.where(F.row_index(x) >= 3, x, 0.0)
    return (
        F.cumsum(late, axis=0, reverse=True),
        F.cumsum(y, axis=0, reverse=True, exclusive=True),
        F.cumprod(y, axis=0, reverse=True),
    )


@chain(B=2, S=300, H=33)
def shares(x: f32[B, S, H]) -> f32[B, S, H]:
    """Behind reductions over the same rows: two passes more."""
    return F.cumsum(F.softmax(x, axis=1), axis=1)


@chain(B=1, S=300, H=5, D=12)
def of_heads(x: bf16[B, S, H, D], mean: f32[B, 1, H, D]) -> f32[B, S, H, D]:
    return F.cumsum(x - mean, axis=1) * 0.5


CHAINS = {c.name: c for c in (plain, fused, backward, shares, of_heads)}


def lowered(spec: Chain) -> Graph:
    (step,) = over_rows(spec.graph)
    return step.graph


def by_columns(spec: Chain, target: Target) -> list[ColumnsPlan]:
    found = [plan for plan in candidates(lowered(spec), target).plans if isinstance(plan, ColumnsPlan)]
    assert found
    return found


def kind_of(plan: ColumnsPlan) -> tuple[bool, ...]:
    """By which ways a row's threads learn what comes before them."""
    tile, warp = plan.tile, plan.target.warp
    return (tile.rows_of_warp(warp) > 1, tile.groups(warp) > 1, tile.cluster > 1, tile.turn > 1, tile.vector > 1)


def programs(spec: Chain, target: Target, every: bool = True) -> Iterator[ProgramPlan]:
    """The chain's program by columns, with each candidate, or with one of each kind."""
    (step,) = over_rows(spec.graph)
    base = cheapest(spec.graph, target)
    plans = by_columns(spec, target)
    for plan in plans if every else {kind_of(plan): plan for plan in reversed(plans)}.values():
        yield replace(base, steps=(step_of(step, plan),), between=(), shared=())


def operands(spec: Chain) -> list[Array]:
    rng = np.random.default_rng(len(spec.name))
    found: list[Array] = []
    for tensor in spec.graph.inputs:
        shape = [spec.graph.sizes.get(str(size), size) for size in tensor.shape]
        if tensor.dtype is i32:
            found.append(rng.integers(-(2**31), 2**31, shape).astype(np.int32) | 1)
        elif tensor.dtype is b8:
            found.append(rng.random(shape) < 0.7)
        else:
            found.append(rng.standard_normal(shape).astype(tensor.dtype.numpy))
    return found


def wrapped(function: Any, array: Array) -> Array:
    return np.asarray(function.accumulate(array.astype(np.uint32), axis=0, dtype=np.uint32).astype(np.int32))


def expected(name: str, *given: Array) -> list[Array]:
    """By numpy alone, in float64, and modulo 2^32."""
    x = given[0].astype(np.float64)
    if name == "plain":
        return [np.cumsum(x, 1)]
    if name == "fused":
        p = np.where(given[2], np.exp(x) * given[1], 0.0)
        c = np.cumsum(p, 1)
        return [c / (1 + np.exp(-c)), x * np.cumprod(1 + 0.01 * x, 1)]
    if name == "backward":
        late = np.where(np.arange(len(x))[:, None] >= 3, x, 0.0)
        y = given[1][::-1]
        before = np.concatenate([np.zeros_like(y[:1]), y[:-1]])
        return [np.cumsum(late[::-1], 0)[::-1], wrapped(np.add, before)[::-1], wrapped(np.multiply, y)[::-1]]
    if name == "shares":
        e = np.exp(x)
        return [np.cumsum(e / e.sum(1, keepdims=True), 1)]
    assert name == "of_heads"
    return [np.cumsum(x - given[1], 1) * 0.5]


def agrees(program: ProgramPlan, spec: Chain, given: list[Array]) -> None:
    found = compile_program(program, on="emulator", validate=False, tuned=False, as_planned=True)(*given)
    which = program.steps[0].plan.configuration
    for got, want in zip(found if isinstance(found, tuple) else (found,), expected(spec.name, *given), strict=True):
        if want.dtype == np.int32:
            assert (got == want).all(), which
        else:
            near = 1e-2 if got.dtype.itemsize == 2 else 2e-5
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=near, atol=near * 4, err_msg=which)


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_every_candidate_agrees_with_numpy(name: str, target: Target) -> None:
    given = operands(CHAINS[name])
    for program in programs(CHAINS[name], target):
        agrees(program, CHAINS[name], given)


@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (2, 1), (3, 1000), (70, 257), (1025, 16)])
@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_every_kind_of_tile_takes_columns_and_rows_of_every_length(target: Target, rows: int, cols: int) -> None:
    spec = backward.at(S=max(2, rows), H=cols)
    given = operands(spec)
    for program in programs(spec, target, every=False):
        agrees(program, spec, given)


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_every_kind_of_tile_passes_validation(name: str, target: Target) -> None:
    """At other lengths of the axis than those of the plan, over poisoned outputs, and within the errors' bounds."""
    for program in programs(CHAINS[name], target, every=False):
        kernel = compile_program(program, on="emulator", validate=False, tuned=False, as_planned=True)
        report = validate(kernel)
        assert report.ok, f"{program.steps[0].plan.configuration}: {report}"


def test_all_kinds_are_there() -> None:
    found = {kind_of(plan) for plan in by_columns(plain.at(B=1, S=9000, H=2048), H200)}
    assert {kind[:2] for kind in found} == {(True, True), (False, True), (False, False)}
    assert {kind[2:4] for kind in found} == {(one, other) for one in (False, True) for other in (False, True)}


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_columns_are_taken_where_they_are_many(target: Target) -> None:
    program = cheapest(plain.at(B=8, S=4096, H=1024).graph, target)
    (step,) = program.steps
    assert isinstance(step.plan, ColumnsPlan)
    assert program.time_us < 3 * step.plan.cost.floor_us
    assert not isinstance(cheapest(plain.at(B=4096, S=512, H=1).graph, target).steps[0].plan, ColumnsPlan)


def test_an_axis_of_any_length_is_planned() -> None:
    """Rows that a block's registers do not hold."""
    spec = plain.at(B=1, S=200000, H=64)
    (step,) = cheapest(spec.graph, H200).steps
    assert isinstance(step.plan, ColumnsPlan)
    assert step.plan.tile.cluster > 1


def test_arrays_whose_columns_lie_apart_go_by_rows() -> None:
    """Which a program for them takes, of the length that was compiled, where a block holds it."""
    kernel = compile_chain(plain.at(B=8, S=1024, H=1024), H200, on="emulator", validate=False)
    assert isinstance(kernel, Program)
    assert isinstance(kernel.plan.steps[0].plan, ColumnsPlan)
    x = np.random.default_rng(0).standard_normal((1, 1024, 1024)).astype(bf16.numpy)
    for given in (x, x.swapaxes(1, 2), x[:, :30]):
        want = np.cumsum(given.astype(np.float64), 1)
        np.testing.assert_allclose(kernel(given).astype(np.float64), want, rtol=1e-2, atol=0.5)
    long = compile_chain(plain.at(B=1, S=200000, H=64), H200, on="emulator", validate=False)
    with pytest.raises(ArgumentError, match="x has a stride of 200 elements along its last axis"):
        long(np.zeros((1, 64, 200), bf16.numpy).swapaxes(1, 2))


@chain(S=40, H=24)
def both_ways(x: f32[S, H]) -> tuple[f32[S, H], f32[S, H]]:
    return F.cumsum(x, axis=0), F.cumsum(x, axis=0, reverse=True)


@chain(S=40, H=24)
def twice(x: f32[S, H]) -> f32[S, H]:
    return F.cumsum(F.cumsum(x, axis=0), axis=0)


@chain(S=40, H=24)
def along_both(x: f32[S, H]) -> f32[S, H]:
    return F.cumsum(F.cumsum(x, axis=0))


@chain(S=40, H=24)
def normed(x: f32[S, H]) -> f32[S, H]:
    c = F.cumsum(x, axis=0)
    return c - F.mean(c, over=S)


@pytest.mark.parametrize("spec", [both_ways, twice, along_both, normed], ids=lambda c: c.name)
def test_what_one_walk_does_not_make_is_a_program(spec: Chain) -> None:
    x = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    found = compile_chain(spec, H200, on="emulator")(x)
    down = np.cumsum(x.astype(float), 0)
    meaning = {
        "both_ways": (down, np.cumsum(x[::-1].astype(float), 0)[::-1]), "twice": (np.cumsum(down, 0),),
        "along_both": (np.cumsum(down, 1),), "normed": (down - down.mean(0),),
    }  # fmt: skip
    for got, want in zip(found if isinstance(found, tuple) else (found,), meaning[spec.name], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_nan_or_an_infinity_counts_from_its_place_on() -> None:
    x = np.ones((1, 300, 40), np.float32).astype(bf16.numpy)
    x[0, 70, 3], x[0, 5, 9] = np.nan, np.inf
    for program in programs(plain.at(B=1), MI300X, every=False):
        found = compile_program(program, on="emulator", validate=False, tuned=False, as_planned=True)(x)
        sums = np.asarray(found).astype(np.float32)[0]
        assert np.isnan(sums[70:, 3]).all()
        assert np.isfinite(sums[:70, 3]).all()
        assert np.isinf(sums[5:, 9]).all()
        assert np.isfinite(np.delete(sums, (3, 9), 1)).all()


BROKEN = {
    "a step of lanes left out": ("step < 32", "step < 16"),
    "groups out of order": ("if (g == group)", "if (g == (group ^ 1))"),
    "blocks out of order": ("if (b == rank)", "if (b == (rank ^ 1))"),
    "a missing barrier": ("__syncthreads();", ""),
    "a cluster that does not wait": ("__cluster_barrier_arrive();  // all blocks have told theirs", ""),
    "one half of the shared parts": ("half ^= 1;", ""),
    "turns that start anew": ("cumsum_of_x_so_far[j] = cumsum_of_x_so_far[j] +", "cumsum_of_x_so_far[j] = 0.0f +"),
    "columns of a neighbour": ("_parts[half][g][from + j]", "_parts[half][g][(from + j) ^ 1]"),
    "a row that is left out": ("      if (turn + own", "      if (turn + 1 + own"),
}


def kernel_of(source: Source) -> Kernel:
    return Kernel(source, None, finding.find(source.plan.target, "emulator"), lambda layout: (source, None))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(name: str) -> None:
    text, broken = BROKEN[name]
    few = (plan for plan in by_columns(plain.at(B=1, S=4000), H200) if plan.tile.rows_in_turn <= 512)
    source = next(source for source in map(render, few) if text in source.text)
    assert validate(kernel_of(source), quick=True).ok
    assert not validate(kernel_of(replace(source, text=source.text.replace(text, broken))), quick=True).ok


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_the_best_compiles_without_spills(name: str, target: Target) -> None:
    spec = CHAINS[name]
    large = {"B": 8, "S": 4096, "H": 1024, "D": 64}
    best, *_ = by_columns(spec.at(**{dim: large[dim] for dim in spec.graph.sizes}), target)
    assert compiled(render(best)).resources.spill_bytes == 0
