"""fp8_norm_swiglu_quant: what the kernel must compute, in float64.

rmsnorm, quantize by rows, two products, SwiGLU, quantize by blocks: a kernel of rows and one of tiles.

Weights have a scale for each channel. Sums are of 14 bits over all of K, as fast accumulation has it elsewhere.

Operands, with leading axes of any size:
    x: bf16[M, K]
    gamma: bf16[K]
    gate: f8e4m3[N, K]
    up: f8e4m3[N, K]
    gate_scale: f32[N]
    up_scale: f32[N]

Returns values f8e4m3[M, N], scale f32[M, N // 128]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import float8_e4m3fn


@np.errstate(all="ignore")
def fp8_norm_swiglu_quant(x, gamma, gate, up, gate_scale, up_scale):
    M, N, K = x.shape[0], gate.shape[0], x.shape[1]
    x = np.asarray(x).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    gate_scale = np.asarray(gate_scale).astype(np.float64)
    up_scale = np.asarray(up_scale).astype(np.float64)
    square = x * x
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / K
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = x * rrms
    rmsnorm = normalized * gamma
    magnitude = np.abs(rmsnorm)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 1e-12)
    row_scale = largest / 448.0
    factor = 1.0 / row_scale
    rmsnorm_times_factor = rmsnorm * factor
    normed = np.clip(rmsnorm_times_factor, -448.0, 448.0).astype(np.float32).astype(float8_e4m3fn).astype(np.float64)
    gate_T = np.swapaxes(gate, -1, -2)
    normed_times_gate = normed @ gate_T
    mul = normed_times_gate * row_scale
    gated = mul * gate_scale
    up_T = np.swapaxes(up, -1, -2)
    normed_times_up = normed @ up_T
    normed_times_up_times_row_scale = normed_times_up * row_scale
    raised = normed_times_up_times_row_scale * up_scale
    silu = gated / (1 + np.exp(-gated))
    silu_times_raised = silu * raised
    quantize = silu_times_raised.reshape(M, N // 128, 128)
    magnitudeof_scale = np.abs(quantize)
    maximum = magnitudeof_scale.max(-1, keepdims=True)
    largestof_scale = np.maximum(maximum, 0.0001)
    row_scaleof_scale = largestof_scale / 448.0
    factorof_scale = 1.0 / row_scaleof_scale
    quantize_times_factorof_scale = quantize * factorof_scale
    values_ = quantize_times_factorof_scale.reshape(M, N)
    scale = row_scaleof_scale[..., 0]
    return values_, scale
