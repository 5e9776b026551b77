"""grouped_gemm: what the kernel must compute, in float64.

Tokens of each expert times its weights. Those of expert e are rows ends[e - 1] up to ends[e] of x.

Operands, with leading axes of any size:
    x: bf16[T, K]
    w: bf16[E, N, K]
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
def grouped_gemm(x, w, ends):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    ends = np.asarray(ends).astype(np.int32)
    w_T = np.swapaxes(w, -1, -2)
    grouped_matmul = matmul_by_group(x, w_T, ends)
    return grouped_matmul
