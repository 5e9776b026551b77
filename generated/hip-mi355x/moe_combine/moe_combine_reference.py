"""moe_combine: what the kernel must compute, in float64.

The sum of weights[t, j] * y[places[t, j]] over a token's 8 experts, in their order.

Operands, with leading axes of any size:
    y: bf16[S, N]
    places: i32[T, 8]
    weights: f32[T, 8]

Returns out bf16[T, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def rows_at(table, index):
    """The rows of a table that an index names; 0 where the table has no such row. The index has an axis of one element
    for each axis of a row."""
    known = (index >= 0) & (index < len(table))
    rows = np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])
    return np.asarray(rows[(np.where(known, index, len(table)), *np.indices(table.shape[1:], sparse=True))])


@np.errstate(all="ignore")
def moe_combine(y, places, weights):
    y = np.asarray(y).astype(np.float64)
    places = np.asarray(places).astype(np.int32)
    weights = np.asarray(weights).astype(np.float64)
    gather_sum = places[..., 0]
    view_of_gather_sum = gather_sum[..., None]
    gather = rows_at(y, view_of_gather_sum)
    view_of_weights = weights[..., 0, None]
    gather_times_view_of_weights = gather * view_of_weights
    view_of_places = places[..., 1]
    view_of_view_of_places = view_of_places[..., None]
    gather_from_y = rows_at(y, view_of_view_of_places)
    gather_sum_from_weights = weights[..., 1, None]
    mul = gather_from_y * gather_sum_from_weights
    sum_of_2 = gather_times_view_of_weights + mul
    gather_sum_from_places = places[..., 2]
    gather_sum_2 = gather_sum_from_places[..., None]
    gather_2 = rows_at(y, gather_sum_2)
    gather_sum_3 = weights[..., 2, None]
    gather_2_times_gather_sum_3 = gather_2 * gather_sum_3
    sum_of_3 = sum_of_2 + gather_2_times_gather_sum_3
    gather_sum_4 = places[..., 3]
    view_of_gather_sum_4 = gather_sum_4[..., None]
    gather_3 = rows_at(y, view_of_gather_sum_4)
    gather_sum_5 = weights[..., 3, None]
    gather_3_times_gather_sum_5 = gather_3 * gather_sum_5
    sum_of_4 = sum_of_3 + gather_3_times_gather_sum_5
    gather_sum_6 = places[..., 4]
    view_of_gather_sum_6 = gather_sum_6[..., None]
    gather_4 = rows_at(y, view_of_gather_sum_6)
    gather_sum_7 = weights[..., 4, None]
    gather_4_times_gather_sum_7 = gather_4 * gather_sum_7
    sum_of_5 = sum_of_4 + gather_4_times_gather_sum_7
    gather_sum_8 = places[..., 5]
    view_of_gather_sum_8 = gather_sum_8[..., None]
    gather_5 = rows_at(y, view_of_gather_sum_8)
    gather_sum_9 = weights[..., 5, None]
    gather_5_times_gather_sum_9 = gather_5 * gather_sum_9
    sum_of_6 = sum_of_5 + gather_5_times_gather_sum_9
    gather_sum_10 = places[..., 6]
    view_of_gather_sum_10 = gather_sum_10[..., None]
    gather_6 = rows_at(y, view_of_gather_sum_10)
    gather_sum_11 = weights[..., 6, None]
    gather_6_times_gather_sum_11 = gather_6 * gather_sum_11
    sum_of_7 = sum_of_6 + gather_6_times_gather_sum_11
    gather_sum_12 = places[..., 7]
    view_of_gather_sum_12 = gather_sum_12[..., None]
    gather_7 = rows_at(y, view_of_gather_sum_12)
    gather_sum_13 = weights[..., 7, None]
    gather_7_times_gather_sum_13 = gather_7 * gather_sum_13
    sum_of_8 = sum_of_7 + gather_7_times_gather_sum_13
    return sum_of_8
