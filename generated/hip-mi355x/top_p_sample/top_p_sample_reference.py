"""top_p_sample: what the kernel must compute, in float64.

A token of the k likeliest, and of those that make up a share p, with its probability among them.

Operands, with leading axes of any size:
    logits: bf16[M, V]
    temperature: f32[M, 1]
    k: i32[M, 1]
    p: f32[M, 1]
    seed: i32[1]
    step: i32[1]

Returns out i64[M]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


def kept_by_count(x, count):
    """x where fewer than so many are larger than it, else -inf; NaN counts for nothing."""
    down = -np.sort(np.where(np.isnan(x), np.inf, -x), -1)
    at = np.clip(np.ceil(count), 1, x.shape[-1]).astype(int) - 1
    least = np.take_along_axis(down, np.broadcast_to(at, (*x.shape[:-1], 1)), -1)
    return np.where((x >= least) & (count > 0), x, -np.inf)


def kept_by_sum(x, limit):
    """x where those larger than it sum up to less than the limit, else 0; what is not above 0 counts for nothing."""
    parts = np.where(x > 0, x, 0.0)
    order = np.argsort(-parts, -1, kind="stable")
    down = np.take_along_axis(parts, order, -1)
    before = np.concatenate([np.zeros_like(down[..., :1]), np.cumsum(down, -1)[..., :-1]], -1)
    new = np.concatenate([np.ones_like(down[..., :1], bool), down[..., 1:] < down[..., :-1]], -1)
    first = np.maximum.accumulate(np.where(new, np.arange(down.shape[-1]), 0), -1)
    larger = np.empty_like(down)
    np.put_along_axis(larger, order, np.take_along_axis(before, first, -1), -1)
    return np.where((larger < limit) & (parts > 0), x, 0.0)


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
def top_p_sample(logits, temperature, k, p, seed, step):
    M, V = logits.shape[0], logits.shape[1]
    logits = np.asarray(logits).astype(np.float64)
    temperature = np.asarray(temperature).astype(np.float64)
    k = np.asarray(k).astype(np.int32)
    p = np.asarray(p).astype(np.float64)
    seed = np.asarray(seed).astype(np.int32)
    step = np.asarray(step).astype(np.int32)
    quotient = logits / temperature
    to_f32 = k.astype(np.float64)
    largest_by_count = kept_by_count(quotient, to_f32)
    top_k = largest_by_count > (-np.inf)
    z = np.where(top_k, quotient, (-np.inf))
    top = z.max(-1, keepdims=True)
    top_is_minus_inf = top == (-np.inf)
    pivot = np.where(top_is_minus_inf, 0.0, top)
    z_minus_pivot = z - pivot
    e = np.exp(z_minus_pivot)
    sum_of_exps = e.sum(-1, keepdims=True)
    sum_of_exps_is_0 = sum_of_exps == 0.0
    one_over_sum_of_exps = 1.0 / sum_of_exps
    inverse_sum = np.where(sum_of_exps_is_0, 0.0, one_over_sum_of_exps)
    softmax = e * inverse_sum
    largest_by_sum_of_softmax = kept_by_sum(softmax, p)
    top_p = largest_by_sum_of_softmax > 0.0
    kept = np.where(top_p, z, (-np.inf))
    low = low_word(flat_index(M, V))
    high = high_word(flat_index(M, V))
    philox_ = philox(low, high, step, seed)
    uniform = (philox_ >> 8 & 0xFFFFFF) * 2.0**-24
    log_ = np.log(uniform)
    neg = -log_
    log_of_neg = np.log(neg)
    drawn = kept - log_of_neg
    max_of_drawn = drawn.max(-1, keepdims=True)
    drawn_is_max_of_drawn = drawn == max_of_drawn
    col_index = np.arange(V, dtype=np.int32)
    first = np.where(drawn_is_max_of_drawn, col_index, 2147483647)
    min_of_first = first.min(-1, keepdims=True)
    slice = min_of_first[..., 0]
    return slice
