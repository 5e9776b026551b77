"""The router of a mixture of experts: which experts each token goes to, and with what weights."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

T, E, K = dims("T E K")


@chain(T=131072, E=256, K=8)
def router_topk(scores: bf16[T, E]) -> tuple[f32[T, K], i32[T, K]]:
    """The K most probable experts of each token, and their probabilities made to add up to 1."""
    likely, experts = F.topk(F.softmax(scores), K)
    weights = likely / F.sum(likely)
    return weights, experts
