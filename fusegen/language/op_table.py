"""THE op table: each primitive is one entry with its meaning as numpy text, device text, cost, slopes and error bound.

Edge cases are decided here, by the numpy text: NaN stays NaN through every op, max and min included; a softmax row
with nothing left (all -inf) gives zeros.

On i32 each op has one meaning, that of numpy's int32: + - * and sums are exact modulo 2^32, choices and comparisons
are exact, bits are bits. Where an i32 meets an f32, or an op has no meaning on whole numbers (/, exp, mean, ...), it
becomes f32 first, which rounds beyond 2^24. On u32 the same holds of numpy's uint32, for those ops that have a meaning
there; i32 and u32 meet in no op. In C a sum of ints that overflows is undefined, so device texts go by
unsigned numbers where a result may (`fusegen.planner.ranges`).
"""

from __future__ import annotations

from typing import Any

from fusegen.language.graph import OPS as OPS
from fusegen.language.graph import Kind, Op
from fusegen.language.scans import SORTED, WAYS
from fusegen.language.types import (
    F8,
    DType,
    b8,
    f4e2m1,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f8e8m0,
    f32,
    i4,
    i8,
    i32,
    u4,
    u8,
    u32,
)

_S = "F.sigmoid(x * (1.5957691216057308 + 0.07135481282553072 * F.minimum(x * x, 1e6)))"
GELU_BY_TANH = (
    f"d * ({_S} + x * {_S} * (1.0 - {_S}) * (1.5957691216057308 + 0.21406443847659216 * F.minimum(x * x, 1e6)))"
)
"""0.5 (1 + tanh(u)) is sigmoid(2 u). Beyond x = 1000 it is 0 or 1, and a square could be infinite."""
GELU_BY_ERF = "d * (0.5 * (1.0 + F.erf(0.7071067811865476 * x)) + 0.3989422804014327 * x * F.exp(-0.5 * x * x))"
OF_EQUALS = "F.where(x == out, d / total(F.where(x == out, 1.0, 0.0)), 0.0)"
"""What is the largest shares the gradient equally, as torch.amax and jax.numpy.max have it."""
PHILOX_SLOTS = 100
"""Issue slots of one call of Philox4x32-10, counted: in each of ten rounds two products of 64 bits, at a quarter of the
usual rate, and two exclusive ors of three words. Keys are the same for all elements."""


def _map(name: str, arity: int, ref: str, expr: str, doc: str, **facts: Any) -> None:
    OPS[name] = Op(name, Kind.MAP, arity, ref, expr, doc, **facts)


def _reduce(name: str, ref: str, expr: str, init: str, doc: str, **facts: Any) -> None:
    OPS[name] = Op(name, Kind.REDUCE, 1, ref, expr, doc, init=init, **facts)


def _select(name: str, arity: int, ref: str, doc: str, **facts: Any) -> None:
    OPS[name] = Op(name, Kind.SELECT, arity, ref, "", doc, **facts)


def _gather(name: str, ref: str, doc: str, **facts: Any) -> None:
    OPS[name] = Op(name, Kind.GATHER, 2, ref, "", doc, takes="any", slopes=("1", "0"), ulps=0, **facts)


# ---- made from nothing
OPS["input"] = Op("input", Kind.INPUT, 0, "", "", "an operand", flops=0, takes="any")
OPS["literal"] = Op("literal", Kind.LEAF, 0, "", "", "a Python number", flops=0, takes="any")
OPS["size"] = Op("size", Kind.LEAF, 0, "", "", "the number of a dimension", flops=0, takes="any", result=f32)
OPS["col_index"] = Op("col_index", Kind.LEAF, 0, "", "", "the column of each element", flops=0, result=i32)
OPS["row_index"] = Op(
    "row_index", Kind.LEAF, 0, "", "", "the index along the axis before the last", flops=0, result=i32
)
for _word in ("low", "high"):
    OPS[f"element_{_word}"] = Op(f"element_{_word}", Kind.LEAF, 0, "", "",
                                 f"the {_word} word of each element's row-major index", flops=0, slots=2,
                                 result=i32)  # fmt: skip
    OPS[f"row_{_word}"] = Op(f"row_{_word}", Kind.LEAF, 0, "", "", f"the {_word} word of each row's index", flops=0,
                             result=i32)  # fmt: skip


def _unsigned(ref: str, first: str, rest: str) -> dict[DType, tuple[str, str]]:
    """Of i32 by unsigned numbers, which wrap where C leaves it open what ints do."""
    return {i32: (ref, f"static_cast<int>({first} {rest})")}


# ---- arithmetic; what takes numbers takes i32 as it is
_map("add", 2, "{0} + {1}", "{0} + {1}", "sum of two", slopes=("1", "1"), ulps=0.5, symbol="+",
     forms=_unsigned("{0} + {1}", "static_cast<unsigned>({0})", "+ {1}"), gradients=("d", "d"))  # fmt: skip
_map("sub", 2, "{0} - {1}", "{0} - {1}", "difference", slopes=("1", "1"), ulps=0.5, symbol="-",
     forms=_unsigned("{0} - {1}", "static_cast<unsigned>({0})", "- {1}"), gradients=("d", "-d"))  # fmt: skip
_map("mul", 2, "{0} * {1}", "{0} * {1}", "product", slopes=("np.abs({1})", "np.abs({0})"), ulps=0.5, symbol="*",
     forms=_unsigned("{0} * {1}", "static_cast<unsigned>({0})", "* {1}"), gradients=("d * y", "d * x"))  # fmt: skip
_map("div", 2, "{0} / {1}", "{0} / {1}", "quotient", takes="float", flops=4, slots=9, ulps=2.5, symbol="/",
     slopes=("1 / np.abs({1})", "np.abs({out} / {1})"), gradients=("d / y", "-d * out / y"))  # fmt: skip
_map("neg", 1, "-{0}", "-{0}", "negation", slopes=("1",), ulps=0, forms=_unsigned("-{0}", "0u", "- {0}"),
     gradients=("-d",))  # fmt: skip
_map("abs", 1, "np.abs({0})", "fabsf({0})", "magnitude", slopes=("1",), ulps=0,
     forms=_unsigned("np.abs({0})", "{0} < 0", "? 0u - {0} : {0}"), gradients=("d * F.sign(x)",))  # fmt: skip
_map("square", 1, "{0} * {0}", "{0} * {0}", "x * x", slopes=("2 * np.abs({0})",), ulps=0.5,
     forms=_unsigned("{0} * {0}", "static_cast<unsigned>({0})", "* {0}"), gradients=("2.0 * d * x",))  # fmt: skip
_map("maximum", 2, "np.maximum({0}, {1})", "larger({0}, {1})", "the larger; NaN wins",
     slopes=("1", "1"), ulps=0, forms={i32: ("np.maximum({0}, {1})", "max({0}, {1})"),
                            u32: ("np.maximum({0}, {1})", "{0} > {1} ? {0} : {1}")},
     gradients=("F.where(x >= y, F.where(x == y, 0.5 * d, d), 0.0)",
                "F.where(y >= x, F.where(x == y, 0.5 * d, d), 0.0)"))  # fmt: skip
_map("minimum", 2, "np.minimum({0}, {1})", "smaller({0}, {1})", "the smaller; NaN wins",
     slopes=("1", "1"), ulps=0, forms={i32: ("np.minimum({0}, {1})", "min({0}, {1})"),
                            u32: ("np.minimum({0}, {1})", "{0} < {1} ? {0} : {1}")},
     gradients=("F.where(x <= y, F.where(x == y, 0.5 * d, d), 0.0)",
                "F.where(y <= x, F.where(x == y, 0.5 * d, d), 0.0)"))  # fmt: skip
_map("pow", 2, "np.power({0}, {1})", "powf({0}, {1})", "x ** number", takes="float", flops=16, slots=76, ulps=16,
     slopes=("np.abs({1} * np.power({0}, {1} - 1))", "np.abs({out} * np.log(np.abs({0})))"),
     gradients=("d * y * x ** (y - 1.0)", "F.where(out == 0.0, 0.0, d * out * F.log(x))"))  # fmt: skip
_map("small_pow", 2, "np.power({0}, {1})", "small_power({0}, {1})", "x ** number up to 4, not whole; planners choose",
     takes="float", flops=16, slots=24, ulps=16,
     slopes=("np.abs({1} * np.power({0}, {1} - 1))", "np.abs({out} * np.log(np.abs({0})))"))  # fmt: skip

# ---- exponentials and roots. exponential(x) is 2^(x log2 e): the product's rounding moves it by x 2^-24, the power by
# 2 ulp (PTX ISA, ex2.approx.ftz); beyond |x| = 128 it is 0 or infinite like the true one. To make up for the product's
# rounding takes four FMAs and a test for infinity, beside two instructions, in every term of every softmax
_map("exp", 1, "np.exp({0})", "exponential({0})", "e ** x", takes="float", flops=4, slots=3, ulps=2.25,
     slopes=("{out}",), scale="{out} * (1 + 0.3 * np.minimum(np.abs({0}), 128))", gradients=("d * out",))  # fmt: skip
_map("log", 1, "np.log({0})", "natural_log({0})", "natural logarithm", takes="float", flops=4, slots=12, ulps=3,
     slopes=("1 / np.abs({0})",), gradients=("d / x",))  # fmt: skip
_map("exp2", 1, "np.exp2({0})", "power_of_2({0})", "2 ** x", takes="float", flops=2, slots=1, ulps=2,
     slopes=("0.6931471805599453 * {out}",), gradients=("0.6931471805599453 * d * out",))  # fmt: skip
_map("expm1", 1, "np.expm1({0})", "expm1f({0})", "e ** x - 1", takes="float", flops=8, slots=20, ulps=2,
     slopes=("1 + {out}",), gradients=("d * (1.0 + out)",))  # fmt: skip
_map("log2", 1, "np.log2({0})", "log_base_2({0})", "logarithm to the base 2", takes="float", flops=4, slots=13, ulps=4,
     slopes=("1.4426950408889634 / np.abs({0})",), gradients=("1.4426950408889634 * d / x",))  # fmt: skip
_map("log1p", 1, "np.log1p({0})", "log_1_plus({0})", "log(1 + x)", takes="float", flops=5, slots=9, ulps=4,
     slopes=("1 / np.abs(1 + {0})",), gradients=("d / (1.0 + x)",))  # fmt: skip
_map("sqrt", 1, "np.sqrt({0})", "sqrtf({0})", "square root", takes="float", flops=4, slots=8, ulps=3,
     slopes=("0.5 / {out}",), gradients=("0.5 * d / out",))  # fmt: skip
_map("rsqrt", 1, "1 / np.sqrt({0})", "rsqrtf({0})", "1 / sqrt(x)", takes="float", flops=4, slots=5, ulps=3,
     slopes=("0.5 * {out} / np.abs({0})",), gradients=("-0.5 * d * out * out * out",))  # fmt: skip
_map("log_of_normal", 1, "np.log({0})", "log_of_normal({0})", "log of what is no subnormal number; planners choose",
     takes="float", flops=4, slots=9, ulps=3, slopes=("1 / np.abs({0})",))  # fmt: skip
_map("tanh", 1, "np.tanh({0})", "hyperbolic_tangent({0})", "hyperbolic tangent", takes="float", flops=8, slots=13,
     ulps=5, slopes=("1 - {out} * {out}",), gradients=("d * (1.0 - out * out)",))  # fmt: skip
_map("tanh_log1p", 1, "np.tanh(np.log1p({0}))", "tanh_of_log({0})", "tanh(log(1 + x)); planners choose",
     takes="float", flops=8, slots=8, ulps=4, slopes=("1.3",))  # fmt: skip
_map("erf", 1, "erf({0})", "error_function({0})", "error function", takes="float", flops=12, slots=14, ulps=6,
     slopes=("1.1283791670955126 * np.exp(-{0} * {0})",),
     gradients=("1.1283791670955126 * d * F.exp(-x * x)",))  # fmt: skip

# both vendors' functions are within 2 ulp, whatever the angle (CUDA Programming Guide, "Mathematical Functions"; HIP
# math API); beyond 105615 they reduce it by a table of the bits of 2 / pi
_map("sin", 1, "np.sin({0})", "sinf({0})", "sine of an angle in radians", takes="float", flops=16, slots=25, ulps=2.5,
     slopes=("1",), gradients=("d * F.cos(x)",))  # fmt: skip
_map("cos", 1, "np.cos({0})", "cosf({0})", "cosine of an angle in radians", takes="float", flops=16, slots=25,
     ulps=2.5, slopes=("1",), gradients=("-d * F.sin(x)",))  # fmt: skip

# ---- whole numbers near x, and its sign; of i32 x itself
_map("floor", 1, "np.floor({0})", "floorf({0})", "the largest whole number up to x", takes="float", ulps=0,
     gradients=(None,))  # fmt: skip
_map("ceil", 1, "np.ceil({0})", "ceilf({0})", "the smallest whole number from x on", takes="float", ulps=0,
     gradients=(None,))  # fmt: skip
_map("trunc", 1, "np.trunc({0})", "truncf({0})", "x without its fraction", takes="float", ulps=0, gradients=(None,))
_map("round", 1, "np.round({0})", "rintf({0})", "the nearest whole number, the even one of two", takes="float", ulps=0,
     gradients=(None,))  # fmt: skip
_map("sign", 1, "np.sign({0})", "{0} > 0.0f ? 1.0f : {0} < 0.0f ? -1.0f : {0}", "-1, 0 or 1; NaN stays NaN", ulps=0,
     flops=2, forms={i32: ("np.sign({0})", "({0} > 0) - ({0} < 0)")}, gradients=(None,))  # fmt: skip
# a remainder of f32 is exact, and found a few bits of the quotient at a time
_map("fmod", 2, "np.fmod({0}, {1})", "fmodf({0}, {1})", "remainder of x / y toward zero, of x's sign", takes="float",
     flops=8, slots=60, ulps=0, gradients=("d", "-d * F.trunc(x / y)"))  # fmt: skip

# ---- i32 divided; numpy's int32 gives 0 of a division by 0
_map("floor_div", 2, "np.floor_divide({0}, {1})", "floor_quotient({0}, {1})", "whole quotient, downwards", takes="int",
     symbol="//", flops=4, slots=24, ulps=0, forms={u32: (
         "np.floor_divide({0}, {1})", "{1} == 0u ? 0u : {0} / {1}")})  # fmt: skip
_map("mod", 2, "np.mod({0}, {1})", "floor_remainder({0}, {1})", "its remainder, of y's sign", takes="int",
     symbol="%", flops=4, slots=24, ulps=0, forms={u32: (
         "np.mod({0}, {1})", "{1} == 0u ? 0u : {0} % {1}")})  # fmt: skip

# ---- activations; the slope bounds hold for every x. reciprocal(x) is within 1 ulp (PTX ISA, rcp.approx.ftz); above
# 2^126 it gives 0, where the quotient is below what f32 resolves here anyway
_map("sigmoid", 1, "1 / (1 + np.exp(-{0}))", "reciprocal(1.0f + exponential(-{0}))", "1 / (1 + exp(-x))",
     takes="float", flops=9, slots=6, ulps=4.5, slopes=("{out} * (1 - {out})",),
     scale="{out} * (1 + 0.2 * np.minimum(np.abs({0}), 128) * (1 - {out}))",
     gradients=("d * out * (1.0 - out)",))  # fmt: skip
_map("relu", 1, "np.maximum({0}, 0)", "larger({0}, 0.0f)", "max(x, 0)", ulps=0, slopes=("1",),
     forms={i32: ("np.maximum({0}, 0)", "max({0}, 0)")}, gradients=("F.where(x > 0.0, d, 0.0)",))  # fmt: skip
_map("silu", 1, "{0} / (1 + np.exp(-{0}))", "{0} * reciprocal(1.0f + exponential(-{0}))", "x * sigmoid(x)",
     takes="float", flops=10, slots=7, ulps=5, slopes=("1.1",),
     scale="{out} * (1 + 0.2 * np.minimum(np.abs({0}), 128) / (1 + np.exp({0})))",
     gradients=("d * (F.sigmoid(x) + out * (1.0 - F.sigmoid(x)))",))  # fmt: skip
_map("gelu_erf", 1, "0.5 * {0} * (1 + erf({0} * 0.7071067811865476))",
     "{0} * normal_cdf({0})", "x * Phi(x), exact",
     takes="float", flops=16, slots=11, ulps=6, scale="{0}", slopes=("1.13",), gradients=(GELU_BY_ERF,))  # fmt: skip
_map("gelu_tanh", 1, "0.5 * {0} * (1 + np.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))",
     "gelu_by_tanh({0})", "x * Phi(x) by tanh",
     takes="float", flops=16, slots=9, ulps=6, scale="{0}", slopes=("1.13",), gradients=(GELU_BY_TANH,))  # fmt: skip

# ---- comparisons and masks
for _name, _sign, _doc in (
    ("lt", "<", "less"), ("le", "<=", "less or equal"), ("gt", ">", "greater"),
    ("ge", ">=", "greater or equal"), ("eq", "==", "equal"), ("ne", "!=", "not equal"),
):  # fmt: skip
    _map(_name, 2, f"{{0}} {_sign} {{1}}", f"{{0}} {_sign} {{1}}", _doc, result=b8, symbol=_sign, ulps=0)
_map("isnan", 1, "np.isnan({0})", "{0} != {0}", "is it NaN?", takes="float", result=b8, ulps=0)
_map("isinf", 1, "np.isinf({0})", "fabsf({0}) == INFINITY", "is it an infinity?", takes="float", result=b8, ulps=0)
_map("isfinite", 1, "np.isfinite({0})", "fabsf({0}) < INFINITY", "is it a number?", takes="float", result=b8, ulps=0)
_map("logical_and", 2, "{0} & {1}", "{0} && {1}", "both", takes="bool", result=b8, symbol="&", ulps=0)
_map("logical_or", 2, "{0} | {1}", "{0} || {1}", "either", takes="bool", result=b8, symbol="|", ulps=0)
_map("logical_not", 1, "~{0}", "!{0}", "not", takes="bool", result=b8, symbol="~", ulps=0)
_map("where", 3, "np.where({0}, {1}, {2})", "{0} ? {1} : {2}", "{1} where {0} holds, else {2}", takes="where", ulps=0,
     slopes=("0", "1", "1"), gradients=(None, "F.where(x, d, 0.0)", "F.where(x, 0.0, d)"))  # fmt: skip

# ---- bits of i32; a shift by more than 31 leaves nothing, or the sign, as numpy's does
_map("bit_and", 2, "{0} & {1}", "{0} & {1}", "bits of both", takes="int", symbol="&", ulps=0)
_map("bit_or", 2, "{0} | {1}", "{0} | {1}", "bits of either", takes="int", symbol="|", ulps=0)
_map("bit_xor", 2, "{0} ^ {1}", "{0} ^ {1}", "bits of one alone", takes="int", symbol="^", ulps=0)
_map("bit_not", 1, "~{0}", "~{0}", "bits of what is none of x's", takes="int", symbol="~", ulps=0)
_map("shift_left", 2, "np.left_shift({0}, {1})", "static_cast<int>(static_cast<unsigned>({0}) << {1})", "x * 2^n",
     takes="int", symbol="<<", flops=3, ulps=0, forms={
         i32: ("np.left_shift({0}, {1})",
               "static_cast<unsigned>({1}) < 32u ? static_cast<int>(static_cast<unsigned>({0}) << {1}) : 0"),
         u32: ("np.left_shift({0}, {1})", "{1} < 32u ? {0} << {1} : 0u")})  # fmt: skip
_map("shift_right", 2, "np.right_shift({0}, {1})", "{0} >> {1}", "x / 2^n, downwards",
     takes="int", symbol=">>", flops=2, ulps=0,
     forms={i32: ("np.right_shift({0}, {1})", "{0} >> (static_cast<unsigned>({1}) < 32u ? {1} : 31)"),
            u32: ("np.right_shift({0}, {1})", "{1} < 32u ? {0} >> {1} : 0u")})  # fmt: skip

# ---- random numbers, as fusegen.language.philox defines them
_map("philox", 4, "philox({0}, {1}, {2}, {3})", "philox({0}, {1}, {2}, {3})",
     "32 random bits of an element: index (low, high), offset, seed", takes="int", result=i32, slots=PHILOX_SLOTS,
     ulps=0)  # fmt: skip
_map("to_unit", 1, "({0} >> 8 & 0xFFFFFF) * 2.0**-24",
     "5.96046448e-08f * static_cast<float>(static_cast<int>(static_cast<unsigned>({0}) >> 8))",
     "the upper 24 of 32 bits as a number in [0, 1), exact", takes="int", result=f32, slots=3, ulps=0)  # fmt: skip

# ---- conversions; a round trip through a storage type rounds there, to nearest even
_map("to_f32", 1, "{0}.astype(np.float64)", "static_cast<float>({0})", "as f32", takes="any", result=f32,
     slopes=("1",), gradients=("d",))  # fmt: skip
_map("to_i32", 1, "np.nan_to_num(np.clip({0}, -(2.0**31), 2.0**31 - 1)).astype(np.int32)", "to_int({0})",
     "as i32, toward zero; the nearest i32 of what is too large, 0 of NaN", takes="any", result=i32, slopes=("1",),
     forms={b8: ("{0}.astype(np.int32)", "static_cast<int>({0})"),
            u32: ("{0}.astype(np.int32)", "static_cast<int>({0})")})  # fmt: skip
_map("to_u32", 1, "np.nan_to_num(np.clip({0}, 0, 2.0**32 - 1)).astype(np.uint32)", "to_unsigned({0})",
     "as u32, toward zero; 0 of what is below it and of NaN, 2^32 - 1 of what is beyond; of i32 the same bits",
     takes="any", result=u32, forms={b8: ("{0}.astype(np.uint32)", "static_cast<unsigned>({0})"),
                                     i32: ("{0}.astype(np.uint32)", "static_cast<unsigned>({0})")})  # fmt: skip
_map("to_b8", 1, "{0} != 0", "{0} != 0", "True where not zero", takes="any", result=b8, ulps=0)
_map("round_f16", 1, "{0}.astype(np.float16).astype(np.float64)", "round_f16({0})", "rounded to f16, kept as f32",
     takes="float", slopes=("1",), ulps=2.0**13, gradients=("d",))  # fmt: skip
_map("round_bf16", 1, "{0}.astype(np.float32).astype(bfloat16).astype(np.float64)", "round_bf16({0})",
     "rounded to bf16, kept as f32", takes="float", slopes=("1",), ulps=2.0**16, gradients=("d",))  # fmt: skip

# to 8 bits: what is beyond the range, infinities too, becomes the nearest number that there is; NaN stays NaN
_NAN_CODES = {f8e4m3fnuz: 128, f8e5m2fnuz: 128, f8e8m0: 255}  # of others 127
for _type in F8:
    _map(f"round_{_type}", 1,
         f"np.clip({{0}}, {_type.nearest[0]}, {_type.nearest[1]}).astype(np.float32).astype({_type.numpy_name})"
         ".astype(np.float64)", f"round_{_type}({{0}})", f"rounded to {_type}, kept as f32", takes="float", slots=12,
         slopes=("1",), ulps=_type.epsilon * 2.0**24, gradients=("d",))  # fmt: skip
    _map(f"overflow_{_type}", 1, f"{{0}}.astype(np.float32).astype({_type.numpy_name}).astype(np.float64)",
         f"overflow_{_type}({{0}})", f"rounded to {_type}, kept as f32; inf or NaN beyond its range", takes="float",
         slots=14, slopes=("1",), ulps=_type.epsilon * 2.0**24, gradients=("d",))  # fmt: skip
    _map(f"code_of_{_type}", 1, f"np.where(np.isnan({{0}}), {_NAN_CODES.get(_type, 127)}, "
         f"{{0}}.astype({_type.numpy_name}).view(np.uint8)).astype(np.int32)",
         f"static_cast<int>({'to_f8e5m2_or_infinity' if _type is f8e5m2 else f'to_{_type}'}({{0}}))",
         f"the byte that a number of {_type} is", takes="float", result=i32, slots=12, ulps=0)  # fmt: skip
    _map(f"{_type}_of_code", 1, f"{{0}}.astype(np.uint8).view({_type.numpy_name}).astype(np.float64)",
         f"{_type}_value(static_cast<unsigned char>({{0}}))", f"the {_type} whose byte is the lowest of an i32",
         takes="int", result=f32, slots=8, ulps=0)  # fmt: skip
_map("round_f4e2m1", 1, "np.where(np.isnan({0}), 6.0, np.clip({0}, -6.0, 6.0).astype(np.float32).astype(float4_e2m1fn))"
     ".astype(np.float64)", "round_f4e2m1({0})", "rounded to f4e2m1, kept as f32; 6 of NaN", takes="float", slots=12,
     slopes=("1",), ulps=2.0**22, gradients=("d",))  # fmt: skip
_map("code_of_f4e2m1", 1, "np.where(np.isnan({0}), 7, np.clip({0}, -6.0, 6.0).astype(np.float32).astype(float4_e2m1fn)"
     ".view(np.uint8)).astype(np.int32)", "to_f4e2m1({0})", "the nibble of the nearest f4e2m1; 7 of NaN", takes="float",
     result=i32, slots=10, ulps=0)  # fmt: skip
_map("f4e2m1_of_code", 1, "({0} & 15).astype(np.uint8).view(float4_e2m1fn).astype(np.float64)", "f4e2m1_value({0})",
     "the f4e2m1 of a nibble", takes="int", result=f32, slots=5, ulps=0)  # fmt: skip
_map("bits_of_f32", 1, "{0}.astype(np.float32).view(np.int32)", "__float_as_int({0})", "the bits of an f32 as an i32",
     takes="float", result=i32, ulps=0)  # fmt: skip
_map("f32_of_bits", 1, "{0}.view(np.float32).astype(np.float64)", "__int_as_float({0})",
     "the f32 that has the bits of an i32", takes="int", result=f32, ulps=0)  # fmt: skip
for _type in (i8, u8, i4, u4):
    _limits = f"{_type.least:.0f}, {_type.largest:.0f}"
    _map(f"to_{_type}", 1, f"np.nan_to_num(np.clip(np.round({{0}}), {_limits})).astype(np.int32)",
         f"to_{_type}({{0}})", f"nearest whole number from {_type.least:.0f} to {_type.largest:.0f}, 0 of NaN",
         takes="number", result=i32, slots=4, slopes=("1",), forms={i32: (
             f"np.clip({{0}}, {_limits})", f"min(max({{0}}, {_type.least:.0f}), {_type.largest:.0f})")})  # fmt: skip

# powers of 2 next to a number, as scales of narrow types are; no number is below the range's least or beyond its last
for _name, _last, _exponent, _doc in (
    ("above", "2.0**127", "np.frexp({x})[1] - (np.frexp({x})[0] == 0.5)", "the least power of 2 from x on"),
    ("below", "1.9 * 2.0**127", "np.frexp({x})[1] - 1", "the largest power of 2 up to x"),
):
    _clipped = f"np.nan_to_num(np.clip({{0}}, 2.0**-126, {_last}), nan=2.0**127)"
    _map(f"power_of_2_{_name}", 1, f"np.ldexp(1.0, {_exponent.format(x=_clipped)})", f"power_of_2_{_name}({{0}})",
         f"{_doc}, within 2^-126 to 2^127; 2^127 of NaN", takes="float", slots=5, ulps=0,
     gradients=(None,))  # fmt: skip

# ---- reductions over the last axis
_reduce("sum", "{0}.sum(-1, keepdims=True)", "{0} + {1}", "0.0f", "sum of the row",
        forms={i32: ("{0}.sum(-1, keepdims=True, dtype=np.int32)", "{0} + {1}")},
        over={f32: "{0}.sum({axes}, keepdims=True)",
              i32: "{0}.sum({axes}, keepdims=True, dtype=np.int32)"}, gradients=("d",))  # fmt: skip
_reduce("prod", "{0}.prod(-1, keepdims=True)", "{0} * {1}", "1.0f", "product of the row",
        forms={i32: ("{0}.prod(-1, keepdims=True, dtype=np.int32)", "{0} * {1}")},
        over={f32: "{0}.prod({axes}, keepdims=True)",
              i32: "{0}.prod({axes}, keepdims=True, dtype=np.int32)"}, gradients=("times_others(x, d)",))  # fmt: skip
_reduce("max", "{0}.max(-1, keepdims=True)", "larger({0}, {1})", "-INFINITY",
        "largest of the row; NaN wins", ulps=0,
        over={f32: "{0}.max({axes}, keepdims=True, initial=-np.inf)",
              i32: "{0}.max({axes}, keepdims=True, initial=-2147483648)"}, gradients=(OF_EQUALS,))  # fmt: skip
_reduce("min", "{0}.min(-1, keepdims=True)", "smaller({0}, {1})", "INFINITY",
        "smallest of the row; NaN wins", ulps=0,
        over={f32: "{0}.min({axes}, keepdims=True, initial=np.inf)",
              i32: "{0}.min({axes}, keepdims=True, initial=2147483647)"}, gradients=(OF_EQUALS,))  # fmt: skip

# ---- running sums and products along the last axis
for _way in WAYS:
    OPS[_way.name] = Op(_way.name, Kind.SCAN, 1, _way.text(), "{0} + {1}" if _way.kind == "sum" else "{0} * {1}",
                        "running sum of the row" if _way.kind == "sum" else "running product of the row",
                        init="0.0f" if _way.kind == "sum" else "1.0f", slots=3, forms={i32: (
                            _way.text("np.int32"), "{0} + {1}" if _way.kind == "sum" else "{0} * {1}")},
                        gradients=(f"F.cumsum(whole(d), exclusive={_way.exclusive}, reverse={not _way.reverse})",)
                        if _way.kind == "sum" else ())  # fmt: skip

for _sorted in SORTED:
    OPS[_sorted.name] = Op(_sorted.name, Kind.SCAN, 1, _sorted.text(), "",
                           f"{_sorted.what} of the row in {'descending' if _sorted.descending else 'ascending'} order",
                           slots=64, result=i32 if _sorted.what == "columns" else None)  # fmt: skip
for _what, _doc in (("sum", "as few as sum up to a limit, else 0"), ("count", "so many of them, else -inf")):
    OPS[f"largest_by_{_what}"] = Op(f"largest_by_{_what}", Kind.SCAN, 2, f"kept_by_{_what}({{0}}, {{1}})", "",
                                    f"x where it is among its row's largest: {_doc}", takes="float", slots=64,
                                    gradients=("F.where(out != 0.0, d, 0.0)" if _what == "sum" else
                                               "F.where(out > -INF, d, 0.0)", None))  # fmt: skip

# ---- of groups of neighbours along the row: planners make these of reductions over the last axis of [.., G, K], which
# are one axis [.., G * K] in memory. A node's own text says how many they are
for _name in ("sum", "max", "min"):
    OPS[f"group_{_name}"] = Op(f"group_{_name}", Kind.GROUP, 1, "", OPS[_name].expr, f"{_name} of each group of a row",
                               init=OPS[_name].init)  # fmt: skip
# ---- of every so-many-th row: planners make these of reductions over rows, whose first kernel leaves as many parts. A
# node's own text says how many they are
for _name in ("sum", "max", "min"):
    OPS[f"part_{_name}"] = Op(f"part_{_name}", Kind.PART, 1, "", OPS[_name].expr,
                              f"{_name} of each column, over every so-many-th row", init=OPS[_name].init)  # fmt: skip
# ---- of columns that are dealt to so many parts, a tile at a time, on a leading axis of parts: planners make these of
# attention, whose first kernel leaves as many parts. A node's own text says which columns a part has
for _name in ("sum", "max"):
    OPS[f"deal_{_name}"] = Op(f"deal_{_name}", Kind.DEAL, 1, "", OPS[_name].expr,
                              f"{_name} of the columns that each part is dealt", init=OPS[_name].init)  # fmt: skip
OPS["deal_back"] = Op("deal_back", Kind.SPREAD, 1, "", "", "each part's value at the columns that it is dealt", flops=0,
                      slopes=("1",), ulps=0)  # fmt: skip
OPS["spread"] = Op("spread", Kind.SPREAD, 1, "", "", "each group's value at all of its places", flops=0, takes="any",
                   slopes=("1",), ulps=0)  # fmt: skip

# ---- selections from the last axis: the functions of fusegen.language.selection are their meaning
_select("top_columns", 1, "top_columns({0}, {k})", "columns of the k largest; -inf is never chosen", result=i32,
        forms={i32: ("top_columns(np.where({0} > -(2**31), {0}, -np.inf), {k})", "")})  # fmt: skip
_select(
    "take",
    2,
    "take({0}, {1}, {missing})",
    "x at those columns",
    takes="any",
    slopes=("1", "0"),
    ulps=0,
    gradients=("at_columns(d)", None),
)

# ---- places that are computed: the functions of fusegen.language.lookup are their meaning
_gather("gather", "rows_at({0}, {1})", "rows of an operand that indices name; 0 where there is no such row")
_gather(
    "take_at",
    "take_at({0}, {1}, {missing})",
    "x at the column that each row's index names",
    gradients=("F.where(F.col_index(x) == y, d, 0.0)", None),
)

# what a kernel sees of a gather whose rows are seen as one axis
_gather(
    "paged_rows", "pages_at({0}, {1})", "rows of the pages that indices name, page behind page; 0 where there is none"
)

OPS["scatter"] = Op("scatter", Kind.SCATTER, 3, "rows_put({0}, {1}, {2})", "",
                    "an operand whose rows that indices name are new; the others stay as they are", takes="any",
                    flops=0, ulps=0)  # fmt: skip
# what a kernel sees of it: its own rows, and where they go
OPS["put"] = Op(
    "put", Kind.SCATTER, 2, "{1}", "", "rows, written where indices name some", takes="any", flops=0, ulps=0
)


# ---- slots sorted by the group that each names: the functions of fusegen.language.segments are their meaning. How many
# groups there are a node of the first says in its own text
for _name, _count, _ref, _doc in (
    ("group_ends", 1, "", "behind which slot each group ends, of slots sorted by the group that each names"),
    ("slot_order", 2, "order_of_slots({0}, {1})", "slots sorted by the group that each names, stable"),
    ("slot_places", 2, "places_of_slots({0}, {1})", "where each slot goes that is sorted by its group"),
):
    OPS[_name] = Op(_name, Kind.ORDER, _count, _ref, "", _doc, takes="int", slots=16, ulps=0, result=i32)

# ---- matrix products over the last two axes, summed in f32; factors are f16 or bf16 in memory, or rounded to it
OPS["transpose"] = Op("transpose", Kind.TRANSPOSE, 1, "np.swapaxes({0}, -1, -2)", "",
                      "an operand's matrices, transposed", flops=0, takes="any", slopes=("1",), ulps=0,
                      gradients=("whole(d).mT",))  # fmt: skip
for _type in (i4, u4, f4e2m1):
    OPS[f"unpack_{_type}"] = Op(f"unpack_{_type}", Kind.UNPACK, 1, "", "", f"two {_type} from each byte", flops=0,
                                result=_type.value)  # fmt: skip
OPS["view"] = Op("view", Kind.VIEW, 1, "", "", "some elements of a value, in other axes", flops=0, takes="any",
                 slopes=("1",), ulps=0, gradients=("back(d)",))  # fmt: skip
OPS["join"] = Op("join", Kind.JOIN, 2, "", "", "values side by side", flops=0, takes="any", ulps=0,
                 gradients=("part(d)",))  # fmt: skip
_EXACT = "({0}.astype(np.float64) @ {1}.astype(np.float64)).astype(np.int64).astype(np.int32)"  # sums below 2^53 are
OPS["matmul"] = Op("matmul", Kind.PRODUCT, 2, "{0} @ {1}", "", "matrix product, summed in f32; of whole numbers in i32",
                   symbol="@", forms={i32: (_EXACT, "")},
                   gradients=("whole(d) @ y.mT", "in_rows(x).mT @ in_rows(d)"))  # fmt: skip
OPS["grouped_matmul"] = Op("grouped_matmul", Kind.PRODUCT, 3, "matmul_by_group({0}, {1}, {2})", "",
                           "matrix product of each group of rows with a matrix of its own, summed in f32",
                           gradients=("F.grouped_matmul(whole(d), y.mT, z)",
                                      "F.grouped_matmul(as_multiplied(x).mT, whole(d), z)", None))  # fmt: skip
OPS["matmul_over_groups"] = Op("matmul_over_groups", Kind.PRODUCT, 3, "products_by_group({0}, {1}, {2})", "",
                               "a matrix product for each group of what is summed over, summed in f32")  # fmt: skip
OPS["add_group_rows"] = Op("add_group_rows", Kind.BIAS, 3, "add_by_group({0}, {1}, {2})", "{0} + {1}",
                           "a grouped product with each group's own vector added to its rows",
                           gradients=("whole(d)", "by_groups(whole(d))", None))  # fmt: skip
OPS["scale_group_rows"] = Op("scale_group_rows", Kind.BIAS, 3, "scale_by_group({0}, {1}, {2})", "{0} * {1}",
                             "a grouped product whose rows are multiplied by their group's own vector")  # fmt: skip
OPS["deal_matmul"] = Op("deal_matmul", Kind.PRODUCT, 2, "", "",
                        "matrix product over the columns of the left factor that each part is dealt",
                        takes="any")  # fmt: skip
OPS["matmul_tf32"] = Op("matmul_tf32", Kind.PRODUCT, 2, "{0} @ {1}", "",
                        "matrix product of f32 factors that may become the nearest tf32, summed in f32",
                        gradients=('F.matmul(whole(d), y.mT, precision="tf32")',
                                   'F.matmul(in_rows(x).mT, in_rows(d), precision="tf32")'))  # fmt: skip
