"""gemm_swiglu_quant_block: what the kernel must compute, in float64.

silu(x @ gate.T) * (x @ up.T) as f8e4m3, with a scale for each 128 of a row, quantized where the sums are.

Operands, with leading axes of any size:
    x: bf16[M, K]
    gate: bf16[N, K]
    up: bf16[N, K]

Returns values f8e4m3[M, N], scale f32[M, N // 128]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def gemm_swiglu_quant_block(x, gate, up):
    M, N = x.shape[0], gate.shape[0]
    x = np.asarray(x).astype(np.float64)
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    gate_T = np.swapaxes(gate, -1, -2)
    x_times_gate = x @ gate_T
    silu = x_times_gate / (1 + np.exp(-x_times_gate))
    up_T = np.swapaxes(up, -1, -2)
    x_times_up = x @ up_T
    silu_times_x_times_up = silu * x_times_up
    quantize = silu_times_x_times_up.reshape(M, N // 128, 128)
    magnitude = np.abs(quantize)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 0.0001)
    row_scale = largest / 448.0
    factor = 1.0 / row_scale
    quantize_times_factor = quantize * factor
    values_ = quantize_times_factor.reshape(M, N)
    scale = row_scale[..., 0]
    return values_, scale
