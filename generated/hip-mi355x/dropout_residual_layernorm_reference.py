"""dropout_residual_layernorm: what the kernel must compute, in float64.

h = residual + dropout(x + bias), LayerNorm(h).

Operands, with leading axes of any size:
    x: bf16[M, N]
    bias: bf16[N]
    residual: bf16[M, N]
    gamma: bf16[N]
    beta: bf16[N]
    p: f32
    seed: i32
    offset: i32[1]

Returns h bf16[M, N], layernorm bf16[M, N]; floats are left in float64, not yet rounded to the storage type.
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
def dropout_residual_layernorm(x, bias, residual, gamma, beta, p, seed, offset):
    x = np.asarray(x).astype(np.float64)
    bias = np.asarray(bias).astype(np.float64)
    residual = np.asarray(residual).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    beta = np.asarray(beta).astype(np.float64)
    p = np.asarray(p).astype(np.float64)
    seed = np.asarray(seed).astype(np.int32)
    offset = np.asarray(offset).astype(np.int32)
    x_plus_bias = x + bias
    low = low_word(flat_index(x.shape[-2], x.shape[-1]))
    high = high_word(flat_index(x.shape[-2], x.shape[-1]))
    philox_ = philox(low, high, offset, seed)
    to_unit = (philox_ >> 8 & 0xFFFFFF) * 2.0**-24
    keep = to_unit >= p
    sub = 1.0 - p
    quotient = 1.0 / sub
    mul = x_plus_bias * quotient
    dropout = np.where(keep, mul, 0.0)
    h = residual + dropout
    sum_of_h = h.sum(-1, keepdims=True)
    mean = sum_of_h / x.shape[-1]
    centered = h - mean
    square = centered * centered
    sum_of_squares = square.sum(-1, keepdims=True)
    variance = sum_of_squares / x.shape[-1]
    variance_plus_eps = variance + 1e-05
    rstd = 1 / np.sqrt(variance_plus_eps)
    normalized = centered * rstd
    scaled = normalized * gamma
    layernorm = scaled + beta
    return h, layernorm
