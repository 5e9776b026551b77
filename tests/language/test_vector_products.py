"""Products with a vector: numpy's shapes, right on every kind of target, and what stands instead of them is refused."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f32, i8, i32
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.planner.programs.model import ProgramPlan
from fusegen.validation import validate

B, M, N, K = dims("B M N K")
SIZES = {"N": 200, "K": 136}


@chain(**SIZES)
def rows_of_matrix(x: bf16[K], w: bf16[N, K]) -> bf16[N]:
    return w @ x


@chain(**SIZES)
def of_transpose(x: bf16[K], w: bf16[N, K], bias: f32[N]) -> bf16[N]:
    return F.gelu(x @ w.T + bias)


@chain(**SIZES)
def columns_of_matrix(x: bf16[K], w: bf16[K, N]) -> bf16[N]:
    return x @ w


@chain(**SIZES)
def transpose_on_the_left(x: bf16[K], w: bf16[K, N]) -> bf16[N]:
    return w.T @ x


@chain(K=136)
def two_vectors(x: f32[K], y: f32[K]) -> f32[1]:
    return F.broadcast(x @ y, [1])


@chain(B=3, **SIZES)
def many_matrices(x: bf16[K], w: bf16[B, N, K]) -> bf16[B, N]:
    return w @ x


@chain(B=3, **SIZES)
def columns_of_many(x: bf16[K], w: bf16[B, K, N]) -> bf16[B, N]:
    return x @ w


@chain(M=7, K=136)
def scores(x: bf16[M, K], gain: bf16[K], v: bf16[K]) -> f32[M]:
    return F.sigmoid(F.rmsnorm(x, gain) @ v)


@chain(**SIZES)
def whole_numbers(x: i8[K], w: i8[N, K]) -> i32[N]:
    return w @ x


@chain(N=64, K=136)
def one_behind_another(x: bf16[K], up: bf16[N, K], down: bf16[K, N]) -> bf16[K]:
    return x + down @ F.silu(up @ x)


CHAINS = {
    c.name: c
    for c in (
        rows_of_matrix, of_transpose, columns_of_matrix, transpose_on_the_left, two_vectors, many_matrices,
        columns_of_many, scores, whole_numbers, one_behind_another,
    )
}  # fmt: skip


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("on", ["cuda:h200", "cuda:sm_80", "hip:mi300x"])
@pytest.mark.parametrize("name", CHAINS)
def test_results_are_right(name: str, on: str) -> None:
    report = validate(fusegen.compile(CHAINS[name], on, on="emulator", validate=False), quick=True)
    assert report.ok, report


@pytest.mark.parametrize("name", ["rows_of_matrix", "columns_of_matrix", "columns_of_many", "whole_numbers"])
def test_the_reference_is_numpys_product(name: str, rng: np.random.Generator) -> None:
    spec = CHAINS[name]
    x, w = (rng.integers(-8, 9, [spec.graph.sizes[str(d)] for d in t.shape]) for t in spec.graph.inputs)
    expected = x @ w if name.startswith("columns") else w @ x
    made = fusegen.compile(spec, "cuda:h200", on="emulator", validate=False)
    given = [np.asarray(v, t.dtype.numpy) for v, t in zip((x, w), spec.graph.inputs, strict=True)]
    out = np.asarray(made(*given), np.float64)
    assert np.abs(out - expected).max() <= 2**-8 * np.abs(expected).max()


def test_a_matrix_whose_rows_are_summed_is_read_by_one_kernel_of_rows() -> None:
    plan = fusegen.plan(rows_of_matrix.at(N=8192, K=8192), "cuda:h200")
    assert isinstance(plan, ProgramPlan)
    (step,) = plan.steps
    assert not step.graph.products
    assert step.plan.cost.time_us < 1.3 * step.plan.cost.floor_us


def test_refusals() -> None:
    with pytest.raises(SpecError, match=r"matmul: found a scalar where a matrix or a vector is wanted\n  write \*"):

        @chain(N=200, K=136)
        def of_a_number(x: f32, w: f32[N, K]) -> f32[N, K]:
            return w @ x

    with pytest.raises(SpecError, match=r"matmul: .*K and N differ"):

        @chain(N=200, K=136)
        def of_another_size(x: bf16[N], w: bf16[N, K]) -> bf16[N]:
            return w @ x
