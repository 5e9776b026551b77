"""grouped_fp8_block_gemm: what the kernel must compute, in float64.

dequantize(x) @ dequantize(w[e]).T, where e is the expert of the token, as DeepSeek-V3's gate and up.

Operands, with leading axes of any size:
    x: f8e4m3[T, K]
    sx: f32[K // 128, T]
    w: f8e4m3[E, N, K]
    sw: f32[E, N // 128, K // 128]
    ends: i32[E]

Returns out bf16[T, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def group_bounds(ends, rows):
    """Where each group begins and, behind it, the rows of no group: ends as they rise, between 0 and `rows`."""
    return np.concatenate([[0], np.clip(np.maximum.accumulate(ends), 0, rows)]).astype(np.int64)


def matmul_by_group(x, w, ends):
    """Rows of group e times w[e]; 0 in rows of no group."""
    bounds = group_bounds(ends, len(x))
    result = np.zeros((len(x), w.shape[-1]))
    for group, matrix in enumerate(w):
        rows = slice(bounds[group], bounds[group + 1])
        result[rows] = x[rows] @ matrix
    return result


@np.errstate(all="ignore")
def grouped_fp8_block_gemm(x, sx, w, sw, ends):
    x = np.asarray(x).astype(np.float64)
    sx = np.asarray(sx).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    sw = np.asarray(sw).astype(np.float64)
    ends = np.asarray(ends).astype(np.int32)
    sx_T = np.swapaxes(sx, -1, -2)
    w_T = np.swapaxes(w, -1, -2)
    grouped_matmul = matmul_by_group(x * np.repeat(sx_T, 128, axis=-1), w_T * np.repeat(np.repeat(np.swapaxes(sw, -1, -2), 128, axis=-2), 128, axis=-1), ends)
    return grouped_matmul
