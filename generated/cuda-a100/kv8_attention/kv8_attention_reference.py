"""kv8_attention: what the kernel must compute, in float64.

Keys and values become bf16 on their way to shared memory; their scales meet the scores and the sums.

Operands, with leading axes of any size:
    q: bf16[B, G, R, D]
    k: f8e4m3[B, G, T, D]
    v_value: f8e4m3[B, G, T, D]
    k_scale: f32[G, 1, 1]
    v_scale: f32[G, 1, 1]
    length: i32[B, 1, 1, 1]

Returns out bf16[B, G, R, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import bfloat16


@np.errstate(all="ignore")
def kv8_attention(q, k, v_value, k_scale, v_scale, length):
    T, D = k.shape[2], q.shape[3]
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v_value = np.asarray(v_value).astype(np.float64)
    k_scale = np.asarray(k_scale).astype(np.float64)
    v_scale = np.asarray(v_scale).astype(np.float64)
    length = np.asarray(length).astype(np.int32)
    cast = k.astype(np.float32).astype(bfloat16).astype(np.float64)
    matmul = np.swapaxes(cast, -1, -2)
    matmul_from_q = q @ matmul
    pow_ = np.power(D, (-0.5))
    k_scale_times_pow = k_scale * pow_
    scores = matmul_from_q * k_scale_times_pow
    col_index = np.arange(T, dtype=np.int32)
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
    weights_ = e * inverse_sum
    round_bf16_ = v_value.astype(np.float32).astype(bfloat16).astype(np.float64)
    weights_times_round_bf16 = weights_ @ round_bf16_
    out = weights_times_round_bf16 * v_scale
    return out
