"""decoder_layer_prefill: what the kernel must compute, in float64.

S tokens of one sequence, from its first on: each attends to itself and to those before it, and its keys and
values go to the caches, in the slots given. A program: norm and q, k, v; RoPE and caches; causal attention; output
and residual; norm, gate, up; down and residual.

Operands, with leading axes of any size:
    x: bf16[S, D]
    norm: bf16[D]
    wq: bf16[E * G * H, D]
    wk: bf16[E * H, D]
    wv: bf16[E * H, D]
    cosine: f32[S, 1, E // 2]
    sine: f32[S, 1, E // 2]
    slots: i32[S]
    k_cache: bf16[V, H, E]
    v_cache: bf16[V, H, E]
    wo: bf16[D, E * G * H]
    norm_2: bf16[D]
    gate: bf16[U, D]
    up: bf16[U, D]
    down: bf16[D, U]

Returns out bf16[S, D], out1 bf16[V, H, E], out2 bf16[V, H, E]; floats are left in float64, not yet rounded to the storage type.
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
def decoder_layer_prefill(x, norm, wq, wk, wv, cosine, sine, slots, k_cache, v_cache, wo, norm_2, gate, up, down):
    S, E, G, H, D = x.shape[0], k_cache.shape[2], 4, k_cache.shape[1], x.shape[1]
    x = np.asarray(x).astype(np.float64)
    norm = np.asarray(norm).astype(np.float64)
    wq = np.asarray(wq).astype(np.float64)
    wk = np.asarray(wk).astype(np.float64)
    wv = np.asarray(wv).astype(np.float64)
    cosine = np.asarray(cosine).astype(np.float64)
    sine = np.asarray(sine).astype(np.float64)
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
    normed_times_wq = normed @ wq_T
    q = normed_times_wq.astype(np.float32).astype(bfloat16).astype(np.float64)
    wk_T = np.swapaxes(wk, -1, -2)
    normed_times_wk = normed @ wk_T
    k_ = normed_times_wk.astype(np.float32).astype(bfloat16).astype(np.float64)
    wv_T = np.swapaxes(wv, -1, -2)
    normed_times_wv = normed @ wv_T
    v_ = normed_times_wv.astype(np.float32).astype(bfloat16).astype(np.float64)
    rearrange = q.reshape(S, G * H, E)
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
    view_of_k = k_.reshape(S, H, E)
    view_of_view_of_k = view_of_k[:, :, 0:E // 2]
    mul = view_of_view_of_k * cosine
    rope_from_x = view_of_k[:, :, E // 2:E]
    rope_from_x_times_sine = rope_from_x * sine
    sub = mul - rope_from_x_times_sine
    rope_from_x_times_cosine = rope_from_x * cosine
    mul_from_x = view_of_view_of_k * sine
    add_from_x = rope_from_x_times_cosine + mul_from_x
    rope_2 = np.concatenate([sub, add_from_x], axis=-1)
    keys = rope_2.astype(np.float32).astype(bfloat16).astype(np.float64)
    values_ = v_.reshape(S, H, E)
    view_of_normed_times_wv = normed_times_wv.reshape(S, H, E)
    queries = turned.reshape(S, H, G, E).transpose(1, 2, 0, 3)
    view_of_keys = keys.transpose(1, 2, 0).reshape(H, 1, E, S)
    matmul = queries @ view_of_keys
    pow_ = np.power(E, (-0.5))
    scores = matmul * pow_
    col_index = np.arange(S, dtype=np.int32)
    row_index = np.arange(S, dtype=np.int32)[:, None]
    le = col_index <= row_index
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
    view_of_values = values_.transpose(1, 0, 2).reshape(H, 1, S, E)
    matmul_from_x = cast @ view_of_values
    mixed = matmul_from_x.astype(np.float32).astype(bfloat16).astype(np.float64)
    view_of_mixed = mixed.transpose(2, 0, 1, 3)
    attended = view_of_mixed.reshape(S, E * G * H)
    wo_T = np.swapaxes(wo, -1, -2)
    attended_times_wo = attended @ wo_T
    add_2 = x + attended_times_wo
    h = add_2.astype(np.float32).astype(bfloat16).astype(np.float64)
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
    out = h + activated_times_down
    scatter = slots[..., None, None]
    out1 = rows_put(k_cache, scatter, rope_2)
    out2 = rows_put(v_cache, scatter, view_of_normed_times_wv)
    return out, out1, out2
