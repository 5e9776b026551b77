"""Attention of each sequence's next token to a KV cache in pages, which a table names, as vLLM keeps it."""

from math import inf

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

# sequences, heads of keys, heads of queries of each of those; pages of the cache, pages of a sequence, keys of a page,
# numbers of each
B, G, R, N, P, L, D = dims("B G R N P L D")


@chain(B=8, G=8, R=4, N=8192, P=512, L=16, D=128)
def paged_attention(
    q: bf16[B, G, R, D], key_cache: bf16[N, L, G, D], value_cache: bf16[N, L, G, D], table: i32[B, P],
    length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    """No copy of the pages is made: a tile's are read where they lie, and none behind the sequence's length."""
    k = F.rearrange(F.gather(key_cache, table), "b p l g d -> b g (p l) d")
    v = F.rearrange(F.gather(value_cache, table), "b p l g d -> b g (p l) d")
    scores = q @ k.mT * D**-0.5
    return F.softmax(F.where(F.col_index(scores) < length, scores, -inf)) @ v
