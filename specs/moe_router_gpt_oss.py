"""The router of gpt-oss: the best 4 of 128 experts by biased logits, weighed by the softmax of those 4."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

T, E, K = dims("T E K")  # tokens; experts, and those of a token


@chain(T=65536, E=128, K=4)
def moe_router_gpt_oss(logits: bf16[T, E], bias: bf16[E]) -> tuple[f32[T, K], i32[T, K]]:
    """top-k, then softmax of what was chosen: weights and experts of each token.

    Biased logits are rounded to bf16, as the results of the layer are that makes them.
    """
    best, experts = F.topk(F.cast(logits + bias, bf16), K)
    return F.softmax(best), experts
