"""column_sum: what the kernel must compute, in float64.

The sum of each column.

Operands, with leading axes of any size:
    x: f32[M, N]

Returns out f32[1, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def column_sum(x):
    x = np.asarray(x).astype(np.float64)
    sum_of_x = x.sum(-2, keepdims=True)
    return sum_of_x
