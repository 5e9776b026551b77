"""Rotary position embedding of queries or keys (Su et al. 2021), whose pairs are neighbours."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

T, H, D = dims("T H D")


@chain(T=16384, H=32, D=128)
def rope_interleaved(x: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> bf16[T, H, D]:
    """Pairs are neighbours, as in the paper and GPT-J."""
    even, odd = x[..., ::2], x[..., 1::2]
    rotated = F.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return F.rearrange(rotated, "t h p two -> t h (p two)")
