"""The functions and types that a kernel may use, each against numpy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fusegen.emulator import Buffer, EmulatedKernel, KernelFault, build, toolchain
from fusegen.targets import MI300X, RX7900XTX, Target
from tests.programs import aligned
from tests.tools import needs_compiler

pytestmark = needs_compiler

Array = npt.NDArray[Any]
FULL = {32: "0xffffffffu", 64: "0xffffffffffffffffull"}
CUDA_HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
HIP_HEADERS = "#include <hip/hip_runtime.h>\n#include <hip/hip_fp16.h>\n#include <hip/hip_bf16.h>\n"


def run(
    body: str, *arrays: Array, warp: int = 32, threads: int = 64, before: str = "", check: bool | None = None,
    contract: bool = False,
) -> None:  # fmt: skip
    """Run `body` in one block. The arrays are a, b, c, ... in it; all may be written."""
    c_types = {
        "float32": "float", "float64": "double", "int32": "int", "uint32": "unsigned", "int64": "long long",
        "uint64": "unsigned long long", "uint16": "unsigned short", "int16": "short", "uint8": "unsigned char",
        "float16": "__half", "bfloat16": "__nv_bfloat16",
    }  # fmt: skip
    names = [chr(ord("a") + place) for place in range(len(arrays))]
    parameters = ", ".join(f"{c_types[array.dtype.name]}* {name}" for name, array in zip(names, arrays, strict=True))
    source = f'{before}extern "C" __global__ void kernel({parameters}) {{\n  const int i = threadIdx.x;\n{body}\n}}\n'
    check = toolchain.can_check() if check is None else check
    kernel = build(source, "kernel", warp=warp, check=check, filename="dialect.cu", contract=contract)
    buffers = [
        Buffer(n, array.ctypes.data, array.ctypes.data, array.nbytes) for n, array in zip(names, arrays, strict=True)
    ]
    kernel.launch((1, 1, 1), (threads, 1, 1), 0, buffers)


# --- 16-bit floats

EVERY_PATTERN = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def floats_around(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each value, each midpoint between neighbours, and the floats next to all of these: where rounding is decided."""
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    )
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 65504, 65519.996, 65520])
    return np.concatenate([points, special.astype(np.float32)])


def same_bits(got: npt.NDArray[np.uint16], want: Array) -> bool:
    nan = np.isnan(want.astype(np.float32))
    return bool(np.array_equal(got[~nan], want.view(np.uint16)[~nan])) and bool(
        np.all(np.isnan(got.view(want.dtype)[nan].astype(np.float32)))
    )


CONVERSIONS = [
    # spelling of the type, its numpy type, to float, from float, headers
    ("__half", np.float16, "__half2float({})", "__float2half_rn({})", CUDA_HEADERS),
    ("__half", np.float16, "float({})", "__float2half({})", HIP_HEADERS),
    ("_Float16", np.float16, "static_cast<float>({})", "static_cast<_Float16>({})", ""),
    ("__nv_bfloat16", ml_dtypes.bfloat16, "__bfloat162float({})", "__float2bfloat16_rn({})", CUDA_HEADERS),
    ("__hip_bfloat16", ml_dtypes.bfloat16, "__bfloat162float({})", "__float2bfloat16({})", HIP_HEADERS),
    ("__bf16", ml_dtypes.bfloat16, "static_cast<float>({})", "static_cast<__bf16>({})", ""),
]
CONVERT = """
extern "C" __global__ void convert(const unsigned short* bits, float* floats, int n,
                                   const float* from, unsigned short* to, int m) {
  const TYPE* in = reinterpret_cast<const TYPE*>(bits);
  TYPE* out = reinterpret_cast<TYPE*>(to);
  for (int i = threadIdx.x; i < n; i += blockDim.x) floats[i] = TO_FLOAT;
  for (int i = threadIdx.x; i < m; i += blockDim.x) out[i] = FROM_FLOAT;
}
"""  # fmt: skip


def check_conversion(kernel: EmulatedKernel, dtype: type[Any]) -> None:
    exact = EVERY_PATTERN.view(dtype).astype(np.float32)
    floats = np.zeros(65536, np.float32)
    source = floats_around(exact)
    rounded = np.zeros(source.size, np.uint16)
    arrays: dict[str, Array] = {"bits": EVERY_PATTERN, "floats": floats, "from": source, "to": rounded}
    buffers = {name: Buffer(name, array.ctypes.data, array.ctypes.data, array.nbytes) for name, array in arrays.items()}
    arguments = [
        buffers["bits"],
        buffers["floats"],
        ctypes.c_int(65536),
        buffers["from"],
        buffers["to"],
        ctypes.c_int(source.size),
    ]
    kernel.launch((1, 1, 1), (64, 1, 1), 0, arguments)
    np.testing.assert_array_equal(floats.view(np.uint32)[~np.isnan(exact)], exact.view(np.uint32)[~np.isnan(exact)])
    assert np.all(np.isnan(floats[np.isnan(exact)]))
    with np.errstate(over="ignore"):
        assert same_bits(rounded, source.astype(dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "to_float", "from_float", "headers"), CONVERSIONS, ids=lambda value: str(value)[:24]
)
def test_every_conversion_rounds_to_nearest_even(
    name: str, dtype: type[Any], to_float: str, from_float: str, headers: str
) -> None:
    text = (
        CONVERT.replace("TYPE", name)
        .replace("TO_FLOAT", to_float.format("in[i]"))
        .replace("FROM_FLOAT", from_float.format("from[i]"))
    )
    check_conversion(build(headers + text, "convert", warp=32, check=False, filename="convert.cu"), dtype)


def test_portable_half_conversion_is_the_same(tmp_path: Path) -> None:
    """Machines without half instructions convert by integer arithmetic."""
    text = (
        CONVERT.replace("TYPE", "__half").replace("TO_FLOAT", "float(in[i])").replace("FROM_FLOAT", "__half(from[i])")
    )
    text = f"#include <cuda_fp16.h>\n{text}\nSIMT_EXPORT(convert, (), ())\n"
    library, log = toolchain.build_kernel(
        text, entry="kernel", warp=32, check=False, cache=None, extra=["-DSIMT_PORTABLE_HALF"]
    )
    assert log is None
    check_conversion(
        EmulatedKernel(library, text, "convert", "convert.cu", warp=32, check=False, alignment=16), np.float16
    )


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "__half"), (ml_dtypes.bfloat16, "__nv_bfloat16")])
def test_short_float_arithmetic(dtype: type[Any], name: str) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(256).astype(dtype) for _ in range(2))
    out = np.zeros((8, 256), dtype)
    body = f"""  typedef {name} T;
      for (int j = i; j < 256; j += blockDim.x) {{
        T x = a[j], y = b[j];
        c[j] = x + y; c[256 + j] = x - y; c[512 + j] = __hmul(x, y); c[768 + j] = x / y;
        c[1024 + j] = __hfma(x, y, x); c[1280 + j] = -x; c[1536 + j] = __hmax(x, y);
        c[1792 + j] = x < y ? x : __habs(y);
      }}"""
    run(body, x, y, out, before=CUDA_HEADERS)
    wide = [value.astype(np.float64) for value in (x, y)]
    want = [wide[0] + wide[1], wide[0] - wide[1], wide[0] * wide[1], wide[0] / wide[1], wide[0] * wide[1] + wide[0],
            -wide[0], np.maximum(*wide), np.where(wide[0] < wide[1], wide[0], abs(wide[1]))]  # fmt: skip
    for got, exact in zip(out, want, strict=True):
        # numpy rounds float64 to float16 once, ml_dtypes goes through float32, which for these values is the same
        np.testing.assert_array_equal(
            got, exact.astype(np.float32).astype(dtype) if dtype is not np.float16 else exact.astype(dtype)
        )


def test_pairs_of_halves() -> None:
    out = np.zeros(8, np.float32)
    run("""  __half2 p = __floats2half2_rn(1.5f, -2.0f);
      float2 f = __half22float2(__hadd2(p, __half2half2(__float2half(1.0f))));
      __nv_bfloat162 q = __floats2bfloat162_rn(3.0f, 4.0f);
      float2 g = __bfloat1622float2(__hmul2(q, q));
      if (i == 0) {
        a[0] = f.x; a[1] = f.y; a[2] = g.x; a[3] = g.y; a[4] = __low2float(p); a[5] = __high2float(p);
        a[6] = sizeof(p) + alignof(__half2); a[7] = __half_as_ushort(p.x);
      }""", out, before=CUDA_HEADERS)  # fmt: skip
    assert out.tolist() == [2.5, -1.0, 9.0, 16.0, 1.5, -2.0, 8.0, 0x3E00]


# --- mathematics

ONE_ARGUMENT: dict[str, Callable[..., Any]] = {
    "expf": np.exp, "exp2f": np.exp2, "expm1f": np.expm1, "logf": np.log, "log2f": np.log2, "log1pf": np.log1p,
    "log10f": np.log10, "sinf": np.sin, "cosf": np.cos, "tanhf": np.tanh, "sqrtf": np.sqrt, "fabsf": np.abs,
    "floorf": np.floor, "ceilf": np.ceil, "truncf": np.trunc, "rintf": np.rint, "cbrtf": np.cbrt,
    "roundf": lambda x: np.sign(x) * np.floor(abs(x) + 0.5),
    "erff": np.vectorize(math.erf), "erfcf": np.vectorize(math.erfc),
    "rsqrtf": lambda x: 1 / np.sqrt(x), "__expf": np.exp, "__logf": np.log, "__frcp_rn": lambda x: 1 / x,
    "__fsqrt_rn": np.sqrt, "normcdff": lambda x: 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2)), "exp": np.exp,
    "sqrt": np.sqrt, "fabs": np.abs, "tanh": np.tanh, "__saturatef": lambda x: np.clip(x, 0, 1),
    "__builtin_amdgcn_rcpf": lambda x: 1 / x, "__builtin_amdgcn_exp2f": np.exp2, "exp10f": lambda x: 10.0**x,
}  # fmt: skip
TWO_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "powf": np.power, "fmaxf": np.fmax, "fminf": np.fmin, "fmodf": np.fmod, "copysignf": np.copysign,
    "atan2f": np.arctan2,
    "__fdividef": np.divide, "max": np.fmax, "min": np.fmin, "hypotf": np.hypot, "__fmul_rn": np.multiply,
}  # fmt: skip


def test_mathematics() -> None:
    positive = np.array([0.1, 0.5, 1.0, 1.5, 2.25, 3.0, 10.0, 0.7071], np.float32)
    other = np.array([0.3, -1.5, 2.0, 2.5, -0.5, 3.0, 0.25, 1.0], np.float32)
    out = np.zeros((len(ONE_ARGUMENT) + len(TWO_ARGUMENTS), 8), np.float32)
    lines = [f"c[{8 * row} + i] = {name}(a[i]);" for row, name in enumerate(ONE_ARGUMENT)]
    lines += [f"c[{8 * (row + len(ONE_ARGUMENT))} + i] = {name}(a[i], b[i]);" for row, name in enumerate(TWO_ARGUMENTS)]
    run("\n".join(lines), positive, other, out, threads=8)
    wide = positive.astype(np.float64), other.astype(np.float64)
    for row, (name, meaning) in enumerate((ONE_ARGUMENT | TWO_ARGUMENTS).items()):
        want = meaning(*wide[: 1 if row < len(ONE_ARGUMENT) else 2])
        np.testing.assert_allclose(out[row], want, rtol=5e-7, atol=1e-7, err_msg=name)


def test_special_values() -> None:
    out = np.zeros(16, np.float32)
    run("""  if (i == 0) {
        float inf = __int_as_float(0x7f800000), nan = __int_as_float(0x7fffffff);
        a[0] = isnan(nan) + 2 * isnan(inf); a[1] = isinf(-inf) + 2 * isinf(1.0f);
        a[2] = isfinite(1.0f) + 2 * isfinite(nan);
        a[3] = fmaxf(nan, 1.0f); a[4] = fminf(1.0f, nan); a[5] = expf(-inf); a[6] = expf(inf); a[7] = max(nan, 2.0f);
        a[8] = __float2int_rn(2.5f); a[9] = __float2int_rn(3.5f); a[10] = __float2int_rn(1e20f);
        a[11] = __float2int_rn(nan);
        a[12] = __float2int_rz(-2.7f); a[13] = 1e-45f * 1.0f != 0.0f; a[14] = fmaf(3.0f, 4.0f, 5.0f);
        a[15] = rintf(-0.5f);
      }""", out)  # fmt: skip
    assert out.tolist() == [1, 1, 1, 1, 1, 0, np.inf, 2, 2, 4, 2147483648.0, 0, -2, 1, 17, 0]
    assert np.signbit(out[15])


@pytest.mark.parametrize("contract", [False, True])
def test_products_and_sums_are_fused_where_the_text_or_the_build_says_so(contract: bool) -> None:
    """And rounded intrinsics never are."""
    x = np.array([1 + 2.0**-12], np.float32)
    out = np.zeros(4, np.float32)
    for check in (False, toolchain.can_check()):
        run("""  float rounded = __fmul_rn(a[0], a[0]);
          if (i == 0) {
            b[0] = __fadd_rn(a[0] * a[0], -rounded);
            b[1] = __fmul_rn(a[0], a[0]) - rounded;
            b[2] = fmaf(a[0], a[0], -rounded);
            b[3] = a[0] * a[0] - rounded;
          }""", x, out, check=check, contract=contract)  # fmt: skip
        assert out.tolist() == [0, 0, 2.0**-24, 2.0**-24 if contract else 0]


def test_bits_and_integers() -> None:
    out = np.zeros(24, np.int64)
    run("""  if (i == 0) {
        a[0] = __popc(0xf0f0u); a[1] = __popcll(~0ull); a[2] = __ffs(8); a[3] = __ffs(0); a[4] = __clz(1);
        a[5] = __clz(0);
        a[6] = __brev(1u); a[7] = __float_as_int(1.0f); a[8] = __float_as_uint(-1.0f); a[9] = min(-1, 2);
        a[10] = max(-1, 2);
        a[11] = max(1u, 2); a[12] = min(1ll, -5ll); a[13] = __byte_perm(0x33221100u, 0x77665544u, 0x7401u);
        a[14] = __mulhi(1 << 30, 8); a[15] = __umulhi(1u << 31, 8u); a[16] = abs(-4); a[17] = __clzll(1);
        a[18] = __funnelshift_l(0x80000000u, 1u, 1);
        a[19] = sizeof(float3) + 100 * alignof(float4) + 10000 * sizeof(short4);
        a[20] = sizeof(size_t); a[21] = make_int4(1, 2, 3, 4).w; a[22] = int(fabsf(-3.0f)); a[23] = dim3(4).y;
      }""", out)  # fmt: skip
    assert out.tolist() == [
        8, 64, 4, 0, 31, 32, 1 << 31, 0x3F800000, 0xBF800000, -1, 2,
        2, -5, 0x77440011, 2, 4, 4, 63,
        3, 12 + 1600 + 80000, 8, 4, 3, 1,
    ]  # fmt: skip


# --- warps


@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize("width", [4, 32])
def test_shuffles(warp: int, width: int) -> None:
    out = np.zeros((8, 128), np.int32)
    full = FULL[warp]
    body = f"""
      a[i] = __shfl_sync({full}, i, 5, {width}); a[128 + i] = __shfl_up_sync({full}, i, 1, {width});
      a[256 + i] = __shfl_down_sync({full}, i, 3, {width}); a[384 + i] = __shfl_xor_sync({full}, i, 2, {width});
      a[512 + i] = __shfl(i, i + 1, {width}); a[640 + i] = __shfl_up(i, 2u, {width});
      a[768 + i] = __shfl_down(i, 1u, {width}); a[896 + i] = __shfl_xor(i, 3, {width});"""
    run(body, out, warp=warp, threads=128)
    lane = np.arange(128)
    base, inside = lane // width * width, lane % width
    want = [base + 5 % width, np.where(inside >= 1, lane - 1, lane), np.where(inside + 3 < width, lane + 3, lane),
            lane ^ 2, base + (lane % warp + 1) % width, np.where(inside >= 2, lane - 2, lane),
            np.where(inside + 1 < width, lane + 1, lane), lane ^ 3]  # fmt: skip
    for row in range(8):
        np.testing.assert_array_equal(out[row], want[row], err_msg=str(row))


def test_maxima_of_ieee_754_keep_a_nan_and_know_negative_zero() -> None:
    numbers = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan], np.float32)
    a, b = (aligned(each.ravel()) for each in np.meshgrid(numbers, numbers))
    most, least = aligned(np.zeros(49, np.float32)), aligned(np.zeros(49, np.float32))
    calls = [f"__builtin_elementwise_{name}(a[i], b[i])" for name in ("maximum", "minimum")]
    run(f"if (i < 49) c[i] = {calls[0]}, d[i] = {calls[1]};", a, b, most, least, warp=64)
    for got, want, zero in ((most, np.maximum(a, b), 0.0), (least, np.minimum(a, b), -0.0)):
        np.testing.assert_array_equal(got, want)
        different = (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))
        assert (np.signbit(got[different]) == np.signbit(zero)).all()


@pytest.mark.parametrize("of", [MI300X, RX7900XTX], ids=str)
def test_a_partner_is_found_by_dpp_and_swizzle(of: Target) -> None:
    """What HIP's spelling makes of each step, against the shuffle that it stands for. Of RDNA, 16 apart lanes are found
    by v_permlanex16_b32."""
    steps = of.warp.bit_length() - 1
    out = np.zeros((6, 64), np.float32)
    lines = "\n".join(of.spelling.functions["partner"])
    calls = "".join(f"a[{64 * place} + i] = partner(i + 0.5f, {1 << place});\n" for place in range(steps))
    run(calls, out, warp=of.warp, before=f"__device__ float partner(float v, int step) {{\n{lines}\n}}\n")
    for place in range(steps):
        np.testing.assert_array_equal(out[place], (np.arange(64) ^ 1 << place) + 0.5)


def test_lanes_of_the_other_16_are_named_by_digits() -> None:
    """v_permlanex16_b32: of two words, one for each half of 16 lanes; the lanes of the other 16 are meant."""
    low, high = 0x01234567, 0xFEDC3210
    out = np.zeros(64, np.int32)
    run(f"a[i] = __builtin_amdgcn_permlanex16(0, i, {low:#x}, {high:#x}, false, false);", out, warp=32)
    digits = [low >> 4 * n & 15 for n in range(8)] + [high >> 4 * n & 15 for n in range(8)]
    lanes = np.arange(64)
    np.testing.assert_array_equal(out, (lanes ^ 16) // 16 * 16 + np.array(digits)[lanes % 16])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("__builtin_amdgcn_update_dpp(0, i, 0x111, 0xf, 0xf, true)", "DPP of control 0x111"),  # row_shr: lanes go empty
        ("__builtin_amdgcn_update_dpp(0, i, 0x128, 0xa, 0xf, true)", "rows 0xa"),
        ("__builtin_amdgcn_ds_swizzle(i, 0x80b1)", "ds_swizzle_b32 of pattern 0x80b1"),
        ("__builtin_amdgcn_permlanex16(0, i, 0u, 0u, false, false)", "v_permlanex16_b32 is of RDNA"),
    ],
)
def test_exchanges_between_lanes_that_are_not_modelled_are_refused(call: str, said: str) -> None:
    with pytest.raises(KernelFault, match=said):
        run(f"a[i] = {call};", np.zeros(64, np.int32), warp=64)


@pytest.mark.parametrize("warp", [32, 64])
def test_shuffles_of_every_type(warp: int) -> None:
    out = np.zeros((6, 64), np.float64)
    full = FULL[warp]
    run(
        f"""
      a[i] = __shfl_xor_sync({full}, i + 0.5, 1);
      a[64 + i] = __shfl_xor_sync({full}, i + (1ll << 40), 1);
      a[128 + i] = __half2float(__shfl_xor_sync({full}, __float2half(i), 1));
      a[192 + i] = __half22float2(__shfl_xor_sync({full}, __floats2half2_rn(i, 0.0f), 1)).x;
      a[256 + i] = __shfl_xor_sync({full}, (unsigned char)i, 1);
      a[320 + i] = __shfl_xor_sync({full}, i + 0.0f, 1);""",
        out,
        warp=warp,
        before=CUDA_HEADERS,
    )
    neighbour = np.arange(64) ^ 1
    for row, offset in enumerate([0.5, 2**40, 0, 0, 0, 0]):
        np.testing.assert_array_equal(out[row], neighbour + offset)


def signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


@pytest.mark.parametrize("warp", [32, 64])
def test_votes(warp: int) -> None:
    out = np.zeros((9, 64), np.int64)
    full = FULL[warp]
    run(
        f"""
      a[i] = __ballot_sync({full}, i % 3 == 0); a[64 + i] = __any_sync({full}, i == 1);
      a[128 + i] = __all_sync({full}, i < 64);
      a[192 + i] = __ballot(i % 2); a[256 + i] = __any(0); a[320 + i] = __all(i != 3); a[384 + i] = __activemask();
      a[448 + i] = __popcll(__match_any_sync({full}, i % 4)); a[512 + i] = __reduce_add_sync({full}, i);""",
        out,
        warp=warp,
    )
    for start in range(0, 64, warp):
        lanes = np.arange(start, start + warp)
        bits = [1 << int(lane - start) for lane in lanes]
        every_third = signed(sum(bit for bit, lane in zip(bits, lanes, strict=True) if lane % 3 == 0))
        odd = signed(sum(bit for bit, lane in zip(bits, lanes, strict=True) if lane % 2))
        want = [every_third, 1 in lanes, 1, odd, 0, 3 not in lanes, signed(sum(bits)), warp // 4, lanes.sum()]
        assert np.all(out[:, lanes] == np.array(want, np.int64)[:, None])


@pytest.mark.parametrize("warp", [32, 64])
def test_operations_without_a_mask_take_the_lanes_that_arrive_together(warp: int) -> None:
    """As on a machine that runs a warp in lock step: in a branch, and in a loop that lanes leave one after another."""
    out = np.zeros((3, 64), np.int32)
    run("""
      const int lane = i % warpSize;
      if (lane < 16) a[i] = __popcll(__ballot(1));
      else a[i] = -__popcll(__ballot(1));
      int rounds = 0;
      for (int step = 0; step < lane % 4 + 1; ++step) rounds += __popcll(__ballot(1));
      a[64 + i] = rounds;
      if (lane < 8) a[128 + i] = __shfl_down(lane, 4u, 8);""", out, warp=warp)  # fmt: skip
    lane = np.arange(64) % warp
    assert np.array_equal(out[0], np.where(lane < 16, 16, 16 - warp))
    quarter = warp // 4
    assert np.array_equal(out[1], np.array([4, 7, 9, 10])[lane % 4] * quarter)
    assert np.array_equal(out[2], np.where(lane < 8, np.where(lane < 4, lane + 4, lane), 0))


@pytest.mark.parametrize("warp", [32, 64])
def test_explicit_masks_split_a_warp(warp: int) -> None:
    out = np.zeros(64, np.int32)
    low = "0xffffu" if warp == 32 else "0xffffffffull"
    high = "0xffff0000u" if warp == 32 else "0xffffffff00000000ull"
    run(f"""
      const int half = warpSize / 2;
      if (i % warpSize < half) {{ a[i] = __shfl_xor_sync({low}, i, 1); __syncwarp({low}); }}
      else {{ a[i] = __shfl_xor_sync({high}, i, 2); __syncwarp({high}); }}""", out, warp=warp)  # fmt: skip
    lane = np.arange(64)
    assert np.array_equal(out, np.where(lane % warp < warp // 2, lane ^ 1, lane ^ 2))


def test_block_votes() -> None:
    out = np.zeros((3, 64), np.int32)
    run("a[i] = __syncthreads_count(i < 10); a[64 + i] = __syncthreads_or(i == 63); "
        "a[128 + i] = __syncthreads_and(i < 63);", out)  # fmt: skip
    assert np.all(out == np.array([10, 1, 0])[:, None])


# --- memory


def test_atomics_of_every_kind() -> None:
    ints = np.array([0, 0, 1000, 7, 0, 0xFF, 0, 0, 5, 0], np.int32)
    unsigned = np.zeros(4, np.uint32)
    wide = np.zeros(3, np.uint64)
    floats = np.zeros(2, np.float32)
    run("""
      atomicAdd(a, i); atomicMax(a + 1, i); atomicMin(a + 2, i); atomicExch(a + 3, 9); atomicOr(a + 4, 1 << (i % 8));
      atomicAnd(a + 5, ~(1 << (i % 4))); atomicXor(a + 6, i); atomicSub(a + 7, 1); atomicCAS(a + 8, 5, 6);
      atomicInc(b, 9u); atomicMax(b + 1, unsigned(i)); atomicAdd(c, 1ull << 33); atomicAdd(d, 0.5f);
      atomicExch(d + 1, 2.0f);""",
        ints, unsigned, wide, floats)  # fmt: skip
    assert ints.tolist()[:9] == [2016, 63, 0, 9, 255, 0xF0, 0, -64, 6]
    assert unsigned.tolist()[:2] == [64 % 10, 63]
    assert wide[0] == 64 << 33
    assert floats.tolist() == [32.0, 2.0]


def test_atomics_between_workers() -> None:
    source = 'extern "C" __global__ void count(int* total, float* sum) { atomicAdd(total, 1); atomicAdd(sum, 1.0f); }'
    kernel = build(source, "count", warp=32, check=False, filename="count.cu")
    total, sum_ = np.zeros(1, np.int32), np.zeros(1, np.float32)
    buffers = [
        Buffer(name, array.ctypes.data, array.ctypes.data, 4) for name, array in (("total", total), ("sum", sum_))
    ]
    kernel.launch((200, 1, 1), (128, 1, 1), 0, buffers, workers=4)
    assert total[0] == sum_[0] == 25600


def test_hinted_loads_and_stores() -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64 * 4, np.float32)
    run("""  __stcs(b + i, __ldg(a + i)); __stcg(b + 64 + i, __ldcs(&a[i])); b[128 + i] = __ldcg(a + i);
      __builtin_nontemporal_store(__builtin_nontemporal_load(a + i), b + 192 + i);""", x, y)  # fmt: skip
    assert np.array_equal(y, np.tile(x, 4))


def test_copies() -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    run("  int v[2]; if (i < 32) { memcpy(v, a + 2 * i, sizeof(v)); memset(b + 2 * i, 255, 4); "
        "memcpy(b + 2 * i + 1, v, 4); }", x, y)  # fmt: skip
    assert np.array_equal(y, np.where(np.arange(64) % 2, np.arange(64) - 1, -1))


def test_printf_and_clock(capfd: pytest.CaptureFixture[str]) -> None:
    out = np.zeros(1, np.int64)
    run('  if (i == 3) { printf("thread %d of %s: %.2f\\n", i, "block", 1.5); a[0] = clock64(); }', out)
    assert capfd.readouterr().out == "thread 3 of block: 1.50\n"
    assert out[0] > 0


def test_everyday_decorations_compile() -> None:
    out = np.zeros(64, np.float32)
    before = """
    template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec { T at[N]; };
    template <int N, typename T> __device__ __forceinline__ Vec<T, N> load(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p); }
    static __device__ __noinline__ float twice(float x) { return 2.0f * x; }
    __host__ __device__ constexpr int square(int x) { return x * x; }
    namespace detail { inline __device__ float half_of(const float* __restrict__ x) { return *x / 2; } }
    enum class Kind { plain };
    """  # fmt: skip
    run(
        """
      static_assert(sizeof(Vec<float, 4>) == 16, "sizes");
      __shared__ alignas(16) float tile[64];
      tile[i] = 1.0f;
      __syncthreads();
      float sum = 0.0f;
      if (__builtin_expect(i < 64, 1)) {
        const Vec<float, 4> v = load<4>(tile + i / 4 * 4);
        #pragma unroll
        for (int j = 0; j < 4; ++j) sum += v.at[j];
      }
      auto add = [&](float x) { return x + sum; };
      __builtin_assume(blockDim.x == 64);
      a[i] = add(twice(square(2))) + detail::half_of(tile) + static_cast<float>(Kind::plain);""",
        out,
        before=before,
    )
    assert np.all(out == 12.5)


def test_hinted_loads_and_stores_of_vectors() -> None:
    x, y, z = (aligned(np.full(64, value, np.float32)) for value in (1.5, 0, 0))
    x[:] = np.arange(64)
    run("""  if (i < 16) {
      float4 v = __ldcs(reinterpret_cast<const float4*>(a) + i);
      __stcs(reinterpret_cast<float4*>(b) + i, v);
      __stcg(reinterpret_cast<uint4*>(c) + i, __ldcg(reinterpret_cast<const uint4*>(a) + i));
    }""", x, y, z)  # fmt: skip
    assert np.array_equal(x, y)
    assert np.array_equal(x, z)
