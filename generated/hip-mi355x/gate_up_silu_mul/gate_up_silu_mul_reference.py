"""gate_up_silu_mul: what the kernel must compute, in float64.

silu(gate) * up.

Operands, with leading axes of any size:
    gate_up: bf16[M, 2 * N]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def gate_up_silu_mul(gate_up):
    N = gate_up.shape[1] // 2
    gate_up = np.asarray(gate_up).astype(np.float64)
    gate = gate_up[:, 0:N]
    up = gate_up[:, N:2 * N]
    silu = gate / (1 + np.exp(-gate))
    mul = silu * up
    return mul
