"""linear_cross_entropy: what the kernel must compute, in float64.

Each token's cross entropy, of logits x w, as a program: tiles of logits reduced in the product's kernel.

Operands, with leading axes of any size:
    x: bf16[M, H]
    w: bf16[V, H]
    labels: i32[M, 1]

Returns out f32[M, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def take_at(x, columns, missing):
    """x at one column of each row; `missing` where the row has no such column."""
    rank = max(x.ndim, columns.ndim)
    x, columns = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, columns))
    known = (columns >= 0) & (columns < x.shape[-1])
    return np.where(known, np.take_along_axis(x, np.where(known, columns, 0), -1), missing)


@np.errstate(all="ignore")
def linear_cross_entropy(x, w, labels):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    labels = np.asarray(labels).astype(np.int32)
    w_T = np.swapaxes(w, -1, -2)
    matmul = x @ w_T
    eq = labels == (-100)
    top = matmul.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    matmul_minus_pivot = matmul - pivot
    exp_ = np.exp(matmul_minus_pivot)
    sum_of_exps = exp_.sum(-1, keepdims=True)
    log_sum = np.log(sum_of_exps)
    own_logit = take_at(matmul, labels, np.nan)
    own_logit_minus_pivot = own_logit - pivot
    loss = log_sum - own_logit_minus_pivot
    cross_entropy = np.where(eq, 0.0, loss)
    return cross_entropy
