"""The weights of causal attention as an array, for those who look at them: no score is ever in memory."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, H, S, T, D = dims("B H S T D")  # batch, heads, queries, keys, numbers of each


@chain(B=1, H=32, S=2048, T=2048, D=128)
def qk_causal_softmax(query: bf16[B, H, S, D], key: bf16[B, H, T, D]) -> bf16[B, H, S, T]:
    """softmax(causal(query @ key^T / sqrt(D))): scores are made twice, and of masked tiles not at all."""
    return F.softmax(F.causal(query @ key.mT * D**-0.5))
