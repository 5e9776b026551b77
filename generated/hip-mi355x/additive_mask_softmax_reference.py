"""additive_mask_softmax: what the kernel must compute, in float64.

softmax(scores / 8 + mask); a row of -inf gives zeros.

Operands, with leading axes of any size:
    scores: bf16[B, H, S, N]
    mask: bf16[S, N]

Returns out bf16[B, H, S, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def additive_mask_softmax(scores, mask):
    scores = np.asarray(scores).astype(np.float64)
    mask = np.asarray(mask).astype(np.float64)
    mul = scores * 0.125
    z = mul + mask
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
