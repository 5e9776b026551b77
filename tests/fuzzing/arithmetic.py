"""Elementwise ops on bounded values: the accuracies here are those that docs and op table promise, with room."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.fuzzing.bounded import (
    EPS,
    INF,
    TINY,
    Array,
    Bounded,
    as_float,
    exact,
    moved,
    rounded,
    settled,
    size_of,
    unknown,
)

Meaning = Callable[..., Bounded]
erf = np.vectorize(math.erf, otypes=[float])
LIMITS = np.iinfo(np.int32)

# ---------------------------------------------------------------- what a selection goes by


def ordered_as(a: Bounded, result: Bounded, missing: float) -> Bounded:
    """`result`, which is strictly increasing in `a` along the row; a masked element of `a` becomes `missing`.

    What was 0 for a masked element, and goes on to be something else, no longer tells: the result is its own key.
    """
    if a.key is not None and a.missing == 0.0:
        return result
    key = as_float(a if a.key is None else a.key)
    return Bounded(result.kind, result.value, result.error, key=key, missing=missing, doubtful=a.doubtful)


def doubted(a: Bounded) -> Bounded:
    """A result that keeps the order only if some value is positive, which is not looked into."""
    return Bounded(a.kind, a.value, a.error, doubtful=True)


def along_row(a: Bounded) -> bool:
    return a.value.ndim > 0 and a.value.shape[-1] != 1


def shifted(a: Bounded, result: Bounded) -> Bounded:
    """`result` = a + a term of the row. Where the term is no number, the order is that of the sum; else both have the
    same. But what is not a number in a result that has a key may be one in that."""
    return result if a.key is None and not a.doubtful else doubted(result)


# ---------------------------------------------------------------- of one argument


def unary(
    function: Callable[[Array], Array], ulps: float, *, slope: Callable[[Array, Array], Array] | None = None,
    tiny: float = TINY, more: Callable[[Array, Array], Array] | None = None,
) -> Meaning:  # fmt: skip
    """An op within `ulps` of `function`: monotone between the ends of an error, or with the `slope` (value, error) as
    a bound. `more` (argument, result) is error of another form."""

    def run(a: Bounded) -> Bounded:
        a = as_float(a)
        value = function(a.value)
        error = moved(function, a, value)
        if slope is not None:
            error = np.where(a.error == 0, 0.0, np.maximum(error, slope(a.value, a.error)))
        error = error + ulps * 2 * EPS * size_of(value) + tiny
        if more is not None:
            error = error + more(a.value, value)
        return settled(value, np.where(np.isinf(a.error), INF, error))

    return run


def exponents(argument: Array, value: Array) -> Array:
    """x log2(e) is rounded before the power is taken."""
    return size_of(value) * EPS * 2 * np.minimum(size_of(argument), 200)


def gentle(value: Array, error: Array) -> Array:
    """SiLU and GELU are nowhere steeper than 1.13."""
    return 1.2 * error


def gelu_error(argument: Array, value: Array) -> Array:
    return 16 * EPS * size_of(argument)


def tanh_gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


absolute = unary(np.abs, 0, slope=lambda _, error: error, tiny=0.0)
square = unary(lambda x: x * x, 1, slope=lambda value, error: 2 * np.abs(value) * error + error * error)
rsqrt = unary(lambda x: 1 / np.sqrt(x), 4)
sqrt = unary(np.sqrt, 4)
exponential = unary(np.exp, 4, more=exponents)
logarithm = unary(np.log, 5)
silu = unary(lambda x: x / (1 + np.exp(-x)), 8, slope=gentle, more=exponents)
logistic = unary(lambda x: 1 / (1 + np.exp(-x)), 6, more=exponents)


logarithm_to_2 = unary(np.log2, 6)
power_of_2 = unary(np.exp2, 4)


def stepped(function: Callable[[Array], Array]) -> Meaning:
    """Of what is not exact, nothing is known where the ends of its error land on other steps."""

    def run(a: Bounded) -> Bounded:
        a = as_float(a)
        value = function(a.value)
        same = (function(a.value - a.error) == value) & (function(a.value + a.error) == value)
        return settled(value, np.where((a.error == 0) | same, 0.0, INF))

    return run


def exp2(a: Bounded) -> Bounded:
    return doubted(power_of_2(a))


def exp(a: Bounded) -> Bounded:
    return ordered_as(a, exponential(a), 0.0)


def sigmoid(a: Bounded) -> Bounded:
    return ordered_as(a, logistic(a), 0.0)


UNARY: dict[str, Meaning] = {
    "exp": exp,
    "log": lambda a: doubted(logarithm(a)),
    "log1p": unary(np.log1p, 6),
    "exp2": exp2,
    "expm1": unary(np.expm1, 4),
    "log2": lambda a: doubted(logarithm_to_2(a)),
    "sin": unary(np.sin, 5, slope=lambda _, error: error),
    "cos": unary(np.cos, 5, slope=lambda _, error: error),
    "floor": stepped(np.floor),
    "ceil": stepped(np.ceil),
    "trunc": stepped(np.trunc),
    "round": stepped(np.round),
    "sign": stepped(np.sign),
    "softplus": unary(lambda x: np.logaddexp(0, x), 12, slope=gentle),
    "mish": unary(lambda x: x * np.tanh(np.logaddexp(0, x)), 16, slope=gentle, more=gelu_error),
    "elu": unary(lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), 6, slope=gentle),
    "hardswish": unary(
        lambda x: x * np.clip(x + 3, 0, 6) / 6, 4, slope=lambda value, error: 1.5 * error, more=gelu_error
    ),
    "softsign": unary(lambda x: x / (1 + np.abs(x)), 6),
    "sqrt": lambda a: doubted(sqrt(a)),
    "rsqrt": rsqrt,
    "tanh": unary(np.tanh, 8),
    "erf": unary(lambda x: np.asarray(erf(x)), 8),
    "sigmoid": sigmoid,
    "relu": unary(lambda x: np.maximum(x, 0), 0, tiny=0.0),
    "silu": silu,
    "gelu": unary(tanh_gelu, 0, slope=gentle, more=gelu_error),
    "gelu_none": unary(lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))), 0, slope=gentle, more=gelu_error),
    "square": square,
    "abs": absolute,
    "neg": unary(lambda x: -x, 0, tiny=0.0),
}


def power(a: Bounded, exponent: float) -> Bounded:
    """a ** exponent. Of subnormal and of huge arguments nothing is judged: 1 / x and its like may flush either."""
    a = as_float(a)
    exponent = float(np.float32(exponent))
    value = np.power(a.value, exponent)
    error = moved(lambda x: np.power(x, exponent), a, value) + 40 * EPS * size_of(value) + TINY
    zero_between = (a.error > 0) & (np.abs(a.value) <= a.error)
    return settled(value, np.where(zero_between | beyond_reciprocals(a.value) | np.isinf(a.error), INF, error))


def beyond_reciprocals(value: Array) -> Array:
    """Subnormal numbers, and those whose reciprocal is one."""
    size = np.abs(value)
    found: Array = ((size < TINY) & (value != 0)) | (np.isfinite(value) & (size > 2.0**125))
    return found


# ---------------------------------------------------------------- of two


def integers(a: Bounded, b: Bounded) -> bool:
    return a.kind == "i" and b.kind == "i"


def wrapped(value: Array, error: Array) -> Bounded:
    """i32, modulo 2^32 in two's complement; on the edge of that an error has no bound."""
    inside = (value + error <= LIMITS.max) & (value - error >= LIMITS.min)
    held = np.asarray((value - LIMITS.min) % 2**32 + LIMITS.min)
    return Bounded("i", held, np.where((error > 0) & ~inside, INF, error))


def summed(a: Bounded, b: Bounded, sign: int) -> Bounded:
    if integers(a, b):
        return wrapped(a.value + sign * b.value, a.error + b.error)
    a, b = as_float(a), as_float(b)
    value = a.value + sign * b.value
    result = settled(value, a.error + b.error + EPS * size_of(value))
    if along_row(a) and not along_row(b):
        return shifted(a, result)
    if sign > 0 and along_row(b) and not along_row(a):
        return shifted(b, result)
    return result if along_row(a) or along_row(b) else doubted(result)


def add(a: Bounded, b: Bounded) -> Bounded:
    return summed(a, b, 1)


def sub(a: Bounded, b: Bounded) -> Bounded:
    return summed(a, b, -1)


def mul(a: Bounded, b: Bounded) -> Bounded:
    if integers(a, b):
        error = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
        return wrapped(a.value * b.value, error)
    a, b = as_float(a), as_float(b)
    value = a.value * b.value
    error = np.where(b.error > 0, np.abs(a.value) * b.error, 0) + np.where(a.error > 0, np.abs(b.value) * a.error, 0)
    error = error + a.error * b.error + EPS * size_of(value) + TINY
    error = np.where(outright(a, b) | outright(b, a), 0.0, np.where(unknown(a, b), INF, error))
    result = settled(value, error)
    return result if along_row(a) and along_row(b) else doubted(result)


def outright(a: Bounded, b: Bounded) -> Array:
    """Where `a` decides a product with `b`, whose error is of no matter: a NaN, or an infinity times what is not 0."""
    some = np.isinf(a.value) & (np.abs(b.value) - b.error > TINY)
    found: Array = (a.error == 0) & (np.isnan(a.value) | some)
    return found


def div(a: Bounded, b: Bounded) -> Bounded:
    """a / b. A denominator that is subnormal, or beyond 2^125, may be flushed: not judged."""
    a, b = as_float(a), as_float(b)
    value = a.value / b.value
    least = np.abs(b.value) - b.error
    error = (a.error + np.where(b.error > 0, np.abs(value) * b.error, 0)) / least
    error = np.where((a.error == 0) & (b.error == 0), 0.0, error)
    error = np.where((least <= 0) & (b.error > 0), INF, error)
    error = np.where(np.isinf(b.value) & (b.error == 0) & np.isfinite(a.error), 0.0, error)
    error = error + 6 * EPS * size_of(value) + TINY
    result = settled(value, np.where(beyond_reciprocals(b.value) | unknown(a, b), INF, error))
    return result if along_row(b) else doubted(result)


def either(function: Callable[[Array, Array], Array]) -> Meaning:
    def run(a: Bounded, b: Bounded) -> Bounded:
        if integers(a, b):
            return Bounded("i", function(a.value, b.value), np.maximum(a.error, b.error))
        a, b = as_float(a), as_float(b)
        return settled(function(a.value, b.value), np.maximum(a.error, b.error))

    return run


maximum, minimum = either(np.maximum), either(np.minimum)


def clip(a: Bounded, low: float, high: float) -> Bounded:
    return minimum(maximum(a, exact(low)), exact(high))


def bits(function: Callable[[Array, Array], Array]) -> Meaning:
    """On i32: exact, or not known at all."""

    def run(a: Bounded, b: Bounded) -> Bounded:
        error = np.where((a.error > 0) | (b.error > 0), INF, 0.0)
        return Bounded("i", function(a.value, b.value), error)

    return run


BITS = {"&": bits(np.bitwise_and), "|": bits(np.bitwise_or), "^": bits(np.bitwise_xor)}

# ---------------------------------------------------------------- masks


def compare(function: Callable[[Array, Array], Array]) -> Meaning:
    def run(a: Bounded, b: Bounded) -> Bounded:
        if a.kind == "b" and b.kind == "b":
            return Bounded("b", function(a.value, b.value), a.error | b.error)
        if not integers(a, b):
            a, b = as_float(a), as_float(b)
        slack = a.error + b.error
        apart = np.abs(a.value - b.value) > slack
        close = (slack > 0) & ~apart & ~(np.isnan(a.value) | np.isnan(b.value))
        return Bounded("b", function(a.value, b.value), close | np.isinf(slack))

    return run


COMPARE = {
    "<": compare(np.less), "<=": compare(np.less_equal), ">": compare(np.greater), ">=": compare(np.greater_equal),
    "==": compare(np.equal), "!=": compare(np.not_equal),
}  # fmt: skip


def both(a: Bounded, b: Bounded) -> Bounded:
    return Bounded("b", a.value & b.value, (a.error & b.error) | (a.error & b.value) | (b.error & a.value))


def any_of(a: Bounded, b: Bounded) -> Bounded:
    return Bounded("b", a.value | b.value, (a.error & b.error) | (a.error & ~b.value) | (b.error & ~a.value))


def one_of(a: Bounded, b: Bounded) -> Bounded:
    return Bounded("b", a.value ^ b.value, a.error | b.error)


def inverse(a: Bounded) -> Bounded:
    return Bounded("b", ~a.value, a.error)


MASKS = {"&": both, "|": any_of, "^": one_of}


def where(mask: Bounded, a: Bounded, b: Bounded) -> Bounded:
    whole = integers(a, b)
    if not whole:
        a, b = as_float(a), as_float(b)
    value, error = np.where(mask.value, a.value, b.value), np.where(mask.value, a.error, b.error)
    return Bounded("i" if whole else "f", value, np.where(mask.error, INF, error))


# ---------------------------------------------------------------- casts


def cast(a: Bounded, to: str) -> Bounded:
    if to == "f32":
        return as_float(a)
    if to == "b8":
        near = (a.error > 0) & (np.abs(a.value) <= a.error)
        return a if a.kind == "b" else Bounded("b", a.value != 0, near | np.isinf(a.error))
    if to == "i32":
        return a if a.kind == "i" else whole_numbers(as_float(a))
    a = as_float(a)
    value = rounded(a.value, to)
    low, high = rounded(a.value - a.error, to), rounded(a.value + a.error, to)
    error = np.where(a.error == 0, 0.0, np.maximum(np.abs(low - value), np.abs(high - value)))
    error = np.where(np.isinf(value) & (low == value) & (high == value), 0.0, error)
    return settled(value, np.where(np.isinf(a.error), INF, error))


def whole_numbers(a: Bounded) -> Bounded:
    """Toward zero; NaN is 0 and what is beyond i32 the nearest that it holds, as on the hardware of both vendors."""

    def held(value: Array) -> Array:
        return np.clip(np.trunc(np.where(np.isnan(value), 0.0, value)), LIMITS.min, LIMITS.max)

    value = held(a.value)
    error = np.where(np.isinf(a.error), INF, moved(held, a, value))
    return Bounded("i", value.astype(np.int64), np.where(np.isnan(error), INF, error))
