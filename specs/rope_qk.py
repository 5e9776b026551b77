"""Rotary position embedding of queries and keys (Su et al. 2021) in one launch, whose heads differ in number."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

T, H, K, D = dims("T H K D")


@chain(T=16384, H=32, K=8, D=128)
def rope_qk(
    q: bf16[T, H, D], k: bf16[T, K, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]
) -> tuple[bf16[T, H, D], bf16[T, K, D]]:  # fmt: skip
    """Pairs are the halves of a head, as in GPT-NeoX and Llama; `out=(q, k)` turns both where they are."""
    q_turned, k_turned = F.rope(q, cos, sin), F.rope(k, cos, sin)
    return q_turned, k_turned
