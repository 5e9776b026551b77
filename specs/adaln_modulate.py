"""Adaptive LayerNorm of a diffusion transformer (Peebles & Xie 2023): samples have scales and shifts of their own."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, S, N = dims("B S N")


@chain(B=16, S=1024, N=3072)
def adaln_modulate(x: bf16[B, S, N], scale: bf16[B, 1, N], shift: bf16[B, 1, N]) -> bf16[B, S, N]:
    """LayerNorm(x) * (1 + scale) + shift, the scale and the shift those of the sample."""
    return F.layernorm(x, eps=1e-6) * (1 + scale) + shift
