"""Causal attention with capped logits, as Gemma 2 has it."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each
CAP = 50.0


@chain(B=1, H=16, S=4096, T=4096, D=128)
def softcap_attention(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    """Logits stay between -50 and 50 by a hyperbolic tangent."""
    capped = CAP * F.tanh(q @ k.mT * (D**-0.5 / CAP))
    return F.softmax(F.causal(capped)) @ v
