"""moe_router_deepseek: what the kernel must compute, in float64.

Weights and experts of each token: sigmoid of the chosen ones' logits, made to add up to 2.5.

Operands, with leading axes of any size:
    logits: f32[T, E]
    bias: f32[E]

Returns out0 f32[T, K], experts i32[T, K]; floats are left in float64, not yet rounded to the storage type.
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


def in_best_groups(key, groups, best, by):
    """key in the best groups of its row, whose `by` largest keys add up to most, and -inf in the others. NaN comes
    first, and of equals the first."""
    parts = key.reshape(*key.shape[:-1], groups, key.shape[-1] // groups)
    largest = -np.sort(-parts, -1)[..., :by].sum(-1)
    score = np.where(np.isnan(parts).any(-1), np.nan, largest)
    rank = np.argsort(np.lexsort((-score, ~np.isnan(score))), -1)
    return np.where((rank < best)[..., None], parts, -np.inf).reshape(key.shape)


@np.errstate(all="ignore")
def moe_router_deepseek(logits, bias):
    logits = np.asarray(logits).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    scores = 1 / (1 + np.exp(-logits))
    add = scores + bias
    experts = top_columns(in_best_groups(add, 8, 4, 2), 8)
    experts_below_0 = experts < 0
    take_ = take(logits, experts, 0.0)
    sigmoid = 1 / (1 + np.exp(-take_))
    chosen = np.where(experts_below_0, 0.0, sigmoid)
    sum_of_chosen = chosen.sum(-1, keepdims=True)
    quotient = chosen / sum_of_chosen
    mul = quotient * 2.5
    return mul, experts
