"""moe_router_gpt_oss: what the kernel must compute, in float64.

top-k, then softmax of what was chosen: weights and experts of each token.

Biased logits are rounded to bf16, as the results of the layer are that makes them.

Operands, with leading axes of any size:
    logits: bf16[T, E]
    bias: bf16[E]

Returns softmax f32[T, K], experts i32[T, K]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import bfloat16


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
def moe_router_gpt_oss(logits, bias):
    logits = np.asarray(logits).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    add = logits + bias
    cast = add.astype(np.float32).astype(bfloat16).astype(np.float64)
    experts = top_columns(cast, 4)
    best_ = take(cast, experts, (-np.inf))
    top = best_.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    best_minus_pivot = best_ - pivot
    e = np.exp(best_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    return softmax, experts
