"""moe_routing: what the kernel must compute, in float64.

softmax of the chosen experts' logits; slots by their experts, where each expert's end, each slot's place.

Operands, with leading axes of any size:
    x: bf16[T, D]
    router: bf16[E, D]

Returns softmax f32[T, K], order i32[K * T], ends i32[E], places i32[T, K]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


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


@np.errstate(all="ignore")
def moe_routing(x, router):
    T, E, K = x.shape[0], router.shape[0], 4
    x = np.asarray(x).astype(np.float64)
    router = np.asarray(router).astype(np.float64)
    router_T = np.swapaxes(router, -1, -2)
    matmul = x @ router_T
    experts = top_columns(matmul, 4)
    best_ = take(matmul, experts, (-np.inf))
    sort_by_group = experts.reshape(K * T)
    ends_ = ends_of_groups(sort_by_group, E)
    order_ = order_of_slots(sort_by_group, ends_)
    slot_places = places_of_slots(sort_by_group, ends_)
    places = slot_places.reshape(T, K)
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
    return softmax, order_, ends_, places
