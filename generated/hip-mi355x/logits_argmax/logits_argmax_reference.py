"""logits_argmax: what the kernel must compute, in float64.

argmax of head x over the vocabulary, as a program: a choice needs whole rows, which no tile holds.

Operands, with leading axes of any size:
    x: bf16[M, K]
    head_value: bf16[V, K]

Returns out i32[M, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def top_columns(key, k):
    """The columns of each row's k largest keys, largest first; -1 where fewer than k keys are above -inf."""
    order = np.lexsort((-key, ~np.isnan(key)))[..., :k]  # NaN before all, then descending; ties by column
    found = np.take_along_axis(key, order, -1)
    return np.where(found == -np.inf, -1, order)


@np.errstate(all="ignore")
def logits_argmax(x, head_value):
    x = np.asarray(x).astype(np.float64)
    head_value = np.asarray(head_value).astype(np.float64)
    head_value_T = np.swapaxes(head_value, -1, -2)
    logits = x @ head_value_T
    top_columns_ = top_columns(logits, 1)
    return top_columns_
