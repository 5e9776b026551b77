"""Causal attention inside of documents that lie one behind another in a row."""

from math import inf

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=32, S=4096, T=4096, D=128)
def document_attention(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], start: i32[B, 1, S, 1],
) -> bf16[B, H, S, D]:  # fmt: skip
    """Each query sees the keys from its document's first, `start`, up to its own."""
    scores = q @ k.mT * D**-0.5
    row, col = F.row_index(scores), F.col_index(scores)
    return F.softmax(F.where((col >= start) & (col <= row), scores, -inf)) @ v
