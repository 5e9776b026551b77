"""Rows in order: kernels against numpy's stable sorts, broken ones, which are caught, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f32, i32, i64
from fusegen import ops as F
from fusegen.errors import NoPlan
from fusegen.language.spec import Chain
from fusegen.planner import candidates
from fusegen.runtime import Kernel
from fusegen.targets import H200
from fusegen.validation import validate

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N = dims("M N")


@chain(M=5, N=40)
def ascending(x: f32[M, N], y: i32[M, N]) -> tuple[f32[M, N], i32[M, N], i32[M, N], i32[M, N]]:
    values, columns = F.sort(x)
    least, of_least = F.sort(y)
    return values, columns, least, of_least


@chain(M=5, N=40)
def descending(x: bf16[M, N], y: i32[M, N]) -> tuple[bf16[M, N], i64[M, N], i32[M, N]]:
    values, columns = F.sort(x, descending=True)
    return values, columns, F.sort(y, descending=True)[1]


@chain(M=5, N=40)
def sorted_mass(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], i32[M, N]]:
    """Behind a softmax, and before a running sum."""
    p, tokens = F.sort(F.softmax(x), descending=True)
    return p, F.cumsum(p), tokens


def made(spec: Chain, where: str = "cuda:h200") -> Any:
    return fusegen.compile(spec, target=where, on="emulator", validate=False)


def whole_numbers(cols: int) -> Any:
    found = np.random.default_rng(cols).integers(-9, 9, (5, cols)).astype(np.int32)
    found.reshape(-1)[:2] = -(2**31), 2**31 - 1
    return found


@pytest.mark.parametrize("where", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("cols", [2, 33, 40, 600, 4096])
def test_rows_come_in_order(cols: int, where: str) -> None:
    """Many equals, both zeros, infinities and NaN: equals stay in the order of their columns."""
    y = whole_numbers(cols)
    x = np.random.default_rng(1).integers(-9, 9, (5, cols)).astype(np.float32) * 0.5
    x[1, ::2] *= 0.0
    x[2, :: max(1, cols // 3)] = np.nan, *([-np.inf, np.inf, np.nan][: len(x[2, :: max(1, cols // 3)]) - 1])
    values, columns, least, of_least = made(ascending.at(N=cols), where)(x, y)
    order = np.argsort(x, -1, kind="stable")
    assert np.array_equal(columns, order)
    assert np.array_equal(values, np.take_along_axis(x, order, -1), equal_nan=True)
    assert np.array_equal(of_least, np.argsort(y, -1, kind="stable"))
    assert np.array_equal(least, np.sort(y, -1))


@pytest.mark.parametrize("cols", [40, 1000])
def test_the_largest_first(cols: int) -> None:
    y = whole_numbers(cols)
    x = np.random.default_rng(2).integers(-9, 9, (5, cols)).astype(bf16.numpy)
    x[0, 3] = np.nan
    values, columns, down = made(descending.at(N=cols))(x, y)
    assert np.isnan(np.float32(values[0, 0]))
    assert columns.dtype == np.int64
    assert columns[0, 0] == 3
    wide = np.where(np.isnan(np.float32(x)), np.inf, np.float32(x))
    assert np.array_equal(columns, np.argsort(-wide, -1, kind="stable"))
    assert np.array_equal(down, np.argsort(-y.astype(np.int64), -1, kind="stable"))


@pytest.mark.parametrize("spec", [ascending, descending, sorted_mass], ids=lambda spec: spec.name)
def test_validation_passes(spec: Chain) -> None:
    report = validate(made(spec))
    assert report.ok, report


BROKEN = {
    "the last merge is left out": ("size <= 1024", "size < 1024"),
    "runs all go up": ("((low & size) == 0)", "true"),
    "no barrier between steps": ("        }\n        __syncthreads();\n      }", "        }\n      }"),
    "columns are left out of the key": (" | (col + j)", " | (col + j > 1)"),
    "places behind the row hold what was there": ("own[i] = ~0ull", "own[i] = 0ull"),
}


@pytest.mark.parametrize("models", BROKEN)
def test_validation_catches(models: str) -> None:
    kernel = made(ascending.at(N=1000))
    old, new = BROKEN[models]
    text = kernel.source.text.replace(old, new)
    assert text != kernel.source.text
    broken = replace(kernel.source, text=text)
    assert not validate(Kernel(broken, None, kernel.device, lambda _: (broken, None)), quick=True).ok


def test_longer_rows_are_refused() -> None:
    with pytest.raises(NoPlan, match="sorts rows of 4097, and a block sorts at most 4096"):
        candidates(ascending.at(N=4097).graph, H200).need()
