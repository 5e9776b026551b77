"""topk: what the kernel must compute, in float64.

The K largest logits of each row and their columns: NaN first, ties by column, -inf never.

Operands, with leading axes of any size:
    logits: bf16[B, V]

Returns values bf16[B, K], columns i32[B, K]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def top_columns(key, k):
    """The columns of each row's k largest keys, largest first; -1 where fewer than k keys are above -inf."""
    order = np.lexsort((-key, ~np.isnan(key)))[..., :k]  # NaN before all, then descending; ties by column
    found = np.take_along_axis(key, order, -1)
    return np.where(found == -np.inf, -1, order)


def take(x, columns, missing):
    """x at the columns of its row; `missing` where the column is -1."""
    rank = max(x.ndim, columns.ndim)
    x, columns = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, columns))
    return np.where(columns < 0, missing, np.take_along_axis(x, np.maximum(columns, 0), -1))


@np.errstate(all="ignore")
def topk(logits):
    logits = np.asarray(logits).astype(np.float64)
    columns = top_columns(logits, 50)
    values_ = take(logits, columns, (-np.inf))
    return values_, columns
