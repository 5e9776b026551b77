"""What choosing columns means, in numpy: the functions that a chain's reference calls, and their text.

A key of -inf is *masked*: its column is never chosen. NaN comes before every number, as in torch; columns whose keys
are equal (0 and -0 are) come by their own order. So the columns are one certain answer, whatever computes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def top_columns(key: Any, k: int) -> Array:
    """The columns of each row's k largest keys, largest first; -1 where fewer than k keys are above -inf."""
    order = np.lexsort((-key, ~np.isnan(key)))[..., :k]  # NaN before all, then descending; ties by column
    found = np.take_along_axis(key, order, -1)
    return np.where(found == -np.inf, -1, order)


def take(x: Any, columns: Any, missing: Any) -> Array:
    """x at the columns of its row; `missing` where the column is -1."""
    rank = max(x.ndim, columns.ndim)
    x, columns = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, columns))
    return np.where(columns < 0, missing, np.take_along_axis(x, np.maximum(columns, 0), -1))


def bare(key: Any) -> Array:
    """key, but NaN all along a row of nothing but -inf: so is what a softmax without a guard makes of it."""
    return np.where((key == -np.inf).all(-1, keepdims=True), np.nan, key)


def in_best_groups(key: Any, groups: int, best: int, by: int) -> Array:
    """key in the best groups of its row, whose `by` largest keys add up to most, and -inf in the others. NaN comes
    first, and of equals the first."""
    parts = key.reshape(*key.shape[:-1], groups, key.shape[-1] // groups)
    largest = -np.sort(-parts, -1)[..., :by].sum(-1)
    score = np.where(np.isnan(parts).any(-1), np.nan, largest)
    rank = np.argsort(np.lexsort((-score, ~np.isnan(score))), -1)
    return np.where((rank < best)[..., None], parts, -np.inf).reshape(key.shape)


def source_of(name: str) -> str:
    """The text of one of them, as it stands above, without its types: it runs on numpy alone."""
    functions: dict[str, Callable[..., Array]] = {
        "top_columns": top_columns, "take": take, "bare": bare, "in_best_groups": in_best_groups,
    }  # fmt: skip
    text = inspect.getsource(functions[name])
    return text.replace(": Any", "").replace(": int", "").replace(" -> Array", "")
