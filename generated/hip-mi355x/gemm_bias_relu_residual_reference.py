"""gemm_bias_relu_residual: what the kernel must compute, in float64.

relu(x @ w + bias) + residual.

Operands, with leading axes of any size:
    x: f16[M, K]
    w: f16[K, N]
    bias: f16[N]
    residual: f16[M, N]

Returns out f16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def gemm_bias_relu_residual(x, w, bias, residual):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    residual = np.asarray(residual).astype(np.float64)
    matmul = x @ w
    matmul_plus_bias = matmul + bias
    relu = np.maximum(matmul_plus_bias, 0)
    relu_plus_residual = relu + residual
    return relu_plus_residual
