"""dropout_attention: what the kernel must compute, in float64.

dropout(softmax(scores)) @ v and logsumexp(scores); seed and offset lie on the device, where graphs read them.

Operands, with leading axes of any size:
    q: bf16[B, H, S, D]
    k: bf16[B, H, T, D]
    v: bf16[B, H, T, D]
    p: f32
    seed: i32[1]
    offset: i32[1]

Returns out0 bf16[B, H, S, D], logsumexp f32[B, H, S, 1]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def flat_index(*shape):
    """The row-major index of each element of an array, in 64 bits."""
    return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)


def low_word(index):
    """The lower half of 64 bits."""
    return np.asarray(index).astype(np.int32)


def high_word(index):
    """The upper half of 64 bits."""
    return np.asarray(index >> 32).astype(np.int32)


def philox4x32(counter, key):
    """Philox4x32-10: ten rounds over a counter of four words, by a key of two (Salmon et al. 2011)."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3, k0, k1 = (np.asarray(word).astype(np.uint64) & mask for word in (*counter, *key))
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & mask, a >> 32 ^ c3 ^ k1, a & mask
        k0, k1 = k0 + np.uint64(0x9E3779B9) & mask, k1 + np.uint64(0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def philox(low, high, offset, seed):
    """The word of the element whose index has these two halves: 32 random bits."""
    low, high = (np.asarray(half).astype(np.int64) & 0xFFFFFFFF for half in (low, high))
    words = philox4x32((low >> 2 | (high & 3) << 30, high >> 2, offset, 0), (seed, 0))
    return np.asarray(np.choose(low & 3, np.broadcast_arrays(*words, low)[:4])).astype(np.uint32).view(np.int32)


@np.errstate(all="ignore")
def dropout_attention(q, k, v, p, seed, offset):
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k).astype(np.float64)
    v = np.asarray(v).astype(np.float64)
    p = np.asarray(p).astype(np.float64)
    seed = np.asarray(seed).astype(np.int32)
    offset = np.asarray(offset).astype(np.int32)
    k_T = np.swapaxes(k, -1, -2)
    q_times_k = q @ k_T
    small_pow = np.power(q.shape[-1], (-0.5))
    q_times_k_times_small_pow = q_times_k * small_pow
    col_index = np.arange(k.shape[-2], dtype=np.int32)
    last = np.arange(q.shape[-2], dtype=np.int32)[:, None]
    keep = col_index <= last
    scores = np.where(keep, q_times_k_times_small_pow, (-np.inf))
    top = scores.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    scores_minus_pivot = scores - pivot
    e = np.exp(scores_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    low = low_word(flat_index(q.shape[-4], q.shape[-3], q.shape[-2], k.shape[-2]))
    high = high_word(flat_index(q.shape[-4], q.shape[-3], q.shape[-2], k.shape[-2]))
    philox_ = philox(low, high, offset, seed)
    to_unit = (philox_ >> 8 & 0xFFFFFF) * 2.0**-24
    keepof_dropout = to_unit >= p
    sub = 1.0 - p
    quotient = 1.0 / sub
    softmax_times_quotient = softmax * quotient
    dropout = np.where(keepof_dropout, softmax_times_quotient, 0.0)
    dropout_times_v = dropout @ v
    top_is_inf = top == np.inf
    log_ = np.log(sum_of_exps)
    add = pivot + log_
    logsumexp = np.where(top_is_inf, np.inf, add)
    return dropout_times_v, logsumexp
