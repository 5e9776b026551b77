"""i8_gemm: what the kernel must compute, in float64.

relu((x @ w.T) * sx * sw + bias): sums are exact.

Operands, with leading axes of any size:
    x: i8[M, K]
    w: i8[N, K]
    sx: f32[M, 1]
    sw: f32[N]
    bias: bf16[N]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def i8_gemm(x, w, sx, sw, bias):
    x = np.asarray(x).astype(np.int32)
    w = np.asarray(w).astype(np.int32)
    sx = np.asarray(sx).astype(np.float64)
    sw = np.asarray(sw).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    w_T = np.swapaxes(w, -1, -2)
    matmul = (x.astype(np.float64) @ w_T.astype(np.float64)).astype(np.int64).astype(np.int32)
    to_f32 = matmul.astype(np.float64)
    to_f32_times_sx = to_f32 * sx
    to_f32_times_sx_times_sw = to_f32_times_sx * sw
    add = to_f32_times_sx_times_sw + bias
    relu = np.maximum(add, 0)
    return relu
