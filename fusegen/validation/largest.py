"""Errors of a row's order and of its largest elements: what the errors of the elements themselves leave in doubt.

An element is kept where those larger than it sum up to less than the limit, or are fewer. How much that can be, and how
little, follows from the elements' own errors: others are surely larger where all that they can be is, and perhaps where
some of it is. The kernel's sums round as any row's do. What is in doubt is either the element or nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegen.language.graph import Node
from fusegen.language.largest import kept_by_count, kept_by_sum, order_of
from fusegen.language.scans import SCANS, Sorted
from fusegen.validation.accumulation import Accumulation
from fusegen.validation.bounded import Bounded, gap

Array = np.ndarray[Any, np.dtype[Any]]

UNIT = 2.0**-24  # roundoff of an f32


@np.errstate(all="ignore")
def largest_kept(node: Node, x: Bounded, limit: Bounded, how: Accumulation | None) -> Bounded:
    """Each element where it is kept, with its own error; in doubt it may also be what stands for the others."""
    by_sum = node.op.name == "largest_by_sum"
    value = (kept_by_sum if by_sum else kept_by_count)(x.value, limit.value)
    if how is None:
        return Bounded(value, np.full(value.shape, np.inf))
    error = np.broadcast_to(x.error, x.value.shape)
    known = np.isfinite(error)
    low, high = np.where(known, x.value - error, -np.inf), np.where(known, x.value + error, np.inf)
    weights = (np.fmax(low, 0.0), np.fmax(high, 0.0)) if by_sum else (np.ones(low.shape), np.ones(low.shape))
    certain = beyond(low, weights[0], high)
    possible = beyond(high, weights[1], low) - np.where(high > low, weights[1], 0.0)  # but for the element itself
    rounds = weights[1].sum(-1, keepdims=True) * UNIT * (how.serial + how.levels + 2) if by_sum else 0.0
    kept = possible + rounds < limit.value - limit.error
    out = certain - rounds >= limit.value + limit.error
    if by_sum:
        kept, out = kept & (low > 0), out | (high <= 0) | np.isnan(x.value)
    else:
        out = out | (np.isnan(x.value) & known)
    doubt = np.abs(x.value) + error if by_sum else np.full(value.shape, np.inf)
    found = np.where(out, 0.0, np.where(kept, error, doubt))
    return Bounded(value, np.where(np.isnan(found), np.inf, found))


@np.errstate(all="ignore")
def in_order(node: Node, x: Bounded) -> Bounded:
    """A row sorted: a place's value lies between those that all lowest and all highest numbers have there; a column is
    sure where nothing else may be equal, or where all is exact."""
    way = SCANS[node.op.name]
    assert isinstance(way, Sorted)
    order = order_of(x.value, way.descending)
    error = np.broadcast_to(x.error, x.value.shape)
    if way.what == "values":
        ends = (np.take_along_axis(end, order_of(end, way.descending), -1) for end in (x.low, x.high))
        value = np.take_along_axis(x.value, order, -1)
        off = np.maximum(*(gap(end, value) for end in ends))
        return Bounded(value, np.where(np.isnan(off), np.inf, off) if np.any(error > 0) else np.zeros(value.shape))
    if not np.any(error > 0):
        return Bounded(order.astype(np.int32), np.zeros(order.shape))
    sign = -1.0 if way.descending else 1.0
    value, spread = sign * np.take_along_axis(x.value, order, -1), np.take_along_axis(error, order, -1)
    before = np.maximum.accumulate(value + spread, -1)[..., :-1]
    behind = np.minimum.accumulate((value - spread)[..., ::-1], -1)[..., ::-1][..., 1:]
    sure = np.ones(order.shape, bool)
    sure[..., 1:] &= before < (value - spread)[..., 1:]
    sure[..., :-1] &= behind > (value + spread)[..., :-1]
    return Bounded(order.astype(np.int32), np.where(sure, 0.0, np.inf))


def beyond(numbers: Array, weights: Array, marks: Array) -> Array:
    """For each mark of a row the weights of the numbers above it."""
    shape = numbers.shape
    found = np.empty(shape)
    rows = (array.reshape(-1, shape[-1]) for array in (numbers, weights, marks, found))
    for number, weight, mark, result in zip(*rows, strict=True):
        order = np.argsort(number)  # NaN last
        order = order[: np.count_nonzero(~np.isnan(number))]
        sums = np.concatenate([np.cumsum(weight[order][::-1])[::-1], [0.0]])
        result[:] = sums[np.searchsorted(number[order], np.nan_to_num(mark, nan=np.inf), "right")]
    return found
