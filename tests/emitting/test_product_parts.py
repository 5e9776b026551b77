"""Reductions of a product's rows by tiles of its columns: by every way to multiply, and what is wrong is caught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.language.graph import Graph
from fusegen.planner import candidates
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.product_parts import grouped
from fusegen.planner.programs.steps import step_of, whole
from fusegen.targets import target
from fusegen.validation import validate
from tests.emitting.test_row_parts import built

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

M, H, V = dims("M H V")


@chain(M=70, H=128, V=520)
def loss(x: bf16[M, H], w: bf16[V, H], labels: i32[M, 1]) -> f32[M, 1]:
    return F.cross_entropy(x @ w.T, labels)


@chain(M=70, H=128, V=520)
def scaled_logsumexp(x: bf16[M, H], gamma: bf16[H], w: bf16[V, H], bias: bf16[V], scale: f32) -> f32[M, 1]:
    logits = F.rmsnorm(x, gamma) @ w.T * scale + bias
    return F.logsumexp(logits)


@chain(M=70, H=128, V=520)
def extremes(x: bf16[M, H], w: bf16[H, V], shift: f32[M, 1]) -> tuple[f32[M, 1], f32[M, 1], f32[M, 1]]:
    z = F.relu(x @ w + shift)
    return F.sum(z), F.max(z), F.min(z)


@chain(M=70, H=128, V=520)
def both_ways(x: bf16[M, H], w: bf16[V, H]) -> tuple[f32[M, 1], bf16[M, V]]:
    z = x @ w.T
    return F.max(z), z


@chain(M=70, H=128, V=520)
def variance(x: bf16[M, H], w: bf16[V, H]) -> f32[M, 1]:
    return F.var(x @ w.T)


def two_kernels(graph: Graph, at: str, start: str) -> ProgramPlan:
    """The program whose first kernel's configuration begins so."""
    chosen = target(at)
    for both in grouped(lowered(graph) if graph.viewed else whole(graph), chosen):
        for plan in candidates(both.first.graph, chosen).plans:
            if plan.configuration.startswith(start):
                last = candidates(both.second.graph, chosen).need()[0]
                return ProgramPlan(graph, chosen, (step_of(both.first, plan), step_of(both.second, last)), both.between)
    raise AssertionError(f"{graph.name} has no {start} on {at}")


WAYS = [
    (loss, "cuda:h200", "wgmma pingpong 128x128"),
    (loss, "cuda:h200", "wgmma cooperative 128x256"),
    (loss, "cuda:h200", "wgmma cooperative 80x64"),
    (loss, "cuda:a100", "gemm"),
    (loss, "hip:mi300x", "gemm 64x128"),
    (scaled_logsumexp, "cuda:h200", "wgmma cooperative 128x256"),
    (scaled_logsumexp, "cuda:a100", "gemm"),
    (scaled_logsumexp, "hip:mi300x", "gemm"),
    (extremes, "cuda:h200", "wgmma cooperative 80x128"),
    (extremes, "cuda:a100", "gemm 64x128"),
    (extremes, "hip:mi300x", "gemm 64x64"),
]


@pytest.mark.parametrize(("spec", "at", "start"), WAYS, ids=lambda value: getattr(value, "name", value))
def test_every_way_to_multiply_is_right(spec: Chain, at: str, start: str) -> None:
    report = validate(built(two_kernels(spec.graph, at, start)), quick=True)
    assert report.ok, str(report)


def test_the_logits_of_a_large_vocabulary_are_not_in_memory() -> None:
    found: Any = fusegen.plan(loss.at(M=4096, H=4096, V=128256), target="cuda:h200")
    arena = found.arena(found.graph.sizes)
    assert [step.plan.rule for step in found.steps] == ["wgmma", "rowwise"]
    assert arena.bytes < 4096 * 128256 * 2 / 20


def test_a_label_that_is_no_column_gives_nan() -> None:
    program = built(two_kernels(loss.graph, "cuda:h200", "wgmma pingpong"))
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((4, 128), (520, 128)))
    out = program(x, w, np.array([[0], [519], [520], [-100]], np.int32))
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    top = logits.max(-1, keepdims=True)
    wanted = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    np.testing.assert_allclose(out[:2, 0], [wanted[0, 0] - logits[0, 0], wanted[1, 0] - logits[1, 519]], rtol=1e-4)
    assert np.isnan(out[2, 0])
    assert out[3, 0] == 0.0


@pytest.mark.parametrize("spec", [both_ways, variance], ids=lambda c: c.name)
def test_what_needs_the_products_themselves_is_cut(spec: Chain) -> None:
    """Logits that are returned, and squares of what is left of a mean, are made of products in memory."""
    assert not list(grouped(lowered(spec.graph) if spec.graph.viewed else whole(spec.graph), target("cuda:h200")))


MISTAKES = {
    "a lane of a row is left out": ("wgmma pingpong", r"int step = 2; step > 0", "int step = 1; step > 0"),
    "columns behind the last": ("wgmma pingpong", r"if \(col < 520\)", "if (true)"),
    "another group's place": ("wgmma pingpong", r"at\.col0 / tile_cols\)", "at.col0 / (2 * tile_cols))"),
    "the largest of the other row": ("wgmma pingpong", r"where = where_of\[r8\]", "where = where_of[r8 ^ 1]"),
    "a label's neighbour": ("wgmma pingpong", r"col_index == labels", "col_index == labels + 1"),
    "rows of the next tile": ("wgmma cooperative 80x64", r"if \(inside && lane % 4 == 0", "if (lane % 4 == 0"),
}  # fmt: skip


@pytest.mark.parametrize(("start", "wrong", "right"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_caught(start: str, wrong: str, right: str) -> None:
    assert not validate(built(two_kernels(loss.graph, "cuda:h200", start), (wrong, right)), quick=True).ok
