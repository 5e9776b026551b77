"""Bounds on reductions and running values: of rows, of groups and parts of them, and over axes of rows.

All come down to `reduction`, of the last axis: what is reduced otherwise is brought there first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fusegen.language.graph import OPS, Node
from fusegen.language.scans import SCANS, ScanWay
from fusegen.language.types import f32, i32
from fusegen.validation.accumulation import Accumulation, ColumnSums, PartSums, RunningSums, accumulation_error
from fusegen.validation.bounded import Bounded, bounded, exact, gap
from fusegen.validation.carried import CarriedSum, carried_sum_error
from fusegen.validation.formulas import apply, formula
from fusegen.validation.regrouped import columns_dealt, columns_of_groups, rows_of_parts
from fusegen.validation.running import LARGEST_INTEGER, running_product_error, running_sum_error

Array = np.ndarray[Any, np.dtype[Any]]
SECOND_ORDER = 1 + 2.0**-10  # of a sum: rounding errors of its terms' errors


def over_rows(node: Node, arg: Bounded, how: ColumnSums | None) -> Bounded:
    """A reduction over axes of rows: over the last axis of the same numbers with those axes there, as one."""
    shape = tuple(1 if place in node.over else size for place, size in enumerate(arg.value.shape, -arg.value.ndim))
    rows = math.prod(arg.value.shape[axis] for axis in node.over)
    if not rows:
        return exact(formula(node.ref, 1)(arg.value))

    def moved(array: Array) -> Array:
        array = np.moveaxis(np.broadcast_to(array, arg.value.shape), node.over, range(-len(node.over), 0))
        return array.reshape(*array.shape[: array.ndim - len(node.over)], rows)

    own = Bounded(moved(arg.value), moved(arg.error))
    summed = None if how is None else how.of(rows)
    found = reduction(replace(node, over=()), own, summed, {node.inputs[0]: own})
    return Bounded(found.value.reshape(shape), np.broadcast_to(found.error, found.value.shape).reshape(shape))


def scanned_over_rows(node: Node, arg: Bounded, how: RunningSums | None) -> Bounded:
    """A running sum along an axis of rows: along the last one of the same numbers with that axis there."""
    (axis,) = node.over
    errors = np.broadcast_to(arg.error, arg.value.shape)
    own = Bounded(np.swapaxes(arg.value, axis, -1), np.swapaxes(errors, axis, -1))
    along = replace(node, over=(), text="")
    found = scanned(along, own, None if how is None else how.of(arg.value.shape[axis]))
    shown = np.broadcast_to(found.error, found.value.shape)
    return Bounded(np.swapaxes(found.value, axis, -1), np.swapaxes(shown, axis, -1))


def scanned(node: Node, arg: Bounded, how: Accumulation | None) -> Bounded:
    """A running sum or product: each element's error is that of the elements up to it."""
    value, way, whole = apply(node.op, [arg.value]), SCANS[node.op.name], node.dtype is i32
    assert isinstance(way, ScanWay)
    if whole and arg.exact:
        return exact(value)
    if how is None:
        return bounded(value, np.inf)
    x, errors = arg.value, np.broadcast_to(arg.error, arg.value.shape)
    if way.reverse:
        x, errors = x[..., ::-1], errors[..., ::-1]
    sums = running_sum_error(x, errors, whole, how.depth) if way.kind == "sum" else None
    error = running_product_error(x, errors, whole) if sums is None else sums
    if way.exclusive:
        error = np.concatenate([np.zeros_like(error[..., :1]), error[..., :-1]], -1)
    return bounded(value, error[..., ::-1] if way.reverse else error)


def of_groups(node: Node, arg: Bounded, how: Accumulation | None) -> Bounded:
    """A reduction of groups of a row: over the last axis, where a group is a row of its own."""
    own = columns_of_groups(node, arg)
    whole = replace(node, op=OPS[node.op.name.removeprefix("group_")], group=0, text="")
    found = reduction(whole, own, how, {node.inputs[0]: own})
    return Bounded(found.value[..., 0], np.broadcast_to(found.error, found.value.shape)[..., 0])


def of_deals(node: Node, arg: Bounded, how: CarriedSum | None) -> Bounded:
    """A reduction of the columns that each part is dealt: over the last axis, where those are a row."""
    own = columns_dealt(node, arg)
    one = replace(node, op=OPS[node.op.name.removeprefix("deal_")], group=0, count=0, text="")
    return reduction(one, own, how, {node.inputs[0]: own})


def of_parts(node: Node, arg: Bounded, how: PartSums | None) -> Bounded:
    """A reduction over every so-many-th row: over the last axis of the same numbers, where those rows are one."""
    own = rows_of_parts(node, arg)
    one = replace(node, op=OPS[node.op.name.removeprefix("part_")], count=0, text="")
    found = reduction(one, own, None if how is None else how.of(own.value.shape[-1]), {node.inputs[0]: own})
    shape = (*(1,) * (len(node.shape) - 2), node.count, own.value.shape[1])
    return Bounded(found.value.reshape(shape), np.broadcast_to(found.error, found.value.shape).reshape(shape))


def reduction(
    node: Node, arg: Bounded, how: Accumulation | CarriedSum | None, table: Mapping[Node, Bounded]
) -> Bounded:
    value = apply(node.op, [arg.value])
    if node.dtype is i32 and arg.exact:
        return exact(value)
    if node.op.name in ("max", "min"):
        low, high = apply(node.op, [arg.low]), apply(node.op, [arg.high])
        return bounded(value, np.maximum(gap(low, value), gap(high, value)))
    errors = np.broadcast_to(arg.error, arg.value.shape)
    if node.op.name == "prod":
        error = running_product_error(arg.value, errors, whole=node.dtype is i32)[..., -1:]
        return bounded(value, error if how is not None or node.dtype is i32 else np.inf)
    if node.dtype is i32:
        error = errors.sum(-1, keepdims=True)
        wraps = np.abs(arg.value.sum(-1, keepdims=True, dtype=np.float64)) + error > LARGEST_INTEGER
        return bounded(value, np.where((error > 0) & wraps, np.inf, error))
    finite = np.isfinite(arg.value)
    size = np.where(finite, np.abs(arg.value) + errors, 0.0).sum(-1, keepdims=True)
    if how is None:  # a result that the kernel has no use for
        return bounded(value, np.inf)
    if isinstance(how, CarriedSum):
        own = carried_sum_error(arg.value, how)
    else:
        own = accumulation_error(node, how, {n: b.value for n, b in table.items()})
    error = (errors.sum(-1, keepdims=True) + own) * SECOND_ORDER
    # a partial sum may overflow before it cancels; an infinite or NaN element decides the row if nothing else can
    error = np.where(size + error > f32.largest, np.inf, error)
    unknown = np.isinf(np.where(finite, 0.0, errors)).any(-1, keepdims=True) | ~(size <= f32.largest)
    return bounded(value, np.where(np.isfinite(value), error, np.where(unknown, np.inf, 0.0)))
