"""rope_interleaved: what the kernel must compute, in float64.

Pairs are neighbours, as in the paper and GPT-J.

Operands, with leading axes of any size:
    x: bf16[T, H, D]
    cos: f32[T, 1, D // 2]
    sin: f32[T, 1, D // 2]

Returns out bf16[T, H, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rope_interleaved(x, cos, sin):
    T, H, D = x.shape[0], x.shape[1], x.shape[2]
    x = np.asarray(x).astype(np.float64)
    cos = np.asarray(cos).astype(np.float64)
    sin = np.asarray(sin).astype(np.float64)
    even = x[..., ::2]
    odd = x[..., 1::2]
    even_times_cos = even * cos
    odd_times_sin = odd * sin
    sub = even_times_cos - odd_times_sin
    odd_times_cos = odd * cos
    even_times_sin = even * sin
    add = odd_times_cos + even_times_sin
    rotated = np.stack([sub, add], axis=-1)
    rearrange = rotated.reshape(T, H, D)
    return rearrange
