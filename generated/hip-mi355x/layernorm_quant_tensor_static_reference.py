"""layernorm_quant_tensor_static: what the kernel must compute, in float64.

layernorm(x) / scale, rounded to i8; what is beyond -128 to 127 becomes the nearer end.

Operands, with leading axes of any size:
    x: bf16[M, N]
    gamma: bf16[N]
    beta: bf16[N]
    scale: f32

Returns out i8[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def layernorm_quant_tensor_static(x, gamma, beta, scale):
    x = np.asarray(x).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    beta = np.asarray(beta).astype(np.float64)
    scale = np.asarray(scale).astype(np.float64)
    sum_of_x = x.sum(-1, keepdims=True)
    mean = sum_of_x / x.shape[-1]
    centered = x - mean
    square = centered * centered
    sum_of_squares = square.sum(-1, keepdims=True)
    variance = sum_of_squares / x.shape[-1]
    variance_plus_eps = variance + 1e-05
    rstd = 1 / np.sqrt(variance_plus_eps)
    normalized = centered * rstd
    scaled = normalized * gamma
    y = scaled + beta
    one_over_scale = 1.0 / scale
    mul = y * one_over_scale
    quantize = np.nan_to_num(np.clip(np.round(mul), -128, 127)).astype(np.int32)
    return quantize
