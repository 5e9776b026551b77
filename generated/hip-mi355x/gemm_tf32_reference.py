"""gemm_tf32: what the kernel must compute, in float64.

gelu(x @ w.T + bias), of each factor 11 significant bits at least, summed in f32.

Operands, with leading axes of any size:
    x: f32[M, K]
    w: f32[N, K]
    bias: f32[N]

Returns out f32[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def gemm_tf32(x, w, bias):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    w_T = np.swapaxes(w, -1, -2)
    matmul_tf32 = x @ w_T
    add = matmul_tf32 + bias
    gelu = 0.5 * add * (1 + np.tanh(0.7978845608028654 * (add + 0.044715 * add * add * add)))
    return gelu
