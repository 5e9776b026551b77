"""rope_interleaved: what the kernel must compute, in float64.

Pairs are neighbours, as in the paper and GPT-J.

Operands, with leading axes of any size:
    x: bf16[T, H, D]
    cosine: f32[T, 1, D // 2]
    sine: f32[T, 1, D // 2]

Returns out bf16[T, H, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rope_interleaved(x, cosine, sine):
    T, H, D = x.shape[0], x.shape[1], x.shape[2]
    x = np.asarray(x).astype(np.float64)
    cosine = np.asarray(cosine).astype(np.float64)
    sine = np.asarray(sine).astype(np.float64)
    even = x[..., ::2]
    odd = x[..., 1::2]
    even_times_cosine = even * cosine
    odd_times_sine = odd * sine
    sub = even_times_cosine - odd_times_sine
    odd_times_cosine = odd * cosine
    even_times_sine = even * sine
    add = odd_times_cosine + even_times_sine
    rotated = np.stack([sub, add], axis=-1)
    rearrange = rotated.reshape(T, H, D)
    return rearrange
