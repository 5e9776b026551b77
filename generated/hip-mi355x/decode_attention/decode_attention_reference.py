"""decode_attention: what the kernel must compute, in float64.

Heads of queries that share keys are a tile's rows; of a cache no tile behind the sequence's length is read.

Operands, with leading axes of any size:
    q: bf16[B, G, R, D]
    k: bf16[B, G, T, D]
    v: bf16[B, G, T, D]
    length: i32[B, 1, 1, 1]

Returns out bf16[B, G, R, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def decode_attention(q, k, v, length):
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v = np.asarray(v).astype(np.float64)
    length = np.asarray(length).astype(np.int32)
    k_T = np.swapaxes(k, -1, -2)
    q_times_k = q @ k_T
    pow_ = np.power(q.shape[-1], (-0.5))
    scores = q_times_k * pow_
    col_index = np.arange(k.shape[-2], dtype=np.int32)
    lt = col_index < length
    where = np.where(lt, scores, (-np.inf))
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
