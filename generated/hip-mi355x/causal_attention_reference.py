"""causal_attention: what the kernel must compute, in float64.

softmax(scores) @ v and logsumexp(scores), of keys up to the query's own; tiles of later keys are not read.

Operands, with leading axes of any size:
    q: bf16[B, H, S, D]
    k: bf16[B, H, T, D]
    v: bf16[B, H, T, D]

Returns out0 bf16[B, H, S, D], logsumexp f32[B, H, S, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def causal_attention(q, k, v):
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v = np.asarray(v).astype(np.float64)
    k_T = np.swapaxes(k, -1, -2)
    q_times_k = q @ k_T
    small_pow = np.power(q.shape[-1], (-0.5))
    mul = q_times_k * small_pow
    col_index = np.arange(k.shape[-2], dtype=np.int32)
    last = np.arange(q.shape[-2], dtype=np.int32)[:, None]
    keep = col_index <= last
    scores = np.where(keep, mul, (-np.inf))
    top = scores.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    scores_minus_pivot = scores - pivot
    e = np.exp(scores_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    softmax_times_v = softmax @ v
    top_is_inf = top == np.inf
    log_ = np.log(sum_of_exps)
    add = pivot + log_
    logsumexp = np.where(top_is_inf, np.inf, add)
    return softmax_times_v, logsumexp
