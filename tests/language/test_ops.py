"""Every op: its numpy meaning against an independent one, its edge cases, and its kernel in the emulator.

Tests iterate over the table, so a new op is tested the moment it exists.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i8, i32, u8, u32
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.language.graph import Kind, Op
from fusegen.language.reference import load_reference, reference, reference_source
from fusegen.language.spec import Chain
from fusegen.language.trace import apply
from fusegen.language.types import F8, DType, TensorType
from fusegen.pipeline import compile
from fusegen.targets import H200, Target
from fusegen.validation.running import running_product_error

M, N = dims("M N")
INF = math.inf
NAN = math.nan
MAPS = [op for op in F.PRIMITIVES if op.kind is Kind.MAP]
REDUCES = [op for op in F.PRIMITIVES if op.kind is Kind.REDUCE]

# the meaning of each op once more, by Python's math where numpy spells the reference
INDEPENDENT: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": lambda a: math.fabs(a),
    "square": lambda a: math.pow(a, 2),
    "maximum": lambda a, b: a if a >= b else b,
    "minimum": lambda a, b: a if a <= b else b,
    "pow": lambda a, b: math.pow(a, b),
    "small_pow": lambda a, b: math.exp(b * math.log(a)),
    "exp": math.exp,
    "exp2": lambda a: math.pow(2, a),
    "expm1": lambda a: 2 * math.sinh(a / 2) * math.exp(a / 2),
    "log2": lambda a: math.log(a) / math.log(2),
    "sin": lambda a: cmath.exp(1j * a).imag,
    "cos": lambda a: cmath.exp(1j * a).real,
    "floor": lambda a: a - a % 1,
    "ceil": lambda a: a + -a % 1,
    "trunc": lambda a: math.modf(a)[1],
    "round": lambda a: float(round(a)),
    "sign": lambda a: math.copysign(1, a) if a else 0,
    "fmod": math.fmod,
    "floor_div": lambda a, b: (a - a % b) / b if b else 0,
    "mod": lambda a, b: math.fmod(a, b) if b else 0,
    "isnan": lambda a: math.isnan(a),
    "isinf": lambda a: math.isinf(a),
    "isfinite": lambda a: math.isfinite(a),
    "log": math.log,
    "log1p": math.log1p,
    "log_of_normal": math.log,
    "tanh_log1p": lambda a: 1 - 2 / ((1 + a) ** 2 + 1),
    "sqrt": math.sqrt,
    "rsqrt": lambda a: a**-0.5,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda a: 0.5 * (1 + math.tanh(a / 2)),
    "relu": lambda a: (a + abs(a)) / 2,
    "silu": lambda a: a * 0.5 * (1 + math.tanh(a / 2)),
    "gelu_erf": lambda a: a * 0.5 * math.erfc(-a / math.sqrt(2)),
    "gelu_tanh": lambda a: a / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "to_f32": float,
    "to_i32": math.trunc,
    "to_u32": lambda a: max(0, math.trunc(a)),
    "to_b8": bool,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "bit_and": lambda a, b: a & b,
    "bit_or": lambda a, b: a | b,
    "bit_xor": lambda a, b: a ^ b,
    "bit_not": lambda a: -1 - a,
    "shift_left": lambda a, b: a * 2**b,
    "shift_right": lambda a, b: a // 2**b,
    "power_of_2_above": lambda a: 2.0 ** math.ceil(math.log2(a)) if a > 0 else 2.0**-126,
    "power_of_2_below": lambda a: 2.0 ** math.floor(math.log2(a)) if a > 0 else 2.0**-126,
    "to_unit": lambda a: int(a) % 2**32 // 256 / 2**24,
}
SPECIAL = {"where", "logical_and", "logical_or", "logical_not", "round_f16", "round_bf16"}  # tested by name below
EACH_F8 = ("round_{}", "overflow_{}", "code_of_{}", "{}_of_code")
SPECIAL |= {name.format(dtype) for dtype in F8 for name in EACH_F8}  # and in test_narrow.py
SPECIAL |= {"to_i8", "to_u8", "bits_of_f32", "f32_of_bits"}
SPECIAL |= {"round_f4e2m1", "code_of_f4e2m1", "f4e2m1_of_code", "to_i4", "to_u4"}  # in test_packing.py
SPECIAL |= {"philox"}  # in test_random.py
POSITIVE = {"log", "log1p", "log_of_normal", "tanh_log1p", "sqrt", "rsqrt", "pow", "small_pow", "log2"}


def test_every_op_has_an_independent_meaning() -> None:
    assert {op.name for op in MAPS} == set(INDEPENDENT) | SPECIAL


@pytest.mark.parametrize("op", [op for op in MAPS if op.name in INDEPENDENT], ids=str)
def test_numpy_meaning(op: Op, rng: np.random.Generator) -> None:
    arguments: list[np.ndarray[Any, Any]] = [rng.normal(size=200) * 3 for _ in range(op.arity)]
    if op.name in POSITIVE:
        arguments[0] = np.abs(arguments[0]) + 0.1
    if op.name in ("pow", "small_pow"):
        arguments[1] = np.full(200, 1.7)
    if op.takes == "int":
        arguments = [rng.integers(0, 20, 200, dtype=np.int32) for _ in range(op.arity)]
    elif op.result is b8:
        arguments[-1][::3] = arguments[0][::3] if op.arity == 2 else 0.0
        if op.arity == 1:
            arguments[0][1:4] = NAN, INF, -INF
    module = {"np": np, "erf": np.vectorize(math.erf)}
    text = op.ref.format(*(f"a{i}" for i in range(op.arity)), out="out")
    with np.errstate(divide="ignore"):
        found = eval(text, {**module, **{f"a{i}": a for i, a in enumerate(arguments)}})
    wanted = np.array([INDEPENDENT[op.name](*row) for row in zip(*arguments, strict=True)])
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


def one(chain: Chain, *arrays: Any) -> Any:
    return reference(chain.graph)(*arrays)


def test_maximum_and_minimum_keep_nan() -> None:
    @chain(M=1, N=4)
    def spec(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, 1], f32[M, 1]]:
        return F.maximum(x, y), F.minimum(x, y), F.max(x), F.min(y)

    x, y = np.array([[NAN, 1.0, -INF, 0.0]]), np.array([[1.0, 2.0, 3.0, INF]])
    top, low, row_top, row_low = one(spec, x, y)
    np.testing.assert_array_equal(top, [[NAN, 2, 3, INF]])
    np.testing.assert_array_equal(low, [[NAN, 1, -INF, 0]])
    assert math.isnan(row_top[0, 0])
    assert row_low[0, 0] == 1


def test_softmax_of_fully_masked_row_is_zero_and_nan_stays_in_its_row() -> None:
    @chain(M=4, N=3)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        return F.softmax(x), F.log_softmax(x)

    x = np.array([[-INF, -INF, -INF], [0.0, -INF, 0.0], [NAN, 1.0, 2.0], [1000.0, 1000.0, -1000.0]])
    p, log_p = one(spec, x)
    np.testing.assert_array_equal(p, [[0, 0, 0], [0.5, 0, 0.5], [NAN] * 3, [0.5, 0.5, 0]])
    np.testing.assert_allclose(log_p[1], [math.log(0.5), -INF, math.log(0.5)])
    np.testing.assert_array_equal(log_p[0], [-INF] * 3)
    assert np.isnan(log_p[2]).all()


def test_layernorm_and_rmsnorm_by_hand() -> None:
    @chain(M=1, N=4)
    def spec(x: f32[M, N], g: f32[N], b: f32[N]) -> tuple[f32[M, N], f32[M, N], f32[M, 1]]:
        return F.layernorm(x, g, b, eps=0.25), F.rmsnorm(x, g, eps=0.5), F.var(x)

    x, g, b = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([1.0, 2.0, 1.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0])
    y, r, v = one(spec, x, g, b)
    np.testing.assert_allclose(y, (x - 2.5) / math.sqrt(1.25 + 0.25) * g + b)
    np.testing.assert_allclose(r, x / math.sqrt(7.5 + 0.5) * g)
    np.testing.assert_allclose(v, [[1.25]])


def test_causal_counts_from_the_rows_own_axis() -> None:
    B, S = dims("B S")

    @chain(B=2, S=3, N=4)
    def spec(x: f32[B, S, N]) -> f32[B, S, N]:
        return F.causal(x, offset=1)

    found = one(spec, np.zeros((2, 3, 4)))
    np.testing.assert_array_equal(found[1] == 0, np.tril(np.ones((3, 4)), 1) == 1)


def test_casts_round_to_the_storage_type() -> None:
    @chain(M=1, N=3)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], i32[M, N], b8[M, N]]:
        return F.cast(x, f16), F.cast(x, bf16), F.cast(x, i32), F.cast(x, b8)

    half, brain, whole, truth = one(spec, np.array([[1.0 + 2**-11, -2.75, 0.0]]))
    np.testing.assert_array_equal(half, [[1.0, -2.75, 0.0]])
    np.testing.assert_array_equal(brain, [[1.0, -2.75, 0.0]])
    np.testing.assert_array_equal(whole, [[1, -2, 0]])
    np.testing.assert_array_equal(truth, [[True, True, False]])


def test_powers_become_products() -> None:
    def kinds(exponent: float) -> list[str]:
        @chain(N=4)
        def spec(x: f32[N]) -> f32[N]:
            return x**exponent + 0.0

        return [n.op.name for n in spec.graph.nodes if n.op.kind is Kind.MAP]

    assert kinds(2) == ["square", "add"]
    assert kinds(0.5) == ["sqrt", "add"]
    assert kinds(3) == ["square", "mul", "add"]
    assert kinds(-1) == ["div", "add"]
    assert kinds(1.5) == ["pow", "add"]


@pytest.mark.parametrize("doc", [r"a \ne b, \xi and \u, \N", 'said """so""" and """" so', "ends in \\", 'ends in "'])
def test_a_docstring_is_only_text_to_the_reference(doc: str) -> None:
    @chain(M=2, N=3)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return x + 1.0

    source = reference_source(replace(spec.graph, doc=doc))
    module: dict[str, Any] = {}
    exec(source, module)
    assert f"\n\n{doc}\n\n" in module["__doc__"]


def test_reference_stands_alone_and_reads() -> None:
    @chain(M=2, N=3)
    def spec(x: bf16[M, N], lambda_: f32) -> f32[M, N]:
        """A value named like a keyword, an erf, a rounding point."""
        bool = F.gelu(x, approximate="none")
        return F.cast(bool, bf16) * lambda_

    source = reference_source(spec.graph)
    assert "import math" in source
    assert "from ml_dtypes import bfloat16" in source
    assert "bool_ = " in source
    found = load_reference(source, "spec")(np.ones((2, 3)), 2.0)
    np.testing.assert_allclose(found, 0.83984375 * 2)


# ---------------------------------------------------------------- every op as a kernel, validated on its own


X, Y = {"x": f32[M, N]}, {"x": f32[M, N], "y": f16[M, N]}
WHOLE, BOTH, SIGNS = {"x": i32[M, N]}, {"x": i32[M, N], "y": i32[M, N]}, {"x": b8[M, N], "y": b8[N]}

# what ops of a form take, what they give, and an op's value of that; ops of one form can stand in one chain
Form = tuple[dict[str, Any], TensorType, Callable[..., Any]]
FORMS: dict[str, Form] = {
    "unary": (X, f32[M, N], lambda op, x: apply(op.name, x)),
    "binary": (Y, f32[M, N], lambda op, x, y: apply(op.name, x, y)),
    "compare": (Y, b8[M, N], lambda op, x, y: apply(op.name, x, y) if op.arity == 2 else apply(op.name, x) | (y > 0.0)),
    "bits": (BOTH, i32[M, N], lambda op, x, y: apply(op.name, x, y) if op.arity == 2 else apply(op.name, x) | y),
    "logic": (SIGNS, b8[M, N], lambda op, x, y: apply(op.name, x, y) if op.arity == 2 else apply(op.name, x) | y),
    "code": (X, i32[M, N], lambda op, x: apply(op.name, apply(op.name.replace("code_of", "round"), x))),
    "recoded": (X, i32[M, N], lambda op, x: apply(op.name, x)),
    "decoded": (WHOLE, f32[M, N], lambda op, x: apply(op.name, x)),
    "where": ({"m": b8[M, N], "x": f16[M, N], "y": f32[M, 1]}, f32[M, N], lambda op, m, x, y: F.where(m, x, y)),
    "pow": (X, f32[M, N], lambda op, x: F.pow(F.abs(x) + 0.5, 5.7)),
    "small_pow": (X, f32[M, N], lambda op, x: F.pow(F.abs(x) + 0.5, 1.7)),
    "log_of_normal": (X, f32[M, N], lambda op, x: F.log(F.maximum(x, 1e-30))),
    "to_i32": (X, i32[M, N], lambda op, x: F.cast(F.clip(x, -1e6, 1e6), i32)),
    "to_u32": (X, u32[M, N], lambda op, x: F.cast(x * 1e6, u32)),
    "to_i8": (X, i8[M, N], lambda op, x: F.cast(x * 100.0, i8)),
    "to_u8": (X, u8[M, N], lambda op, x: F.cast(x * 200.0, u8)),
    "to_b8": (X, b8[M, N], lambda op, x: F.cast(x, b8)),
    "to_f32": (WHOLE, f32[M, N], lambda op, x: F.cast(x, f32)),
    "to_unit": (WHOLE, f32[M, N], lambda op, x: apply("to_unit", x)),
    "philox": (BOTH, i32[M, N], lambda op, x, y: apply("philox", x, y, y, x)),
}


def form_of(op: Op) -> str:
    if op.name in FORMS:
        return op.name
    if op.name.startswith("code_of_"):
        return "code"
    if op.name.startswith(("bits_of_", "to_i4", "to_u4")):
        return "recoded"
    if op.name.endswith(("_of_code", "_of_bits")):
        return "decoded"
    if op.takes in ("bool", "int"):
        return {"bool": "logic", "int": "bits"}[op.takes]
    if op.result is b8:
        return "compare"
    return "unary" if op.arity == 1 else "binary"


BY_FORM = {form: [op for op in MAPS if form_of(op) == form] for form in dict.fromkeys(map(form_of, MAPS))}


def together(ops: Sequence[Op], cols: int) -> Chain:
    """A chain with a result of each op, which are of one form."""
    operands, result, value = FORMS[form_of(ops[0])]

    def made(*given: Any) -> Any:
        values = [value(op, *given) for op in ops]
        return tuple(values) if len(values) > 1 else values[0]

    specs: dict[int, Callable[..., Any]] = {
        1: lambda x: made(x), 2: lambda x, y: made(x, y), 3: lambda m, x, y: made(m, x, y),
    }  # fmt: skip
    spec = specs[len(operands)]
    spec.__name__ = "spec"
    spec.__annotations__ = {
        **operands,
        "return": tuple.__class_getitem__((result,) * len(ops)) if len(ops) > 1 else result,
    }
    return chain(M=3, N=cols)(spec)


TOGETHER = [ops[i : i + 6] for ops in BY_FORM.values() for i in range(0, len(ops), 6)]


@pytest.mark.parametrize("ops", TOGETHER, ids=lambda ops: "-".join(op.name for op in ops))
def test_ops_match_numpy(ops: list[Op]) -> None:
    """In whole vectors and in a ragged tail."""
    compile(together(ops, 1000), H200, on="emulator")


# one op of every form: an op's expression is the same at every length, and what is around it depends on types alone


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("form", BY_FORM)
@pytest.mark.parametrize("cols", [1, 31])
def test_ops_of_every_form_match_numpy_in_short_rows(form: str, cols: int) -> None:
    """Below and at a warp."""
    compile(together(BY_FORM[form][:1], cols), H200, on="emulator")


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("op", REDUCES, ids=str)
@pytest.mark.parametrize("cols", [1, 33, 1000, 4100])
def test_reduction_matches_numpy(op: Op, cols: int, target: Target) -> None:
    @chain(M=3, N=4)
    def spec(x: f16[M, N]) -> f32[M, 1]:
        return apply(op.name, x)

    compile(spec.at(N=cols), target, on="emulator")


def test_products_of_rows_and_of_columns(target: Target, rng: np.random.Generator) -> None:
    """Of a masked tail too; of no rows 1."""

    @chain(M=37, N=70)
    def spec(x: f32[M, N], y: i32[M, N]) -> tuple[f32[M, 1], i32[M, 1]]:
        return F.prod(F.where(F.col_index(x) <= F.row_index(x), x, 0.99)), F.prod(y)

    @chain(M=37, N=70)
    def columns(x: f32[M, N], y: i32[M, N]) -> tuple[f32[1, N], i32[1, N]]:
        return F.prod(x, over=M), F.prod(y, over=M)

    x = (1 + rng.normal(size=(37, 70)) / 8).astype(np.float32)
    y = rng.integers(-9, 9, size=(37, 70), dtype=np.int32) * 2 + 1  # odd: no power of 2 makes them 0
    kernel, of_columns = compile(spec, target, on="emulator"), compile(columns, target, on="emulator")
    real, whole = kernel(x, y)
    for row in range(37):
        factors = [float(x[row, col]) if col <= row else 0.99 for col in range(70)]
        assert real[row, 0] == pytest.approx(math.prod(factors), rel=5e-6)
        assert int(whole[row, 0]) % 2**32 == math.prod(map(int, y[row])) % 2**32
    real, whole = of_columns(x, y)
    np.testing.assert_allclose(real[0], [math.prod(map(float, x[:, col])) for col in range(70)], rtol=5e-6)
    assert [int(n) % 2**32 for n in whole[0]] == [math.prod(map(int, y[:, col])) % 2**32 for col in range(70)]
    assert all((found == 1).all() for found in of_columns(x[:0], y[:0]))


def test_a_product_of_a_row_is_bounded_through_the_ends_of_f32() -> None:
    """Parts that are too large leave nothing known, parts that are too small little; a NaN is one for certain."""
    rows = np.array([[1e30, 1e30, 1e-30], [1e-30, 1e-30, 1e30], [NAN, 1e30, 1e30], [INF, 2.0, 0.5], [INF, 0.0, 1.0]])
    error = running_product_error(rows, np.zeros_like(rows), whole=False)[:, -1]
    assert error[0] == INF
    assert 1e-8 < error[1] < 1e-6
    assert error[2:].tolist() == [0, 0, 0]
    near = running_product_error(np.array([[3.0, -2.0]]), np.array([[0.5, 0.25]]), whole=False)[0, -1]
    assert 3.5 * 2.25 - 6 <= near <= (3.5 * 2.25 - 6) * 1.002


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.by_values("function", "target")  # what they are made of, ops, is compiled for both vendors
@pytest.mark.parametrize("function", F.COMPOSITES, ids=lambda f: f.__name__)
def test_composite_matches_numpy(function: Callable[..., Any], target: Target) -> None:
    def body(x: f32[M, N]) -> f32[M, N]:
        if function is F.clip:
            return function(x, -1.0, 1.0)
        if function in (F.any, F.all):
            return F.where(function(x > 2.0), x, -x)
        if function is F.quantize:
            return function(x, i8)[0] * 1.0
        if function is F.dequantize:
            return function(F.cast(x, i8), 0.5)
        if function is F.one_hot:
            return function(F.cast(F.max(x), i32), N) + x
        if function is F.cross_entropy:
            return function(x, F.cast(F.max(x), i32)) + x
        if function in (F.glu, F.reglu, F.geglu, F.swiglu, F.quick_geglu, F.clipped_swiglu, F.bilinear):
            return function(x, x + 1.0)
        if function is F.groupnorm:
            return function(x, 8)
        if function is F.batchnorm:
            return function(x, x[0], F.square(x[1]))
        if function is F.rope:
            return function(x, x[..., : N // 2], x[..., N // 2 :])
        if function is F.einsum:
            return function("mn,mn->m", x, x)[:, None] + x
        if function is F.kl_div:
            return function(x, F.softmax(x)) + x
        if function in (F.uniform, F.normal):
            return function(x, 1, 2) + x * 0.0
        if function is F.dropout:
            return function(x, 0.3, 1, 2)
        if function in (F.top_k, F.top_p, F.min_p):
            return F.where(function(x, 0.5 if function is F.min_p else 3), x, -x)
        if function is F.sort:
            return function(x)[0]
        if function is F.sort_by_group:
            return x * F.cast(function(F.cast(x[:, 0], i32), 4)[2], f32)[:, None]
        if function is F.gather_sum:
            ids = F.cast(F.broadcast(F.max(x), (M, 2)), i32)
            return function(x, ids, x[:, :2])
        return function(x) + x * 0.0

    compile(chain(M=3, N=200)(body), target, on="emulator")


# by other formulas than those of fusegen.ops
FORMULAS: dict[str, Callable[[Any], Any]] = {
    "softplus": lambda x: np.logaddexp(0, x),
    "softsign": lambda x: np.where(x < 0, x / (1 - x), x / (1 + x)),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "elu": lambda x: np.maximum(x, 0) + np.expm1(np.minimum(x, 0)),
    "selu": lambda x: 1.0507009873554805 * (np.maximum(x, 0) + 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "leaky_relu": lambda x: np.maximum(x, 0.01 * x),
    "hardsigmoid": lambda x: np.interp(x, [-3, 3], [0, 1]),
    "hardswish": lambda x: x * np.interp(x, [-3, 3], [0, 1]),
    "std": lambda x: x.std(-1, keepdims=True),
    "norm": lambda x: np.linalg.norm(x, axis=-1, keepdims=True),
    "logsumexp": lambda x: np.logaddexp.reduce(x, axis=-1, keepdims=True),
    "l2norm": lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_composites_are_what_their_names_say(name: str, rng: np.random.Generator) -> None:
    def body(x: f32[M, N]) -> f32[M, N]:
        return getattr(F, name)(x) + 0.0 * x

    x = rng.normal(size=(5, 40)) * 3
    wanted = np.broadcast_to(FORMULAS[name](x), x.shape)
    np.testing.assert_allclose(one(chain(M=5, N=40)(body), x), wanted, rtol=1e-12, atol=1e-13)


def test_gated_units() -> None:
    @chain(M=1, N=3)
    def spec(x: f32[M, N], g: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N], f32[M, N]]:
        return F.glu(x, g), F.reglu(x, g), F.swiglu(x, g), F.geglu(x, g, approximate="none")

    x, g = np.array([[2.0, 3.0, -4.0]]), np.array([[0.0, math.log(3), -math.log(3)]])
    glu, reglu, swiglu, geglu = one(spec, x, g)
    np.testing.assert_allclose(glu, [[1.0, 2.25, -1.0]])
    np.testing.assert_allclose(reglu, [[0.0, 3 * math.log(3), 0.0]])
    np.testing.assert_allclose(swiglu, glu * g)
    np.testing.assert_allclose(geglu, x * g * [[0.5 * math.erfc(-a / math.sqrt(2)) for a in g[0]]])


def test_gated_units_of_other_gates() -> None:
    @chain(M=1, N=4)
    def spec(x: f32[M, N], g: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N]]:
        return F.quick_geglu(x, g), F.clipped_swiglu(x, g), F.bilinear(x, g)

    x, g = np.array([[2.0, 30.0, -40.0, 1.0]]), np.array([[0.5, -1.0, 2.0, 99.0]])
    quick, clipped, bilinear = one(spec, x, g)
    opened = [math.tanh(0.851 * a) / 2 + 0.5 for a in g[0]]
    np.testing.assert_allclose(quick, [[a * b * s for a, b, s in zip(x[0], g[0], opened, strict=True)]])
    gates = [0.5 * opened[0], -opened[1], 2.0 * opened[2], 7 * (math.tanh(0.851 * 7) / 2 + 0.5)]
    np.testing.assert_allclose(clipped, [[a * b for a, b in zip((3, 8, -6, 2), gates, strict=True)]])
    np.testing.assert_allclose(bilinear, x * g)


def test_edges_of_what_is_rounded_and_classified() -> None:
    @chain(M=1, N=8)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N], f32[M, N], b8[M, N], b8[M, 1], b8[M, 1]]:
        nan = F.isnan(x)
        return F.round(x), F.sign(x), F.fmod(x, 2.0), F.floor(x), F.isinf(x), F.any(nan), F.all(nan | F.isfinite(x))

    x = np.array([[2.5, -0.5, -0.0, NAN, INF, -INF, 3.5, -2.5]], np.float32)
    whole, sign, rest, below, infinite, has_nan, no_inf = compile(spec, H200, on="emulator")(x)
    np.testing.assert_array_equal(whole, [[2, -0.0, -0.0, NAN, INF, -INF, 4, -2]])
    np.testing.assert_array_equal(sign, [[1, -1, -0.0, NAN, 1, -1, 1, -1]])
    np.testing.assert_array_equal(rest, [[0.5, -0.5, -0.0, NAN, NAN, NAN, 1.5, -0.5]])
    np.testing.assert_array_equal(below, [[2, -1, -0.0, NAN, INF, -INF, 3, -3]])
    np.testing.assert_array_equal(infinite, [[False] * 4 + [True] * 2 + [False] * 2])
    assert has_nan.all()
    assert not no_inf.any()


def test_whole_quotients_go_downwards() -> None:
    @chain(M=1, N=8)
    def spec(x: i32[M, N], y: i32[M, N]) -> tuple[i32[M, N], i32[M, N], i32[M, N], i32[M, N], i32[M, N]]:
        return x // y, x % y, x // 8, x % 8, 7 // y

    least = -(2**31)
    x = np.array([[7, -7, 7, -7, least, least, 5, 0]], np.int32)
    y = np.array([[2, 2, -2, -2, -1, 1, 0, 3]], np.int32)
    quotient, remainder, eighth, of_eight, sevenths = compile(spec, H200, on="emulator")(x, y)
    np.testing.assert_array_equal(quotient, [[3, -4, -4, 3, least, least, 0, 0]])
    np.testing.assert_array_equal(remainder, [[1, 1, -1, -1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(eighth, x >> 3)
    np.testing.assert_array_equal(of_eight, x & 7)
    np.testing.assert_array_equal(sevenths, [[3, 3, -4, -4, -7, 7, 0, 2]])


def test_quotients_of_floats_are_refused_with_what_to_write() -> None:
    def spec(x: f32[M, N]) -> f32[M, N]:
        return x % 2

    with pytest.raises(SpecError, match=r"%: found f32, wanted whole numbers \(i32\)\n  of f32 write F.floor\(x / y\)"):
        chain(M=1, N=8)(spec)


def test_logsumexp_of_infinite_rows() -> None:
    @chain(M=4, N=3)
    def spec(x: f32[M, N]) -> f32[M, 1]:
        return F.logsumexp(x)

    x = np.array([[-INF] * 3, [INF, 0, -INF], [NAN, INF, 0], [500, 500, -500]], np.float32)
    found = compile(spec, H200, on="emulator")(x)[:, 0]
    np.testing.assert_allclose(found, [-INF, INF, NAN, 500 + math.log(2)], rtol=1e-6)


@pytest.mark.parametrize("dtype", [f32, i32], ids=str)
def test_argmin_is_the_first_of_the_smallest(dtype: DType) -> None:
    @chain(M=3, N=40)
    def spec(x: dtype[M, N]) -> i32[M, 1]:  # type: ignore[valid-type]
        return F.argmin(x)

    x = np.arange(120, dtype=dtype.numpy).reshape(3, 40) % 7 + 1
    x[1, 22] = x[1, 30] = -(2**31)
    assert compile(spec, H200, on="emulator")(x)[:, 0].tolist() == [0, 22, int((x[2] == 1).argmax())]


def test_powers_of_traced_exponents() -> None:
    @chain(M=1, N=6)
    def spec(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N]]:
        return x**y, 2**y, F.pow(3.0, y)

    x = np.array([[2.0, -2.0, -8.0, 0.0, 0.0, 9.0]], np.float32)
    y = np.array([[0.5, 3.0, 1 / 3, 0.0, -1.0, -0.5]], np.float32)
    power, of_two, of_three = compile(spec, H200, on="emulator")(x, y)
    np.testing.assert_allclose(power, [[math.sqrt(2), -8, NAN, 1, INF, 1 / 3]], rtol=2e-6)
    np.testing.assert_allclose(of_two, np.exp2(y), rtol=1e-6)
    np.testing.assert_allclose(of_three, np.power(3.0, y), rtol=2e-6)


def test_one_hot_wants_a_column_a_row() -> None:
    def spec(x: f32[M, N], labels: i32[M, N]) -> f32[M, N]:
        return x * F.one_hot(labels, N)

    with pytest.raises(SpecError, match=r"one_hot: found i32\[M, N\], wanted one column a row, i32\[..., 1\]"):
        chain(M=2, N=8)(spec)
