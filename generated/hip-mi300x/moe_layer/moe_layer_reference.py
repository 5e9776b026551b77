"""moe_layer: what the kernel must compute, in float64.

The experts' silu(gate x) * (up x), brought down, weighed by the softmax of the chosen ones' logits.

Operands, with leading axes of any size:
    x: bf16[T, D]
    router: bf16[E, D]
    gate: bf16[E, H, D]
    up: bf16[E, H, D]
    down: bf16[E, D, H]

Returns out bf16[T, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import bfloat16


def top_columns(key, k):
    """The columns of each row's k largest keys, largest first; -1 where fewer than k keys are above -inf."""
    order = np.lexsort((-key, ~np.isnan(key)))[..., :k]  # NaN before all, then descending; ties by column
    found = np.take_along_axis(key, order, -1)
    return np.where(found == -np.inf, -1, order)


def take(x, columns, missing):
    """x at the columns of its row; `missing` where the column is -1."""
    rank = max(x.ndim, columns.ndim)
    x, columns = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, columns))
    return np.where(columns < 0, missing, np.take_along_axis(x, np.maximum(columns, 0), -1))


def rows_at(table, index):
    """The rows of a table that an index names; 0 where the table has no such row. The index has an axis of one element
    for each axis of a row."""
    known = (index >= 0) & (index < len(table))
    rows = np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])
    return np.asarray(rows[(np.where(known, index, len(table)), *np.indices(table.shape[1:], sparse=True))])


def ends_of_groups(ids, groups):
    """Behind which slot each group ends, of slots sorted by the group that each names; ids that are no group's name
    none."""
    named = ids[(ids >= 0) & (ids < groups)]
    return np.cumsum(np.bincount(named, minlength=groups)).astype(np.int32)


def order_of_slots(ids, ends):
    """Slots by the group that each names, those of one group in their own order, those of none behind all others."""
    groups = len(ends)
    return np.argsort(np.where((ids >= 0) & (ids < groups), ids, groups), kind="stable").astype(np.int32)


def places_of_slots(ids, ends):
    """Where each slot is in that order."""
    return np.argsort(order_of_slots(ids, ends)).astype(np.int32)


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
def moe_layer(x, router, gate, up, down):
    T, E = x.shape[0], router.shape[0]
    x = np.asarray(x).astype(np.float64)
    router = np.asarray(router).astype(np.float64)
    gate = np.asarray(gate).astype(np.float64)
    up = np.asarray(up).astype(np.float64)
    down = np.asarray(down).astype(np.float64)
    router_T = np.swapaxes(router, -1, -2)
    matmul = x @ router_T
    experts = top_columns(matmul, 4)
    best_ = take(matmul, experts, (-np.inf))
    sort_by_group = experts.reshape(4 * T)
    ends = ends_of_groups(sort_by_group, E)
    order_ = order_of_slots(sort_by_group, ends)
    slot_places = places_of_slots(sort_by_group, ends)
    places = slot_places.reshape(T, 4)
    floor_div = np.floor_divide(order_, 4)
    gather = floor_div[..., None]
    tokens = rows_at(x, gather)
    gate_T = np.swapaxes(gate, -1, -2)
    tokens_times_gate = matmul_by_group(tokens, gate_T, ends)
    silu = tokens_times_gate / (1 + np.exp(-tokens_times_gate))
    up_T = np.swapaxes(up, -1, -2)
    tokens_times_up = matmul_by_group(tokens, up_T, ends)
    h = silu * tokens_times_up
    down_T = np.swapaxes(down, -1, -2)
    h_times_down = matmul_by_group(h, down_T, ends)
    y = h_times_down.astype(np.float32).astype(bfloat16).astype(np.float64)
    top = best_.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    best_minus_pivot = best_ - pivot
    e = np.exp(best_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    gather_sum = places[..., 0]
    view_of_gather_sum = gather_sum[..., None]
    gather_from_x = rows_at(y, view_of_gather_sum)
    view_of_softmax = softmax[..., 0, None]
    gather_from_x_times_view_of_softmax = gather_from_x * view_of_softmax
    view_of_places = places[..., 1]
    view_of_view_of_places = view_of_places[..., None]
    gather_2 = rows_at(y, view_of_view_of_places)
    gather_sum_from_x = softmax[..., 1, None]
    mul = gather_2 * gather_sum_from_x
    sum_of_2 = gather_from_x_times_view_of_softmax + mul
    gather_sum_2 = places[..., 2]
    view_of_gather_sum_2 = gather_sum_2[..., None]
    gather_3 = rows_at(y, view_of_gather_sum_2)
    gather_sum_3 = softmax[..., 2, None]
    gather_3_times_gather_sum_3 = gather_3 * gather_sum_3
    sum_of_3 = sum_of_2 + gather_3_times_gather_sum_3
    gather_sum_4 = places[..., 3]
    view_of_gather_sum_4 = gather_sum_4[..., None]
    gather_4 = rows_at(y, view_of_gather_sum_4)
    gather_sum_5 = softmax[..., 3, None]
    gather_4_times_gather_sum_5 = gather_4 * gather_sum_5
    sum_of_4 = sum_of_3 + gather_4_times_gather_sum_5
    return sum_of_4
