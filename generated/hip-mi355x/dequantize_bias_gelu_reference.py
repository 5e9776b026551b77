"""dequantize_bias_gelu: what the kernel must compute, in float64.

gelu(values * scale + bias), with a scale for each row.

Operands, with leading axes of any size:
    values_value: f8e4m3[M, N]
    scale: f32[M, 1]
    bias: bf16[N]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def dequantize_bias_gelu(values_value, scale, bias):
    values_value = np.asarray(values_value).astype(np.float64)
    scale = np.asarray(scale).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    dequantize = values_value * scale
    add = dequantize + bias
    gelu = 0.5 * add * (1 + np.tanh(0.7978845608028654 * (add + 0.044715 * add * add * add)))
    return gelu
