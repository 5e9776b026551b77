"""add_rmsnorm: what the kernel must compute, in float64.

h = x + residual, and rmsnorm(h) * gain; the norm sees h before it is rounded.

Operands, with leading axes of any size:
    x: bf16[M, N]
    residual: bf16[M, N]
    gain: bf16[N]

Returns h bf16[M, N], y bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def add_rmsnorm(x, residual, gain):
    x = np.asarray(x).astype(np.float64)
    residual = np.asarray(residual).astype(np.float64)
    gain = np.asarray(gain).astype(np.float64)
    h = x + residual
    square = h * h
    sum_of_squares = square.sum(-1, keepdims=True)
    mean = sum_of_squares / x.shape[-1]
    mean_plus_eps = mean + 1e-06
    rrms = 1 / np.sqrt(mean_plus_eps)
    normalized = h * rrms
    y = normalized * gain
    return h, y
