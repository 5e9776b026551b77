"""qkv: what the kernel must compute, in float64.

x @ [wq | wk | wv].T, each into an array of its own.

Operands, with leading axes of any size:
    x: bf16[M, D]
    wq: bf16[Q, D]
    wk: bf16[G, D]
    wv: bf16[G, D]

Returns out0 bf16[M, Q], out1 bf16[M, G], out2 bf16[M, G]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def qkv(x, wq, wk, wv):
    x = np.asarray(x).astype(np.float64)
    wq = np.asarray(wq).astype(np.float64)
    wk = np.asarray(wk).astype(np.float64)
    wv = np.asarray(wv).astype(np.float64)
    wq_T = np.swapaxes(wq, -1, -2)
    x_times_wq = x @ wq_T
    wk_T = np.swapaxes(wk, -1, -2)
    x_times_wk = x @ wk_T
    wv_T = np.swapaxes(wv, -1, -2)
    x_times_wv = x @ wv_T
    return x_times_wq, x_times_wk, x_times_wv
