"""masked_softmax: what the kernel must compute, in float64.

softmax(scores * scale) over the keys that `mask` keeps; a row with nothing left gives zeros.

Operands, with leading axes of any size:
    scores: bf16[B, H, S, N]
    mask: b8[B, 1, 1, N]
    scale: f32

Returns out bf16[B, H, S, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def masked_softmax(scores, mask, scale):
    scores = np.asarray(scores).astype(np.float64)
    mask = np.asarray(mask).astype(bool)
    scale = np.asarray(scale).astype(np.float64)
    mul = scores * scale
    z = np.where(mask, mul, (-np.inf))
    top = z.max(-1, keepdims=True)
    eq = top == (-np.inf)
    pivot = np.where(eq, 0.0, top)
    sub = z - pivot
    e = np.exp(sub)
    total = e.sum(-1, keepdims=True)
    eq_2 = total == 0.0
    div = 1.0 / total
    scale_2 = np.where(eq_2, 0.0, div)
    softmax = e * scale_2
    return softmax
