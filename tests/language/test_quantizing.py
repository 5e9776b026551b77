"""The conventions of F.quantize, bit by bit, against plain numpy that is written from their sources."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f4e2m1, f8e4m3, f8e5m2, f8e8m0, f32, i8
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.language.types import DType
from fusegen.pipeline import compile
from fusegen.validation import validate
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N = dims("M N")
Array = np.ndarray[Any, np.dtype[Any]]
VENDORS = ("cuda:sm_80", "cuda:h200", "hip:mi300x")
LIMIT = np.float32(448)


def rounded_up(scale: Array) -> Array:
    """DeepGEMM's ceil_to_ue8m0: the exponent, and one more where there is a mantissa, as a number."""
    bits = np.abs(scale).view(np.int32)
    exponent = (bits >> 23 & 0xFF) + ((bits & 0x7FFFFF) != 0)
    found: Array = (np.clip(exponent, 1, 254).astype(np.int32) << 23).view(np.float32)
    return found


def vllm(x: Array, top: Array, least: float, powers: bool) -> tuple[Array, Array]:
    """vLLM's _per_token_group_quant_fp8: absmax, y_s, y_q; with scale_ue8m0 2^ceil(log2(y_s))."""
    scale = np.maximum(top, np.float32(least)) / LIMIT
    if powers:
        exponent = np.ceil(np.log2(np.maximum(np.abs(scale), np.float32(1e-10)).astype(np.float64)))
        scale = np.exp2(exponent).astype(np.float32)
    return np.clip(x / scale, -LIMIT, LIMIT), scale


def inverse(x: Array, top: Array, least: float, powers: bool) -> tuple[Array, Array]:
    """The reciprocal of the scale, of at least 1e-12 / 448."""
    scale = np.maximum(top, np.float32(1e-12)) / LIMIT
    scale = rounded_up(scale) if powers else scale
    return x * (np.float32(1) / scale), scale


def deepseek(x: Array, top: Array, least: float, powers: bool) -> tuple[Array, Array]:
    """DeepGEMM's per_token_cast_to_fp8: amax.clamp(1e-4), sf, x * (1 / sf)."""
    scale = np.maximum(top, np.float32(1e-4)) / LIMIT
    scale = rounded_up(scale) if powers else scale
    return x * (np.float32(1) / scale), scale


def te(x: Array, top: Array, least: float, powers: bool) -> tuple[Array, Array]:
    """TransformerEngine's compute_scale_from_amax: 1 of 0 and of what is not finite; the mantissa is masked out."""
    with np.errstate(divide="ignore"):
        up = LIMIT / top
    up = np.where(np.isinf(up), np.finfo(np.float32).max, up).astype(np.float32)
    up = np.where((top == 0) | ~np.isfinite(top), np.float32(1), up)
    if powers:
        up = (up.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return x * up, np.float32(1) / up


TEXTS: dict[str, Callable[[Array, Array, float, bool], tuple[Array, Array]]] = {
    "inverse": inverse, "vllm": vllm, "deepseek": deepseek, "te": te
}  # fmt: skip


def operand() -> Array:
    """Rows of many magnitudes, zeros, powers of 2 whose scale is exact, and the type's own limits."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(12, 512)) * np.exp(rng.normal(size=(12, 1)) * 6)
    x[0], x[1, :128], x[2, 7], x[3] = 0, 0, 448, x[3] * 1e-6
    x[4], x[5, 5] = np.clip(x[4], -1, 1) * 7, 3.0e38
    x[6] = 1e-38
    x[7], x[8, 130] = 3.5 * 2.0 ** rng.integers(-9, 9, 512), np.inf
    return x.astype(bf16.numpy)


def wanted(x: Array, per: str, rule: str, powers: bool) -> tuple[Array, Array]:
    wide = x.astype(np.float32)
    shown = wide.reshape(len(x), -1, 128) if per == "block" else wide
    top = np.abs(shown).max(axis=None if per == "tensor" else -1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        values, scale = TEXTS[rule](shown, top, 1e-10 if per == "block" else 1e-12, powers)
        codes = np.clip(values, -LIMIT, LIMIT).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(x.shape), scale[..., 0] if per == "block" else scale


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("per", ["row", "block"])
def test_bits_of_each_rule(per: str, vendor: str) -> None:
    scales = f32[M, N // 128] if per == "block" else f32[M, 1]
    cases = [(rule, powers) for rule in TEXTS for powers in (False, True)]

    def spec(x: bf16[M, N]) -> Any:
        made = [F.quantize(x, f8e4m3, per=per, rule=rule, powers=powers) for rule, powers in cases]
        return tuple(value for pair in made for value in pair)

    spec.__annotations__["return"] = tuple[tuple(t for _ in cases for t in (f8e4m3[M, N], scales))]  # type: ignore[misc]
    x = operand()
    kernel = compile(chain(M=12, N=512)(spec), fusegen.target(vendor), on="emulator", validate=False)
    got = [np.asarray(array) for array in kernel(x)]
    for (rule, powers), values, scale in zip(cases, got[::2], got[1::2], strict=True):
        codes, own = wanted(x, per, rule, powers)
        np.testing.assert_array_equal(scale, own, err_msg=f"{rule} {powers}: scales")
        both_nan = np.isnan(values.astype(np.float32)) & np.isnan(codes.astype(np.float32))
        same = (values.view(np.uint8) == codes.view(np.uint8)) | both_nan
        assert same.all(), f"{rule} {powers}: {np.argwhere(~same)[:3]}"


def per_token(x: Array, upper: float, limit: float, divided: bool) -> tuple[Array, Array]:
    """vLLM's dynamic_per_token_scaled_fp8_quant_kernel_strided: absmax, fminf with scale_ub, over the limit, fmaxf
    with min_scaling_factor; x over that. FBGEMM and `inverse` multiply by the reciprocal."""
    wide = x.astype(np.float32)
    top = np.abs(wide).max(-1, keepdims=True)
    bounded = np.where(top > np.float32(upper), np.float32(upper), top)
    floor = np.float32(1) / np.float32(limit * 512)
    scale = bounded / np.float32(limit)
    scale = np.where(scale < floor, floor, scale)
    values = wide / scale if divided else wide * (np.float32(1) / scale)
    return np.clip(values, -np.float32(limit), np.float32(limit)), scale


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_upper_bounds(vendor: str) -> None:
    """Of a number, and of one that the caller gives: rows above it are cut off at the type's ends, others are as they
    were; one below `least` gives way to it, and NaN stays NaN."""

    def spec(
        x: bf16[M, N], upper: f32
    ) -> tuple[f8e4m3[M, N], f32[M, 1], f8e5m2[M, N], f32[M, 1], f8e4m3[M, N], f32[M, 1]]:
        return (
            *F.quantize(x, f8e4m3, rule="vllm", least=1 / 512, scale_ub=upper),
            *F.quantize(x, f8e5m2, least=1 / 512, scale_ub=2),
            *F.quantize(x, f8e4m3, rule="vllm", least=1 / 512, scale_ub=1e-3),
        )

    x = operand()
    x[5, 7] = np.nan
    kernel = compile(chain(M=12, N=512)(spec), fusegen.target(vendor), on="emulator", validate=False)
    got = [np.asarray(array) for array in kernel(x, 0.37)]
    cases = [(0.37, 448.0, True, ml_dtypes.float8_e4m3fn), (2.0, 57344.0, False, ml_dtypes.float8_e5m2)]
    cases.append((1e-3, 448.0, True, ml_dtypes.float8_e4m3fn))
    for (upper, limit, divided, dtype), values, scale in zip(cases, got[::2], got[1::2], strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            wide, own = per_token(x, upper, limit, divided)
            codes = wide.astype(dtype)
        np.testing.assert_array_equal(scale, own)
        both_nan = np.isnan(values.astype(np.float32)) & np.isnan(codes.astype(np.float32))
        assert ((values.view(np.uint8) == codes.view(np.uint8)) | both_nan).all()
        assert np.nanmax(own) <= max(upper, 1 / 512) / limit, "a row is above the bound"


@needs_compiler
def test_upper_bounds_hold_validation() -> None:
    @chain(M=12, N=512)
    def bounded(x: bf16[M, N], upper: f32) -> tuple[f8e4m3[M, N], f32[M, 1]]:
        values, scale = F.quantize(x, f8e4m3, rule="vllm", scale_ub=upper)
        return values, scale

    validate(compile(bounded, fusegen.target("cuda:h200"), on="emulator", validate=False)).raise_for_error()


def mx(x: Array, limit: float) -> tuple[Array, Array]:
    """TransformerEngine's float_to_e8m0 of amax * max_norm_rcp, and exp2f_rcp: codes of scales, and scaled values."""
    shown = x.astype(np.float32).reshape(len(x), -1, 32)
    small = np.abs(shown).max(-1, keepdims=True) * (np.float32(1) / np.float32(limit))
    bits = small.view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = np.where(np.isnan(small), 0xFF, np.where(np.isinf(small), 0xFE, exponent + up)).astype(np.uint32)
    factor = np.where(code == 0, np.float32(1), ((254 - code) << 23).astype(np.uint32).view(np.float32))
    return (shown * np.where(code == 0xFF, np.nan, factor)).reshape(x.shape), code[..., 0]


def mx_floor(x: Array, limit: float) -> tuple[Array, Array]:
    """OCP Microscaling 1.0, 6.3: the largest power of 2 up to amax over that of the type's largest number."""
    shown = x.astype(np.float32).reshape(len(x), -1, 32)
    top = np.abs(shown).max(-1, keepdims=True).astype(np.float64)
    exponent = np.floor(np.log2(top)) - np.floor(np.log2(limit))
    code = np.clip(np.nan_to_num(exponent, neginf=-127.0), -127, 127) + 127
    factor = np.where(np.isfinite(top), 2.0 ** (127 - code), np.nan)
    return (shown * factor).reshape(x.shape), np.where(np.isfinite(top), code, 255)[..., 0].astype(np.uint32)


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("dtype", [f8e4m3, f8e5m2], ids=str)
@pytest.mark.parametrize(("rule", "text"), [("mx", mx), ("mx_floor", mx_floor)], ids=["mx", "mx_floor"])
@np.errstate(all="ignore")
def test_bits_of_microscaling(rule: str, text: Any, dtype: DType, vendor: str) -> None:
    def spec(x: f32[M, N]) -> Any:
        values, scale = F.quantize(x, dtype, rule=rule)
        return values, scale.T

    spec.__annotations__["return"] = tuple[dtype[M, N], f8e8m0[N // 32, M]]  # type: ignore[misc, valid-type]
    x = operand().astype(np.float32)
    x[9, :32], x[10] = np.nan, x[10] * 2.0**-120
    x[11] = np.float32(448) * 2.0 ** np.repeat(np.arange(-134, -118), 32)
    kernel = compile(chain(M=12, N=512)(spec), fusegen.target(vendor), on="emulator", validate=False)
    values, scale = (np.asarray(array) for array in kernel(x))
    wanted, own = text(x, dtype.largest)
    np.testing.assert_array_equal(scale.view(np.uint8).T, own)
    codes = np.clip(wanted.astype(np.float32), -dtype.largest, dtype.largest).astype(dtype.numpy)
    both_nan = np.isnan(values.astype(np.float32)) & np.isnan(codes.astype(np.float32))
    same = (values.view(np.uint8) == codes.view(np.uint8)) | both_nan
    assert same.all(), np.argwhere(~same)[:3]


def nibbles(values: Array) -> Array:
    """Codes of f4e2m1, two to a byte: by ml_dtypes, which saturates; 6 of NaN."""
    codes = np.where(np.isnan(values), np.float32(6), values.astype(np.float32)).astype(f4e2m1.numpy).view(np.uint8)
    found: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return found


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
@np.errstate(all="ignore")
def test_bits_of_microscaling_in_4_bits(vendor: str) -> None:
    @chain(M=12, N=512)
    def spec(x: f32[M, N]) -> tuple[f4e2m1[M, N], f8e8m0[M, N // 32], f4e2m1[M, N], f8e8m0[M, N // 32]]:
        values, scale = F.quantize(x, f4e2m1, rule="mx")
        low, below = F.quantize(x, f4e2m1, rule="mx_floor")
        return values, scale, low, below

    x = operand().astype(np.float32)
    x[9, :32] = np.nan
    got = [np.asarray(a) for a in compile(spec, fusegen.target(vendor), on="emulator", validate=False)(x)]
    for text, values, scale in zip((mx, mx_floor), got[::2], got[1::2], strict=True):
        wanted, own = text(x, 6.0)
        np.testing.assert_array_equal(scale.view(np.uint8), own)
        np.testing.assert_array_equal(values, nibbles(wanted))


def nvfp4(x: Array, whole: Any) -> tuple[Array, Array]:
    """TransformerEngine's compute_decoding_scaling_factor: block_amax * (S_enc / 6) as e4m3; x * 1 / (S_b * S_dec)."""
    encode = np.float32(1) / whole
    blocks = x.astype(np.float32).reshape(len(x), -1, 16)
    decode = np.abs(blocks).max(-1, keepdims=True) * (encode * (np.float32(1) / np.float32(6)))
    scale = np.clip(decode, -448, 448).astype(f8e4m3.numpy)
    factor = np.minimum(np.float32(1) / (scale.astype(np.float32) * whole), np.finfo(np.float32).max)
    return (blocks * factor).reshape(x.shape), scale[..., 0]


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
@np.errstate(all="ignore")
def test_bits_of_nvfp4(vendor: str) -> None:
    @chain(M=12, N=512)
    def known(x: bf16[M, N], whole: f32[1]) -> tuple[f4e2m1[M, N], f8e4m3[M, N // 16]]:
        values, scale = F.quantize(x, f4e2m1, whole, rule="nvfp4")
        return values, scale

    @chain(M=12, N=512)
    def dynamic(x: bf16[M, N]) -> tuple[f4e2m1[M, N], f8e4m3[M, N // 16], f32[1, 1]]:
        values, scale, whole = F.quantize(x, f4e2m1, rule="nvfp4")
        return values, scale, whole

    x = np.nan_to_num(operand().astype(np.float32), posinf=7e4).clip(-7e4, 7e4).astype(bf16.numpy)
    top = np.abs(x.astype(np.float32)).max()
    exact = np.float32(1) / np.minimum(np.float32(448 * 6) / top, np.finfo(np.float32).max)
    own = np.array([0.037], np.float32)
    for spec, whole, extra in ((known, own[0], (own,)), (dynamic, exact, ())):
        values, scale, *rest = compile(spec, fusegen.target(vendor), on="emulator", validate=False)(x, *extra)
        wanted, codes = nvfp4(x, whole)
        np.testing.assert_array_equal(np.asarray(scale).view(np.uint8), codes.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(values), nibbles(wanted))
        assert not rest or np.asarray(rest[0])[0, 0] == exact


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:h200", "hip:mi300x"])
def test_blocks_are_dequantized(vendor: str) -> None:
    @chain(M=5, N=512)
    def spec(x: f8e4m3[M, N], scale: f8e8m0[M, N // 32], bias: bf16[N]) -> bf16[M, N]:
        return F.dequantize(x, scale) + bias

    kernel = compile(spec, fusegen.target(vendor), on="emulator")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(5, 512)).astype(f8e4m3.numpy)
    scale = rng.integers(120, 134, (5, 16)).astype(np.uint8)
    bias = rng.normal(size=512).astype(bf16.numpy)
    got = np.asarray(kernel(x, scale.view(f8e8m0.numpy), bias)).astype(np.float64)
    exact = x.astype(np.float64) * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1) + bias.astype(np.float64)
    np.testing.assert_allclose(got, exact, rtol=2.0**-8, atol=1e-30)


@needs_compiler
def test_a_scale_for_the_tensor() -> None:
    @chain(M=12, N=512)
    def spec(x: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[1, 1]]:
        values, scale = F.quantize(x, f8e4m3, per="tensor", rule="te")
        return values, scale

    x = np.where(np.isfinite(operand().astype(np.float32)), operand(), 1).astype(bf16.numpy)
    x = np.clip(x.astype(np.float32), -100, 100).astype(bf16.numpy)
    values, scale = compile(spec, fusegen.target("cuda:h200"), on="emulator", validate=False)(x)
    codes, own = wanted(x, "tensor", "te", True)
    np.testing.assert_array_equal(scale, own)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), codes.view(np.uint8))


@chain(M=7, N=512)
def powers_of_blocks(x: bf16[M, N], gain: bf16[N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    values, scale = F.quantize(F.rmsnorm(x, gain), f8e4m3, per="block", rule="te")
    return values, scale


@needs_compiler
@pytest.mark.parametrize("vendor", ["cuda:h200", "hip:mi300x"])
def test_powers_of_two_are_validated(vendor: str) -> None:
    """A scale that errors may take to the next power is held to both."""
    validate(compile(powers_of_blocks, fusegen.target(vendor), on="emulator", validate=False)).raise_for_error()


@needs_compiler
@pytest.mark.parametrize("vendor", VENDORS)
def test_powers_next_to_a_number(vendor: str) -> None:
    @chain(M=1, N=4096)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        return F.power_of_2_above(x), F.power_of_2_below(x)

    mantissas = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF, 77], np.uint64)
    bits = np.arange(256, dtype=np.uint64)[:, None] << 23 | mantissas
    x = np.concatenate([bits.reshape(-1), bits.reshape(-1) | 1 << 31]).astype(np.uint32).view(np.float32)[None]
    above, below = compile(spec, fusegen.target(vendor), on="emulator", validate=False)(x)
    with np.errstate(invalid="ignore"):  # NaN of every kind
        wide = np.nan_to_num(x.astype(np.float64), nan=2.0**127)
    mantissa, exponent = np.frexp(np.clip(wide, 2.0**-126, 2.0**127))
    np.testing.assert_array_equal(above, np.ldexp(1.0, exponent - (mantissa == 0.5)))
    _, exponent = np.frexp(np.clip(wide, 2.0**-126, 1.9 * 2.0**127))
    np.testing.assert_array_equal(below, np.ldexp(1.0, exponent - 1))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda x: F.quantize(x, f8e4m3, per="column"), "quantize: per='column'; scales are per tensor, row or block"),
        (lambda x: F.quantize(x, f8e4m3, rule="hf"), "quantize: rule='hf' is none of inverse, vllm, deepseek, te"),
        (lambda x: F.quantize(x, f8e4m3, rule="mx", block=64), "rule='mx' is of blocks of 32; leave"),
        (lambda x: F.quantize(x, i8, rule="mx"), "rule='mx' is of floats of few bits, and i8 is none"),
        (lambda x: F.quantize(x, f8e4m3, rule="mx", powers=False), "rule='mx' has scales that are powers of 2"),
        (lambda x: F.quantize(x, f8e8m0), "quantize: to f8e8m0; it is to 8 bits or 4: f8e4m3, f8e5m2"),
        (lambda x: F.dequantize(x, x[:, :3]), "the size N // 3 does not come out even at N=256"),
        (lambda x: F.quantize(x, f8e4m3, rule="nvfp4"), "quantize: rule='nvfp4' is of f4e2m1 in blocks of 16; leave"),
        (lambda x: F.quantize(x, i8, scale_ub=0.0), "quantize: scale_ub=0.0; it is a number above 0, or traced"),
        (lambda x: F.quantize(x, f8e4m3, per="block", scale_ub=1.0), "scale_ub=1.0 of blocks; it bounds amax of a"),
        (lambda x: F.quantize(x, f4e2m1, rule="nvfp4", scale_ub=1.0), "scale_ub=1.0 of blocks; it bounds amax of a"),
        (lambda x: F.quantize(x, i8, 0.5, scale_ub=1.0), "a scale is given, and a rule to make one; leave one"),
        (lambda x: F.quantize(x, i8, 0.5, rule="te"), "a scale is given, and a rule to make one; leave one"),
        (lambda x: F.quantize(x, f8e4m3, per="block", block=0), "groups: a group has 0 elements"),
    ],
)  # fmt: skip
def test_wrong_requests(body: Callable[[Any], Any], says: str) -> None:
    def spec(x: bf16[M, N]) -> bf16[M, N]:
        return body(x)

    with pytest.raises(SpecError, match=re.escape(says)):
        chain(M=4, N=256)(spec)
