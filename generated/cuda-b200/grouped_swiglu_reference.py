"""grouped_swiglu: what the kernel must compute, in float64.

silu(x @ w_gate[e].T) * (x @ w_up[e].T), where e is the expert of the token.

Operands, with leading axes of any size:
    x: bf16[T, K]
    w_gate: bf16[E, N, K]
    w_up: bf16[E, N, K]
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
def grouped_swiglu(x, w_gate, w_up, ends):
    x = np.asarray(x).astype(np.float64)
    w_gate = np.asarray(w_gate).astype(np.float64)
    w_up = np.asarray(w_up).astype(np.float64)
    ends = np.asarray(ends).astype(np.int32)
    w_gate_T = np.swapaxes(w_gate, -1, -2)
    gate = matmul_by_group(x, w_gate_T, ends)
    w_up_T = np.swapaxes(w_up, -1, -2)
    up = matmul_by_group(x, w_up_T, ends)
    silu = gate / (1 + np.exp(-gate))
    mul = silu * up
    return mul
