"""bias_gelu_residual_quant_row: what the kernel must compute, in float64.

gelu(x + bias) + residual as i8: the largest of each row is 127 times its scale.

Operands, with leading axes of any size:
    x: bf16[M, N]
    bias: bf16[N]
    residual: bf16[M, N]

Returns values i8[M, N], scale f32[M, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def bias_gelu_residual_quant_row(x, bias, residual):
    x = np.asarray(x).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    residual = np.asarray(residual).astype(np.float64)
    add = x + bias
    gelu = 0.5 * add * (1 + np.tanh(0.7978845608028654 * (add + 0.044715 * add * add * add)))
    h = gelu + residual
    magnitude = np.abs(h)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 1e-12)
    scale = largest / 127.0
    factor = 1.0 / scale
    mul = h * factor
    values_ = np.nan_to_num(np.clip(np.round(mul), -128, 127)).astype(np.int32)
    return values_, scale
