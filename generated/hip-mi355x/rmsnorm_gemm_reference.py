"""rmsnorm_gemm: what the kernel must compute, in float64.

rmsnorm(x) * gain @ w.T.

Operands, with leading axes of any size:
    x: bf16[M, K]
    gain: bf16[K]
    w: bf16[N, K]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rmsnorm_gemm(x, gain, w):
    x = np.asarray(x).astype(np.float64)
    gain = np.asarray(gain).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    square = x * x
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / x.shape[-1]
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = x * rrms
    rmsnorm = normalized * gain
    w_T = np.swapaxes(w, -1, -2)
    matmul = rmsnorm @ w_T
    return matmul
