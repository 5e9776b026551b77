"""silu_mul_quant_block: what the kernel must compute, in float64.

silu(gate) * up as f8e4m3 with a scale for each 128 of a row.

Operands, with leading axes of any size:
    gate: bf16[M, N]
    up: bf16[M, N]

Returns values f8e4m3[M, N], scale f32[M, N // 128]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def silu_mul_quant_block(gate, up):
    M, N = gate.shape[0], gate.shape[1]
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    silu = gate / (1 + np.exp(-gate))
    silu_times_up = silu * up
    quantize = silu_times_up.reshape(M, N // 128, 128)
    magnitude = np.abs(quantize)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 0.0001)
    row_scale = largest / 448.0
    factor = 1.0 / row_scale
    quantize_times_factor = quantize * factor
    values_ = quantize_times_factor.reshape(M, N)
    scale = row_scale[..., 0]
    return values_, scale
