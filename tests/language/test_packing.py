"""Numbers of 4 bits, two to a byte: every code, every half and a sweep of f32 against ml_dtypes; what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import chain, dims, f4e2m1, f16, f32, i4, i8, u4, u8
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.language.types import DType
from fusegen.pipeline import compile
from fusegen.validation import validate
from tests.language.test_narrow import VENDORS, numbers
from tests.tools import needs_compiler, untyped

M, N = dims("M N")
Array = np.ndarray[Any, np.dtype[Any]]
EACH = (i4, u4, f4e2m1)


@np.errstate(invalid="ignore")
def nibbles(x: Array, dtype: DType) -> Array:
    """By ml_dtypes, of the nearest number that there is; of NaN 0, or 7 of f4e2m1."""
    least, most = dtype.nearest
    clipped = np.clip(x.astype(np.float32), np.float32(least), np.float32(most))
    if dtype is f4e2m1:
        codes = np.where(np.isnan(x), 6, clipped).astype(dtype.numpy).view(np.uint8)
    else:
        codes = np.nan_to_num(np.round(clipped)).astype(np.int8).view(np.uint8)
    return np.asarray(codes & 15)


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_numbers_to_nibbles(vendor: str) -> None:
    x = np.resize(numbers(), (64, 2368))

    @chain(M=64, N=2368)
    def spec(x: f32[M, N]) -> tuple[i4[M, N], u4[M, N], f4e2m1[M, N], f32[M, N]]:
        return x, x, x, F.cast(x, f4e2m1)

    *packed, rounded = map(np.asarray, compile(spec, fusegen.target(vendor), on="emulator", validate=False)(x))
    for dtype, found in zip(EACH, packed, strict=True):
        assert found.shape == (64, 1184)
        codes = np.stack([found & 15, found >> 4], -1).reshape(x.shape)
        np.testing.assert_array_equal(codes, nibbles(x, dtype), err_msg=str(dtype))
    np.testing.assert_array_equal(rounded, nibbles(x, f4e2m1).view(f4e2m1.numpy).astype(np.float32))


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_nibbles_to_numbers(vendor: str) -> None:
    def spec(a: i4[M, N], b: u4[M, N], c: f4e2m1[M, N], d: u8[M, N // 2]) -> Any:
        return a * 1.0, b * 1.0, c * 1.0, F.unpack(d, i4) * 1.0

    spec.__annotations__["return"] = tuple[(f32[M, N],) * 4]  # type: ignore[misc]
    every = np.stack([np.arange(128), np.arange(128, 256)]).astype(np.uint8)
    codes = np.stack([every & 15, every >> 4], -1).reshape(2, 256)
    signed = codes.astype(np.int64) - 16 * (codes > 7)
    wanted = signed, codes, codes.view(f4e2m1.numpy).astype(np.float32), signed
    kernel = compile(chain(M=2, N=256)(spec), fusegen.target(vendor), on="emulator", validate=False)
    got = kernel(every, every, every, every)
    for found, exact in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(found, exact)


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:h200", "hip:mi300x"])
def test_what_becomes_of_them_is_validated(vendor: str) -> None:
    @chain(M=5, N=64)
    def spec(x: i4[M, N], scale: f16[M, N // 32], bias: f32[N]) -> tuple[f16[M, N], u4[M, N]]:
        y = F.dequantize(x, scale) + bias
        return y, F.clip(y, 0.0, 9.0)

    validate(compile(spec, fusegen.target(vendor), on="emulator", validate=False), quick=True).raise_for_error()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda x: F.unpack(x, i8), "unpack: i8 is none of f4e2m1, i4, u4, of which two are a byte"),
        (lambda x: F.unpack(x * 1.0, i4), "unpack: found f32[M, N], wanted bytes in rows, as of u8[M, N // 2]"),
        (lambda x: F.pack(untyped(3.0), i4), "pack: found 3.0 where a traced value is wanted"),
    ],
)  # fmt: skip
def test_wrong_requests(body: Callable[[Any], Any], says: str) -> None:
    def spec(x: u8[M, N]) -> f32[M, N]:
        return body(x)

    with pytest.raises(SpecError, match=re.escape(says)):
        chain(M=4, N=8)(spec)


def test_odd_rows_are_refused() -> None:
    def spec(x: i4[M, N]) -> f32[M, N]:
        return x * 1.0

    with pytest.raises(SpecError, match=r"the size N // 2 does not come out even at N=5"):
        chain(M=4, N=5)(spec)

    def fixed(x: i4[M, 7]) -> f32[M, 7]:
        return x * 1.0

    with pytest.raises(SpecError, match=r"i4\[M, 7\]: two numbers of i4 are a byte, and rows of 7 are no whole"):
        chain(M=4)(fixed)
