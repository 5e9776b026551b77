"""Running sums along an axis that is not the last one: every candidate, in the checking emulator, against numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.language.spec import Chain
from fusegen.pipeline import compile_program
from fusegen.planner import candidates
from fusegen.planner.columns.plan import ColumnsPlan
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.scans_over_rows import over_rows
from fusegen.planner.programs.search import cheapest
from fusegen.planner.programs.steps import step_of
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate

Array = np.ndarray[Any, np.dtype[Any]]
B, S, H, D = dims("B S H D")


@chain(B=2, S=70, H=40)
def plain(x: bf16[B, S, H]) -> bf16[B, S, H]:
    return F.cumsum(x, axis=1)


@chain(B=2, S=70, H=40)
def fused(x: f16[B, S, H], gain: f32[H], keep: b8[B, S, 1]) -> tuple[f32[B, S, H], f16[B, S, H]]:
    """What comes before and behind, of values of a column and of a row; sums and products in one walk."""
    p = F.where(keep, F.exp(x) * gain, 0.0)
    c = F.cumsum(p, axis=1, exclusive=True)
    return F.silu(c + p), x * F.cumprod(1 + 0.01 * x, axis=1)


@chain(S=70, H=40)
def backward(x: f32[S, H], y: i32[S, H]) -> tuple[f32[S, H], i32[S, H], i32[S, H]]:
    """From the last row on; of the first of several axes."""
    late = F.where(F.row_index(x) >= 3, x, 0.0)
    return (
        F.cumsum(late, axis=0, reverse=True),
        F.cumsum(y, axis=0, reverse=True, exclusive=True),
        F.cumprod(y, axis=0, reverse=True),
    )


@chain(B=2, S=70, H=40)
def shares(x: f32[B, S, H]) -> f32[B, S, H]:
    """Behind reductions over the same rows: two passes more."""
    return F.cumsum(F.softmax(x, axis=1), axis=1)


@chain(B=2, S=70, H=5, D=8)
def of_heads(x: bf16[B, S, H, D], mean: f32[B, 1, H, D]) -> f32[B, S, H, D]:
    return F.cumsum(x - mean, axis=1) * 0.5


CHAINS = {c.name: c for c in (plain, fused, backward, shares, of_heads)}
SIZES = ((70, 40), (1, 8), (3, 1), (257, 6), (600, 33), (64, 64))


def programs(spec: Chain, target: Target, every: bool) -> Iterator[ProgramPlan]:
    """The chain's program by columns, with each candidate, or with one for each shape of a block's rows."""
    (step,) = over_rows(spec.graph)
    base = cheapest(spec.graph, target)
    seen = set()
    found = candidates(step.graph, target).plans
    assert found
    for plan in found:
        assert isinstance(plan, ColumnsPlan)
        tile, warp = plan.tile, target.warp
        kind = (min(2, tile.rows_of_warp(warp)), min(2, tile.groups(warp)), min(2, tile.turn), min(2, tile.vector))
        if every or kind not in seen:
            seen.add(kind)
            yield replace(base, steps=(step_of(step, plan),), between=(), shared=(), cuts=base.cuts)


def check(program: ProgramPlan) -> None:
    kernel = compile_program(program, on="emulator", validate=False, tuned=False, as_planned=True)
    report = validate(kernel, quick=True)
    assert report.ok, f"{program.steps[0].plan.configuration}: {report}"


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_every_kind_of_tile_agrees_with_numpy(name: str, target: Target) -> None:
    for program in programs(CHAINS[name], target, every=False):
        check(program)


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_every_candidate_agrees_with_numpy(name: str, target: Target) -> None:
    for program in programs(CHAINS[name], target, every=True):
        check(program)
