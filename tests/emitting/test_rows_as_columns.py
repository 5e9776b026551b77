"""Rows of a product that are reduced together, as an indexer's heads are: columns of its transpose, in one kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f16, f32, i32, pipeline
from fusegen import ops as F
from fusegen.planner.programs import kernels_of, step_candidates
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.rows_as_columns import rows_as_columns
from fusegen.targets import target

pytestmark = pytest.mark.usefixtures("emulated_only")

B, S, T, H, D = dims("B S T H D")


@chain(S=24, T=150, H=64, D=128)
def indexer(q: bf16[S, H, D], k: bf16[T, D], w: f32[S, H]) -> f32[S, T]:
    return F.sum(F.relu(F.einsum("shd,td->sht", q, k)) * w[:, :, None], axis=1, keepdims=False)


@chain(S=24, T=150, H=64, D=128)
def narrow(q: f8e4m3[S, H, D], k: f8e4m3[T, D], w: f32[S, H], scale: f32[T]) -> f32[S, T]:
    """One value a key is taken of what columns were reduced to."""
    return F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False) * scale


@chain(B=2, S=5, T=70, H=32, D=64)
def batches(q: bf16[B, S, H, D], k: bf16[B, T, D], w: bf16[B, S, H]) -> f32[B, S, T]:
    return F.sum(F.relu(q @ k[:, None].mT) * w[:, :, :, None], axis=-2, keepdims=False)


@chain(S=24, T=150, H=16, D=64)
def causal(q: f16[S, H, D], k: f16[T, D], bias: f32[T]) -> f16[S, T]:
    """A value of each key before the reduction, and a mask behind it."""
    most = F.max(q @ k.T * 0.125 + bias, axis=1, keepdims=False)
    return F.where(F.col_index(most) <= F.row_index(most) + (T - S), most, -65504.0)


@chain(S=24, T=150, H=24, D=64)
def mean(q: bf16[S, H, D], k: bf16[T, D]) -> bf16[S, T]:
    return F.mean(F.sigmoid(q @ k.T), axis=1, keepdims=False)


@chain(S=300, T=256, D=64)
def transposed_scales(x: bf16[S, D], w: bf16[T, D]) -> tuple[f8e4m3[S, T], f32[T // 128, S]]:
    """Of groups of columns that the chain itself has, with the scales the other way round."""
    codes, scales = F.quantize(x @ w.T, f8e4m3, per="block", block=128)
    return codes, scales.T


@chain(S=24, T=150, H=16, D=64)
def projected(x: bf16[S, D], wq: bf16[H * D, D], k: bf16[T, D], ww: bf16[H, D]) -> f32[S, T]:
    """Queries and weights of heads are products themselves."""
    q = F.rearrange(F.cast(x @ wq.T, bf16), "s (h d) -> s h d", h=H)
    return F.sum(F.relu(q @ k.T) * (x @ ww.T)[:, :, None], axis=1, keepdims=False)


@chain(S=24, T=150, H=16, D=64)
def chosen(q: bf16[S, H, D], k: bf16[T, D], w: f32[S, H]) -> tuple[f32[S, 8], i32[S, 8]]:
    """The best keys of those up to the token's own."""
    scores = F.sum(F.relu(q @ k.T) * w[:, :, None], axis=1, keepdims=False)
    return F.topk(F.where(F.col_index(scores) <= F.row_index(scores) + (T - S), scores, -float("inf")), 8)


CHAINS = (indexer, narrow, batches, causal, mean, transposed_scales, projected, chosen)


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:l40s", "hip:mi300x"])
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_reduced_rows_of_products_are_right(spec: Chain, name: str) -> None:
    report = fusegen.compile(spec, name, on="emulator").report
    assert report is not None
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_an_indexer_is_one_kernel(name: str) -> None:
    large = indexer.at(S=2048, T=4096)
    program = planned(large, name)
    (step,) = program.steps
    assert [node.op.name for node in step.graph.grouped] == ["group_sum"]


@pytest.mark.parametrize("spec", [projected.at(S=4096, T=4096, H=64, D=128), chosen.at(S=2048, T=4096, H=64, D=128)],
                         ids=lambda spec: spec.name)  # fmt: skip
def test_what_stands_around_an_indexer_takes_one_more(spec: Chain) -> None:
    """The queries in bf16, as they are multiplied; the scores by tokens, as they are chosen from."""
    program = planned(spec, "cuda:h200")
    assert len(program.steps) == 2
    kinds = {stored.type.dtype for stored in program.between}
    assert kinds == ({bf16, f32} if spec.name == "projected" else {f32})


def test_scales_of_a_product_are_stored_the_other_way_round_at_once() -> None:
    assert len(planned(transposed_scales, "cuda:h200").steps) == 1


def test_every_tile_of_an_indexer_is_right() -> None:
    """Of several groups of columns each, in both schedules and in clusters, more of them than blocks."""
    sizes = {"S": 70, "T": 140, "H": 32, "D": 32}
    program = planned(indexer.at(**sizes), "cuda:h200")
    (step,) = program.steps
    random = np.random.default_rng(0)
    q, k = (random.standard_normal(shape).astype(bf16.numpy) for shape in ((70, 32, 32), (140, 32)))
    w = random.standard_normal((70, 32)).astype(np.float32)
    products = np.einsum("shd,td->sht", q.astype(np.float64), k.astype(np.float64))
    want = (np.maximum(products, 0.0) * w[:, :, None]).sum(axis=1)
    plans = [plan for plan in step_candidates(program, step).plans if plan.rule == "wgmma"]
    assert {plan.configuration.split()[1] for plan in plans} == {"pingpong", "cooperative"}
    for plan in plans:
        one = replace(program, steps=(replace(step, plan=plan),))
        made = pipeline.compile_program(one, on="emulator", validate=False, tuned=False, as_planned=True)
        got = made(q, k, w)
        assert np.abs(got - want).max() < 1e-3, plan.configuration


def test_what_else_is_reduced_over_rows_stays() -> None:
    """Many rows together, a number that no tile has as columns, and values that differ by row and column."""

    @chain(S=8, T=64, H=8, D=32)
    def masked(q: bf16[S, H, D], k: bf16[T, D], mask: f32[S, H, T]) -> f32[S, T]:
        return F.sum((q @ k.T) * mask, axis=1, keepdims=False)

    for spec in (indexer.at(H=128), indexer.at(H=12), masked):
        graph = spec.graph
        assert rows_as_columns(graph) is graph


def planned(spec: Chain, name: str) -> ProgramPlan:
    _, program = kernels_of(spec.graph, target(name))
    assert program is not None
    return program
