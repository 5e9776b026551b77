"""The router of Mixtral: the best 2 of 8 experts by softmax, their probabilities made to add up to 1."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

T, E, K = dims("T E K")  # tokens; experts, and those of a token


@chain(T=65536, E=8, K=2)
def moe_router_mixtral(logits: bf16[T, E]) -> tuple[f32[T, K], i32[T, K]]:
    """softmax, top-k, renormalised: weights and experts of each token.

    The sum of the whole row cancels, so that this is the softmax of the k best logits.
    """
    best, experts = F.topk(logits, K)
    return F.softmax(best), experts
