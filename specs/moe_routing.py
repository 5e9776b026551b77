"""What a mixture does before its experts: each token's best experts, their weights, and the slots in their order."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

T, D, E, K = dims("T D E K")  # tokens; numbers of a token; experts, and those of a token


@chain(T=64, D=2048, E=64, K=4)
def moe_routing(x: bf16[T, D], router: bf16[E, D]) -> tuple[f32[T, K], i32[K * T], i32[E], i32[T, K]]:
    """softmax of the chosen experts' logits; slots by their experts, where each expert's end, each slot's place."""
    best, experts = F.topk(x @ router.T, K)
    order, ends, places = F.sort_by_group(experts, E)
    return F.softmax(best), order, ends, places
