"""fp8_gemm: what the kernel must compute, in float64.

(x @ w.T) * sx * sw + bias, a scale for each row of x and for each row of the weight.

Operands, with leading axes of any size:
    x: f8e4m3[M, K]
    w: f8e4m3[N, K]
    sx: f32[M, 1]
    sw: f32[N]
    bias: bf16[N]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def fp8_gemm(x, w, sx, sw, bias):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    sx = np.asarray(sx).astype(np.float64)
    sw = np.asarray(sw).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    w_T = np.swapaxes(w, -1, -2)
    matmul = x @ w_T
    matmul_times_sx = matmul * sx
    matmul_times_sx_times_sw = matmul_times_sx * sw
    add = matmul_times_sx_times_sw + bias
    return add
