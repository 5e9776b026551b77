"""Attention weights: scaled scores, the future masked, softmax over the keys."""

from fusegen import chain, dims, f16
from fusegen import ops as F

B, H, S, N = dims("B H S N")


@chain(B=1, H=32, S=4096, N=4096)
def scale_causal_softmax(scores: f16[B, H, S, N]) -> f16[B, H, S, N]:
    """softmax(scores / sqrt(64)) over the keys up to each query; a row with nothing left gives zeros."""
    z = F.causal(scores * 0.125)
    return F.softmax(z)
