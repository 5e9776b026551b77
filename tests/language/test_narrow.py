"""Types of 8 bits: every code, every half and a sweep of f32 against ml_dtypes; quantized rows against plain numpy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f8e4m3, f8e5m2, f8e8m0, f16, f32, i8, i32, u8
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import SpecError
from fusegen.language.types import F8, DType
from fusegen.pipeline import compile, plan
from fusegen.runtime import Kernel, finding
from fusegen.runtime.finding import present, target_of
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation import validate
from tests.conversions import TYPES, codes, narrowing, widening, wrong
from tests.tools import needs_compiler, untyped

M, N = dims("M N")
Array = np.ndarray[Any, np.dtype[Any]]
VENDORS = ("cuda:sm_80", "cuda:h200", "hip:mi300x")


def numbers() -> Array:
    """All bf16, a sweep of f32, and the neighbours of every number that lies between two codes."""
    bits = [np.arange(0, 2**32, 65537, dtype=np.uint64).astype(np.uint32), np.arange(2**16, dtype=np.uint32) << 16]
    edges = np.arange(2**12, dtype=np.uint32) << 20
    bits += [edges + step for step in (1, 0x7FFFF, 0x80000, 0x80001, 0xFFFFFFFF)]
    return np.concatenate(bits).view(np.float32)


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_numbers_to_codes(vendor: str) -> None:
    """To all types that are narrower, and to whole numbers, by one kernel; numbers beyond the range of 8 bits to the
    nearest, or to infinities and NaN."""
    x = np.concatenate([numbers(), np.array([464, 464.00003, 61440, 248], np.float32)])
    ways = [(dtype, saturate) for dtype in TYPES for saturate in (True, False) if saturate or dtype in F8]

    def spec(x: f32[N]) -> Any:
        return tuple(F.cast(x, dtype, saturate) for dtype, saturate in ways)

    spec.__annotations__["return"] = tuple[tuple(dtype[N] for dtype, _ in ways)]  # type: ignore[misc]
    kernel = compile(chain(N=len(x))(spec), target=fusegen.target(vendor), on="emulator", validate=False)
    for found, (dtype, saturate) in zip(kernel(x), ways, strict=True):
        assert not wrong(np.asarray(found), x, dtype, saturate).size, (dtype, saturate)
    assert validate(kernel, quick=True).ok


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:h200", "hip:mi300x"])
def test_bits_as_another_type(vendor: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    x = np.resize(numbers(), 256)

    def spec(x: f32[N], k: i32[N], c: u8[N], s: i8[N], a: Any, b: Any, e: Any) -> Any:
        whole = F.bitcast(x, i32), F.bitcast(k, f32), F.bitcast(F.bitcast(x, i32) ^ 1, f32)
        bytes_ = F.bitcast(a, u8), F.bitcast(b, i8), F.bitcast(e, u8), F.bitcast(F.cast(x, f8e4m3), u8)
        return *whole, *bytes_, F.bitcast(c, f8e5m2), F.bitcast(s, f8e8m0)

    spec.__annotations__.update({"a": f8e4m3[N], "b": f8e5m2[N], "e": f8e8m0[N]})
    of = (i32, f32, f32, u8, i8, u8, u8, f8e5m2, f32)
    spec.__annotations__["return"] = tuple[tuple(dtype[N] for dtype in of)]  # type: ignore[misc]
    kernel = compile(chain(N=256)(spec), target=fusegen.target(vendor), on="emulator")
    k = x.view(np.int32)
    named = [every.view(dtype.numpy) for dtype in (f8e4m3, f8e5m2, f8e8m0)]
    got = [np.asarray(each) for each in kernel(x, k, every, every.view(np.int8), *named)]
    np.testing.assert_array_equal(got[0], k)
    np.testing.assert_array_equal(got[1], x)
    np.testing.assert_array_equal(got[2].view(np.int32), k ^ 1)
    number = [~np.isnan(each.astype(np.float32)) for each in named]
    for found, sure in zip(got[3:6], number, strict=True):
        np.testing.assert_array_equal(found.view(np.uint8)[sure], every[sure])
    np.testing.assert_array_equal(got[6], codes(x, f8e4m3))
    np.testing.assert_array_equal(got[8], named[2].astype(np.float32))
    finite = np.isfinite(named[1].astype(np.float32))  # what is stored as 8 bits saturates
    np.testing.assert_array_equal(got[7].view(np.uint8)[finite], every[finite])


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_codes_to_numbers(vendor: str) -> None:
    def spec(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return tuple(x * 1.0 for x in (a, b, c, d, e))

    spec.__annotations__.update({name: dtype[N] for name, dtype in zip("abcde", F8, strict=True)})
    spec.__annotations__["return"] = tuple[tuple(f32[N] for _ in F8)]  # type: ignore[misc]
    kernel = compile(chain(N=256)(spec), target=fusegen.target(vendor), on="emulator", validate=False)
    every = [np.arange(256, dtype=np.uint8).view(dtype.numpy) for dtype in F8]
    for dtype, given, got in zip(F8, every, kernel(*every), strict=True):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(got, given.astype(np.float32))
        assert np.signbit(got[128]) == (dtype in (f8e4m3, f8e5m2))  # -0, where the type has one


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", F8, ids=str)
def test_conversions_on_a_gpu(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    target = next((found for gpu in present().gpus if (found := target_of(gpu)) is not None), None)
    if target is None:
        pytest.skip("no GPU that a target fits: `fusegen doctor` says why")
    x = numbers()
    kernel = fusegen.compile(narrowing(dtype).at(N=len(x)), target=target, validate=False)
    got = kernel(torch.from_numpy(x).cuda()).view(torch.uint8).cpu().numpy()
    np.testing.assert_array_equal(got, codes(x, dtype))
    every = np.arange(256, dtype=np.uint8)
    back = fusegen.compile(widening(dtype).at(N=256), target=target, validate=False)
    named = getattr(torch, dtype.numpy_name)
    found = back(torch.from_numpy(every).cuda().view(named)).cpu().numpy()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, every.view(dtype.numpy).astype(np.float32))


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_whole_numbers_of_8_bits(vendor: str) -> None:
    @chain(N=64)
    def spec(x: f32[N], y: i32[N], a: i8[N], b: u8[N]) -> tuple[i8[N], u8[N], i8[N], u8[N], i32[N]]:
        return F.cast(x, i8), F.cast(x, u8), F.cast(y, i8), y, F.cast(a, i32) - b

    rng = np.random.default_rng(3)
    x = rng.normal(size=64).astype(np.float32) * 150
    x[:8] = 0.5, 1.5, -0.5, 127.5, -128.5, np.nan, np.inf, -np.inf
    y = rng.integers(-(2**31), 2**31, 64, dtype=np.int32)
    y[:8] = 255, 256, -1, -128, -129, 127, 128, 0
    a, b = rng.integers(-128, 128, 64).astype(np.int8), rng.integers(0, 256, 64).astype(np.uint8)
    kernel = compile(spec, target=fusegen.target(vendor), on="emulator")
    signed, unsigned, few, stored, less = kernel(x, y, a, b)
    whole = np.nan_to_num(np.round(x.astype(np.float64)), nan=0.0)
    np.testing.assert_array_equal(signed, np.clip(whole, -128, 127))
    np.testing.assert_array_equal(unsigned, np.clip(whole, 0, 255))
    np.testing.assert_array_equal(few, np.clip(y, -128, 127))
    np.testing.assert_array_equal(stored, np.clip(y, 0, 255))
    np.testing.assert_array_equal(less, a.astype(np.int32) - b)


# ---------------------------------------------------------------- quantized rows


@chain(M=33, N=1000)
def quantized(x: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, 1]]:
    values, scale = F.quantize(x, f8e4m3)
    return values, scale


@chain(M=33, N=1000)
def quantized_whole(x: bf16[M, N]) -> tuple[i8[M, N], f32[M, 1]]:
    values, scale = F.quantize(x, i8)
    return values, scale


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(("spec", "dtype"), [(quantized, f8e4m3), (quantized_whole, i8)], ids=["f8e4m3", "i8"])
def test_rows_with_scales_of_their_own(spec: Any, dtype: DType, vendor: str) -> None:
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(33, 1000)) * np.exp(rng.normal(size=(33, 1)) * 4)).astype(bf16.numpy)
    x[3] = 0
    values, scale = compile(spec, target=fusegen.target(vendor), on="emulator")(x)
    wide = x.astype(np.float64)
    wanted = np.maximum(np.abs(wide).max(-1, keepdims=True), 1e-12) / dtype.largest
    np.testing.assert_allclose(scale, wanted, rtol=3e-7)
    exact = wide / np.asarray(scale, np.float64)
    low, high = (np.clip(exact * (1 + side), -dtype.largest, dtype.largest) for side in (-4e-7, 4e-7))
    if dtype is i8:
        low, high = np.round(low), np.round(high)
    low, high = (np.asarray(end, np.float32).astype(dtype.numpy).astype(np.float64) for end in (low, high))
    got = np.asarray(values).astype(np.float64)
    assert ((got == low) | (got == high)).all()
    assert (np.abs(got).max(-1) == dtype.largest)[np.arange(33) != 3].all(), "a row's largest value is not the type's"
    assert (got[3] == 0).all()


@needs_compiler
def test_what_is_dequantized_is_near_what_was_quantized() -> None:
    @chain(M=33, N=1000)
    def restored(q: f8e4m3[M, N], scale: f32[M, 1]) -> f32[M, N]:
        return F.dequantize(q, scale)

    x = np.random.default_rng(5).normal(size=(33, 1000)).astype(bf16.numpy)
    values, scale = compile(quantized, H200, on="emulator")(x)
    back = compile(restored, H200, on="emulator")(np.asarray(values), np.asarray(scale))
    wide = x.astype(np.float32)
    assert (np.abs(back - wide) <= np.maximum(np.abs(wide) * 2.0**-4, scale * 2.0**-10) * 1.001).all()


@needs_compiler
@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        (A100, "fminf(fabsf(x), 448.0f)", "fabsf(x)"),  # no saturation
        (A100, " + (bits >> 20 & 1u)", ""),  # ties away from even
        (A100, "size < 0.015625f ? small", "size < 0.015625f ? 0u"),  # no subnormals
        (A100, "if (x != x) return 0x7f;", ""),  # NaN is a number
        (A100, "sign | code", "code"),
        (H200, '"f"(high), "f"(low)', '"f"(low), "f"(high)'),  # the halves of a pair swapped
        (H200, "rn.satfinite.e4m3x2", "rn.satfinite.e5m2x2"),
    ],
)
def test_a_wrong_conversion_is_found(target: Target, old: str, new: str) -> None:
    @chain(M=16, N=256)
    def spec(x: bf16[M, N], s: f32[M, 1]) -> f8e4m3[M, N]:
        return F.quantize(x, f8e4m3, s)

    made = render(plan(spec, target))
    assert old in made.text
    mutant = replace(made, text=made.text.replace(old, new))
    kernel = Kernel(mutant, None, finding.find(target, "emulator"), lambda layout: (mutant, None))
    assert not validate(kernel).ok


@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_a_cast_is_not_made_twice(target: Target) -> None:
    """A store rounds to its type."""
    text = render(plan(quantized, target)).text
    assert "f8e4m3_of(" in text or "to_f8e4m3(" in text
    assert "round_f8e4m3" not in text


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda x: F.quantize(x, f16), "quantize: to f16; it is to 8 bits or 4: f8e4m3, f8e5m2, f8e4m3fnuz,"),
        (lambda x: F.quantize(x, u8)[0], "u8 has no numbers below 0; give a scale, or quantize to i8"),
        (lambda x: F.quantize(untyped(3.0), i8), "quantize: found 3.0 where a traced value is wanted"),
        (lambda x: F.cast(x, i8, saturate=False), "cast: saturate=False, and i8 has no other number for what is"),
        (lambda x: F.bitcast(x, i32), "bitcast: f16 as i32; it is between f32, i32 and u32, and between 8-bit"),
        (lambda x: F.cast(x, untyped("f8")), "cast: 'f8' is not a dtype that values can have; use f16, bf16"),
    ],
)  # fmt: skip
def test_wrong_requests(body: Callable[[Any], Any], says: str) -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return body(x)

    with pytest.raises(SpecError, match=re.escape(says)):
        chain(M=4, N=8)(spec)


def test_another_storage_type_leaves_8_bits_alone() -> None:
    other = quantized.with_dtype(f16)
    assert [str(t.dtype) for t in (*other.graph.inputs, *other.graph.outputs)] == ["f16", "f8e4m3", "f16"]
    with pytest.raises(SpecError, match=r"arrays can't be stored as f8e4m3; pass fusegen.f16, bf16 or f32"):
        quantized.with_dtype(f8e4m3)


def test_arrays_of_8_bits_are_taken_as_they_are() -> None:
    kernel = compile(widening(f8e4m3).at(N=8), H200, on="emulator", validate=False)
    codes_ = np.arange(8, dtype=np.uint8)
    with pytest.raises(fusegen.errors.ArgumentError, match="x holds u8, and widen takes f8e4m3"):
        kernel(codes_)
    assert np.asarray(kernel(codes_.view(f8e4m3.numpy))).tolist() == [i / 512 for i in range(8)]
