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
    split_2 = q_gain[D // 2:D]
    square = split * split
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / (D // 2)
    square_of_view_of_q = view_of_q * view_of_q
    sum_of_squares_2 = square_of_view_of_q.sum(-1, keepdims=True)
    quotient = sum_of_squares_2 / (D // 2)
    mean_plus_quotient = mean + quotient
    quotient_2 = mean_plus_quotient / 2.0
    quotient_2_plus_eps = quotient_2 + 1e-06
    rsqrt_ = 1 / np.sqrt(quotient_2_plus_eps)
    split_times_rsqrt = split * rsqrt_
    mul = split_times_rsqrt * view_of_q_gain
    view_of_q_times_rsqrt = view_of_q * rsqrt_
    mul_2 = view_of_q_times_rsqrt * split_2
    mul_times_cosine = mul * cosine
    mul_2_times_sine = mul_2 * sine
    mul_times_cosine_minus_mul_2_times_sine = mul_times_cosine - mul_2_times_sine
    mul_2_times_cosine = mul_2 * cosine
    mul_times_sine = mul * sine
    add = mul_2_times_cosine + mul_times_sine
    q_turned = np.concatenate([mul_times_cosine_minus_mul_2_times_sine, add], axis=-1)
    view_of_k = k[:, :, 0:D // 2]
    split_3 = k[:, :, D // 2:D]
    view_of_k_gain = k_gain[0:D // 2]
    split_4 = k_gain[D // 2:D]
    square_of_view_of_k = view_of_k * view_of_k
    sum_of_squares_3 = square_of_view_of_k.sum(-1, keepdims=True)
    quotient_3 = sum_of_squares_3 / (D // 2)
    square_of_split_3 = split_3 * split_3
    sum_of_squares_4 = square_of_split_3.sum(-1, keepdims=True)
    quotient_4 = sum_of_squares_4 / (D // 2)
    quotient_3_plus_quotient_4 = quotient_3 + quotient_4
    quotient_5 = quotient_3_plus_quotient_4 / 2.0
    quotient_5_plus_eps = quotient_5 + 1e-06
    rsqrt_2 = 1 / np.sqrt(quotient_5_plus_eps)
    view_of_k_times_rsqrt_2 = view_of_k * rsqrt_2
    mul_3 = view_of_k_times_rsqrt_2 * view_of_k_gain
    split_3_times_rsqrt_2 = split_3 * rsqrt_2
    mul_4 = split_3_times_rsqrt_2 * split_4
    mul_3_times_cosine = mul_3 * cosine
    mul_4_times_sine = mul_4 * sine
    sub = mul_3_times_cosine - mul_4_times_sine
    mul_4_times_cosine = mul_4 * cosine
    mul_3_times_sine = mul_3 * sine
    add_2 = mul_4_times_cosine + mul_3_times_sine
    k_turned = np.concatenate([sub, add_2], axis=-1)
    return q_turned, k_turned
