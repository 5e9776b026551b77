"""Matrix products of bounded values."""

from __future__ import annotations

import numpy as np

from tests.fuzzing.arithmetic import cast
from tests.fuzzing.bounded import EPS, INF, LARGEST, TINY, Bounded, settled, size_of

LONGEST_SUM = 300


def product(a: Bounded, b: Bounded, stored: str, *, computed: bool, tf32: bool) -> Bounded:
    """a @ b. A left factor that is computed is rounded to the type of stored factors on its way, f16 with its range;
    tf32 rounds both."""
    if computed and not tf32:
        a = cast(a, stored)
    depth = a.value.shape[-1]
    left, right = size_of(a.value), size_of(b.value)
    value, size = np.matmul(a.value, b.value), np.matmul(left, right)
    rounding = 2.1 * 2.0**-11 if tf32 else 0.0
    known = np.where(np.isfinite(a.error), a.error, 0.0)
    error = 1.01 * np.matmul(known, right) + size * (rounding + 2 * EPS * min(depth, LONGEST_SUM)) + TINY * depth
    lost = np.isinf(a.error).any(-1, keepdims=True)
    return settled(value, np.where(lost | (size > LARGEST / 2), INF, error))


def turned(a: Bounded) -> Bounded:
    """Its matrices, transposed."""
    return Bounded(a.kind, np.swapaxes(a.value, -1, -2), np.swapaxes(a.error, -1, -2))
