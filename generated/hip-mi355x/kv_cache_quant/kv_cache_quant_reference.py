"""kv_cache_quant: what the kernel must compute, in float64.

Each head of a token by its own largest; a slot of -1 is left out.

Operands, with leading axes of any size:
    k: bf16[T, H, D]
    v_value: bf16[T, H, D]
    slots: i64[T]
    k_cache: f8e4m3[V, H, D]
    v_cache: f8e4m3[V, H, D]
    k_scales: f32[V, H, 1]
    v_scales: f32[V, H, 1]

Returns new_keys f8e4m3[V, H, D], new_values f8e4m3[V, H, D], out2 f32[V, H, 1], out3 f32[V, H, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


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
def kv_cache_quant(k, v_value, slots, k_cache, v_cache, k_scales, v_scales):
    k = np.asarray(k).astype(np.float64)
    v_value = np.asarray(v_value).astype(np.float64)
    slots = np.clip(slots, -(2**31), 2**31 - 1).astype(np.int32)
    k_cache = np.asarray(k_cache).astype(np.float64)
    v_cache = np.asarray(v_cache).astype(np.float64)
    k_scales = np.asarray(k_scales).astype(np.float64)
    v_scales = np.asarray(v_scales).astype(np.float64)
    magnitude = np.abs(k)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    largest = np.maximum(max_of_magnitude, 1e-12)
    k_scale = largest / 448.0
    factor = 1.0 / k_scale
    k_times_factor = k * factor
    magnitude_of_v_scale = np.abs(v_value)
    maximum = magnitude_of_v_scale.max(-1, keepdims=True)
    largest_of_v_scale = np.maximum(maximum, 1e-12)
    v_scale = largest_of_v_scale / 448.0
    factor_of_v_scale = 1.0 / v_scale
    mul = v_value * factor_of_v_scale
    scatter = slots[..., None, None]
    new_keys = rows_put(k_cache, scatter, k_times_factor)
    new_values = rows_put(v_cache, scatter, mul)
    out2 = rows_put(k_scales, scatter, k_scale)
    out3 = rows_put(v_scales, scatter, v_scale)
    return new_keys, new_values, out2, out3
