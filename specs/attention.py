"""Attention of every query to every key."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=32, S=4096, T=4096, D=128)
def attention(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    """softmax(q @ k^T / sqrt(D)) @ v in one kernel; no row of scores is ever in memory."""
    return F.softmax(q @ k.mT * D**-0.5) @ v
