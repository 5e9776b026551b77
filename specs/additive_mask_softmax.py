"""Attention weights under an additive mask: ALiBi, relative positions, or 0 and -inf."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, H, S, N = dims("B H S N")


@chain(B=4, H=16, S=1024, N=1024)
def additive_mask_softmax(scores: bf16[B, H, S, N], mask: bf16[S, N]) -> bf16[B, H, S, N]:
    """softmax(scores / 8 + mask); a row of -inf gives zeros."""
    z = scores * 0.125 + mask
    return F.softmax(z)
