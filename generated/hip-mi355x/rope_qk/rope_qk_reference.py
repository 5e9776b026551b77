"""rope_qk: what the kernel must compute, in float64.

Pairs are the halves of a head, as in GPT-NeoX and Llama; `out=(q, k)` turns both where they are.

Operands, with leading axes of any size:
    q: bf16[T, H, D]
    k: bf16[T, K, D]
    cosine: f32[T, 1, D // 2]
    sine: f32[T, 1, D // 2]

Returns q_turned bf16[T, H, D], k_turned bf16[T, K, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rope_qk(q, k, cosine, sine):
    D = q.shape[2]
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    cosine = np.asarray(cosine).astype(np.float64)
    sine = np.asarray(sine).astype(np.float64)
    low = q[:, :, 0:D // 2]
    low_times_cosine = low * cosine
    high = q[:, :, D // 2:D]
    high_times_sine = high * sine
    low_times_cosine_minus_high_times_sine = low_times_cosine - high_times_sine
    high_times_cosine = high * cosine
    low_times_sine = low * sine
    add = high_times_cosine + low_times_sine
    q_turned = np.concatenate([low_times_cosine_minus_high_times_sine, add], axis=-1)
    low_of_k_turned = k[:, :, 0:D // 2]
    low_of_k_turned_times_cosine = low_of_k_turned * cosine
    high_of_k_turned = k[:, :, D // 2:D]
    high_of_k_turned_times_sine = high_of_k_turned * sine
    sub = low_of_k_turned_times_cosine - high_of_k_turned_times_sine
    high_of_k_turned_times_cosine = high_of_k_turned * cosine
    low_of_k_turned_times_sine = low_of_k_turned * sine
    add_from_k = high_of_k_turned_times_cosine + low_of_k_turned_times_sine
    k_turned = np.concatenate([sub, add_from_k], axis=-1)
    return q_turned, k_turned
