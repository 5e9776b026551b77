"""silu_mul_quant_row: what the kernel must compute, in float64.

silu(gate) * up as f8e4m3 with a scale for each row.

Operands, with leading axes of any size:
    gate: bf16[M, N]
    up: bf16[M, N]

Returns values f8e4m3[M, N], scale f32[M, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def silu_mul_quant_row(gate, up):
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    silu = gate / (1 + np.exp(-gate))
    silu_times_up = silu * up
    magnitude = np.abs(silu_times_up)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 1e-12)
    scale = largest / 448.0
    factor = 1.0 / scale
    silu_times_up_times_factor = silu_times_up * factor
    return silu_times_up_times_factor, scale
