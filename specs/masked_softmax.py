"""Attention weights under a boolean mask: padding, document boundaries, anything that says which keys count."""

from fusegen import b8, bf16, chain, dims, f32
from fusegen import ops as F

B, H, S, N = dims("B H S N")


@chain(B=4, H=16, S=1024, N=1024)
def masked_softmax(scores: bf16[B, H, S, N], mask: b8[B, 1, 1, N], scale: f32) -> bf16[B, H, S, N]:
    """softmax(scores * scale) over the keys that `mask` keeps; a row with nothing left gives zeros."""
    z = F.where(mask, scores * scale, -float("inf"))
    return F.softmax(z)
