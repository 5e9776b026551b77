"""Special functions over all halves and a dense sweep of f32: every value within the bound that its op states.

In the emulator the words of the hardware are as good as exact; here they are also as far off as their manuals allow.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from types import GenericAlias
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.prelude import SPECIAL_FUNCTIONS
from fusegen.emulator import Buffer, build
from fusegen.language.graph import Kind, Op
from fusegen.language.spec import Chain
from fusegen.language.trace import OPS as OPERATIONS
from fusegen.language.trace import apply
from fusegen.language.types import DType
from fusegen.pipeline import compile
from fusegen.planner.rewrites import simplify
from fusegen.runtime import Kernel
from fusegen.runtime.finding import present, target_of
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import analyse
from fusegen.validation.bounds import FLOOR, ULP
from fusegen.validation.compare import compare, figures
from fusegen.validation.formulas import formula

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N = dims("M N")
TORCH = {f16: "float16", bf16: "bfloat16", f32: "float32"}
Array = np.ndarray[Any, np.dtype[Any]]
OPS = [
    op for op in F.PRIMITIVES
    if op.kind is Kind.MAP and op.arity == 1 and op.takes == "float" and op.ulps > 1 and op.name[:6] != "round_"
]  # fmt: skip
POWERS = (1e-3, 0.3, 1.7, 3.9, -0.6, -2.5)
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
    found: Array = values[defined(op, values)]
    return found


def defined(op: Op, values: Array) -> Any:
    """Which of them the op is for."""
    if op.name != "log_of_normal":
        return slice(None)
    with np.errstate(invalid="ignore"):
        size = np.abs(values.astype(np.float64))
    return ~(size < 2.0**-126) | (size == 0)


def chain_of(function: Callable[[Any], Any], dtype: DType, count: int) -> Chain:
    def spec(x):  # type: ignore[no-untyped-def]
        return function(x)

    spec.__annotations__ = {"x": dtype[N], "return": dtype[N]}
    return chain(N=count)(spec)


def check(kernel: Kernel, x: Array, got: Array) -> None:
    """Every value of the only output is within the bound of the analysis."""
    (tensor,) = kernel.plan.graph.outputs
    (law,) = analyse(kernel.plan, [x])
    found = figures([compare(tensor, got, law, law.value)])
    assert not found.wrong, f"{found.wrong} of {found.elements} are wrong: {found.worst}"


def chain_of_all(functions: Sequence[Callable[[Any], Any]], dtype: DType, count: int) -> Chain:
    def spec(x):  # type: ignore[no-untyped-def]
        return tuple(function(x) for function in functions)

    spec.__annotations__ = {"x": dtype[N], "return": GenericAlias(tuple, (dtype[N],) * len(functions))}
    return chain(N=count)(spec)


def check_all(kernel: Kernel, x: Array) -> None:
    """Every value of each output is within the bound of the analysis."""
    given = kernel(x)
    outputs = given if isinstance(given, tuple) else (given,)
    for tensor, got, law in zip(kernel.plan.graph.outputs, outputs, analyse(kernel.plan, [x]), strict=True):
        found = figures([compare(tensor, np.asarray(got), law, law.value)])
        assert not found.wrong, f"{tensor.name}: {found.wrong} of {found.elements} are wrong: {found.worst}"


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("part", range(3))
def test_every_half_and_a_sweep(part: int, dtype: DType) -> None:
    """A third of the ops in one kernel."""
    for normal in (False, True):
        ops = [op for op in OPS[part::3] if (op.name == "log_of_normal") is normal]
        if ops:
            x = inputs(ops[0], dtype, 65537)
            spec = chain_of_all([partial(apply, op.name) for op in ops], dtype, len(x))
            check_all(compile(spec, H200, on="emulator", validate=False), x)


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_powers_of_every_half_and_a_sweep(dtype: DType) -> None:
    x = inputs(OPS[0], dtype, 65537)
    spec = chain_of_all([partial(F.pow, exponent=exponent) for exponent in POWERS], dtype, len(x))
    kernel = compile(spec, H200, on="emulator", validate=False)
    assert kernel.source.text.count("= small_power(") >= len(POWERS)
    check_all(kernel, x)


@pytest.mark.parametrize("direction", [-1, 1])
def test_bounds_hold_where_the_hardware_is_as_far_off_as_it_may(direction: int) -> None:
    x = inputs(OPS[0], f32, 16411)
    power = OPERATIONS["small_pow"]
    found = off(direction, x, [op.expr.format("x") for op in MADE] + [f"small_power(x, {y!r}f)" for y in POWERS])
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        for op, got in zip(MADE, found, strict=False):
            exact = formula(op.ref, 1)(wide)
            known = defined(op, x)
            check_off(op, got[known], exact[known], formula(op.scale, 1)(wide, out=exact)[known])
        for exponent, got in zip(POWERS, found[len(MADE) :], strict=True):
            exact = np.power(wide, np.float64(np.float32(exponent)))
            check_off(power, got, exact, exact)


def off(direction: int, x: Array, expressions: Sequence[str]) -> Array:
    """Each expression at every x, by hardware that is as far off as it may be in that direction."""
    bodies = [(name, special.parameters, "\n".join(special.body)) for name, special in SPECIAL_FUNCTIONS.items()]
    functions = "\n".join(f"__device__ float {name}({parameters}) {{ {body} }}" for name, parameters, body in bodies)
    lines = "\n".join(f"    ys[{number} * n + i] = {text};" for number, text in enumerate(expressions))
    text = f"""#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
constexpr double s = {direction};
__device__ float flushed(double x) {{ return fabs(x) < 0x1p-126 ? copysign(0.0, x) : x; }}
{OFF}
{functions}
extern "C" __global__ void kernel(const float* xs, float* ys, int n) {{
  for (int i = threadIdx.x; i < n; i += blockDim.x) {{
    const float x = xs[i];
{lines}
  }}
}}
"""
    found = np.zeros((len(expressions), x.size), np.float32)
    kernel = build(text, "kernel", warp=32, check=False, filename="off.cu")
    buffers = [Buffer(name, a.ctypes.data, a.ctypes.data, a.nbytes) for name, a in (("xs", x), ("ys", found))]
    kernel.launch((1, 1, 1), (64, 1, 1), 0, [*buffers, ctypes.c_int(x.size)])
    return found


def check_off(op: Op, found: Array, exact: Array, scale: Array) -> None:
    sure = np.isfinite(exact) & (np.abs(exact) < 0.99 * f32.largest)
    far = np.abs(found[sure] - exact[sure]) - FLOOR
    worst = np.max(far / np.maximum(ULP * np.abs(scale[sure]), 1e-300))
    assert worst <= op.ulps, f"{op}: {worst:.2f} ulp, and its entry says {op.ulps}"
    assert np.array_equal(np.isnan(found), np.isnan(exact))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_half_and_a_sweep_on_a_gpu(op: Op, dtype: DType) -> None:
    check_on_gpu(partial(apply, op.name), dtype, inputs(op, dtype, 8209))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("exponent", POWERS)
def test_powers_of_every_half_and_a_sweep_on_a_gpu(exponent: float, dtype: DType) -> None:
    check_on_gpu(lambda x: F.pow(x, exponent), dtype, inputs(OPS[0], dtype, 8209))


def check_on_gpu(function: Callable[[Any], Any], dtype: DType, x: Array) -> None:
    torch = pytest.importorskip("torch")
    target = next((found for gpu in present().gpus if (found := target_of(gpu)) is not None), None)
    if target is None:
        pytest.skip("no GPU that a target fits: `fusegen doctor` says why")
    kernel = fusegen.compile(chain_of(function, dtype, len(x)), target=target, validate=False)
    bits = np.int16 if dtype is not f32 else np.int32
    given = torch.from_numpy(x.view(bits).copy()).cuda().view(getattr(torch, TORCH[dtype]))
    got = kernel(given).view(getattr(torch, bits.__name__)).cpu().numpy().view(dtype.numpy)
    check(kernel, x, got)


# ---------------------------------------------------------------- which function stands for a logarithm


def ops_of(function: Callable[[Any], Any], dtype: DType = f32) -> list[str]:
    """The ops of function(x) as they are planned."""

    def spec(x):  # type: ignore[no-untyped-def]
        return function(x)

    spec.__annotations__ = {"x": dtype[N], "return": f32[N]}
    once = simplify(chain(N=100)(spec).graph)
    names, again = ([n.op.name for n in made.nodes if n.op.kind is Kind.MAP] for made in (once, simplify(once)))
    assert names == again
    return names


def test_a_logarithm_of_one_and_something_is_log1p() -> None:
    assert ops_of(lambda x: F.log(1.0 + x)) == ["log1p"]
    assert ops_of(lambda x: F.log(x + 1)) == ["log1p"]
    assert ops_of(lambda x: F.log(x + 1.5)) == ["add", "log"]
    assert ops_of(lambda x: F.tanh(F.log(1.0 + F.exp(x)))) == ["exp", "tanh_log1p"]
    assert ops_of(lambda x: F.tanh(F.log1p(x)) + F.log1p(x)) == ["log1p", "tanh_log1p", "add"]


@pytest.mark.parametrize(("exponent", "op"), [(1.7, "small_pow"), (-0.5, "small_pow"), (4.5, "pow"), (-2.0, "pow")])
def test_powers_of_small_exponents(exponent: float, op: str) -> None:
    assert ops_of(lambda x: F.pow(x, exponent)) == [op]


@pytest.mark.parametrize(
    ("function", "dtype", "normal"),
    [
        (lambda x: x, f32, False),
        (lambda x: x, bf16, False),
        (lambda x: x, f16, True),
        (lambda x: F.abs(x), f16, True),
        (lambda x: x * 0.5, f16, False),
        (lambda x: F.maximum(F.abs(x), 1e-9), f32, True),
        (lambda x: F.maximum(1e-9, x), f32, True),
        (lambda x: F.maximum(x, 1e-40), f32, False),
        (lambda x: F.minimum(x, 1e-9), f32, False),
        (lambda x: F.clip(x, 1e-9, 1.0), f32, True),
        (lambda x: F.exp(x), f32, True),
        (lambda x: F.where(x > 0.0, x, 1.0), f32, False),
        (lambda x: F.where(x > 0.0, F.sqrt(x), 1.0), f32, True),
        (lambda x: F.cast(x, f16), f32, True),
        (lambda x: F.cast(x, bf16), f32, False),
        (lambda x: F.cast(F.col_index(x), f32), f32, True),
    ],
)
def test_what_is_surely_no_subnormal_number(function: Callable[[Any], Any], dtype: DType, normal: bool) -> None:
    found = ops_of(lambda x: F.log(function(x)) + x, dtype)
    assert ("log_of_normal" in found, "log" in found) == (normal, not normal)


@pytest.mark.parametrize("dtype", [f16, f32], ids=str)
@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_chains_of_logarithms_are_right(target: Target, dtype: DType) -> None:
    def spec(x):  # type: ignore[no-untyped-def]
        soft = F.log(1.0 + F.exp(x))
        return x * F.tanh(soft), soft, F.log(F.maximum(F.abs(x), 1e-9)), F.gelu(x, approximate="none")

    spec.__annotations__ = {"x": dtype[M, N], "return": GenericAlias(tuple, (dtype[M, N],) * 4)}
    compile(chain(M=3, N=1001)(spec), target, on="emulator")


def test_a_selection_by_a_logarithm_keeps_its_key() -> None:
    @chain(M=3, N=200)
    def spec(x: f32[M, N]) -> tuple[f32[M, 4], i32[M, 4]]:
        return F.topk(F.log(1.0 + F.exp(x)), 4)

    compile(spec, H200, on="emulator")
