"""argmax: what the kernel must compute, in float64.

The column of the largest logit, the first of them where several are; -1 where all are -inf.

Operands, with leading axes of any size:
    logits: bf16[B, V]

Returns out i32[B, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def top_columns(key, k):
    """The columns of each row's k largest keys, largest first; -1 where fewer than k keys are above -inf."""
    order = np.lexsort((-key, ~np.isnan(key)))[..., :k]  # NaN before all, then descending; ties by column
    found = np.take_along_axis(key, order, -1)
    return np.where(found == -np.inf, -1, order)


@np.errstate(all="ignore")
def argmax(logits):
    logits = np.asarray(logits).astype(np.float64)
    top_columns_ = top_columns(logits, 1)
    return top_columns_
