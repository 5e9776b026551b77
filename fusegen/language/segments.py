"""What groups of rows mean, in numpy, and sorting slots by them: functions that a reference calls, and their text.

Groups of rows lie one behind the other, and `ends` says behind which row each of them ends. A row is of the first group
whose end lies behind it, whatever the ends are: so of ends that descend or are negative some groups are empty, and of
ends beyond the rows there are no more rows. Rows behind all ends are of no group.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def group_bounds(ends: Any, rows: int) -> Array:
    """Where each group begins and, behind it, the rows of no group: ends as they rise, between 0 and `rows`."""
    return np.concatenate([[0], np.clip(np.maximum.accumulate(ends), 0, rows)]).astype(np.int64)


def matmul_by_group(x: Any, w: Any, ends: Any) -> Array:
    """Rows of group e times w[e]; 0 in rows of no group."""
    bounds = group_bounds(ends, len(x))
    result = np.zeros((len(x), w.shape[-1]))
    for group, matrix in enumerate(w):
        rows = slice(bounds[group], bounds[group + 1])
        result[rows] = x[rows] @ matrix
    return result


def products_by_group(x: Any, y: Any, ends: Any) -> Array:
    """A product for each group of what is summed over; 0 of an empty one. What is of no group is in none."""
    bounds = group_bounds(ends, len(y))
    groups = range(len(bounds) - 1)
    return np.stack([x[:, bounds[e] : bounds[e + 1]] @ y[bounds[e] : bounds[e + 1]] for e in groups])


def add_by_group(y: Any, table: Any, ends: Any) -> Array:
    """table[e] is added to the rows of group e; rows of no group stay as they are."""
    bounds = group_bounds(ends, len(y))
    result = np.array(y)
    for group, row in enumerate(table):
        result[bounds[group] : bounds[group + 1]] += row
    return result


def scale_by_group(y: Any, table: Any, ends: Any) -> Array:
    """The rows of group e are multiplied by table[e]; rows of no group are 0."""
    bounds = group_bounds(ends, len(y))
    result = np.zeros(np.shape(y))
    for group, row in enumerate(table):
        rows = slice(bounds[group], bounds[group + 1])
        result[rows] = y[rows] * row
    return result


def ends_of_groups(ids: Any, groups: int) -> Array:
    """Behind which slot each group ends, of slots sorted by the group that each names; ids that are no group's name
    none."""
    named = ids[(ids >= 0) & (ids < groups)]
    return np.cumsum(np.bincount(named, minlength=groups)).astype(np.int32)


def order_of_slots(ids: Any, ends: Any) -> Array:
    """Slots by the group that each names, those of one group in their own order, those of none behind all others."""
    groups = len(ends)
    return np.argsort(np.where((ids >= 0) & (ids < groups), ids, groups), kind="stable").astype(np.int32)


def places_of_slots(ids: Any, ends: Any) -> Array:
    """Where each slot is in that order."""
    return np.argsort(order_of_slots(ids, ends)).astype(np.int32)


def sources_of(names: Iterable[str]) -> list[str]:
    """The texts of what these ops call, each once, as they stand above, without types: they run on numpy alone."""
    functions: dict[str, tuple[Callable[..., Array], ...]] = {
        "grouped_matmul": (group_bounds, matmul_by_group),
        "matmul_over_groups": (group_bounds, products_by_group),
        "add_group_rows": (add_by_group,),
        "scale_group_rows": (scale_by_group,),
        "group_ends": (ends_of_groups,),
        "slot_order": (order_of_slots,),
        "slot_places": (order_of_slots, places_of_slots),
    }
    found = dict.fromkeys(function for name in names for function in functions[name])
    return [re.sub(r": (Any|int)\b| -> Array", "", inspect.getsource(function)) for function in found]
