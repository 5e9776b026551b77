"""bias_relu: what the kernel must compute, in float64.

relu(x + bias).

Operands, with leading axes of any size:
    x: f16[M, N]
    bias: f16[N]

Returns out f16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def bias_relu(x, bias):
    x = np.asarray(x).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    add = x + bias
    relu = np.maximum(add, 0)
    return relu
