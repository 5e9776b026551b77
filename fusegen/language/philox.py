"""What random numbers are, in numpy: the functions that a chain's reference calls, and their text.

A number depends on a seed, an offset and its element's index, and on nothing else: every target, plan and launch draws
the same bits. The index is the element's row-major place in the value it is drawn for, in 64 bits. Four neighbours
share one call of Philox4x32-10, the generator of Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), and each has one of its four words:

    counter = (index // 4 mod 2^32, index // 4 // 2^32, offset, 0)     key = (seed, 0)     word = index mod 4
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def flat_index(*shape: Any) -> Array:
    """The row-major index of each element of an array, in 64 bits."""
    return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)


def low_word(index: Any) -> Array:
    """The lower half of 64 bits."""
    return np.asarray(index).astype(np.int32)


def high_word(index: Any) -> Array:
    """The upper half of 64 bits."""
    return np.asarray(index >> 32).astype(np.int32)


def philox4x32(counter: Any, key: Any) -> list[Any]:
    """Philox4x32-10: ten rounds over a counter of four words, by a key of two (Salmon et al. 2011)."""
    mask: Any = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3, k0, k1 = (np.asarray(word).astype(np.uint64) & mask for word in (*counter, *key))
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & mask, a >> 32 ^ c3 ^ k1, a & mask
        k0, k1 = k0 + np.uint64(0x9E3779B9) & mask, k1 + np.uint64(0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def philox(low: Any, high: Any, offset: Any, seed: Any) -> Array:
    """The word of the element whose index has these two halves: 32 random bits."""
    low, high = (np.asarray(half).astype(np.int64) & 0xFFFFFFFF for half in (low, high))
    words = philox4x32((low >> 2 | (high & 3) << 30, high >> 2, offset, 0), (seed, 0))
    return np.asarray(np.choose(low & 3, np.broadcast_arrays(*words, low)[:4])).astype(np.uint32).view(np.int32)


FUNCTIONS: Sequence[Callable[..., Any]] = (flat_index, low_word, high_word, philox4x32, philox)


def source() -> str:
    """The text of all of them, as it stands above, without its types: it runs on numpy alone."""
    text = "\n\n".join(inspect.getsource(function) for function in FUNCTIONS)
    for words in (": Any", " -> Array", " -> list[Any]"):
        text = text.replace(words, "")
    return text
