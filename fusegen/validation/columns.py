"""Columns that a selection chose: which choices the keys' error bounds allow, and what is taken at them.

A kernel's key may be anything in [v - e, v + e] around the reference's, so near-ties may come in either order. A choice
is right when *some* keys within their bounds make it the selection's answer, which is decided exactly: give the first
column the largest key it may have, each further one the largest that still comes after the one before, and every column
left out the smallest. Where keys are exact, that leaves one answer.

Columns whose operands hold the same bits have the same key, however inexact: they come in their own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegen.language.graph import Tensor
from fusegen.language.nodes import GroupLimit
from fusegen.language.selection import in_best_groups as in_groups_meant
from fusegen.language.selection import take, top_columns
from fusegen.language.types import f32
from fusegen.validation.bounded import Bounded, bounded, exact
from fusegen.validation.compare import Compared

Array = np.ndarray[Any, np.dtype[Any]]

# keys as finite numbers, so that the order of NaN and infinities is that of numbers
INFINITE = 1e300
NAN_RANK = 2e300


@dataclass(frozen=True, slots=True)
class Keys:
    """The least and the most that each key may be, as order numbers; rows flattened. -inf: masked."""

    low: Array
    high: Array

    @property
    def surely(self) -> Array:
        """How many columns of each row are surely not masked."""
        return np.asarray((self.low > -np.inf).sum(-1))

    @property
    def unknown(self) -> Array:
        """The rows of which no key is known at all."""
        return np.asarray(((self.low == -np.inf) & (self.high == NAN_RANK)).all(-1))

    @property
    def perhaps(self) -> Array:
        """How many columns of each row may be not masked."""
        return np.asarray((self.high > -np.inf).sum(-1))


def keys_of(key: Bounded, rows: tuple[int, ...]) -> Keys:
    """The range of each key, for rows of that shape."""
    shape = (*rows, key.value.shape[-1])
    flat = (math.prod(rows), shape[-1])
    value = np.broadcast_to(key.value, shape).reshape(flat).astype(np.float64)
    error = np.broadcast_to(key.error, shape).reshape(flat)
    unknown = np.isinf(error)
    low = np.where(unknown, -np.inf, ranked(value - np.where(unknown, 0.0, error)))
    return Keys(low, np.where(unknown, NAN_RANK, ranked(value + np.where(unknown, 0.0, error))))


def ranked(value: Array) -> Array:
    """A number's place in the order: itself, but for infinity and NaN above it."""
    return np.where(np.isnan(value), NAN_RANK, np.where(value == np.inf, INFINITE, value))


def in_best_groups(key: Bounded, limit: GroupLimit) -> Bounded:
    """Keys of the row's best groups alone, the others masked; in doubt it may be either.

    A group's score is the sum of its largest keys, rounded once. Of two groups one is surely ahead where the least that
    its score may be exceeds the most of the other's; groups whose largest keys are exact and the same come in order.
    """
    parts = key.value.reshape(*key.value.shape[:-1], limit.groups, key.value.shape[-1] // limit.groups)
    error = np.broadcast_to(key.error, key.value.shape).reshape(parts.shape)
    order = np.argsort(np.where(np.isnan(parts), -np.inf, -parts), -1, kind="stable")[..., : limit.by]
    known = np.isfinite(error).all(-1)
    spread = np.where(np.isfinite(error), error, 0.0)
    low, high = (scored(end, limit.by) for end in (parts - spread, parts + spread))
    if limit.by > 1:
        rounded = np.abs(np.where(np.isfinite(low), low, 0.0)) * 2.0**-24 + 2.0**-149
        low, high = low - np.where(np.isfinite(low), rounded, 0.0), high + np.where(np.isfinite(high), rounded, 0.0)
        low, high = in_f32(low), in_f32(high)
    low, high = np.where(known, low, -np.inf), np.where(known, high, NAN_RANK)
    best = np.take_along_axis(parts, order, -1)
    surely = (error == 0).all(-1)
    same = (ranked(best)[..., :, None, :] == ranked(best)[..., None, :, :]).all(-1)
    same &= surely[..., :, None] & surely[..., None, :]
    place = np.arange(limit.groups)
    first = same & (place[None, :] < place[:, None])
    certain = (first | (~same & (low[..., None, :] > high[..., :, None]))).sum(-1)
    possible = (first | (~same & (high[..., None, :] >= low[..., :, None]))).sum(-1)
    kept, out = (possible < limit.best)[..., None], (certain >= limit.best)[..., None]
    meant = in_groups_meant(key.value, limit.groups, limit.best, limit.by)
    found = np.where(kept, error, np.where(out, 0.0, np.inf)).reshape(key.value.shape)
    value = np.where(np.broadcast_to(out, parts.shape).reshape(meant.shape), -np.inf, meant)
    return bounded(np.where(np.broadcast_to(kept, parts.shape).reshape(meant.shape), key.value, value), found)


def in_f32(score: Array) -> Array:
    """What is beyond f32's range is an infinity."""
    beyond = np.where(score > f32.largest, np.maximum(score, INFINITE), score)
    return np.where(beyond < -f32.largest, -np.inf, beyond)


def scored(parts: Array, by: int) -> Array:
    """The sum of each group's largest, as a place in the order."""
    largest = -np.sort(-parts, -1)[..., :by].sum(-1)
    return ranked(np.where(np.isnan(parts).any(-1), np.nan, largest))


# ---------------------------------------------------------------- in the analysis


def chosen_columns(key: Bounded, k: int, given: Array | None) -> Bounded:
    """The columns given, those that are none as -1; without any the reference's, and how far others may be."""
    if given is not None:
        inside = (given >= 0) & (given < key.value.shape[-1])
        return exact(np.where(inside, given, -1).astype(np.int64))
    columns = top_columns(key.value, k)
    every = np.broadcast_to(np.arange(key.value.shape[-1], dtype=np.float64), key.value.shape)
    return bounded(columns, spread(every, columns, key))


def taken(x: Bounded, columns: Array, missing: Any, unsure: Bounded | None, own: bool) -> Bounded:
    """x at the columns. `unsure`: the key, where others nearly as good may have been chosen; `own`: x is that key."""
    value = take(x.value, columns, missing)
    error = np.where(columns < 0, 0.0, take(np.broadcast_to(x.error, x.value.shape), columns, 0.0))
    if unsure is None or unsure.exact:
        return bounded(value, error)
    if own:
        return bounded(value, rank_errors(unsure, columns))
    return bounded(value, np.maximum(error, spread(x.value, columns, unsure)))


def missing_places(columns: Array, unsure: Bounded | None) -> Bounded:
    """`columns < 0`; in doubt where a key may be masked or not."""
    value = columns < 0
    if unsure is None:
        return exact(value)
    keys = keys_of(unsure, columns.shape[:-1])
    place = np.arange(columns.shape[-1])
    doubt = (place >= keys.surely[:, None]) & (place < keys.perhaps[:, None])
    return bounded(value, doubt.reshape(columns.shape).astype(np.float64))


def rank_errors(key: Bounded, columns: Array) -> Array:
    """How far the key at each rank may be from the reference's: order statistics of the least and of the most."""
    keys, k = keys_of(key, columns.shape[:-1]), columns.shape[-1]
    low, high = (-np.sort(-end, axis=-1)[:, :k] for end in (keys.low, keys.high))
    at = ranked(np.asarray(take(key.value, columns, -np.inf), np.float64)).reshape(low.shape)
    off = np.maximum(np.where(low == at, 0.0, at - low), np.where(high == at, 0.0, high - at))
    return np.where(off >= INFINITE / 2, np.inf, off).reshape(columns.shape)


def spread(x: Array, columns: Array, key: Bounded) -> Array:
    """How far x at a column that may have been chosen for a rank may be from x at the reference's."""
    found = np.zeros(columns.shape)
    if key.exact:
        return found
    rows, k = columns.shape[:-1], columns.shape[-1]
    keys = keys_of(key, rows)
    values = np.broadcast_to(x, (*rows, x.shape[-1])).reshape(keys.low.shape).astype(np.float64)
    low, high = (-np.sort(-end, axis=-1)[:, :k] for end in (keys.low, keys.high))
    flat, at = found.reshape(-1, k), columns.reshape(-1, k)
    for row in np.flatnonzero((keys.low != keys.high).any(-1)):
        for rank in range(k):
            may = (keys.high[row] >= low[row, rank]) & (keys.low[row] <= high[row, rank])
            if at[row, rank] < 0 or low[row, rank] == -np.inf:  # something or nothing
                flat[row, rank] = 0.0 if high[row, rank] == -np.inf else np.inf
            else:
                flat[row, rank] = np.abs(values[row, may] - values[row, at[row, rank]]).max()
    return found


# ---------------------------------------------------------------- in the comparison


def compare_columns(
    tensor: Tensor, got: Array, expected: Array, key: Bounded, alike: Sequence[Array], ordered: bool
) -> Compared:
    """The columns that a kernel chose against what the reference's keys allow.

    `alike` are the operands that the key varies with along the row: where all of them are the same, so is the key.
    """
    rows, k = got.shape[:-1], got.shape[-1]
    keys = keys_of(key, rows)
    found = got.reshape(-1, k).astype(np.int64)
    wanted = np.broadcast_to(expected, got.shape).reshape(-1, k)
    verdict = Verdict(
        found, wanted, keys, np.broadcast_to(key.value, (*rows, keys.low.shape[1])).reshape(keys.low.shape)
    )
    verdict.look_at_places()
    verdict.look_at_order(ordered)
    shape = (*rows, keys.low.shape[1])
    operands = [np.broadcast_to(a, shape).reshape(keys.low.shape) for a in alike]
    verdict.look_at_equals(operands, ordered)
    wrong = verdict.reason > 0
    shown = np.where(wrong, wanted, found).astype(np.float64)
    off = np.abs(found - shown)
    anything = keys.unknown[:, None] & ~wrong  # of a row whose keys may be anything, no choice is worse than another
    allowed = np.where(np.broadcast_to(anything, off.shape), np.inf, 0.0)
    used = np.where(wrong, np.inf, 0.0)
    return Compared(tensor, got.shape, found.astype(np.float64), shown, allowed, off, used, wrong, verdict.note)


REASONS = (
    "",
    "is {found}, and the row has {cols} columns",
    "is {found}, which rank {other} has already",
    "is {found}, behind a -1",
    "is {found}, which is masked (key -inf)",
    "is -1, but the row has {count} columns that are not masked",
    "is {found} (key {key:.9g}), where column {due} (key {due_key:.9g}) was due",
    "is {found} (key {key:.9g}), but column {other} has the same key and comes first",
)
OUTSIDE, REPEATED, BEHIND, MASKED, TOO_FEW, WORSE, TIE = range(1, len(REASONS))


class Verdict:
    """What is wrong with each column chosen, if anything: the number of a reason, and another column or rank."""

    def __init__(self, found: Array, wanted: Array, keys: Keys, value: Array) -> None:
        self.found, self.wanted, self.keys, self.value = found, wanted, keys, value
        self.reason = np.zeros(found.shape, np.int64)
        self.other = wanted.copy()
        self.inside = (found >= 0) & (found < value.shape[1])
        self.at = np.where(self.inside, found, 0)
        self.chosen = np.zeros(value.shape, bool)
        row, rank = np.nonzero(self.inside)
        self.chosen[row, found[row, rank]] = True

    def note(self, row: int, rank: int) -> str:
        found, other = int(self.found[row, rank]), int(self.other[row, rank])
        return REASONS[self.reason[row, rank]].format(
            found=found, other=other, due=other, cols=self.value.shape[1], count=int(self.keys.surely[row]),
            key=self.value[row, self.at[row, rank]], due_key=self.value[row, other] if other >= 0 else -math.inf,
        )  # fmt: skip

    def blame(self, wrong: Array, reason: int, other: Array | None = None) -> None:
        """Note a reason where there is none yet."""
        new = wrong & (self.reason == 0)
        self.reason[new] = reason
        if other is not None:
            self.other[new] = np.broadcast_to(other, self.other.shape)[new]

    def look_at_places(self) -> None:
        """Columns of the row, each once, none of them masked; -1 only where the others have run out, and last."""
        found, inside = self.found, self.inside
        none = found == -1
        self.blame(~inside & ~none, OUTSIDE)
        order = np.argsort(found, axis=-1, kind="stable")
        ahead = np.take_along_axis(found, order, -1)
        again = np.zeros(found.shape, bool)
        first = order.copy()
        for place in range(1, found.shape[1]):
            same = ahead[:, place] == ahead[:, place - 1]
            again[:, place] = same
            first[:, place] = np.where(same, first[:, place - 1], order[:, place])
        twice, before = np.zeros(found.shape, bool), np.zeros(found.shape, np.int64)
        np.put_along_axis(twice, order, again, -1)
        np.put_along_axis(before, order, first, -1)
        self.blame(twice & inside, REPEATED, before)
        self.blame(inside & np.logical_or.accumulate(none, axis=-1), BEHIND)
        self.blame(inside & (np.take_along_axis(self.keys.high, self.at, -1) == -np.inf), MASKED)
        self.blame(none & (np.arange(found.shape[1]) < self.keys.surely[:, None]), TOO_FEW)

    def look_at_order(self, ordered: bool) -> None:
        """Is there any order of keys within their bounds that gives these columns?"""
        count, k = self.found.shape
        ranks = np.broadcast_to(np.arange(k), (count, k))
        low, high = (np.take_along_axis(end, self.at, -1) for end in (self.keys.low, self.keys.high))
        if not ordered:  # the order that is easiest to allow; places without a column last
            ranks = np.lexsort((self.at, -np.where(self.inside, high, -np.inf), ~self.inside))
        most, after = np.full((count, k), np.inf), np.full((count, k), -1)
        last, last_column = np.full(count, np.inf), np.full(count, -1)
        every = np.arange(count)
        for place in range(k):
            rank = ranks[:, place]
            column, least, largest = self.at[every, rank], low[every, rank], high[every, rank]
            usable = self.inside[every, rank] & (self.reason[every, rank] == 0)
            fits = (least < last) | ((least == last) & (column > last_column))
            self.reason[every, rank] = np.where(usable & ~fits, WORSE, self.reason[every, rank])
            below = ~fits | (largest < last)
            value = np.where(below, largest, last)
            # a key that must be below another of the same limit has no column that its equals could come after
            own = np.where(below | (column > last_column), column, self.value.shape[1])
            last = np.where(usable, value, last)
            last_column = np.where(usable, own, last_column)
            most[every, rank], after[every, rank] = last, last_column
        self.look_at_the_left_out(most, after, last, last_column)

    def look_at_the_left_out(self, most: Array, after: Array, last: Array, last_column: Array) -> None:
        """No column that was not chosen may be surely better than the last that was."""
        low = np.where(self.chosen, -np.inf, self.keys.low)
        columns = np.arange(low.shape[1])
        better = (low > last[:, None]) | ((low == last[:, None]) & (columns <= last_column[:, None]))
        better &= self.inside.all(-1)[:, None]
        best = np.where(better, low, -np.inf).argmax(-1)
        value = np.take_along_axis(low, best[:, None], -1)
        here = (value > most) | ((value == most) & (best[:, None] <= after))
        first = here & (np.cumsum(here, axis=-1) == 1) & better.any(-1)[:, None]
        self.blame(first, WORSE, best[:, None])

    def look_at_equals(self, operands: Sequence[Array], ordered: bool) -> None:
        """Among columns whose operands are the same, the lower come first, and are not left out."""
        if not operands or self.keys_are_exact():
            return
        value = ranked(self.value.astype(np.float64))
        least = np.where(self.inside, np.take_along_axis(value, self.at, -1), np.inf).min(-1)
        candidates = ~self.chosen & (value >= least[:, None])
        row, rank = np.nonzero(self.inside & (self.reason == 0))
        other_row, other_column = np.nonzero(candidates)
        column = self.found[row, rank]
        rows, columns = np.concatenate([row, other_row]), np.concatenate([column, other_column])
        bits = [np.ascontiguousarray(a[rows, columns]).astype(np.float64).view(np.int64) for a in operands]
        order = np.lexsort((*bits, rows))
        table = np.stack([rows, *bits])[:, order]
        new = np.concatenate([[True], (table[:, 1:] != table[:, :-1]).any(0)])[: len(order)]
        group = np.empty(len(order), np.int64)
        group[order] = np.cumsum(new) - 1
        lowest = np.full(len(order), value.shape[1])
        np.minimum.at(lowest, group[len(row) :], other_column)
        own = group[: len(row)]
        self.tie(row, rank, lowest[own] < column, lowest[own])
        if ordered and len(row):
            order = np.lexsort((rank, own))
            swapped = np.zeros(len(row), bool)
            earlier = np.zeros(len(row), np.int64)
            together = own[order][1:] == own[order][:-1]
            later_is_lower = together & (column[order][1:] < column[order][:-1])
            swapped[order[:-1]] = later_is_lower
            earlier[order[:-1]] = column[order][1:]
            self.tie(row, rank, swapped, earlier)

    def keys_are_exact(self) -> bool:
        return bool((self.keys.low == self.keys.high).all())

    def tie(self, row: Array, rank: Array, wrong: Array, other: Array) -> None:
        at, to = np.zeros(self.reason.shape, bool), np.zeros(self.reason.shape, np.int64)
        at[row[wrong], rank[wrong]] = True
        to[row[wrong], rank[wrong]] = other[wrong]
        self.blame(at, TIE, to)
