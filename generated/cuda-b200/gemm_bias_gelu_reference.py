"""gemm_bias_gelu: what the kernel must compute, in float64.

gelu(x @ w.T + bias), the weight as torch's Linear keeps it.

Operands, with leading axes of any size:
    x: bf16[M, K]
    w: bf16[N, K]
    bias: bf16[N]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def gemm_bias_gelu(x, w, bias):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    w_T = np.swapaxes(w, -1, -2)
    matmul = x @ w_T
    add = matmul + bias
    gelu = 0.5 * add * (1 + np.tanh(0.7978845608028654 * (add + 0.044715 * add * add * add)))
    return gelu
