"""Rounding errors of what a pass over tiles of keys carries: exponentials, their sum, and their product with values.

With u = 2^-24, p the pivot, and a tile's pivot m at most the final one:

*exponentials* are 2^(z c - m c), c = log2 e, by one fused multiply-add whose subtrahend is rounded on its own: beside
what the op table's exp is off by, u |p| of e. Where z c leaves f32's range nothing is known. Where the chain's pivot is
another than its largest logit t, sums are brought to it by exp(t - p): 3u |t - p| more, and u |t| for the pivot that is
carried.

*rescaling* multiplies a sum by 2^(m' - m) where the pivot grows from m' to m. That power costs 4.5u, and 2.35u |m - m'|
for its argument and its own; the product u. Over all tiles the arguments telescope to at most p - z for a term
e = exp(z - p), which is |log e|: n tiles cost 8u (n + 1) e + 2.35u e |log e|.

*the sum* of exponentials passes, beside that, the additions of its lane and of the lanes that share its row.

*the product* is that of any two factors, each step relative to the sums as they are: those of a smaller pivot are
smaller in the end. The weights are rounded to their type when they are relative to a tile's pivot: half an ulp of them,
and where that is below the smallest number, at most as far as if they were relative to the final one. A weight of
exactly 0 hides an infinity or a NaN of a value where its tile is left out, and makes NaN of it where it is not: there
nothing is known. The same of weights without a softmax, of which nothing else is carried.

*late pivots* are those of an earlier tile, which logits may pass by `late`: 8u `late` of e more, u for the pivot, 1.35u
for the power, 2.35u for the one that shrinks it in the end, and 3u for a logarithm of their sum that is as much larger,
and what it is added to. Weights are e^late then, and e^(2 late) where f32 has no closer sums of logit and `late`: their
products with values may leave f32's range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegen.language.graph import Node
from fusegen.language.types import f32
from fusegen.planner.attention.parts import AttentionPlan, ScoresPlan
from fusegen.planner.attention.recognition import Scored, recognized
from fusegen.planner.attention.wgmma import ChainedWgmmaPlan
from fusegen.validation.bounded import Bounded, bounded

Array = np.ndarray[Any, np.dtype[Any]]
HALF_ULP = 2.0**-24
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Exponentials:
    """How exponentials are made: against a pivot that is carried, and brought to the chain's own where that is another.
    `base`: what they are powers of, e or 2. `late`: how far a pivot may be below a logit."""

    top: Node
    pivot: Node
    plain: bool
    base_2: bool
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class CarriedSum:
    """How their sum is made: `serial` additions in a lane, `levels` of lanes, `tiles` after which it may shrink."""

    serial: int
    levels: int
    tiles: int


@dataclass(frozen=True, slots=True)
class CarriedProduct:
    """How their product with values shrinks: after each of `tiles`. Without exponentials it does not. `largest`: of
    weights."""

    exps: Node | None
    tiles: int
    largest: float = 1.0


def carried(plan: AttentionPlan) -> tuple[Mapping[Node, Exponentials | CarriedSum], CarriedProduct, Node]:
    """How `plan` makes its exponentials and their sum, and beside its own rounding the product, which is the last."""
    found = recognized(plan.graph)
    if found.softmax is None:
        return {}, CarriedProduct(None, 0), found.product
    largest = math.exp(2 * lateness(plan))
    return carried_sums(plan, found), CarriedProduct(found.exps, plan.tiles, largest), found.product


def lateness(plan: ScoresPlan) -> float:
    """How far a row's pivot may be below a logit."""
    return plan.late * math.log(2) if isinstance(plan, ChainedWgmmaPlan) else 0.0


def carried_sums(plan: ScoresPlan, found: Scored) -> Mapping[Node, Exponentials | CarriedSum]:
    """How `plan` makes its exponentials and their sum."""
    lanes = 2 ** len(plan.atom.fragment.lanes_of_row)
    top, pivot = found.top, found.pivot
    if plan.parts:  # of each part, and at the columns that it is dealt the largest logit, or 0 where that is -inf
        top = pivot = found.exps.inputs[0].inputs[1]
    how = Exponentials(top, pivot, found.plain_pivot, plan.base_2, lateness(plan))
    hows: dict[Node, Exponentials | CarriedSum] = {found.exps: how}
    if found.total is not None:  # lanes may carry pivots of their own: one tile more, where they are brought together
        tiles = plan.tiles + 1
        hows[found.total] = CarriedSum(plan.tile.keys // lanes * plan.tiles, lanes.bit_length() - 1, tiles)
    return hows


def exponentials(found: Bounded, how: Exponentials, table: Mapping[Node, Bounded], logits: Bounded) -> Bounded:
    """The bound on exponentials, of that on the op itself."""
    pivot, top = (np.where(np.isfinite(table[n].value), np.abs(table[n].value), 0.0) for n in (how.pivot, how.top))
    size = pivot
    if not how.plain:
        apart = table[how.top].value - table[how.pivot].value
        size = pivot + top + 3 * np.where(np.isfinite(apart), np.abs(apart), 0.0)
    size = size + 8 * how.late
    more = HALF_ULP * size * np.where(np.isfinite(found.value), np.abs(found.value), 0.0) * (1 + 2.0**-10)
    largest = f32.largest / (1.0 if how.base_2 else LOG2E)
    z = np.abs(logits.value)
    beyond = (np.isfinite(z) & (z + logits.error > largest)) | (np.maximum(pivot, top) > largest)
    return bounded(found.value, np.where(beyond, np.inf, found.error + more))


def carried_sum_error(x: Array, how: CarriedSum) -> Array:
    """Of the additions and of what shrinks, one value a row; x are the exponentials."""
    size = np.where(np.isfinite(x), np.abs(x), 0.0)
    logs = size * np.abs(np.log(np.where(size > 0, size, 1.0)))
    added = (how.serial + how.levels) + 8 * (how.tiles + 1)
    return np.asarray(HALF_ULP * (added * size.sum(-1, keepdims=True) + 2.35 * logs.sum(-1, keepdims=True)))


def carried_product(found: Bounded, args: Sequence[Bounded], how: CarriedProduct, of: Bounded | None) -> Bounded:
    """The bound on a product, of that on any other: more by what shrinks, and by weights that are 0. `of`: the
    exponentials that the weights are made of, if any."""
    weights, values = (arg.value for arg in args)
    hidden = (weights == 0).astype(np.float32) @ (~np.isfinite(values)).astype(np.float32) > 0
    if of is None:
        return bounded(found.value, np.where(hidden, np.inf, found.error))
    exps = of.value
    size, whole = (np.where(np.isfinite(a), np.abs(a), 0.0) for a in (weights, values))
    logs = np.abs(np.log(np.where(np.isfinite(exps) & (exps > 0), exps, 1.0)))
    error = HALF_ULP * ((8 * (how.tiles + 1) * size + 2.35 * size * logs) @ whole)
    if how.largest > 1:
        hidden |= how.largest * (size @ whole) > f32.largest
    return bounded(found.value, found.error + np.where(hidden, np.inf, error))
