"""Causal attention with linear biases (Press, Smith & Lewis 2022)."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=32, S=4096, T=4096, D=128)
def alibi_attention(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], slope: f32[H, 1, 1],
) -> bf16[B, H, S, D]:  # fmt: skip
    """A key weighs less by its distance, times the head's slope."""
    scores = q @ k.mT * D**-0.5
    distance = F.cast(F.row_index(scores) - F.col_index(scores), f32)
    return F.softmax(F.causal(scores - slope * distance)) @ v
