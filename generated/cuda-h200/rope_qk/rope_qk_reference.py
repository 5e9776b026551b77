"""rope_qk: what the kernel must compute, in float64.

Pairs are the halves of a head, as in GPT-NeoX and Llama; `out=(q, k)` turns both where they are.

Operands, with leading axes of any size:
    q: bf16[T, H, D]
    k: bf16[T, K, D]
    cos: f32[T, 1, D // 2]
    sin: f32[T, 1, D // 2]

Returns q_turned bf16[T, H, D], k_turned bf16[T, K, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rope_qk(q, k, cos, sin):
    D = q.shape[2]
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    cos = np.asarray(cos).astype(np.float64)
    sin = np.asarray(sin).astype(np.float64)
    low = q[:, :, 0:D // 2]
    low_times_cos = low * cos
    high = q[:, :, D // 2:D]
    high_times_sin = high * sin
    low_times_cos_minus_high_times_sin = low_times_cos - high_times_sin
    high_times_cos = high * cos
    low_times_sin = low * sin
    high_times_cos_plus_low_times_sin = high_times_cos + low_times_sin
    q_turned = np.concatenate([low_times_cos_minus_high_times_sin, high_times_cos_plus_low_times_sin], axis=-1)
    low_of_k_turned = k[:, :, 0:D // 2]
    low_of_k_turned_times_cos = low_of_k_turned * cos
    high_of_k_turned = k[:, :, D // 2:D]
    high_of_k_turned_times_sin = high_of_k_turned * sin
    sub = low_of_k_turned_times_cos - high_of_k_turned_times_sin
    high_of_k_turned_times_cos = high_of_k_turned * cos
    low_of_k_turned_times_sin = low_of_k_turned * sin
    add = high_of_k_turned_times_cos + low_of_k_turned_times_sin
    k_turned = np.concatenate([sub, add], axis=-1)
    return q_turned, k_turned
