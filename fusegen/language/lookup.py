"""What looking up rows and columns means, in numpy: the functions that a chain's reference calls, and their text.

An index that names no row, or no column, is no error and reads nothing: the result is 0, or what the spec says is
`missing`. Numpy's negative indices, which count from the end, name nothing here. Nor is anything written there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def rows_at(table: Any, index: Any) -> Array:
    """The rows of a table that an index names; 0 where the table has no such row. The index has an axis of one element
    for each axis of a row."""
    known = (index >= 0) & (index < len(table))
    rows = np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])
    return np.asarray(rows[(np.where(known, index, len(table)), *np.indices(table.shape[1:], sparse=True))])


def pages_at(table: Any, index: Any) -> Array:
    """The rows [..., P * L, D] of pages that an index [..., 1, P] names in a table [N, ..., L, D], page behind page; 0
    where the table has no such page."""
    known = (index[..., 0, :] >= 0) & (index[..., 0, :] < len(table))
    lead = np.broadcast_shapes(table.shape[1:-2], known.shape[:-1])
    known, page = (np.broadcast_to(a, (*lead, a.shape[-1])) for a in (known, index[..., 0, :]))
    own = np.broadcast_to(table, (len(table), *lead, *table.shape[-2:]))
    places: Any = np.indices(lead, sparse=True)
    found = own[(np.where(known, page, 0), *(at[..., None] for at in places))]
    found = np.where(known[..., None, None], found, np.zeros((), table.dtype))
    return np.asarray(found.reshape(*lead, -1, table.shape[-1]))


def take_at(x: Any, columns: Any, missing: Any) -> Array:
    """x at one column of each row; `missing` where the row has no such column."""
    rank = max(x.ndim, columns.ndim)
    x, columns = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, columns))
    known = (columns >= 0) & (columns < x.shape[-1])
    return np.where(known, np.take_along_axis(x, np.where(known, columns, 0), -1), missing)


def rows_put(table: Any, index: Any, rows: Any) -> Array:
    """A table with new rows, where an index names one; the others as they were. Two rows may not go to one place."""
    index, lead = index.reshape(-1), rows.ndim - table.ndim + 1
    rows = np.broadcast_to(rows, (*rows.shape[:lead], *table.shape[1:])).reshape(len(index), *table.shape[1:])
    named = (index >= 0) & (index < len(table))
    places, count = np.unique(index[named], return_counts=True)
    if (count > 1).any():
        place = places[count > 1][0]
        raise ValueError(f"scatter: {count.max()} rows go to row {place}, and each needs a place of its own")
    found = np.array(table)
    found[index[named]] = rows[named]
    return found


def source_of(name: str) -> str:
    """The text of one of them, as it stands above, without its types: it runs on numpy alone."""
    functions: dict[str, Callable[..., Array]] = {
        "gather": rows_at, "paged_rows": pages_at, "take_at": take_at, "scatter": rows_put,
    }  # fmt: skip
    return inspect.getsource(functions[name]).replace(": Any", "").replace(" -> Array", "")
