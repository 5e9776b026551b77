"""scale_causal_softmax: what the kernel must compute, in float64.

softmax(scores / sqrt(64)) over the keys up to each query; a row with nothing left gives zeros.

Operands, with leading axes of any size:
    scores: f16[B, H, S, N]

Returns out f16[B, H, S, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def scale_causal_softmax(scores):
    scores = np.asarray(scores).astype(np.float64)
    mul = scores * 0.125
    col_index = np.arange(scores.shape[-1], dtype=np.int32)
    last = np.arange(scores.shape[-2], dtype=np.int32)[:, None]
    keep = col_index <= last
    z = np.where(keep, mul, (-np.inf))
    top = z.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    z_minus_pivot = z - pivot
    e = np.exp(z_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    return softmax
