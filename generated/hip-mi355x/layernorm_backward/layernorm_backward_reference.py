"""layernorm_backward: what the kernel must compute, in float64.

dx, dgamma and dbeta of layernorm(x) * gamma + beta, of the rows' statistics as the forward pass left them.

Operands, with leading axes of any size:
    dy: bf16[M, N]
    x: bf16[M, N]
    gamma: bf16[N]
    mean: f32[M, 1]
    rstd: f32[M, 1]

Returns dx bf16[M, N], dgamma f32[1, N], dbeta f32[1, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def layernorm_backward(dy, x, gamma, mean, rstd):
    dy = np.asarray(dy).astype(np.float64)
    x = np.asarray(x).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    mean = np.asarray(mean).astype(np.float64)
    rstd = np.asarray(rstd).astype(np.float64)
    x_minus_mean = x - mean
    normed = x_minus_mean * rstd
    g = dy * gamma
    sum_of_g = g.sum(-1, keepdims=True)
    quotient = sum_of_g / dy.shape[-1]
    g_minus_quotient = g - quotient
    g_times_normed = g * normed
    sum_of_products = g_times_normed.sum(-1, keepdims=True)
    quotient_from_dy = sum_of_products / dy.shape[-1]
    normed_times_quotient_from_dy = normed * quotient_from_dy
    sub = g_minus_quotient - normed_times_quotient_from_dy
    dx = rstd * sub
    dy_times_normed = dy * normed
    dgamma = dy_times_normed.sum(-2, keepdims=True)
    dbeta = dy.sum(-2, keepdims=True)
    return dx, dgamma, dbeta
