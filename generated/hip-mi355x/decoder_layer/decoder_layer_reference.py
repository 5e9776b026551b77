"""decoder_layer: what the kernel must compute, in float64.

One token of each of B sequences, at its position: its keys and values go to the caches, in the slot given, and
it attends to all slots up to its position. A program: norm and q, k, v; RoPE and caches; attention; output and
residual; norm, gate, up; down and residual.

Operands, with leading axes of any size:
    x: bf16[B, D]
    norm: bf16[D]
    wq: bf16[E * G * H, D]
    wk: bf16[E * H, D]
    wv: bf16[E * H, D]
    cosine: f32[B, 1, E // 2]
    sine: f32[B, 1, E // 2]
    position: i32[B, 1, 1, 1]
    slots: i32[B]
    k_cache: bf16[B * T, H, E]
    v_cache: bf16[B * T, H, E]
    wo: bf16[D, E * G * H]
    norm_2: bf16[D]
    gate: bf16[U, D]
    up: bf16[U, D]
    down: bf16[D, U]

Returns cast bf16[B, D], keys bf16[B * T, H, E], values bf16[B * T, H, E]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import bfloat16


def rows_put(table, index, rows):
    """A table with new rows, where an index names one; the others as they were. Two rows may not go to one place."""
    index, lead = index.reshape(-1), rows.ndim - table.ndim + 1
    rows = np.broadcast_to(rows, (*rows.shape[:lead], *table.shape[1:])).reshape(len(index), *table.shape[1:])
    named = (index >= 0) & (index < len(table))
    places, count = np.unique(index[named], return_counts=True)
    if (count > 1).any():
        place = places[count > 1][0]
        raise ValueError(f"scatter: {count.max()} rows go to row {place}, and each needs a place of its own")
    found = np.array(table)
    found[index[named]] = rows[named]
    return found


@np.errstate(all="ignore")
def decoder_layer(x, norm, wq, wk, wv, cosine, sine, position, slots, k_cache, v_cache, wo, norm_2, gate, up, down):
    B, E, G, H, T, D = x.shape[0], k_cache.shape[2], 4, k_cache.shape[1], 2048, x.shape[1]
    x = np.asarray(x).astype(np.float64)
    norm = np.asarray(norm).astype(np.float64)
    wq = np.asarray(wq).astype(np.float64)
    wk = np.asarray(wk).astype(np.float64)
    wv = np.asarray(wv).astype(np.float64)
    cosine = np.asarray(cosine).astype(np.float64)
    sine = np.asarray(sine).astype(np.float64)
    position = np.asarray(position).astype(np.int32)
    slots = np.asarray(slots).astype(np.int32)
    k_cache = np.asarray(k_cache).astype(np.float64)
    v_cache = np.asarray(v_cache).astype(np.float64)
    wo = np.asarray(wo).astype(np.float64)
    norm_2 = np.asarray(norm_2).astype(np.float64)
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    down = np.asarray(down).astype(np.float64)
    square = x * x
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / D
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = x * rrms
    normed = normalized * norm
    wq_T = np.swapaxes(wq, -1, -2)
    q = normed @ wq_T
    wk_T = np.swapaxes(wk, -1, -2)
    k_ = normed @ wk_T
    wv_T = np.swapaxes(wv, -1, -2)
    v_ = normed @ wv_T
    rearrange = q.reshape(B, G * H, E)
    low = rearrange[:, :, 0:E // 2]
    low_times_cosine = low * cosine
    high = rearrange[:, :, E // 2:E]
    high_times_sine = high * sine
    low_times_cosine_minus_high_times_sine = low_times_cosine - high_times_sine
    high_times_cosine = high * cosine
    low_times_sine = low * sine
    add = high_times_cosine + low_times_sine
    rope = np.concatenate([low_times_cosine_minus_high_times_sine, add], axis=-1)
    turned = rope.astype(np.float32).astype(bfloat16).astype(np.float64)
    view_of_k = k_.reshape(B, H, E)
    view_of_view_of_k = view_of_k[:, :, 0:E // 2]
    mul = view_of_view_of_k * cosine
    rope_from_x = view_of_k[:, :, E // 2:E]
    rope_from_x_times_sine = rope_from_x * sine
    sub = mul - rope_from_x_times_sine
    rope_from_x_times_cosine = rope_from_x * cosine
    mul_from_x = view_of_view_of_k * sine
    add_from_x = rope_from_x_times_cosine + mul_from_x
    rope_2 = np.concatenate([sub, add_from_x], axis=-1)
    scatter = slots[..., None, None]
    keys = rows_put(k_cache, scatter, rope_2)
    view_of_v = v_.reshape(B, H, E)
    values_ = rows_put(v_cache, scatter, view_of_v)
    queries = turned.reshape(B, H, G, E)
    view_of_keys = keys.reshape(B, T, H, E).transpose(0, 2, 3, 1)
    matmul = queries @ view_of_keys
    pow_ = np.power(E, (-0.5))
    scores = matmul * pow_
    col_index = np.arange(T, dtype=np.int32)
    le = col_index <= position
    where = np.where(le, scores, (-np.inf))
    top = where.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    where_minus_pivot = where - pivot
    e = np.exp(where_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    weights = e * inverse_sum
    cast = weights.astype(np.float32).astype(bfloat16).astype(np.float64)
    view_of_values = values_.reshape(B, T, H, E).transpose(0, 2, 1, 3)
    matmul_from_position = cast @ view_of_values
    mixed = matmul_from_position.astype(np.float32).astype(bfloat16).astype(np.float64)
    view_of_mixed = mixed.reshape(B, E * G * H)
    wo_T = np.swapaxes(wo, -1, -2)
    matmul_wo = view_of_mixed @ wo_T
    x_plus_matmul_wo = x + matmul_wo
    h = x_plus_matmul_wo.astype(np.float32).astype(bfloat16).astype(np.float64)
    squareof_normed_2 = h * h
    sum_of_squares_from_x = squareof_normed_2.sum(-1, keepdims=True)
    meanof_normed_2 = sum_of_squares_from_x / D
    meanof_normed_2_plus_eps = meanof_normed_2 + 1e-06
    rrmsof_normed_2 = 1 / np.sqrt(meanof_normed_2_plus_eps)
    normalizedof_normed_2 = h * rrmsof_normed_2
    normed_2 = normalizedof_normed_2 * norm_2
    gate_T = np.swapaxes(gate, -1, -2)
    normed_2_times_gate = normed_2 @ gate_T
    silu = normed_2_times_gate / (1 + np.exp(-normed_2_times_gate))
    up_T = np.swapaxes(up, -1, -2)
    normed_2_times_up = normed_2 @ up_T
    mul_2 = silu * normed_2_times_up
    activated = mul_2.astype(np.float32).astype(bfloat16).astype(np.float64)
    down_T = np.swapaxes(down, -1, -2)
    activated_times_down = activated @ down_T
    cast_2 = h + activated_times_down
    return cast_2, keys, values_
