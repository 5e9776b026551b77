"""document_attention: what the kernel must compute, in float64.

Each query sees the keys from its document's first, `start`, up to its own.

Operands, with leading axes of any size:
    q: bf16[B, H, S, D]
    k: bf16[B, H, T, D]
    v: bf16[B, H, T, D]
    start_value: i32[B, 1, S, 1]

Returns out bf16[B, H, S, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def document_attention(q, k, v, start_value):
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v = np.asarray(v).astype(np.float64)
    start_value = np.asarray(start_value).astype(np.int32)
    k_T = np.swapaxes(k, -1, -2)
    q_times_k = q @ k_T
    small_pow = np.power(q.shape[-1], (-0.5))
    scores = q_times_k * small_pow
    row_number = np.arange(q.shape[-2], dtype=np.int32)[:, None]
    col_number = np.arange(k.shape[-2], dtype=np.int32)
    ge = col_number >= start_value
    le = col_number <= row_number
    logical_and = ge & le
    where = np.where(logical_and, scores, (-np.inf))
    top = where.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    where_minus_pivot = where - pivot
    e = np.exp(where_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    softmax_times_v = softmax @ v
    return softmax_times_v
