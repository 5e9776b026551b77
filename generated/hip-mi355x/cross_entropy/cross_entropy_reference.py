"""cross_entropy: what the kernel must compute, in float64.

log(sum(exp(logits))) - logits[label] of each row, and 0 of those whose label is -100.

Operands, with leading axes of any size:
    logits: bf16[M, N]
    labels: i32[M]

Returns out f32[M]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def take_at(x, columns, missing):
    """x at one column of each row; `missing` where the row has no such column."""
    rank = max(x.ndim, columns.ndim)
    x, columns = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, columns))
    known = (columns >= 0) & (columns < x.shape[-1])
    return np.where(known, np.take_along_axis(x, np.where(known, columns, 0), -1), missing)


@np.errstate(all="ignore")
def cross_entropy(logits, labels):
    logits = np.asarray(logits).astype(np.float64)
    labels = np.asarray(labels).astype(np.int32)
    at_ = labels[..., None]
    eq = at_ == (-100)
    top = logits.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    logits_minus_pivot = logits - pivot
    exp_ = np.exp(logits_minus_pivot)
    sum_of_exps = exp_.sum(-1, keepdims=True)
    log_sum = np.log(sum_of_exps)
    own_logit = take_at(logits, at_, np.nan)
    own_logit_minus_pivot = own_logit - pivot
    loss = log_sum - own_logit_minus_pivot
    cross_entropy = np.where(eq, 0.0, loss)
    cross_entropy_of_cross_entropy = cross_entropy[..., 0]
    return cross_entropy_of_cross_entropy
