"""grouped_mxfp4: what the kernel must compute, in float64.

(up + 1) * gate * sigmoid(1.702 * gate) of the token's expert, both kept within 7.

Operands, with leading axes of any size:
    x: bf16[T, K]
    w_gate: u8[E, N, K // 2]
    w_up: u8[E, N, K // 2]
    gate_scale: f8e8m0[E, N, K // 32]
    up_scale: f8e8m0[E, N, K // 32]
    gate_bias: bf16[E, N]
    up_bias: bf16[E, N]
    ends: i32[E]

Returns out bf16[T, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import float4_e2m1fn


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


def add_by_group(y, table, ends):
    """table[e] is added to the rows of group e; rows of no group stay as they are."""
    bounds = group_bounds(ends, len(y))
    result = np.array(y)
    for group, row in enumerate(table):
        result[bounds[group] : bounds[group + 1]] += row
    return result


@np.errstate(all="ignore")
def grouped_mxfp4(x, w_gate, w_up, gate_scale, up_scale, gate_bias, up_bias, ends):
    K, E, N = x.shape[1], w_gate.shape[0], w_gate.shape[1]
    x = np.asarray(x).astype(np.float64)
    w_gate = np.asarray(w_gate).astype(np.int32)
    w_up = np.asarray(w_up).astype(np.int32)
    gate_scale = np.asarray(gate_scale).astype(np.float64)
    up_scale = np.asarray(up_scale).astype(np.float64)
    gate_bias = np.asarray(gate_bias).astype(np.float64)
    up_bias = np.asarray(up_bias).astype(np.float64)
    ends = np.asarray(ends).astype(np.int32)
    bit_and = w_gate & 15
    shift_right = np.right_shift(w_gate, 4)
    unpack = np.stack([bit_and, shift_right], axis=-1)
    view_of_unpack = unpack.reshape(E, N, K)
    f4e2m1_of_code_of_view_of_unpack = (view_of_unpack & 15).astype(np.uint8).view(float4_e2m1fn).astype(np.float64)
    bit_and_from_w_up = w_up & 15
    shift_right_from_w_up = np.right_shift(w_up, 4)
    unpack_from_w_up = np.stack([bit_and_from_w_up, shift_right_from_w_up], axis=-1)
    view_of_unpack_from_w_up = unpack_from_w_up.reshape(E, N, K)
    f4e2m1_of_code_from_w_up = (view_of_unpack_from_w_up & 15).astype(np.uint8).view(float4_e2m1fn).astype(np.float64)
    found = f4e2m1_of_code_of_view_of_unpack.reshape(E, N, K // 32, 32)
    dequantize = gate_scale[..., None]
    found_times_dequantize = found * dequantize
    dequantize_from_w_gate = found_times_dequantize.reshape(E, N, K)
    grouped_matmul = np.swapaxes(dequantize_from_w_gate, -1, -2)
    grouped_matmul_from_x = matmul_by_group(x, grouped_matmul, ends)
    add_group_rows = add_by_group(grouped_matmul_from_x, gate_bias, ends)
    dequantize_from_w_up = f4e2m1_of_code_from_w_up.reshape(E, N, K // 32, 32)
    view_of_up_scale = up_scale[..., None]
    mul = dequantize_from_w_up * view_of_up_scale
    view_of_mul = mul.reshape(E, N, K)
    view_of_view_of_mul = np.swapaxes(view_of_mul, -1, -2)
    grouped_matmul_2 = matmul_by_group(x, view_of_view_of_mul, ends)
    add_group_rows_from_x = add_by_group(grouped_matmul_2, up_bias, ends)
    gate = np.minimum(add_group_rows, 7.0)
    maximum = np.maximum(add_group_rows_from_x, (-7.0))
    up = np.minimum(maximum, 7.0)
    add = up + 1.0
    add_times_gate = add * gate
    mul_from_x = 1.702 * gate
    sigmoid = 1 / (1 + np.exp(-mul_from_x))
    add_times_gate_times_sigmoid = add_times_gate * sigmoid
    return add_times_gate_times_sigmoid
