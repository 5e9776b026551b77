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
    logits_times_scale = logits * scale
    top = logits_times_scale.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    sub = logits_times_scale - pivot
    e = np.exp(sub)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    columns = top_columns(logits_times_scale, 50)
    columns_below_0 = columns < 0
    take_ = take(logits_times_scale, columns, (-np.inf))
    take_minus_pivot = take_ - pivot
    exp_ = np.exp(take_minus_pivot)
    exp_times_inverse_sum = exp_ * inverse_sum
    values_ = np.where(columns_below_0, 0.0, exp_times_inverse_sum)
    return values_, columns
