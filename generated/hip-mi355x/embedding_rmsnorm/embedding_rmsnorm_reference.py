"""embedding_rmsnorm: what the kernel must compute, in float64.

The row of `table` that each id names, which begins the residual stream, and its RMSNorm.

Operands, with leading axes of any size:
    table: bf16[V, N]
    ids: i32[M]
    gain: bf16[N]

Returns hidden bf16[M, N], rmsnorm bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def rows_at(table, index):
    """The rows of a table that an index names; 0 where the table has no such row. The index has an axis of one element
    for each axis of a row."""
    known = (index >= 0) & (index < len(table))
    rows = np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])
    return np.asarray(rows[(np.where(known, index, len(table)), *np.indices(table.shape[1:], sparse=True))])


@np.errstate(all="ignore")
def embedding_rmsnorm(table, ids, gain):
    N = table.shape[1]
    table = np.asarray(table).astype(np.float64)
    ids = np.asarray(ids).astype(np.int32)
    gain = np.asarray(gain).astype(np.float64)
    gather = ids[..., None]
    hidden = rows_at(table, gather)
    square = hidden * hidden
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / N
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = hidden * rrms
    rmsnorm = normalized * gain
    return hidden, rmsnorm
