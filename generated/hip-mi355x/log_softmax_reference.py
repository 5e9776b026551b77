"""log_softmax: what the kernel must compute, in float64.

logits - max - log(sum(exp(logits - max))).

Operands, with leading axes of any size:
    logits: bf16[T, V]

Returns out f32[T, V]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def log_softmax(logits):
    logits = np.asarray(logits).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    shifted = logits - pivot
    exp_ = np.exp(shifted)
    sum_of_exps = exp_.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    log_ = np.log(sum_of_exps)
    log_sum = np.where(sum_of_exps_is_0, 0.0, log_)
    log_softmax = shifted - log_sum
    return log_softmax
