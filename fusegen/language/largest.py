"""What keeping a row's largest elements, and sorting it, means in numpy: functions that references call, their text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fusegen.language.scans import SORTED


def kept_by_sum(x: Any, limit: Any) -> Any:
    """x where those larger than it sum up to less than the limit, else 0; what is not above 0 counts for nothing."""
    parts = np.where(x > 0, x, 0.0)
    order = np.argsort(-parts, -1, kind="stable")
    down = np.take_along_axis(parts, order, -1)
    before = np.concatenate([np.zeros_like(down[..., :1]), np.cumsum(down, -1)[..., :-1]], -1)
    new = np.concatenate([np.ones_like(down[..., :1], bool), down[..., 1:] < down[..., :-1]], -1)
    first = np.maximum.accumulate(np.where(new, np.arange(down.shape[-1]), 0), -1)
    larger = np.empty_like(down)
    np.put_along_axis(larger, order, np.take_along_axis(before, first, -1), -1)
    return np.where((larger < limit) & (parts > 0), x, 0.0)


def kept_by_count(x: Any, count: Any) -> Any:
    """x where fewer than so many are larger than it, else -inf; NaN counts for nothing."""
    down = -np.sort(np.where(np.isnan(x), np.inf, -x), -1)
    at = np.clip(np.ceil(count), 1, x.shape[-1]).astype(int) - 1
    least = np.take_along_axis(down, np.broadcast_to(at, (*x.shape[:-1], 1)), -1)
    return np.where((x >= least) & (count > 0), x, -np.inf)


def order_of(x: Any, descending: Any) -> Any:
    """The columns of each row's elements in order; equals by their columns, and NaN above every number."""
    if descending:
        nan = np.isnan(x)
        return np.lexsort((-np.where(nan, 0, x).astype(np.float64), ~nan))
    return np.argsort(x, -1, kind="stable")


def source_of(name: str) -> str:
    """The text of one of them, as it stands above, without its types: it runs on numpy alone."""
    functions: dict[str, Callable[..., Any]] = {
        **{way.name: order_of for way in SORTED}, "largest_by_sum": kept_by_sum, "largest_by_count": kept_by_count,
    }  # fmt: skip
    return inspect.getsource(functions[name]).replace(": Any", "").replace(" -> Any", "")
