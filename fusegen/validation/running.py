"""Errors of running sums and products along a row; a row's product is the last of them.

An element of a sum passes at most `depth` additions, and no more than there are elements up to the one at hand: each
rounds by u = 2^-24 of the elements' magnitudes, summed.

Factors that are off by e_i make a product at most prod(|x_i| + e_i) - prod|x_i| off. Every multiplication rounds the
whole product by u = 2^-24 of it, in whatever order: i + 1 factors, (i + 1) u.

Threads multiply parts of a row before they multiply their parts. Any part lies between the product of the factors below
1 and that of those above 1. Where the one is below what f32 resolves, 2^-126 is lost in each of i + 1 multiplications,
and what follows may multiply that by the other. Where the other is beyond f32, nothing is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegen.language.types import f32

Array = np.ndarray[Any, np.dtype[Any]]
HALF_ULP = 2.0**-24
SECOND_ORDER = 1 + 2.0**-10
FLUSHED = 2.0**-126  # below it f32 results may become 0
LARGEST_INTEGER = 2.0**31 - 1  # of an i32


def up_to(x: Array) -> Array:
    """The products of each element and those before it."""
    return np.multiply.accumulate(x, axis=-1)


def found_up_to(mask: Array) -> Array:
    """Is there one among the element and those before it?"""
    return np.logical_or.accumulate(mask, axis=-1)


def running_sum_error(x: Array, errors: Array, whole: bool, depth: int) -> Array:
    """The error of each sum of a row's elements up to one of them. `whole`: of i32, modulo 2^32."""
    moved = np.add.accumulate(errors, axis=-1)
    size = np.abs(x.astype(np.float64))
    if whole:
        wraps = np.abs(np.add.accumulate(x.astype(np.float64), axis=-1)) + moved > LARGEST_INTEGER
        return np.where((moved > 0) & wraps, np.inf, moved)
    finite = np.isfinite(size)
    magnitudes = np.add.accumulate(np.where(finite, size + errors, 0.0), axis=-1)
    error = (moved + np.minimum(depth, np.arange(x.shape[-1])) * HALF_ULP * magnitudes) * SECOND_ORDER
    error = np.where(magnitudes + error > f32.largest, np.inf, error)
    # an infinite or NaN element decides what follows, if nothing else can
    unknown = found_up_to(np.isinf(np.where(finite, 0.0, errors))) | ~(magnitudes <= f32.largest)
    decided = found_up_to(~finite)
    return np.where(decided, np.where(unknown, np.inf, 0.0), error)


def running_product_error(x: Array, errors: Array, whole: bool) -> Array:
    """The error of each product of a row's elements up to one of them. `whole`: of i32, modulo 2^32."""
    size = np.abs(x.astype(np.float64))
    if whole:
        most, inexact = up_to(size + errors), found_up_to(errors > 0)
        return np.where(inexact, np.where(most <= LARGEST_INTEGER, most - up_to(size), np.inf), 0.0)
    finite, zero = np.isfinite(size), (size == 0) & (errors == 0)
    least = np.where(finite & ~zero, np.maximum(size - errors, 0.0), 1.0)
    most = np.where(finite, size + errors, 1.0)
    largest, smallest = up_to(np.maximum(most, 1.0)), up_to(np.minimum(least, 1.0))
    count = np.arange(1, x.shape[-1] + 1)
    whole_product = up_to(most)
    error = whole_product - up_to(np.where(finite, size, 1.0)) + count * HALF_ULP * whole_product
    error = error + np.where(smallest < FLUSHED, count * FLUSHED * largest, 0.0)
    error = np.where(largest <= f32.largest / 2, error * SECOND_ORDER, np.inf)
    # an infinity stays one, or becomes NaN beside a 0, where no part becomes 0 by itself and no sign is in doubt
    infinite = found_up_to(np.isinf(x) & (errors == 0))
    error = np.where(infinite, np.where((smallest >= FLUSHED) & (largest <= f32.largest / 2), 0.0, np.inf), error)
    error = np.where(found_up_to(np.isinf(errors)), np.inf, error)
    return np.where(found_up_to(np.isnan(x) & (errors == 0)), 0.0, error)
