"""Chains that no one kernel holds, for the tests of programs: small sizes, every kind of cut."""

from __future__ import annotations

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

M, N, K, H, R = dims("M N K H R")
T, D, E = dims("T D E")


@chain(M=24, N=96, K=64)
def logits_argmax(x: bf16[M, K], w: bf16[N, K]) -> i32[M, 1]:
    return F.argmax(x @ w.T)


@chain(M=24, N=96, K=64)
def logits_topk(x: bf16[M, K], w: bf16[N, K]) -> tuple[f32[M, 4], i32[M, 4]]:
    return F.topk(x @ w.T, 4)


@chain(M=24, N=96, K=64)
def residual_norm(x: bf16[M, K], w: bf16[N, K], residual: bf16[M, N], gamma: bf16[N]) -> tuple[bf16[M, N], bf16[M, N]]:
    h = F.cast(x @ w.T + residual, bf16)
    return h, F.rmsnorm(h, gamma)


@chain(M=24, N=96, K=64)
def logsumexp(x: bf16[M, K], w: bf16[N, K], scale: f32) -> f32[M, 1]:
    logits = x @ w.T * scale
    top = F.max(logits)
    return top + F.log(F.sum(F.exp(logits - top)))


@chain(M=24, N=96, K=64)
def product_softmax(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    """Of a factor that is computed, which no kernel of written weights takes."""
    return F.softmax(F.silu(x) @ w.T)


@chain(M=24, H=96, K=64)
def mlp(x: bf16[M, K], gate: bf16[H, K], up: bf16[H, K], down: bf16[K, H]) -> bf16[M, K]:
    h = F.silu(x @ gate.T) * (x @ up.T)
    return h @ down.T


@chain(M=24, N=96, K=64, R=16)
def lora(x: bf16[M, K], w: bf16[N, K], a: bf16[R, K], b: bf16[N, R], scale: f32) -> bf16[M, N]:
    return x @ w.T + (x @ a.T) @ b.T * scale


@chain(M=24, N=96)
def two_selections(x: f32[M, N], y: f32[M, N]) -> tuple[i32[M, 4], i32[M, 2]]:
    return F.topk(x, 4)[1], F.topk(y, 2)[1]


@chain(M=24, N=96)
def below_best(x: f32[M, N]) -> f32[M, N]:
    values, _ = F.topk(x, 4)
    return x - F.min(values)


@chain(M=24, N=96)
def best_masked(x: f32[M, N]) -> f32[M, N]:
    p = F.softmax(x)
    values, _ = F.topk(p, 4)
    return F.where(p >= F.min(values), p, 0.0)


@chain(M=24, N=96, K=64)
def side_by_side(x: f32[M, N], y: f32[M, K]) -> tuple[f32[M, N], f32[M, K]]:
    return F.softmax(x), F.softmax(y)


CHAINS = (
    logits_argmax, logits_topk, residual_norm, logsumexp, product_softmax, mlp, lora, two_selections, below_best,
    best_masked, side_by_side,
)  # fmt: skip


@chain(T=48, D=64, H=40, E=8)
def routed(x: bf16[T, D], router: bf16[E, D], gate: bf16[E, H, D], up: bf16[E, H, D]) -> bf16[T, H]:
    """Each token by one expert, in these' order, which kernels before find."""
    _, experts = F.topk(x @ router.T, 1)
    order, ends, _ = F.sort_by_group(experts, E)
    tokens = F.gather(x, order)
    return F.silu(F.grouped_matmul(tokens, gate.mT, ends)) * F.grouped_matmul(tokens, up.mT, ends)
