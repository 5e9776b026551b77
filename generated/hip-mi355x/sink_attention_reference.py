"""sink_attention: what the kernel must compute, in float64.

softmax of the scores and the sink, of which only the scores' weights are multiplied.

Operands, with leading axes of any size:
    q: bf16[B, H, S, D]
    k: bf16[B, H, T, D]
    v: bf16[B, H, T, D]
    sink: f32[H, 1, 1]

Returns out bf16[B, H, S, D]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def sink_attention(q, k, v, sink):
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v = np.asarray(v).astype(np.float64)
    sink = np.asarray(sink).astype(np.float64)
    k_T = np.swapaxes(k, -1, -2)
    q_times_k = q @ k_T
    small_pow = np.power(q.shape[-1], (-0.5))
    mul = q_times_k * small_pow
    col_index = np.arange(k.shape[-2], dtype=np.int32)
    last = np.arange(q.shape[-2], dtype=np.int32)[:, None]
    keep = col_index <= last
    scores = np.where(keep, mul, (-np.inf))
    max_of_scores = scores.max(-1, keepdims=True)
    pivot = np.maximum(max_of_scores, sink)
    scores_minus_pivot = scores - pivot
    e = np.exp(scores_minus_pivot)
    e_times_v = e @ v
    sum_of_e = e.sum(-1, keepdims=True)
    sink_minus_pivot = sink - pivot
    exp_ = np.exp(sink_minus_pivot)
    add = sum_of_e + exp_
    quotient = e_times_v / add
    return quotient
