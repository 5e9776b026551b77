"""Special functions over all halves and a dense sweep of f32: every value within the bound that its op states.

In the emulator the words of the hardware are as good as exact; here they are also as far off as their manuals allow.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emulator import Buffer, build
from fusegen.graph import Kind, Op
from fusegen.pipeline import compile
from fusegen.prelude import SPECIAL_FUNCTIONS
from fusegen.runtime import Kernel
from fusegen.runtime.devices import present, target_of
from fusegen.spec import Chain
from fusegen.targets import H200
from fusegen.trace import apply
from fusegen.types import DType
from fusegen.validation import analyse
from fusegen.validation.bounds import FLOOR, ULP, formula
from fusegen.validation.compare import compare, figures

(N,) = dims("N")
TORCH = {f16: "float16", bf16: "bfloat16", f32: "float32"}
Array = np.ndarray[Any, np.dtype[Any]]
OPS = [
    op for op in F.PRIMITIVES
    if op.kind is Kind.MAP and op.arity == 1 and op.takes == "float" and op.ulps > 1 and op.name[:6] != "round_"
]  # fmt: skip
MADE = [op for op in OPS if any(f"{name}(" in op.expr for name in SPECIAL_FUNCTIONS)]
# the hardware's words, off by what the PTX ISA and the CUDA guide allow beside rounding, in the direction of `s`
OFF = """
__device__ float power_of_2(float x) { return flushed(exp2((double)flushed(x)) * (1 + s * 0x1.8p-23)); }
__device__ float reciprocal(float x) { return flushed(1 / (double)flushed(x) * (1 + s * 0x1p-24)); }
__device__ float log_2(float x) {
  const double y = log2((double)flushed(x));
  return flushed(fabs(y) == INFINITY ? y : y + s * (fabs(y) < 1 ? 0x1.cp-23 : 0x1.8p-23 * fabs(y)));
}
__device__ float smaller(float a, float b) { return a < b || a != a ? a : b; }
"""


def dense(step: int) -> Array:
    """Every `step`-th f32 by its bits, and all bf16: both zeros, infinities, NaN, and the powers of two."""
    bits = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([bits, np.arange(2**16, dtype=np.uint32) << 16]).view(np.float32)


def inputs(op: Op, dtype: DType, step: int) -> Array:
    values: Array = np.arange(2**16, dtype=np.uint16).view(dtype.numpy) if dtype is not f32 else dense(step)
    if op.name == "log_of_normal":
        with np.errstate(invalid="ignore"):
            size = np.abs(values.astype(np.float64))
        values = values[~(size < 2.0**-126) | (size == 0)]
    return values


def chain_of(op: Op, dtype: DType, count: int) -> Chain:
    def spec(x):  # type: ignore[no-untyped-def]
        return apply(op.name, x)

    spec.__annotations__ = {"x": dtype[N], "return": dtype[N]}
    return chain(N=count)(spec)


def check(kernel: Kernel, x: Array, got: Array) -> None:
    """Every value of the only output is within the bound of the analysis."""
    (tensor,) = kernel.plan.graph.outputs
    (law,) = analyse(kernel.plan, [x])
    found = figures([compare(tensor, got, law, law.value)])
    assert not found.wrong, f"{found.wrong} of {found.elements} are wrong: {found.worst}"


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_half_and_a_sweep(op: Op, dtype: DType) -> None:
    x = inputs(op, dtype, 65537)
    kernel = compile(chain_of(op, dtype, len(x)), H200, on="emulator", validate=False)
    check(kernel, x, np.asarray(kernel(x)))


@pytest.mark.parametrize("direction", [-1, 1])
@pytest.mark.parametrize("op", MADE, ids=str)
def test_bounds_hold_where_the_hardware_is_as_far_off_as_it_may(op: Op, direction: int) -> None:
    bodies = {name: " ".join(special.body) for name, special in SPECIAL_FUNCTIONS.items()}
    functions = "\n".join(f"__device__ float {name}(float x) {{ {body} }}" for name, body in bodies.items())
    text = f"""#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
constexpr double s = {direction};
__device__ float flushed(double x) {{ return fabs(x) < 0x1p-126 ? copysign(0.0, x) : x; }}
{OFF}
{functions}
extern "C" __global__ void kernel(const float* xs, float* ys, int n) {{
  for (int i = threadIdx.x; i < n; i += blockDim.x) {{
    const float x = xs[i];
    ys[i] = {op.expr.format("x")};
  }}
}}
"""
    x = inputs(op, f32, 16411)
    found = np.zeros_like(x)
    kernel = build(text, "kernel", warp=32, check=False, filename="off.cu")
    buffers = [Buffer(name, a.ctypes.data, a.ctypes.data, a.nbytes) for name, a in (("xs", x), ("ys", found))]
    kernel.launch((1, 1, 1), (64, 1, 1), 0, [*buffers, ctypes.c_int(x.size)])
    with np.errstate(all="ignore"):
        exact = formula(op.ref, 1)(x.astype(np.float64))
        scale = formula(op.scale, 1)(x.astype(np.float64), out=exact)
    sure = np.isfinite(exact) & (np.abs(exact) < 0.99 * f32.largest)
    off = np.abs(found[sure] - exact[sure]) - FLOOR
    worst = np.max(off / np.maximum(ULP * np.abs(scale[sure]), 1e-300))
    assert worst <= op.ulps, f"{op}: {worst:.2f} ulp, and its entry says {op.ulps}"
    assert np.array_equal(np.isnan(found), np.isnan(exact))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_half_and_a_sweep_on_a_gpu(op: Op, dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    target = next((found for gpu in present().gpus if (found := target_of(gpu)) is not None), None)
    if target is None:
        pytest.skip("no GPU that a target fits: `fusegen doctor` says why")
    x = inputs(op, dtype, 8209)
    kernel = fusegen.compile(chain_of(op, dtype, len(x)), target=target, validate=False)
    bits = np.int16 if dtype is not f32 else np.int32
    given = torch.from_numpy(x.view(bits).copy()).cuda().view(getattr(torch, TORCH[dtype]))
    got = kernel(given).view(getattr(torch, bits.__name__)).cpu().numpy().view(dtype.numpy)
    check(kernel, x, got)
