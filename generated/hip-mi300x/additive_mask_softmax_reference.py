"""additive_mask_softmax: what the kernel must compute, in float64.

softmax(scores / 8 + mask); a row of -inf gives zeros.

Operands, with leading axes of any size:
    scores: bf16[B, H, S, N]
    mask: bf16[S, N]

Returns out bf16[B, H, S, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def additive_mask_softmax(scores, mask):
    scores = np.asarray(scores).astype(np.float64)
    mask = np.asarray(mask).astype(np.float64)
    mul = scores * 0.125
    z = mul + mask
    top = z.max(-1, keepdims=True)
    eq = top == (-np.inf)
    pivot = np.where(eq, 0.0, top)
    sub = z - pivot
    e = np.exp(sub)
    total = e.sum(-1, keepdims=True)
    eq_2 = total == 0.0
    div = 1.0 / total
    scale = np.where(eq_2, 0.0, div)
    softmax = e * scale
    return softmax
