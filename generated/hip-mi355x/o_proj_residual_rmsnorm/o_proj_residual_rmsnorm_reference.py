"""o_proj_residual_rmsnorm: what the kernel must compute, in float64.

h = x w + residual, rounded, and rmsnorm(h), as a program: a norm needs whole rows, which no tile holds.

Operands, with leading axes of any size:
    x: bf16[M, K]
    w: bf16[N, K]
    residual: bf16[M, N]
    gamma: bf16[N]

Returns h bf16[M, N], normed bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import bfloat16


@np.errstate(all="ignore")
def o_proj_residual_rmsnorm(x, w, residual, gamma):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    residual = np.asarray(residual).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    w_T = np.swapaxes(w, -1, -2)
    matmul = x @ w_T
    matmul_plus_residual = matmul + residual
    h = matmul_plus_residual.astype(np.float32).astype(bfloat16).astype(np.float64)
    square = h * h
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / w.shape[-2]
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = h * rrms
    normed = normalized * gamma
    return matmul_plus_residual, normed
