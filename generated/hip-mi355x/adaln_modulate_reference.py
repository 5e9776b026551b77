"""adaln_modulate: what the kernel must compute, in float64.

LayerNorm(x) * (1 + scale) + shift, the scale and the shift those of the sample.

Operands, with leading axes of any size:
    x: bf16[B, S, N]
    scale: bf16[B, 1, N]
    shift_value: bf16[B, 1, N]

Returns out bf16[B, S, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def adaln_modulate(x, scale, shift_value):
    x = np.asarray(x).astype(np.float64)
    scale = np.asarray(scale).astype(np.float64)
    shift_value = np.asarray(shift_value).astype(np.float64)
    sum_of_x = x.sum(-1, keepdims=True)
    mean = sum_of_x / x.shape[-1]
    centered = x - mean
    square = centered * centered
    sum_of_squares = square.sum(-1, keepdims=True)
    variance = sum_of_squares / x.shape[-1]
    variance_plus_eps = variance + 1e-06
    rstd = 1 / np.sqrt(variance_plus_eps)
    normalized = centered * rstd
    add = 1.0 + scale
    mul = normalized * add
    mul_plus_shift_value = mul + shift_value
    return mul_plus_shift_value
