"""next_tokens: what the kernel must compute, in float64.

The K largest of softmax(logits * scale) and their columns: NaN first, ties by column, -inf never.

Operands, with leading axes of any size:
    logits: f32[B, V]
    scale: f32

Returns values f32[B, K], columns i32[B, K]; floats are left in float64, not yet rounded to the storage type.
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
def next_tokens(logits, scale):
    logits = np.asarray(logits).astype(np.float64)
    scale = np.asarray(scale).astype(np.float64)
    mul = logits * scale
    top = mul.max(-1, keepdims=True)
    eq = top == (-np.inf)
    pivot = np.where(eq, 0.0, top)
    sub = mul - pivot
    e = np.exp(sub)
    total = e.sum(-1, keepdims=True)
    eq_2 = total == 0.0
    div = 1.0 / total
    scale_2 = np.where(eq_2, 0.0, div)
    columns = top_columns(mul, 50)
    lt = columns < 0
    take_ = take(mul, columns, (-np.inf))
    sub_2 = take_ - pivot
    exp_ = np.exp(sub_2)
    mul_2 = exp_ * scale_2
    values_ = np.where(lt, 0.0, mul_2)
    return values_, columns
