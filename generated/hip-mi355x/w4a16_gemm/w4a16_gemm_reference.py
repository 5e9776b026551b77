"""w4a16_gemm: what the kernel must compute, in float64.

x @ w.T, with a scale for each 128 weights of a column.

Operands, with leading axes of any size:
    x: bf16[M, K]
    w: u8[N, K // 2]
    scale: bf16[N, K // 128]

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def w4a16_gemm(x, w, scale):
    K, N = x.shape[1], w.shape[0]
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.int32)
    scale = np.asarray(scale).astype(np.float64)
    bit_and = w & 15
    shift_right = np.right_shift(w, 4)
    unpack = np.stack([bit_and, shift_right], axis=-1)
    view_of_unpack = unpack.reshape(N, K)
    bit_xor = view_of_unpack ^ 8
    sub = bit_xor - 8
    to_f32 = sub.astype(np.float64)
    found = to_f32.reshape(N, K // 128, 128)
    dequantize = scale[..., None]
    mul = found * dequantize
    view_of_mul = mul.reshape(N, K)
    matmul = np.swapaxes(view_of_mul, -1, -2)
    out = x @ matmul
    return out
