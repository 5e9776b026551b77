"""Products of a matrix with itself, and of one that is read beside its product too, by kernels of tensor copies."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.errors import FusegenError
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.factors_apart import factors_apart
from fusegen.planner.programs.steps import whole
from fusegen.targets import target

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K = dims("M N K")


@chain(M=200, K=136)
def gram(x: bf16[M, K]) -> bf16[M, M]:
    return x @ x.T


@chain(M=200)
def squared(x: bf16[M, M]) -> bf16[M, M]:
    return F.cast(-4.775 * x + 2.0315 * (x @ x), bf16)


@chain(M=300, K=200)
def covariance(x: bf16[M, K]) -> f32[K, K]:
    return x.T @ x * (1.0 / M)


@chain(M=264, N=200)
def beside(x: bf16[M, N], b: bf16[M, M]) -> bf16[M, N]:
    return 3.4445 * x + b @ x


@chain(M=136, K=72)
def newton_schulz(x: bf16[M, K]) -> bf16[M, K]:
    """A step of Muon's: three products, the first two of a matrix with itself."""
    a = F.cast(x @ x.T, bf16)
    b = F.cast(-4.775 * a + 2.0315 * (a @ a), bf16)
    return 3.4445 * x + b @ x


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:b200", "cuda:a100"])
@pytest.mark.parametrize("spec", [gram, squared, covariance, beside, newton_schulz], ids=lambda spec: spec.name)
def test_a_matrix_times_itself_is_right(spec: Chain, name: str) -> None:
    report = fusegen.compile(spec, name, on="emulator").report
    assert report is not None
    assert report.ok, str(report)[:2000]


LARGE = (gram.at(M=2048, K=1024), squared.at(M=2048))


@pytest.mark.parametrize("name", ["cuda:h200", "cuda:b200"])
@pytest.mark.parametrize("spec", LARGE, ids=lambda spec: spec.name)
def test_large_ones_are_of_tensor_copies(spec: Chain, name: str) -> None:
    assert rules(spec, name) == {"wgmma" if name == "cuda:h200" else "tcgen05"}


def test_a_step_of_newton_and_schulz_is_of_tensor_copies() -> None:
    assert rules(newton_schulz.at(M=2048, K=1024), "cuda:h200") == {"wgmma"}


def test_only_what_is_used_in_several_ways_is_taken_apart() -> None:
    @chain(M=64, N=32, K=32)
    def once(x: bf16[M, K], w: bf16[N, K], v: bf16[N, K]) -> bf16[M, N]:
        return F.silu(x @ w.T) * (x @ v.T)

    assert factors_apart(whole(once.graph)) is None
    apart = factors_apart(whole(squared.graph))
    assert apart is not None
    assert {bound.tensor: bound.base for bound in apart.bounds} == {
        "x": "x", "x_left": "x", "x_right": "x", "out": "out"
    }  # fmt: skip


def test_a_factor_is_not_written_over() -> None:
    kernel = fusegen.compile(squared.at(M=2048), "cuda:h200", on="emulator", validate=False)
    x = np.zeros((2048, 2048), bf16.numpy)
    with pytest.raises(FusegenError, match="out="):
        kernel(x, out=x)


def rules(spec: Chain, name: str) -> set[str]:
    _, program = kernels_of(spec.graph, target(name))
    assert program is not None
    return {step.plan.rule for step in program.steps}
