"""Routers of mixtures of experts, and what brings their tokens together."""

from fusegen import bf16, dims, f32, i32
from fusegen import ops as F
from tests.corpus.cases import case

E, K, M, N, T = dims("E K M N T")


@case(T=6, E=16, K=2)
def topk_softmax(scores: bf16[T, E]) -> tuple[f32[T, K], i32[T, K]]:
    """vLLM topk_softmax."""
    return F.topk(F.softmax(scores), K)


@case(T=6, E=16, K=2)
def topk_softmax_renormalized(scores: bf16[T, E]) -> tuple[f32[T, K], i32[T, K]]:
    """Mixtral."""
    p, experts = F.topk(F.softmax(scores), K)
    return p / F.sum(p), experts


@case(T=6, E=16, K=2)
def softmax_of_topk(scores: bf16[T, E]) -> tuple[f32[T, K], i32[T, K]]:
    """gpt-oss."""
    z, experts = F.topk(scores, K)
    return F.softmax(z), experts


@case(T=6, E=16, K=2)
def sigmoid_router(scores: f32[T, E], bias: f32[E]) -> tuple[f32[T, K], i32[T, K]]:
    """DeepSeek V3 without groups: chosen with a bias, weighed without."""
    s = F.sigmoid(scores)
    _, experts = F.topk(s + bias, K)
    w = F.take(s, experts)
    return w / (F.sum(w) + 1e-20) * 2.5, experts


@case(T=6, E=16)
def grouped_scores(scores: f32[T, E]) -> f32[T, E // 4]:
    """DeepSeek V2: the best of each group of experts."""
    return F.max(F.groups(F.softmax(scores), 4))[..., 0]


@case(T=6, E=16, K=1)
def llama4_router(scores: bf16[T, E]) -> tuple[f32[T, K], i32[T, K]]:
    z, expert = F.topk(scores, K)
    return F.sigmoid(z), expert


@case(T=6, E=16)
def load_balancing(probs: f32[T, E], chosen: f32[T, E]) -> f32[1, 1]:
    """Switch's auxiliary loss."""
    return F.sum(F.mean(probs, over=T) * F.mean(chosen, over=T)) * E


@case(T=6, E=16)
def router_z_loss(logits: f32[T, E]) -> f32[1, 1]:
    return F.mean(F.square(F.logsumexp(logits)), over=T)


@case(T=6, K=2, N=64)
def moe_sum(x: bf16[T, K, N]) -> bf16[T, N]:
    """vLLM moe_sum."""
    return F.sum(x, axis=1)[:, 0]


@case(T=6, K=2, N=64)
def moe_weighted_sum(x: bf16[T, K, N], w: f32[T, K]) -> bf16[T, N]:
    return F.sum(x * w[..., None], axis=1)[:, 0]


@case(T=6, M=12, N=64)
def permute_tokens(x: bf16[T, N], rows: i32[M]) -> bf16[M, N]:
    """Tokens in the order of their experts."""
    return F.gather(x, rows)


@case(T=6, M=12, N=64)
def unpermute_pairs(x: bf16[M, N], first: i32[T], second: i32[T], w: f32[T, 2]) -> bf16[T, N]:
    return F.gather(x, first) * w[:, :1] + F.gather(x, second) * w[:, 1:]


@case(T=6, N=64)
def shared_expert_gate(x: bf16[T, N], y: bf16[T, N], gate: bf16[T, 1]) -> bf16[T, N]:
    """Qwen2-MoE."""
    return x + F.sigmoid(gate) * y
