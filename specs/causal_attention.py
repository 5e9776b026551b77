"""Attention of every query to the keys up to its own, and what backward passes need of it."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=32, S=4096, T=4096, D=128)
def causal_attention(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D],
) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:  # fmt: skip
    """softmax(scores) @ v and logsumexp(scores), of keys up to the query's own; tiles of later keys are not read."""
    scores = F.causal(q @ k.mT * D**-0.5)
    return F.softmax(scores) @ v, F.logsumexp(scores)
