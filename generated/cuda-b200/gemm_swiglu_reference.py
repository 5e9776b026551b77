"""gemm_swiglu: what the kernel must compute, in float64.

silu(x @ w_gate.T) * (x @ w_up.T) (Shazeer 2020).

Operands, with leading axes of any size:
    x: bf16[M, K]
    w_gate: bf16[N, K]
    w_up: bf16[N, K]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def gemm_swiglu(x, w_gate, w_up):
    x = np.asarray(x).astype(np.float64)
    w_gate = np.asarray(w_gate).astype(np.float64)
    w_up = np.asarray(w_up).astype(np.float64)
    w_gate_T = np.swapaxes(w_gate, -1, -2)
    x_times_w_gate = x @ w_gate_T
    silu = x_times_w_gate / (1 + np.exp(-x_times_w_gate))
    w_up_T = np.swapaxes(w_up, -1, -2)
    x_times_w_up = x @ w_up_T
    mul = silu * x_times_w_up
    return mul
