"""mlp: what the kernel must compute, in float64.

down(silu(gate x) * up x), as a program: the products back need whole rows of the products before.

Operands, with leading axes of any size:
    x: bf16[M, K]
    gate: bf16[H, K]
    up: bf16[H, K]
    down: bf16[K, H]

Returns out bf16[M, K]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def mlp(x, gate, up, down):
    x = np.asarray(x).astype(np.float64)
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    down = np.asarray(down).astype(np.float64)
    gate_T = np.swapaxes(gate, -1, -2)
    x_times_gate = x @ gate_T
    silu = x_times_gate / (1 + np.exp(-x_times_gate))
    up_T = np.swapaxes(up, -1, -2)
    x_times_up = x @ up_T
    h = silu * x_times_up
    down_T = np.swapaxes(down, -1, -2)
    h_times_down = h @ down_T
    return h_times_down
