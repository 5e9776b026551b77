"""Causal attention in training: weights are dropped by random numbers that no tile or GPU changes."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=32, S=4096, T=4096, D=128)
def dropout_attention(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], p: f32, seed: i32[1], offset: i32[1],
) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:  # fmt: skip
    """dropout(softmax(scores)) @ v and logsumexp(scores); seed and offset lie on the device, where graphs read them."""
    scores = F.causal(q @ k.mT * D**-0.5)
    return F.dropout(F.softmax(scores), p, seed, offset) @ v, F.logsumexp(scores)
