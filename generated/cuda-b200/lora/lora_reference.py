"""lora: what the kernel must compute, in float64.

w x + scale * b (a x), as a program: b's product takes what a's gives.

Operands, with leading axes of any size:
    x: bf16[M, K]
    w: bf16[N, K]
    a: bf16[R, K]
    b: bf16[N, R]
    scale: f32

Returns out bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def lora(x, w, a, b, scale):
    x = np.asarray(x).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    a = np.asarray(a).astype(np.float64)
    b = np.asarray(b).astype(np.float64)
    scale = np.asarray(scale).astype(np.float64)
    w_T = np.swapaxes(w, -1, -2)
    x_times_w = x @ w_T
    a_T = np.swapaxes(a, -1, -2)
    x_times_a = x @ a_T
    b_T = np.swapaxes(b, -1, -2)
    x_times_a_times_b = x_times_a @ b_T
    mul = x_times_a_times_b * scale
    add = x_times_w + mul
    return add
