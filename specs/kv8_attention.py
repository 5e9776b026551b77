"""Attention of each sequence's next token to a KV cache of 8-bit numbers, with a scale for each head of keys."""

from math import inf

from fusegen import bf16, chain, dims, f8e4m3, f32, i32
from fusegen import ops as F

# sequences, heads of keys, heads of queries of each of those, slots of a cache, numbers of each
B, G, R, T, D = dims("B G R T D")


@chain(B=8, G=8, R=4, T=8192, D=128)
def kv8_attention(
    q: bf16[B, G, R, D], k: f8e4m3[B, G, T, D], v: f8e4m3[B, G, T, D],
    k_scale: f32[G, 1, 1], v_scale: f32[G, 1, 1], length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    """Keys and values become bf16 on their way to shared memory; their scales meet the scores and the sums."""
    scores = q @ F.cast(k, bf16).mT * (k_scale * D**-0.5)
    weights = F.softmax(F.where(F.col_index(scores) < length, scores, -inf))
    return weights @ F.cast(v, bf16) * v_scale
