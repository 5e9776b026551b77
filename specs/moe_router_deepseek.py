"""The router of DeepSeek-V3: the best 8 of 256 experts, of 4 of 8 groups alone; a bias decides, and weighs nothing."""

from fusegen import chain, dims, f32, i32
from fusegen import ops as F

T, E, K = dims("T E K")  # tokens; experts, and those of a token


@chain(T=65536, E=256, K=8)
def moe_router_deepseek(logits: f32[T, E], bias: f32[E]) -> tuple[f32[T, K], i32[T, K]]:
    """Weights and experts of each token: sigmoid of the chosen ones' logits, made to add up to 2.5."""
    scores = F.sigmoid(logits)
    _, experts = F.topk(scores + bias, K, groups=8, best_groups=4, by=2)
    chosen = F.take(scores, experts)
    return chosen / F.sum(chosen) * 2.5, experts
