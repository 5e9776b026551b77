"""retention: what the kernel must compute, in float64.

(q @ k.mT * decay) @ v: weights decay as tokens age, by a rate of each head; later tokens are not read.

Operands, with leading axes of any size:
    q: bf16[B, H, S, D]
    k: bf16[B, H, S, D]
    v: bf16[B, H, S, E]
    log_rate: f32[H, 1, 1]

Returns out bf16[B, H, S, E]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def retention(q, k, v, log_rate):
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v = np.asarray(v).astype(np.float64)
    log_rate = np.asarray(log_rate).astype(np.float64)
    k_T = np.swapaxes(k, -1, -2)
    q_times_k = q @ k_T
    small_pow = np.power(q.shape[-1], (-0.5))
    scores = q_times_k * small_pow
    row_number = np.arange(q.shape[-2], dtype=np.int32)[:, None]
    col_number = np.arange(q.shape[-2], dtype=np.int32)
    le = col_number <= row_number
    exp_ = np.exp(log_rate)
    neg = -exp_
    row_number_minus_col_number = row_number - col_number
    cast = row_number_minus_col_number.astype(np.float64)
    mul = neg * cast
    exp_of_mul = np.exp(mul)
    decay = np.where(le, exp_of_mul, 0.0)
    weighed = scores * decay
    weighed_times_v = weighed @ v
    return weighed_times_v
