"""rmsnorm_quant_block: what the kernel must compute, in float64.

rmsnorm(x) * gain as f8e4m3 with a scale for each 128 of a row.

Operands, with leading axes of any size:
    x: bf16[M, N]
    gain: bf16[N]

Returns values f8e4m3[M, N], scale f32[M, N // 128]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rmsnorm_quant_block(x, gain):
    M, N = x.shape[0], x.shape[1]
    x = np.asarray(x).astype(np.float64)
    gain = np.asarray(gain).astype(np.float64)
    square = x * x
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / N
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = x * rrms
    y = normalized * gain
    quantize = y.reshape(M, N // 128, 128)
    magnitude = np.abs(quantize)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 0.0001)
    row_scale = largest / 448.0
    factor = 1.0 / row_scale
    mul = quantize * factor
    view_of_mul = mul.reshape(M, N)
    scale = row_scale[..., 0]
    return view_of_mul, scale
