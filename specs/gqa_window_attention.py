"""Attention of heads in groups that share keys, to a window of keys."""

from math import inf

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, G, R, S, T, D = dims("B G R S T D")  # batch, groups, heads of a group, queries, keys, numbers of each
WINDOW = 1024


@chain(B=1, G=8, R=4, S=4096, T=4096, D=128)
def gqa_window_attention(
    q: bf16[B, G, R, S, D], k: bf16[B, G, 1, T, D], v: bf16[B, G, 1, T, D],
) -> bf16[B, G, R, S, D]:  # fmt: skip
    """Each query sees itself and the 1023 keys before it; the heads of a group read the same keys."""
    scores = q @ k.mT * D**-0.5
    row, col = F.row_index(scores), F.col_index(scores)
    return F.softmax(F.where((col <= row) & (col > row - WINDOW), scores, -inf)) @ v
