"""Few long rows are reduced by groups of their columns, where one kernel would leave most of a GPU idle."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.language.spec import Chain
from fusegen.planner.programs.model import ProgramPlan
from fusegen.targets import A100, H200, MI300X, Target
from tests.tools import needs_compiler

M, N = dims("M N")


@chain(N=2**26)
def clipped(x: bf16[N], most: f32) -> tuple[bf16[N], f32[1]]:
    """Gradients, flat, by their norm."""
    norm = F.norm(x)
    return x * F.minimum(1.0, most / (norm + 1e-6)), norm


@chain(M=2, N=2**23)
def softmax(x: f32[M, N]) -> f32[M, N]:
    return F.softmax(x)


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=str)
@pytest.mark.parametrize("spec", [clipped, softmax], ids=lambda spec: str(spec.name))
def test_all_of_a_gpu_reads_a_row(spec: Chain, target: Target) -> None:
    """One kernel of `clipped` took 302 us on an H200, and is expected to take 5288 on an A100."""
    planned = fusegen.plan(spec, target)
    assert isinstance(planned, ProgramPlan)
    assert planned.time_us < 1.4 * planned.floor_us


@pytest.mark.parametrize("sizes", [{"M": 1024, "N": 2**17}, {"M": 2, "N": 2**12}], ids=str)
def test_rows_that_are_many_or_short_are_one_kernel(sizes: dict[str, int]) -> None:
    assert not isinstance(fusegen.plan(softmax.at(**sizes), A100), ProgramPlan)


@pytest.mark.parametrize("cols", [30_000_000, 7_000_003])
def test_rows_of_any_length_are_read_by_all_of_a_gpu(cols: int) -> None:
    """No multiple of 1024; one kernel of 30000000 was expected to take 2386 us, and takes the first."""
    planned = fusegen.plan(clipped.at(N=cols), A100)
    assert isinstance(planned, ProgramPlan)
    assert planned.time_us < 1.4 * planned.floor_us + 10


@needs_compiler
@pytest.mark.parametrize("cols", [2**18 + 96, 2**18 + 3])
def test_what_no_group_has_is_reduced_by_itself(cols: int) -> None:
    x = np.random.default_rng(9).standard_normal((2, cols), dtype=np.float32)
    program = fusegen.compile(softmax.at(N=cols), "hip:mi300x", on="emulator", validate=False)
    assert isinstance(program, fusegen.Program)
    wide = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(program(x), wide / wide.sum(-1, keepdims=True), rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:a100", "hip:mi300x"])
def test_a_row_by_groups_is_what_numpy_makes_of_it(vendor: str) -> None:
    x = np.random.default_rng(8).standard_normal((2, 2**18), dtype=np.float32)
    program = fusegen.compile(softmax.at(N=2**18), vendor, on="emulator", validate=False)
    assert isinstance(program, fusegen.Program)
    wide = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(program(x), wide / wide.sum(-1, keepdims=True), rtol=1e-4)
