"""The functions of `fusegen.ops` that take an element at a time: arithmetic, functions, activations, masks, casts."""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.graph import CASTS, Node, shown_by
from fusegen.language.op_table import OPS
from fusegen.language.sizes import Dim, Expr, Size
from fusegen.language.trace import Number, Value, apply, caller, composite, current, power, size_leaf
from fusegen.language.types import DTYPES, F8, PACKED, DType, Shape, b8, f32, i8, i32, i64, u8, u32


def exp(x: Value) -> Value:
    """e ** x."""
    return apply("exp", x)


def log(x: Value | Size) -> Value:
    """Natural logarithm; -inf at 0, NaN below."""
    return apply("log", x)


def log1p(x: Value) -> Value:
    """log(1 + x), as exact near 0 as x is; -inf at -1, NaN below."""
    return apply("log1p", x)


def sqrt(x: Value | Size) -> Value:
    """Square root; NaN below 0."""
    return apply("sqrt", x)


def rsqrt(x: Value | Size) -> Value:
    """1 / sqrt(x)."""
    return apply("rsqrt", x)


def tanh(x: Value) -> Value:
    """Hyperbolic tangent."""
    return apply("tanh", x)


def erf(x: Value) -> Value:
    """Error function."""
    return apply("erf", x)


def exp2(x: Value) -> Value:
    """2 ** x."""
    return apply("exp2", x)


def expm1(x: Value) -> Value:
    """e ** x - 1, as exact near 0 as x is."""
    return apply("expm1", x)


def log2(x: Value | Size) -> Value:
    """Logarithm to the base 2; -inf at 0, NaN below."""
    return apply("log2", x)


def sin(x: Value) -> Value:
    """Sine of an angle in radians, of any size; NaN of an infinity."""
    return apply("sin", x)


def cos(x: Value) -> Value:
    """Cosine of an angle in radians, of any size; NaN of an infinity."""
    return apply("cos", x)


def floor(x: Value) -> Value:
    """The largest whole number up to x, as f32; i32 stay what they are."""
    return _whole("floor", x)


def ceil(x: Value) -> Value:
    """The smallest whole number from x on, as f32; i32 stay what they are."""
    return _whole("ceil", x)


def trunc(x: Value) -> Value:
    """x without its fraction, as f32; i32 stay what they are."""
    return _whole("trunc", x)


def round(x: Value) -> Value:
    """The nearest whole number, of two the even one, as f32; i32 stay what they are."""
    return _whole("round", x)


def _whole(name: str, x: Value) -> Value:
    return x if isinstance(x, Value) and x.dtype is i32 else apply(name, x)


def sign(x: Value) -> Value:
    """-1, 0 or 1; NaN stays NaN."""
    return apply("sign", x)


def fmod(x: Value | Number | Size, y: Value | Number | Size) -> Value:
    """Remainder of x / y toward zero, exact and of x's sign; NaN where y is 0. Of i32, `x % y` has y's sign."""
    return apply("fmod", x, y)


def isnan(x: Value) -> Value:
    """A mask of what is NaN."""
    return apply("isnan", x)


def isinf(x: Value) -> Value:
    """A mask of infinities."""
    return apply("isinf", x)


def isfinite(x: Value) -> Value:
    """A mask of what is neither NaN nor infinite."""
    return apply("isfinite", x)


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def relu(x: Value) -> Value:
    """max(x, 0); NaN stays NaN."""
    return apply("relu", x)


def silu(x: Value) -> Value:
    """x * sigmoid(x)."""
    return apply("silu", x)


@composite
def gelu(x: Value, approximate: str = "tanh") -> Value:
    """x * Phi(x): by tanh (Hendrycks & Gimpel 2016, the default) or exact with approximate="none"."""
    kinds = {"tanh": "gelu_tanh", "none": "gelu_erf"}
    if approximate not in kinds:
        raise SpecError(f"gelu: approximate={approximate!r}; it is 'tanh' or 'none'", caller())
    return apply(kinds[approximate], x)


@composite
def softplus(x: Value) -> Value:
    """log(1 + exp(x)), of x of any size."""
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


@composite
def softsign(x: Value) -> Value:
    """x / (1 + |x|)."""
    return x / (1.0 + abs(x))


@composite
def mish(x: Value) -> Value:
    """x * tanh(softplus(x)) (Misra 2019)."""
    return x * tanh(log1p(exp(x)))


@composite
def elu(x: Value, alpha: Number = 1.0) -> Value:
    """x above 0, alpha * (exp(x) - 1) below (Clevert, Unterthiner & Hochreiter 2016)."""
    return where(x > 0.0, x, alpha * expm1(x))


@composite
def selu(x: Value) -> Value:
    """1.0507 * elu(x, 1.6733), with the constants of Klambauer et al. 2017: rows keep mean 0 and variance 1."""
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


@composite
def leaky_relu(x: Value, slope: Number = 0.01) -> Value:
    """x above 0, slope * x below."""
    return where(x > 0.0, x, slope * x)


@composite
def hardsigmoid(x: Value) -> Value:
    """min(max(x + 3, 0), 6) / 6 (Howard et al. 2019)."""
    return clip(x + 3.0, 0.0, 6.0) / 6.0


@composite
def hardswish(x: Value) -> Value:
    """x * hardsigmoid(x) (Howard et al. 2019)."""
    return x * hardsigmoid(x)


@composite
def glu(x: Value, gate: Value) -> Value:
    """x * sigmoid(gate) (Dauphin et al. 2017); `reglu`, `geglu` and `swiglu` have other gates (Shazeer 2020)."""
    return x * sigmoid(gate)


@composite
def reglu(x: Value, gate: Value) -> Value:
    """x * relu(gate)."""
    return x * relu(gate)


@composite
def geglu(x: Value, gate: Value, approximate: str = "tanh") -> Value:
    """x * gelu(gate)."""
    return x * gelu(gate, approximate)


@composite
def swiglu(x: Value, gate: Value) -> Value:
    """x * silu(gate)."""
    return x * silu(gate)


@composite
def quick_geglu(x: Value, gate: Value) -> Value:
    """x * gate * sigmoid(1.702 * gate): the gate is GELU as Hendrycks & Gimpel (2016) have it by a sigmoid."""
    return x * (gate * sigmoid(1.702 * gate))


@composite
def clipped_swiglu(x: Value, gate: Value, alpha: Number = 1.702, limit: Number = 7.0) -> Value:
    """(clip(x, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit), as gpt-oss has it."""
    low = -limit
    open = minimum(gate, limit)
    return (clip(x, low, limit) + 1.0) * (open * sigmoid(alpha * open))


@composite
def bilinear(x: Value, gate: Value) -> Value:
    """x * gate: a gated unit without an activation (Shazeer 2020)."""
    return x * gate


def square(x: Value) -> Value:
    """x * x."""
    return apply("square", x)


def pow(x: Value | Number, exponent: Value | Number) -> Value:
    """x ** exponent, one or both of which are traced: NaN below 0, unless the exponent is whole."""
    return power(x, exponent)


def abs(x: Value) -> Value:
    """Magnitude."""
    return apply("abs", x)


def neg(x: Value) -> Value:
    """-x."""
    return apply("neg", x)


def minimum(x: Value | Number | Size, y: Value | Number | Size) -> Value:
    """The smaller of two, element by element; NaN wins, as np.minimum."""
    return apply("minimum", x, y)


def maximum(x: Value | Number | Size, y: Value | Number | Size) -> Value:
    """The larger of two, element by element; NaN wins, as np.maximum."""
    return apply("maximum", x, y)


@composite
def clip(x: Value, low: Value | Number | Size, high: Value | Number | Size) -> Value:
    """min(max(x, low), high); NaN stays NaN."""
    return minimum(maximum(x, low), high)


def logical_and(x: Value, y: Value) -> Value:
    """Both masks hold; also written x & y."""
    return apply("logical_and", x, y)


def logical_or(x: Value, y: Value) -> Value:
    """Either mask holds; also written x | y."""
    return apply("logical_or", x, y)


def logical_not(x: Value) -> Value:
    """The mask does not hold; also written ~x."""
    return apply("logical_not", x)


def where(condition: Value, x: Value | Number | Size, y: Value | Number | Size) -> Value:
    """x where the mask holds, else y."""
    return apply("where", condition, x, y)


def power_of_2_above(x: Value) -> Value:
    """The least power of 2 from x on, from 2^-126 to 2^127; 2^127 of NaN. So are scales rounded up to a bare
    exponent."""
    return apply("power_of_2_above", x)


def power_of_2_below(x: Value) -> Value:
    """The largest power of 2 up to x, from 2^-126 to 2^127; 2^127 of NaN: x without its mantissa."""
    return apply("power_of_2_below", x)


def cast(x: Value, dtype: DType, saturate: bool = True) -> Value:
    """x as `dtype`. f16, bf16 and 8 bits round there and go on as f32 or i32: a rounding point the author asks for.

    It goes to the nearest, of two to the even one. To 8 bits, `f8e4m3` and its like, i8 and u8, what is beyond the
    range becomes the nearest number that there is, infinities too; NaN stays NaN, and is 0 as i8 or u8. `f8e8m0` holds
    powers of 2: of two the larger one is taken, and 0 and what is below it become 2^-127.

    To 4 bits it saturates too: i4 and u4 as i8 and u8, and NaN becomes 6 as `f4e2m1`.

    With saturate=False what is beyond the range of an 8-bit float becomes an infinity where the type has one, else NaN.

    To i32 it goes toward zero; what is beyond i32, infinities too, becomes the nearest i32, and NaN 0, on every target.
    An i32 becomes the nearest f32: exact up to 2^24. A mask is 0 or 1, and b8 says what is not 0. To u32 it goes alike,
    from 0 on; between i32 and u32 the 32 bits stay, modulo 2^32.
    """
    if not isinstance(dtype, DType) or dtype.name not in {**DTYPES, **PACKED}:
        every = ", ".join((*DTYPES, *PACKED))
        raise SpecError(f"cast: {dtype!r} is not a dtype that values can have; use {every}", caller())
    if dtype is i64:
        raise SpecError(
            "cast: i64 is for arrays, and values between ops are i32; cast to i32, and declare the output i64", caller()
        )
    name = f"to_{dtype}" if dtype is f32 or dtype.kind != "float" else f"round_{dtype}"
    if not saturate and dtype not in F8:
        raise SpecError(
            f"cast: saturate=False, and {dtype} has no other number for what is beyond its range\n"
            f"  it is for {', '.join(map(str, F8))}", caller(),
        )  # fmt: skip
    name = name if saturate else f"overflow_{dtype}"
    if isinstance(x, Value) and dtype in (f32, i32, u32, b8) and x.dtype is dtype:
        if dtype is f32 and current().eager and current().open is None:
            with current().operator(name) as own:
                return Value(Node(OPS["to_f32"], (x.node,), x.shape, f32, own))
        return x
    with current().operator(name):
        if isinstance(x, Value) and x.dtype is b8 and OPS[name].takes != "any":
            x = apply("to_i32" if dtype.kind == "int" else "to_f32", x)
        return apply(name, x)


def bitcast(x: Value, dtype: DType) -> Value:
    """The bits of x as another type of as many: f32, i32 and u32, or an 8-bit float and i8 or u8.

    x's type is an operand's own, or what it was cast to. Of 8-bit floats NaN has one code, 0x7f (0x80 of fnuz, 0xff of
    f8e8m0), whatever an operand's was.
    """
    need_traced("bitcast", x)
    own = type_of(x)
    with current().operator("bitcast"):
        if own is dtype:
            return x
        if (own, dtype) == (f32, i32):
            return apply("bits_of_f32", x)
        if (own, dtype) == (i32, f32):
            return apply("f32_of_bits", x)
        if {own, dtype} == {i32, u32}:
            return cast(x, dtype)
        if {own, dtype} == {f32, u32}:
            return bitcast(bitcast(x, i32), dtype)
        if own in F8 and dtype in (i8, u8):
            code = apply(f"code_of_{own}", x)
            return code if dtype is u8 else apply("shift_right", apply("shift_left", code, 24), 24)
        if own in (i8, u8) and dtype in F8:
            return apply(f"{dtype}_of_code", apply("bit_and", x, 255))
    raise SpecError(
        f"bitcast: {own} as {dtype!s}; it is between f32, i32 and u32, and between 8-bit floats and i8 or u8\n"
        "  the type is an operand's own, or that of a cast: F.bitcast(F.cast(x, u8), f8e4m3)", caller(),
    )  # fmt: skip


def type_of(x: Value) -> DType:
    """A value's type: an operand's own, or what it was cast to; else f32, i32, u32 or b8."""
    node = shown_by(x.node)
    if (operand := current().operands.get(node)) is not None:
        return operand.dtype
    casts = {**CASTS, "to_i8": i8, "to_u8": u8}
    return casts.get(node.op.name, node.dtype)


def col_index(x: Value) -> Value:
    """The column (0 ...) of each element of x's last axis, i32."""
    need_traced("col_index", x)
    if not x.shape:
        raise SpecError("col_index: a scalar has no columns", caller())
    return index_of("col_index", (x.shape[-1],))


def row_index(x: Value) -> Value:
    """The index (0 ...) along the axis before x's last, i32: the query position of scores [B, heads, S, N]."""
    need_traced("row_index", x)
    if len(x.shape) < 2:
        raise SpecError(f"row_index: found rank {len(x.shape)}, wanted an axis before the last", caller())
    return index_of("row_index", (x.shape[-2], 1))


def need_traced(name: str, x: object) -> None:
    if not isinstance(x, Value):
        found = f"{x}, a dim," if isinstance(x, Dim) else repr(x)
        raise SpecError(f"{name}: found {found} where a traced value is wanted, as in F.{name}(x)", caller())


def index_of(name: str, shape: Shape) -> Value:
    with current().operator(name) as operator:
        return Value(Node(OPS[name], (), shape, i32, operator))


def size(dim: Size) -> Value:
    """The number of a size, such as N or `D // 2`, as an f32 constant of the kernel; in arithmetic N is that itself."""
    if not isinstance(dim, (Dim, Expr)):
        raise SpecError(f"size: {dim!r} is not a Dim, as one of M, N = dims('M N') is", caller())
    return size_leaf(dim)
