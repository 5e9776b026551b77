"""The k largest of each row by the order of docs/spec.md, on bounded keys: NaN first, ties by column, -inf never.

Of i32 the lowest, -2^31, is what -inf is of floats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.fuzzing.bounded import INF, Array, Bounded, as_float


@dataclass(frozen=True)
class Choice:
    """Columns of each row, -1 where none is left, and whether each is certain, rank by rank."""

    columns: Array
    certain: Array
    missing: float  # the score's value where the column is -1
    keys: Array  # of each column of the row
    slack: Array  # one a row: keys nearer to each other than this may have changed places; inf where any may have


def chosen(score: Bounded, k: int) -> Choice:
    key = score if score.kind == "i" else as_float(score if score.key is None else score.key)
    cols = key.value.shape[-1]
    value = key.value.reshape(-1, cols)
    error = np.broadcast_to(key.error, key.value.shape).reshape(-1, cols).astype(float)
    nan = np.isnan(value)
    masked = value == lowest(score)
    size = np.where(nan, 0, value).astype(float)  # i32 are exact in float64
    places = np.broadcast_to(np.arange(cols), value.shape)
    order = np.lexsort((places, -size, ~nan, masked), axis=-1)  # the last one counts first
    left = (~masked).sum(-1, keepdims=True)
    columns = np.where(np.arange(k) < left, order[:, :k], -1)
    certain = surely(value, error, order, k, left)
    if score.key is None and score.doubtful:  # the order may be that of something below, which has other ties
        ordered = np.take_along_axis(size, order, -1)
        ties = (np.diff(ordered, axis=-1) == 0).any(-1, keepdims=True) if cols > 1 else np.zeros_like(left, bool)
        certain &= np.isfinite(value).all(-1, keepdims=True) & ~ties
    elif score.doubtful:
        certain &= np.isfinite(value).all(-1, keepdims=True)
    shape = (*key.value.shape[:-1], k)
    slack = slack_of(score, value, error).reshape(*shape[:-1], 1)
    return Choice(columns.reshape(shape), certain.reshape(shape), missing(score), key.value, slack)


def surely(value: Array, error: Array, order: Array, k: int, left: Array) -> Array:
    """A rank is certain where its key is further from those beside it than both may be off."""
    worst = error.max(-1, keepdims=True, initial=0.0)
    ranked = np.take_along_axis(value, order, -1)
    nan = np.isnan(ranked)
    with np.errstate(all="ignore"):
        apart = (nan[:, 1:] != nan[:, :-1]) | (np.abs(ranked[:, 1:] - ranked[:, :-1]) > 2 * worst)
    apart |= (nan[:, 1:] & nan[:, :-1]) | (np.isinf(ranked[:, 1:]) & (ranked[:, 1:] == ranked[:, :-1]))  # by column
    apart |= np.arange(1, ranked.shape[-1]) >= left  # what comes next is masked
    edge = np.ones((len(value), 1), bool)
    apart = np.concatenate([edge, apart, edge], -1)
    certain = (apart[:, :-1] & apart[:, 1:])[:, :k] | (np.arange(k) >= left)
    doubt = ~np.isfinite(worst) | ((error > 0) & (value == -INF)).any(-1, keepdims=True)
    return np.where(worst > 0, certain & ~doubt, True)


def slack_of(score: Bounded, value: Array, error: Array) -> Array:
    """Twice the largest error of a row's keys; without a bound where a mask or the order itself is in doubt."""
    doubt = ((error > 0) & (value == -INF)).any(-1) | score.doubtful
    return np.where(doubt, INF, 2 * error.max(-1, initial=0.0))


def given(choice: Choice, columns: Array) -> Choice:
    """The choice that a kernel made in the place of this one."""
    return replace(choice, columns=columns.astype(np.int64), certain=np.ones(columns.shape, bool))


def lowest(score: Bounded) -> float:
    """What is masked, and never chosen."""
    return -(2.0**31) if score.kind == "i" else -INF


def missing(score: Bounded) -> float:
    return lowest(score) if score.key is None else score.missing


def columns(choice: Choice) -> Bounded:
    return Bounded("i", choice.columns, np.where(choice.certain, 0.0, INF))


def taken(values: Bounded, choice: Choice, otherwise: float, *, same: bool) -> Bounded:
    """`values` at the columns chosen. Of the `same` values that were chosen by, an uncertain rank has one near it."""
    shape = (*choice.columns.shape[:-1], values.value.shape[-1])
    value, error = np.broadcast_to(values.value, shape), np.broadcast_to(values.error, shape)
    at = np.maximum(choice.columns, 0)
    none = choice.columns < 0
    got = np.where(none, otherwise, np.take_along_axis(value, at, -1))
    if values.kind == "b":
        doubt = np.where(none, False, np.take_along_axis(error, at, -1))
        return Bounded("b", got.astype(bool), doubt | ~choice.certain)
    off = np.where(none, 0.0, np.take_along_axis(error, at, -1))
    other = 3 * error.max(-1, keepdims=True) if same else INF
    return Bounded(values.kind, got, np.where(choice.certain, off, other))


def best(score: Bounded, choice: Choice) -> Bounded:
    """The largest themselves."""
    values = Bounded(score.kind, score.value, score.error)
    return taken(values, choice, choice.missing, same=not score.doubtful)
