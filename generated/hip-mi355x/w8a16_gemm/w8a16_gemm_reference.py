"""w8a16_gemm: what the kernel must compute, in float64.

x @ w.T, with a scale for each 128 weights of a column.

Operands, with leading axes of any size:
    x: bf16[M, K]
    w: i8[N, K]
    scale: bf16[N, K // 128]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def w8a16_gemm(x, w, scale):
    K, N = x.shape[1], w.shape[0]
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.int32)
    scale = np.asarray(scale).astype(np.float64)
    to_f32 = w.astype(np.float64)
    found = to_f32.reshape(N, K // 128, 128)
    dequantize = scale[..., None]
    mul = found * dequantize
    view_of_mul = mul.reshape(N, K)
    matmul = np.swapaxes(view_of_mul, -1, -2)
    out = x @ matmul
    return out
