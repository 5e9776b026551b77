"""fp8_block_gemm: what the kernel must compute, in float64.

dequantize(x) @ dequantize(w).T, as DeepGEMM has it; the scales of x are transposed.

Operands, with leading axes of any size:
    x: f8e4m3[M, K]
    w: f8e4m3[N, K]
    sx: f32[K // 128, M]
    sw: f32[N // 128, K // 128]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def fp8_block_gemm(x, w, sx, sw):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    sx = np.asarray(sx).astype(np.float64)
    sw = np.asarray(sw).astype(np.float64)
    sx_T = np.swapaxes(sx, -1, -2)
    w_T = np.swapaxes(w, -1, -2)
    matmul = (x * np.repeat(sx_T, 128, axis=-1)) @ (w_T * np.repeat(np.repeat(np.swapaxes(sw, -1, -2), 128, axis=-2), 128, axis=-1))
    return matmul
