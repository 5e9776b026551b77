"""Causal attention with a sink, as gpt-oss has it: one more logit a head, whose value is nothing."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=64, S=4096, T=4096, D=64)
def sink_attention(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], sink: f32[H, 1, 1],
) -> bf16[B, H, S, D]:  # fmt: skip
    """softmax of the scores and the sink, of which only the scores' weights are multiplied."""
    scores = F.causal(q @ k.mT * D**-0.5)
    pivot = F.maximum(F.max(scores), sink)
    e = F.exp(scores - pivot)
    return (e @ v) / (F.sum(e) + F.exp(sink - pivot))
