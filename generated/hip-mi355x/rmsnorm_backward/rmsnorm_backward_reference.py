"""rmsnorm_backward: what the kernel must compute, in float64.

dx and dgamma of rmsnorm(x) * gamma, of each row's 1 / sqrt(mean(x^2) + eps) as the forward pass left it.

Operands, with leading axes of any size:
    dy: bf16[M, N]
    x: bf16[M, N]
    gamma: bf16[N]
    rstd: f32[M, 1]

Returns dx bf16[M, N], dgamma f32[1, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rmsnorm_backward(dy, x, gamma, rstd):
    dy = np.asarray(dy).astype(np.float64)
    x = np.asarray(x).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    rstd = np.asarray(rstd).astype(np.float64)
    normed = x * rstd
    g = dy * gamma
    g_times_normed = g * normed
    sum_of_products = g_times_normed.sum(-1, keepdims=True)
    mean = sum_of_products / dy.shape[-1]
    normed_times_mean = normed * mean
    sub = g - normed_times_mean
    dx = rstd * sub
    dy_times_normed = dy * normed
    dgamma = dy_times_normed.sum(-2, keepdims=True)
    return dx, dgamma
