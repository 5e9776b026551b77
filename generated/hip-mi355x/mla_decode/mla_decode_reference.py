"""mla_decode: what the kernel must compute, in float64.

Heads are a tile's rows, and values are the first columns of the keys: a tile of latent rows is read once.

Operands, with leading axes of any size:
    q: bf16[B, H, D]
    kv: bf16[B, T, D]
    length: i32[B, 1, 1]

Returns out bf16[B, H, E]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def mla_decode(q, kv, length):
    T, E = kv.shape[1], 512
    q = np.asarray(q).astype(np.float64)
    kv = np.asarray(kv).astype(np.float64)
    length = np.asarray(length).astype(np.int32)
    kv_T = np.swapaxes(kv, -1, -2)
    q_times_kv = q @ kv_T
    scores = q_times_kv * 0.07216878364870322
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
    softmax = e * inverse_sum
    slice = kv[..., :E]
    out = softmax @ slice
    return out
