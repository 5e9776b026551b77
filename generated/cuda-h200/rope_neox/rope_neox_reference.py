"""rope_neox: what the kernel must compute, in float64.

Pairs are the first half of a head and the second one, as in GPT-NeoX and Llama.

Operands, with leading axes of any size:
    x: bf16[T, H, D]
    cos: f32[T, 1, D // 2]
    sin: f32[T, 1, D // 2]

Returns out bf16[T, H, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def rope_neox(x, cos, sin):
    D = x.shape[2]
    x = np.asarray(x).astype(np.float64)
    cos = np.asarray(cos).astype(np.float64)
    sin = np.asarray(sin).astype(np.float64)
    low = x[:, :, 0:D // 2]
    high = x[:, :, D // 2:D]
    low_times_cos = low * cos
    high_times_sin = high * sin
    sub = low_times_cos - high_times_sin
    high_times_cos = high * cos
    low_times_sin = low * sin
    add = high_times_cos + low_times_sin
    concat = np.concatenate([sub, add], axis=-1)
    return concat
