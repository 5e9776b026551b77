"""rmsnorm_gemm_swiglu: what the kernel must compute, in float64.

silu(h @ w_gate.T) * (h @ w_up.T) with h = rmsnorm(x) * gain.

Operands, with leading axes of any size:
    x: bf16[M, K]
    gain: bf16[K]
    w_gate: bf16[N, K]
    w_up: bf16[N, K]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rmsnorm_gemm_swiglu(x, gain, w_gate, w_up):
    x = np.asarray(x).astype(np.float64)
    gain = np.asarray(gain).astype(np.float64)
    w_gate = np.asarray(w_gate).astype(np.float64)
    w_up = np.asarray(w_up).astype(np.float64)
    square = x * x
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / x.shape[-1]
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = x * rrms
    h = normalized * gain
    w_gate_T = np.swapaxes(w_gate, -1, -2)
    h_times_w_gate = h @ w_gate_T
    silu = h_times_w_gate / (1 + np.exp(-h_times_w_gate))
    w_up_T = np.swapaxes(w_up, -1, -2)
    h_times_w_up = h @ w_up_T
    mul = silu * h_times_w_up
    return mul
