"""swiglu_elementwise: what the kernel must compute, in float64.

silu(gate) * up.

Operands, with leading axes of any size:
    gate: bf16[M, N]
    up: bf16[M, N]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def swiglu_elementwise(gate, up):
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    silu = gate / (1 + np.exp(-gate))
    mul = silu * up
    return mul
