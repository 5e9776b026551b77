"""kv_cache_write: what the kernel must compute, in float64.

RoPE of k by halves of a head, then both written in one kernel; a slot of -1 is left out.

Operands, with leading axes of any size:
    k: bf16[T, H, D]
    v_value: bf16[T, H, D]
    rotations: f32[P, D]
    positions: i64[T]
    slots: i64[T]
    k_cache: bf16[V, H, D]
    v_cache: bf16[V, H, D]

Returns out0 bf16[V, H, D], out1 bf16[V, H, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def rows_at(table, index):
    """The rows of a table that an index names; 0 where the table has no such row. The index has an axis of one element
    for each axis of a row."""
    known = (index >= 0) & (index < len(table))
    rows = np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])
    return np.asarray(rows[(np.where(known, index, len(table)), *np.indices(table.shape[1:], sparse=True))])


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
def kv_cache_write(k, v_value, rotations, positions, slots, k_cache, v_cache):
    D = k.shape[2]
    k = np.asarray(k).astype(np.float64)
    v_value = np.asarray(v_value).astype(np.float64)
    rotations = np.asarray(rotations).astype(np.float64)
    positions = np.clip(positions, -(2**31), 2**31 - 1).astype(np.int32)
    slots = np.clip(slots, -(2**31), 2**31 - 1).astype(np.int32)
    k_cache = np.asarray(k_cache).astype(np.float64)
    v_cache = np.asarray(v_cache).astype(np.float64)
    gather = positions[..., None]
    gather_from_rotations = rows_at(rotations, gather)
    slice = gather_from_rotations[:, None]
    cosine = slice[:, :, 0:D // 2]
    sine = slice[:, :, D // 2:D]
    low = k[:, :, 0:D // 2]
    low_times_cosine = low * cosine
    high = k[:, :, D // 2:D]
    high_times_sine = high * sine
    sub = low_times_cosine - high_times_sine
    high_times_cosine = high * cosine
    low_times_sine = low * sine
    add = high_times_cosine + low_times_sine
    rope = np.concatenate([sub, add], axis=-1)
    scatter = slots[..., None, None]
    out0 = rows_put(k_cache, scatter, rope)
    out1 = rows_put(v_cache, scatter, v_value)
    return out0, out1
