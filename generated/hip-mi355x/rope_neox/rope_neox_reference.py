"""rope_neox: what the kernel must compute, in float64.

Pairs are the first half of a head and the second one, as in GPT-NeoX and Llama.

Operands, with leading axes of any size:
    x: bf16[T, H, D]
    cosine: f32[T, 1, D // 2]
    sine: f32[T, 1, D // 2]

Returns out bf16[T, H, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rope_neox(x, cosine, sine):
    D = x.shape[2]
    x = np.asarray(x).astype(np.float64)
    cosine = np.asarray(cosine).astype(np.float64)
    sine = np.asarray(sine).astype(np.float64)
    low = x[:, :, 0:D // 2]
    high = x[:, :, D // 2:D]
    low_times_cosine = low * cosine
    high_times_sine = high * sine
    sub = low_times_cosine - high_times_sine
    high_times_cosine = high * cosine
    low_times_sine = low * sine
    add = high_times_cosine + low_times_sine
    concat = np.concatenate([sub, add], axis=-1)
    return concat
