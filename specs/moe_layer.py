"""A mixture's feed-forward layer from its router to its sum: each token by 4 of 64 experts."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

T, D, H, E = dims("T D H E")  # tokens; numbers of a token; hidden numbers; experts


@chain(T=256, D=2048, H=1024, E=64)
def moe_layer(
    x: bf16[T, D], router: bf16[E, D], gate: bf16[E, H, D], up: bf16[E, H, D], down: bf16[E, D, H],
) -> bf16[T, D]:  # fmt: skip
    """The experts' silu(gate x) * (up x), brought down, weighed by the softmax of the chosen ones' logits."""
    best, experts = F.topk(x @ router.T, 4)
    order, ends, places = F.sort_by_group(experts, E)
    tokens = F.gather(x, order // 4)
    h = F.silu(F.grouped_matmul(tokens, gate.mT, ends)) * F.grouped_matmul(tokens, up.mT, ends)
    y = F.cast(F.grouped_matmul(h, down.mT, ends), bf16)
    return F.gather_sum(y, places, F.softmax(best))
