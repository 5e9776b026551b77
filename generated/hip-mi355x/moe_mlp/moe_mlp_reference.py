"""moe_mlp: what the kernel must compute, in float64.

weight * down[e](silu(gate[e] x) * up[e] x), where e is the expert of the token.

Operands, with leading axes of any size:
    x: bf16[T, K]
    gate: bf16[E, H, K]
    up: bf16[E, H, K]
    down: bf16[E, K, H]
    ends: i32[E]
    weight: f32[T, 1]

Returns out bf16[T, K]; floats are left in float64, not yet rounded to the storage type.
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
def moe_mlp(x, gate, up, down, ends, weight):
    x = np.asarray(x).astype(np.float64)
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    down = np.asarray(down).astype(np.float64)
    ends = np.asarray(ends).astype(np.int32)
    weight = np.asarray(weight).astype(np.float64)
    gate_T = np.swapaxes(gate, -1, -2)
    x_times_gate = matmul_by_group(x, gate_T, ends)
    silu = x_times_gate / (1 + np.exp(-x_times_gate))
    up_T = np.swapaxes(up, -1, -2)
    x_times_up = matmul_by_group(x, up_T, ends)
    h = silu * x_times_up
    down_T = np.swapaxes(down, -1, -2)
    h_times_down = matmul_by_group(h, down_T, ends)
    mul = h_times_down * weight
    return mul
