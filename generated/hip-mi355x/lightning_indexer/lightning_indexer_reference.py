"""lightning_indexer: what the kernel must compute, in float64.

Sums over heads of relu(q k) * w, as DeepSeek-V3.2 has them; F.topk of a row are the keys.

Operands, with leading axes of any size:
    q: bf16[S, H, D]
    k_value: bf16[T, D]
    w: f32[S, H]

Returns out f32[S, T]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def lightning_indexer(q, k_value, w):
    q = np.asarray(q).astype(np.float64)
    k_value = np.asarray(k_value).astype(np.float64)
    w = np.asarray(w).astype(np.float64)
    k_value_T = np.swapaxes(k_value, -1, -2)
    matmul = q @ k_value_T
    relu = np.maximum(matmul, 0)
    slice_ = w[:, :, None]
    mul = relu * slice_
    sum_of_products = mul.sum(-2, keepdims=True)
    view_of_sum_of_products = sum_of_products[:, 0, :]
    return view_of_sum_of_products
