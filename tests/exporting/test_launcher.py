"""The launcher in C against the one in Python: the same numbers, the same results, the same refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.pipeline import compile
from tests.exports import Library, build

M, N = dims("M N")


@chain(M=64, N=96)
def scaled(x: f32[M, N], gain: f32[N], factor: f32) -> f32[M, N]:
    """rmsnorm(x) * gain * factor."""
    return F.rmsnorm(x, gain) * factor


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    made = compile(scaled, "cuda:h200", on="emulator", validate=False)
    with pytest.MonkeyPatch.context() as patch:
        return build(made, tmp_path_factory.mktemp("scaled"), patch)


def wanted(x: np.ndarray, gain: np.ndarray, factor: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain * factor


def test_a_call(library: Library) -> None:
    rng = np.random.default_rng(0)
    x, gain = rng.standard_normal((5, 96), np.float32), rng.standard_normal(96, np.float32)
    out = np.zeros_like(x)
    assert library.call([(x, f32), (gain, f32), 2.5, (out, f32)]) == 0, library.message
    assert library.launched == ["sm_90a scaled"]
    np.testing.assert_allclose(out, wanted(x, gain, 2.5), rtol=1e-5, atol=1e-5)
