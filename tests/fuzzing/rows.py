"""Reductions of a row, and the composites made of them, on bounded values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzzing.arithmetic import (
    add,
    div,
    doubted,
    exponential,
    logarithm,
    mul,
    ordered_as,
    rsqrt,
    square,
    sub,
    where,
)
from tests.fuzzing.bounded import EPS, INF, LARGEST, Bounded, as_float, exact, settled, size_of

Array = np.ndarray[Any, np.dtype[Any]]
LONGEST_SUM = 300  # roundings, one after another, that a sum of any length has: it is a tree of shorter ones


def total(a: Bounded) -> Bounded:
    a = as_float(a)
    size = size_of(a.value).sum(-1, keepdims=True)
    value = a.value.sum(-1, keepdims=True)
    error = a.error.sum(-1, keepdims=True) + EPS * min(a.value.shape[-1], LONGEST_SUM) * size
    return settled(value, np.where(size > LARGEST / 2, INF, error))  # a partial sum may overflow


def running_sum(a: Bounded) -> Bounded:
    a = as_float(a)
    error = np.broadcast_to(a.error, a.value.shape)
    size = np.cumsum(size_of(a.value), -1)
    found = np.cumsum(error, -1) + EPS * min(a.value.shape[-1], LONGEST_SUM) * size
    return settled(np.cumsum(a.value, -1), np.where(size > LARGEST / 2, INF, found))


def mean(a: Bounded) -> Bounded:
    return div(total(a), Bounded("f", float(a.value.shape[-1])))


def variance(a: Bounded) -> Bounded:
    """In two passes, and never below 0."""
    found = mean(square(sub(as_float(a), mean(a))))
    low, high = np.maximum(found.value - found.error, 0.0), found.value + found.error
    narrowed = np.isfinite(high) & (low <= high)
    with np.errstate(all="ignore"):
        value, error = (low + high) / 2, (high - low) / 2
    return Bounded("f", np.where(narrowed, value, found.value), np.where(narrowed, error, found.error))


def extreme(function: Callable[..., Any]) -> Callable[[Bounded], Bounded]:
    """The largest or smallest of a row; of i32 an i32."""

    def run(a: Bounded) -> Bounded:
        if a.kind == "i":
            return Bounded("i", function(a.value, -1, keepdims=True), a.error.max(-1, keepdims=True))
        a = as_float(a)
        lost = np.isinf(a.error).any(-1, keepdims=True)
        return settled(function(a.value, -1, keepdims=True), np.where(lost, INF, a.error.max(-1, keepdims=True)))

    return run


largest, smallest = extreme(np.max), extreme(np.min)
REDUCE = {"sum": total, "mean": mean, "max": largest, "min": smallest, "var": variance}


def pivot(a: Bounded) -> tuple[Bounded, Bounded]:
    """The row's maximum, and what is subtracted of each: 0 where all is -inf. Its error is common to the row and
    cancels, but for where it has no bound."""
    top = largest(a)
    return top, Bounded("f", np.where(top.value == -INF, 0.0, top.value), np.where(np.isfinite(top.error), 0.0, INF))


def softmax(a: Bounded) -> Bounded:
    """The textbook's, but that a row of -inf gives zeros."""
    a = as_float(a)
    powers = exponential(sub(a, pivot(a)[1]))
    whole = total(powers)
    share = div(powers, whole)
    none = whole.value == 0
    value, error = np.broadcast_arrays(
        np.where(none, 0.0, share.value), np.where(none & (whole.error < 1e-30), 0.0, share.error)
    )
    return ordered_as(a, Bounded("f", value, error + 4 * EPS * size_of(value)), 0.0)


def log_softmax(a: Bounded) -> Bounded:
    a = as_float(a)
    top, subtracted = pivot(a)
    shift = sub(a, subtracted)
    whole = total(exponential(shift))
    log = logarithm(whole)
    none = whole.value == 0
    log = Bounded("f", np.where(none, 0.0, log.value), np.where(none & (whole.error < 1e-30), 0.0, log.error))
    result = sub(shift, log)
    return ordered_as(a, Bounded("f", result.value, result.error + EPS * size_of(top.value)), -INF)


def plain(a: Bounded) -> Bounded:
    """The value alone, which orders by itself."""
    return Bounded(a.kind, a.value, a.error)


def layernorm(a: Bounded, gamma: Bounded | None, beta: Bounded | None, eps: float) -> Bounded:
    centered = plain(sub(as_float(a), mean(a)))
    result = doubted(mul(centered, rsqrt(add(mean(square(centered)), exact(float(eps))))))
    if gamma is not None:
        result = mul(result, gamma)
    return result if beta is None else add(result, beta)


def rms_scale(a: Bounded, eps: float) -> Bounded:
    """1 / rms, one value a row."""
    return rsqrt(add(mean(square(as_float(a))), exact(float(eps))))


def rmsnorm(a: Bounded, gamma: Bounded | None, eps: float) -> Bounded:
    result = doubted(mul(plain(as_float(a)), rms_scale(a, eps)))
    return result if gamma is None else mul(result, gamma)


def causal(a: Bounded, offset: int) -> Bounded:
    """-inf where the column is beyond the row's index, plus `offset`."""
    a = as_float(a)
    keep = below_diagonal(a, offset)
    return Bounded("f", np.where(keep, a.value, -INF), np.where(keep, a.error, 0.0))


def below_diagonal(a: Bounded, offset: int = 0) -> Any:
    rows, cols = a.value.shape[-2:]
    return np.arange(cols)[None, :] <= np.arange(rows)[:, None] + offset


def columns(a: Bounded) -> Bounded:
    return Bounded("i", np.arange(a.value.shape[-1]))


def row_indices(a: Bounded) -> Bounded:
    return Bounded("i", np.arange(a.value.shape[-2])[:, None])


# ---------------------------------------------------------------- random numbers


def uniform(a: Bounded, seed: int, offset: int) -> Bounded:
    """Philox4x32-10 (Salmon et al. 2011) by products of 16-bit halves, of each element's row-major place."""
    place = np.arange(a.value.size)
    words = [place // 4 % 2**32, place // 4 >> 32, np.full(place.shape, offset % 2**32), np.zeros_like(place)]
    for turn in range(10):
        first, third = product_of(0xD2511F53, words[0]), product_of(0xCD9E8D57, words[2])
        keys = (seed + turn * 0x9E3779B9) % 2**32, turn * 0xBB67AE85 % 2**32
        words = [third[0] ^ words[1] ^ keys[0], third[1], first[0] ^ words[3] ^ keys[1], first[1]]
    own = np.select([place % 4 == word for word in range(4)], words)
    return Bounded("f", (own // 256 / 2.0**24).reshape(a.value.shape))


def product_of(a: int, b: Array) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of a product."""
    low, high = a * (b % 2**16), a * (b // 2**16) + a * (b % 2**16) // 2**16
    return high // 2**16, (high % 2**16 * 2**16) + low % 2**16


def dropout(a: Bounded, seed: int, offset: int) -> Bounded:
    """Half of the elements, doubled."""
    kept = Bounded("b", uniform(a, seed, offset).value >= 0.5)
    return where(kept, mul(a, exact(2.0)), exact(0.0))
