"""qk_causal_softmax: what the kernel must compute, in float64.

softmax(causal(query @ key^T / sqrt(D))): scores are made twice, and of masked tiles not at all.

Operands, with leading axes of any size:
    query: bf16[B, H, S, D]
    key: bf16[B, H, T, D]

Returns out bf16[B, H, S, T]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def qk_causal_softmax(query, key):
    query = np.asarray(query).astype(np.float64)
    key = np.asarray(key).astype(np.float64)
    key_T = np.swapaxes(key, -1, -2)
    matmul = query @ key_T
    small_pow = np.power(query.shape[-1], (-0.5))
    mul = matmul * small_pow
    col_index = np.arange(key.shape[-2], dtype=np.int32)
    last_value = np.arange(query.shape[-2], dtype=np.int32)[:, None]
    keep = col_index <= last_value
    causal = np.where(keep, mul, (-np.inf))
    top = causal.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    causal_minus_pivot = causal - pivot
    e = np.exp(causal_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    return softmax
