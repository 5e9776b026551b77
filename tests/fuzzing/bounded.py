"""Values with a bound of their error: what a chain means, in float64, and how far f32 arithmetic may be from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Kind = Literal["f", "i", "b"]  # a float, an i32, a mask

EPS = 2.0**-24
LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-126  # the smallest normal f32: what is below may be flushed to 0
INF = float("inf")

STORED: dict[str, Any] = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "b8": np.bool_,
}  # fmt: skip
KINDS: dict[str, Kind] = {"f32": "f", "f16": "f", "bf16": "f", "i32": "i", "b8": "b"}


class Bounded:
    """`value`, and the `error` that a kernel's may have; of a mask, `error` is where it is too close to call.

    A score whose order is that of another value has that as its `key`, and is `missing` where the key is -inf. Where
    it is not known here whether a step keeps the order, as a factor's sign decides, the score is `doubtful`.
    """

    __slots__ = ("doubtful", "error", "key", "kind", "missing", "value")

    def __init__(
        self, kind: Kind, value: object, error: object = None, *, key: Bounded | None = None, missing: float = -INF,
        doubtful: bool = False,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.value: Array = np.asarray(value)
        exact = np.zeros(self.value.shape, bool if kind == "b" else float)
        self.error: Array = exact if error is None else np.broadcast_to(np.asarray(error), self.value.shape)
        self.key, self.missing, self.doubtful = key, missing, doubtful

    @property
    def certain(self) -> Array:
        """Where it is judged."""
        return ~self.error if self.kind == "b" else np.isfinite(self.error)


def exact(value: bool | int | float) -> Bounded:
    """A Python number as a kernel's constant: a float is one of f32."""
    if isinstance(value, bool):
        return Bounded("b", np.bool_(value))
    if isinstance(value, int):
        return Bounded("i", np.int64(value))
    return Bounded("f", np.float64(np.float32(value)))


def settled(value: Array, error: Array) -> Bounded:
    """A float as f32 has it: beyond its largest number an infinity, and near that edge nothing is certain."""
    error = np.where(np.isnan(error), INF, error)
    value = np.asarray(value, float)
    size = np.abs(value)
    over = np.isfinite(value) & (size > LARGEST)
    surely_over = size - error > LARGEST * (1 + EPS)
    near = np.isfinite(value) & ~over & (size + error > LARGEST)
    value = np.where(over, np.sign(value) * INF, value)
    error = np.where(over, np.where(surely_over, 0.0, INF), np.where(near, INF, error))
    return Bounded("f", value, np.where(~np.isfinite(value) & np.isfinite(error), 0.0, error))


def as_float(a: Bounded) -> Bounded:
    """The same as f32, to which an i32 beyond 2^24 is rounded."""
    if a.kind == "f":
        return a
    value = a.value.astype(float)
    return Bounded("f", value, np.where(np.abs(value) > 2.0**24, EPS * np.abs(value), 0.0) + a.error)


def size_of(value: Array) -> Array:
    """Magnitudes, and 0 where there is none: what relative errors are relative to."""
    return np.where(np.isfinite(value), np.abs(value), 0.0)


def unknown(*values: Bounded) -> Array:
    """Where any of them has no bound."""
    found: Array = np.isinf(values[0].error)
    for one in values[1:]:
        found = found | np.isinf(one.error)
    return found


def any_of(one: Bounded, other: Bounded) -> Bounded:
    """Floats of which either is right."""
    with np.errstate(all="ignore"):
        same = (one.value == other.value) | (np.isnan(one.value) & np.isnan(other.value))
        apart = np.where(same, 0.0, np.abs(one.value - other.value))
        error = np.maximum(one.error, apart + other.error)
    return Bounded("f", one.value, np.where(np.isnan(error), INF, error))


def moved(function: Callable[[Array], Array], a: Bounded, value: Array) -> Array:
    """How far the argument's error moves `value`, by the ends of its interval; for what is monotone between them."""
    with np.errstate(all="ignore"):
        low, high = function(a.value - a.error), function(a.value + a.error)
        either: Array = np.maximum(np.abs(low - value), np.abs(high - value))
    return np.where(a.error == 0, 0.0, either)  # also where value is infinite


def rounded(value: Array, stored: str) -> Array:
    """As an array of that type holds it: rounded to f32 first, as the kernel's value is."""
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(np.float32).astype(STORED[stored]).astype(float)
