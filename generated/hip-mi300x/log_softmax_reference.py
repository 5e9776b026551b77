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
    eq = top == (-np.inf)
    pivot = np.where(eq, 0.0, top)
    shifted = logits - pivot
    exp_ = np.exp(shifted)
    total = exp_.sum(-1, keepdims=True)
    eq_2 = total == 0.0
    log_ = np.log(total)
    log_total = np.where(eq_2, 0.0, log_)
    log_softmax = shifted - log_total
    return log_softmax
