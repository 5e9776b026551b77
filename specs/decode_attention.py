"""Attention of each sequence's next token to its KV cache: few queries, many keys."""

from math import inf

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

# sequences, heads of keys, heads of queries of each of those, slots of a cache, numbers of each
B, G, R, T, D = dims("B G R T D")


@chain(B=8, G=8, R=4, T=8192, D=128)
def decode_attention(
    q: bf16[B, G, R, D], k: bf16[B, G, T, D], v: bf16[B, G, T, D], length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    """Heads of queries that share keys are a tile's rows; of a cache no tile behind the sequence's length is read."""
    scores = q @ k.mT * D**-0.5
    return F.softmax(F.where(F.col_index(scores) < length, scores, -inf)) @ v
