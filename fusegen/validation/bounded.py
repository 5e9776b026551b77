"""A value and how far the kernel's own may be from it: what the error analysis carries from node to node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A value and how far the kernel's may be from it; of a mask, error 1 says that the kernel may hold either."""

    value: Array
    error: Array

    @property
    def exact(self) -> bool:
        return not np.any(self.error)

    @property
    def low(self) -> Array:
        """-inf where nothing is known, also of what the reference has as NaN."""
        return np.asarray(np.where(np.isinf(self.error), -np.inf, self.value - self.error))

    @property
    def high(self) -> Array:
        return np.asarray(np.where(np.isinf(self.error), np.inf, self.value + self.error))

    @property
    def unsure(self) -> Array:
        return np.asarray(self.error > 0)


def exact(value: Any) -> Bounded:
    return Bounded(np.asarray(value), np.zeros(()))


def bounded(value: Any, error: Any) -> Bounded:
    """With NaN errors made infinite: what can't be said is not known."""
    error = np.asarray(error, np.float64)
    return Bounded(np.asarray(value), np.where(np.isnan(error), np.inf, error))


def gap(a: Any, b: Any) -> Array:
    """|a - b|; 0 between equal infinities and between NaNs, infinite where only one is NaN. Where float64 has no such
    number it is the next one above: b = 1 lies within the gap of a = -1e38."""
    same = (a == b) | ((a != a) & (b != b))
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    difference = a - b
    moved = difference - a
    lost = (a - (difference - moved)) - (b + moved)  # what the subtraction rounded, after Knuth
    distance = np.abs(difference)
    distance = np.where((lost != 0) & np.isfinite(difference), np.nextafter(distance, np.inf), distance)
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
