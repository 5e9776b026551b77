"""bias_gelu_residual_ln: what the kernel must compute, in float64.

LayerNorm(residual + gelu(x + bias)).

Operands, with leading axes of any size:
    x: f16[M, N]
    bias: f16[N]
    residual: f16[M, N]
    gamma: f16[N]
    beta: f16[N]

Returns out f16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def bias_gelu_residual_ln(x, bias, residual, gamma, beta):
    x = np.asarray(x).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    residual = np.asarray(residual).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    beta = np.asarray(beta).astype(np.float64)
    x_plus_bias = x + bias
    gelu = 0.5 * x_plus_bias * (1 + np.tanh(0.7978845608028654 * (x_plus_bias + 0.044715 * x_plus_bias * x_plus_bias * x_plus_bias)))
    h = residual + gelu
    sum_of_h = h.sum(-1, keepdims=True)
    mean = sum_of_h / x.shape[-1]
    centered = h - mean
    square = centered * centered
    sum_of_squares = square.sum(-1, keepdims=True)
    variance = sum_of_squares / x.shape[-1]
    variance_plus_eps = variance + 1e-05
    rstd = 1 / np.sqrt(variance_plus_eps)
    normalized = centered * rstd
    scaled = normalized * gamma
    layernorm = scaled + beta
    return layernorm
