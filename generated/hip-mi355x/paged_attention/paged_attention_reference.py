"""paged_attention: what the kernel must compute, in float64.

No copy of the pages is made: a tile's are read where they lie, and none behind the sequence's length.

Operands, with leading axes of any size:
    q: bf16[B, G, R, D]
    key_cache: bf16[N, L, G, D]
    value_cache: bf16[N, L, G, D]
    table: i32[B, P]
    length: i32[B, 1, 1, 1]

Returns out bf16[B, G, R, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def rows_at(table, index):
    """The rows of a table that an index names; 0 where the table has no such row. The index has an axis of one element
    for each axis of a row."""
    known = (index >= 0) & (index < len(table))
    rows = np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])
    return np.asarray(rows[(np.where(known, index, len(table)), *np.indices(table.shape[1:], sparse=True))])


@np.errstate(all="ignore")
def paged_attention(q, key_cache, value_cache, table, length):
    B, G, D, L, P = q.shape[0], q.shape[1], q.shape[3], key_cache.shape[1], table.shape[1]
    q = np.asarray(q).astype(np.float64)
    key_cache = np.asarray(key_cache).astype(np.float64)
    value_cache = np.asarray(value_cache).astype(np.float64)
    table = np.asarray(table).astype(np.int32)
    length = np.asarray(length).astype(np.int32)
    gather = table[..., None, None, None]
    gather_from_key_cache = rows_at(key_cache, gather)
    k = gather_from_key_cache.transpose(0, 3, 1, 2, 4).reshape(B, G, L * P, D)
    gather_from_value_cache = rows_at(value_cache, gather)
    v_ = gather_from_value_cache.transpose(0, 3, 1, 2, 4).reshape(B, G, L * P, D)
    matmul = np.swapaxes(k, -1, -2)
    matmul_from_q = q @ matmul
    pow_ = np.power(D, (-0.5))
    scores = matmul_from_q * pow_
    col_index = np.arange(L * P, dtype=np.int32)
    lt = col_index < length
    where = np.where(lt, scores, (-np.inf))
    top = where.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    where_minus_pivot = where - pivot
    e = np.exp(where_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    softmax_times_v = softmax @ v_
    return softmax_times_v
