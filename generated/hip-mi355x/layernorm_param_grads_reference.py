"""layernorm_param_grads: what the kernel must compute, in float64.

dgamma and dbeta of LayerNorm, of its rows' mean and 1 / sqrt(var + eps) as the forward pass left them.

Operands, with leading axes of any size:
    dy: bf16[M, N]
    x: bf16[M, N]
    mean: f32[M, 1]
    rstd: f32[M, 1]

Returns dgamma f32[1, N], dbeta f32[1, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def layernorm_param_grads(dy, x, mean, rstd):
    dy = np.asarray(dy).astype(np.float64)
    x = np.asarray(x).astype(np.float64)
    mean = np.asarray(mean).astype(np.float64)
    rstd = np.asarray(rstd).astype(np.float64)
    x_minus_mean = x - mean
    normed = x_minus_mean * rstd
    mul = dy * normed
    dgamma = mul.sum(-2, keepdims=True)
    dbeta = dy.sum(-2, keepdims=True)
    return dgamma, dbeta
