"""What a grouped product means, in numpy: the functions that a chain's reference calls, and their text.

Groups of rows lie one behind the other, and `ends` says behind which row each of them ends. A row is of the first group
whose end lies behind it, whatever the ends are: so of ends that descend or are negative some groups are empty, and of
ends beyond the rows there are no more rows. Rows behind all ends are of no group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def add_by_group(y: Any, table: Any, ends: Any) -> Array:
    """table[e] is added to the rows of group e; rows of no group stay as they are."""
    bounds = group_bounds(ends, len(y))
    result = np.array(y)
    for group, row in enumerate(table):
        result[bounds[group] : bounds[group + 1]] += row
    return result


def source_of(name: str) -> str:
    """The text of one of them and of what it calls, as it stands above, without its types: it runs on numpy alone."""
    functions: dict[str, tuple[Callable[..., Array], ...]] = {
        "grouped_matmul": (group_bounds, matmul_by_group),
        "add_group_rows": (add_by_group,),
    }
    text = "\n\n".join(inspect.getsource(function) for function in functions[name])
    return text.replace(": Any", "").replace("rows: int", "rows").replace(" -> Array", "")
