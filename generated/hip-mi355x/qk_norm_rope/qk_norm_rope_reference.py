"""qk_norm_rope: what the kernel must compute, in float64.

rmsnorm of each head of q and k, times a gain, then rope; q and k in one launch.

Operands, with leading axes of any size:
    q: bf16[T, H, D]
    k: bf16[T, K, D]
    q_gain: bf16[D]
    k_gain: bf16[D]
    cosine: f32[T, 1, D // 2]
    sine: f32[T, 1, D // 2]

Returns q_turned bf16[T, H, D], k_turned bf16[T, K, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def qk_norm_rope(q, k, q_gain, k_gain, cosine, sine):
    D = q.shape[2]
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    q_gain = np.asarray(q_gain).astype(np.float64)
    k_gain = np.asarray(k_gain).astype(np.float64)
    cosine = np.asarray(cosine).astype(np.float64)
    sine = np.asarray(sine).astype(np.float64)
    split = q[:, :, 0:D // 2]
    view_of_q = q[:, :, D // 2:D]
    view_of_q_gain = q_gain[0:D // 2]
    split_from_q_gain = q_gain[D // 2:D]
    square = split * split
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / (D // 2)
    square_of_view_of_q = view_of_q * view_of_q
    sum_of_squares_from_q = square_of_view_of_q.sum(-1, keepdims=True)
    quotient = sum_of_squares_from_q / (D // 2)
    mean_plus_quotient = mean + quotient
    quotient_from_q = mean_plus_quotient / 2.0
    quotient_from_q_plus_eps = quotient_from_q + 1e-06
    rsqrt_ = 1 / np.sqrt(quotient_from_q_plus_eps)
    split_times_rsqrt = split * rsqrt_
    mul = split_times_rsqrt * view_of_q_gain
    view_of_q_times_rsqrt = view_of_q * rsqrt_
    mul_from_q = view_of_q_times_rsqrt * split_from_q_gain
    mul_times_cosine = mul * cosine
    mul_from_q_times_sine = mul_from_q * sine
    sub = mul_times_cosine - mul_from_q_times_sine
    mul_from_q_times_cosine = mul_from_q * cosine
    mul_times_sine = mul * sine
    add = mul_from_q_times_cosine + mul_times_sine
    q_turned = np.concatenate([sub, add], axis=-1)
    view_of_k = k[:, :, 0:D // 2]
    split_from_k = k[:, :, D // 2:D]
    view_of_k_gain = k_gain[0:D // 2]
    split_from_k_gain = k_gain[D // 2:D]
    square_of_view_of_k = view_of_k * view_of_k
    sum_of_squares_from_k = square_of_view_of_k.sum(-1, keepdims=True)
    quotient_from_k = sum_of_squares_from_k / (D // 2)
    square_of_split_from_k = split_from_k * split_from_k
    sum_of_squares_2 = square_of_split_from_k.sum(-1, keepdims=True)
    quotient_2 = sum_of_squares_2 / (D // 2)
    quotient_from_k_plus_quotient_2 = quotient_from_k + quotient_2
    quotient_3 = quotient_from_k_plus_quotient_2 / 2.0
    quotient_3_plus_eps = quotient_3 + 1e-06
    rsqrt_from_k = 1 / np.sqrt(quotient_3_plus_eps)
    view_of_k_times_rsqrt_from_k = view_of_k * rsqrt_from_k
    mul_from_k = view_of_k_times_rsqrt_from_k * view_of_k_gain
    split_from_k_times_rsqrt_from_k = split_from_k * rsqrt_from_k
    mul_2 = split_from_k_times_rsqrt_from_k * split_from_k_gain
    mul_from_k_times_cosine = mul_from_k * cosine
    mul_2_times_sine = mul_2 * sine
    sub_from_k = mul_from_k_times_cosine - mul_2_times_sine
    mul_2_times_cosine = mul_2 * cosine
    mul_from_k_times_sine = mul_from_k * sine
    add_from_k = mul_2_times_cosine + mul_from_k_times_sine
    k_turned = np.concatenate([sub_from_k, add_from_k], axis=-1)
    return q_turned, k_turned
