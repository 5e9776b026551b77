"""Rotary position embedding of queries or keys (Su et al. 2021), whose pairs are the halves of a head."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

T, H, D = dims("T H D")


@chain(T=16384, H=32, D=128)
def rope_neox(x: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> bf16[T, H, D]:
    """Pairs are the first half of a head and the second one, as in GPT-NeoX and Llama."""
    low, high = F.split(x, 2)
    return F.concat([low * cos - high * sin, high * cos + low * sin])
