"""Losses, and their gradients."""

from fusegen import b8, bf16, dims, f32, i32, i64
from fusegen import ops as F
from tests.corpus.cases import case

B, D, M, N, V = dims("B D M N V")


@case(M=6, V=100)
def cross_entropy(logits: bf16[M, V], labels: i64[M]) -> f32[M]:
    """Liger."""
    return F.cross_entropy(logits, labels, ignore_index=-100)


@case(M=6, V=100)
def cross_entropy_smoothed(logits: bf16[M, V], labels: i32[M]) -> f32[M]:
    return F.cross_entropy(logits, labels, label_smoothing=0.1, z_loss=1e-4)


@case(M=6, V=100)
def cross_entropy_gradient(logits: bf16[M, V], labels: i32[M], scale: f32) -> bf16[M, V]:
    """Of the mean, in place of the logits."""
    return (F.softmax(logits) - F.cast(F.col_index(logits) == labels[:, None], f32)) * scale


@case(M=6, V=100)
def cross_entropy_mean(logits: f32[M, V], labels: i32[M]) -> f32[1]:
    return F.mean(F.cross_entropy(logits, labels)[:, None], over=M)[:, 0]


@case(M=6, V=100)
def softcapped_cross_entropy(logits: bf16[M, V], labels: i32[M]) -> f32[M]:
    return F.cross_entropy(30.0 * F.tanh(logits / 30.0), labels)


@case(M=6, V=100)
def kl_divergence(student: bf16[M, V], teacher: bf16[M, V]) -> f32[M]:
    p = F.log_softmax(teacher)
    return F.sum(F.exp(p) * (p - F.log_softmax(student)))[..., 0]


@case(M=6, V=100)
def reverse_kl(student: f32[M, V], teacher: f32[M, V]) -> f32[M]:
    q = F.log_softmax(student)
    return F.sum(F.exp(q) * (q - F.log_softmax(teacher)))[..., 0]


@case(M=6, V=100)
def jensen_shannon(p: f32[M, V], q: f32[M, V]) -> f32[M]:
    """Liger JSD, of log probabilities."""
    m = F.log(0.5 * (F.exp(p) + F.exp(q)))
    return 0.5 * (F.sum(F.exp(p) * (p - m)) + F.sum(F.exp(q) * (q - m)))[..., 0]


@case(M=6, V=100)
def total_variation(p: f32[M, V], q: f32[M, V]) -> f32[M]:
    return 0.5 * F.sum(abs(p - q))[..., 0]


@case(M=6, N=64)
def mean_squared_error(x: f32[M, N], y: f32[M, N]) -> f32[1, 1]:
    return F.mean(F.square(x - y), axis=None)


@case(M=6, N=64)
def huber(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    d = abs(x - y)
    return F.where(d < 1.0, 0.5 * d * d, d - 0.5)


@case(M=6, N=64)
def binary_cross_entropy(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    return F.maximum(x, 0.0) - x * y + F.log1p(F.exp(-abs(x)))


@case(M=6, N=64)
def focal(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    p = F.sigmoid(x)
    hit = p * y + (1 - p) * (1 - y)
    return -F.square(1 - hit) * F.log(hit + 1e-8)


@case(B=6)
def dpo(chosen: f32[B], rejected: f32[B], ref_chosen: f32[B], ref_rejected: f32[B], beta: f32) -> f32[B]:
    """Liger DPO."""
    return F.softplus(-beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


@case(B=4, N=30)
def grpo(logp: f32[B, N], old: f32[B, N], ref: f32[B, N], advantage: f32[B, 1], mask: b8[B, N]) -> f32[B]:
    """TRL GRPO with a KL term."""
    ratio = F.exp(logp - old)
    gain = F.minimum(ratio * advantage, F.clip(ratio, 0.8, 1.2) * advantage)
    kl = F.exp(ref - logp) - (ref - logp) - 1
    each = F.where(mask, 0.04 * kl - gain, 0.0)
    return (F.sum(each) / F.maximum(F.sum(F.cast(mask, f32)), 1.0))[..., 0]


@case(B=4, N=30)
def ppo_clip(logp: f32[B, N], old: f32[B, N], advantage: f32[B, N]) -> f32[B, N]:
    ratio = F.exp(logp - old)
    return -F.minimum(ratio * advantage, F.clip(ratio, 0.8, 1.2) * advantage)


@case(B=4, N=30)
def discounted_returns(reward: f32[B, N], weight: f32[N]) -> f32[B, N]:
    """By weights gamma^t: a running sum from the end."""
    return F.cumsum(reward * weight, reverse=True) / weight


@case(B=8, D=32)
def clip_contrastive(image: f32[B, D], text: f32[B, D], scale: f32) -> f32[B]:
    """Of normalized embeddings, each against all."""
    z = F.matmul(F.l2norm(image), F.l2norm(text).T, precision="tf32") * scale
    return (F.logsumexp(z) - F.sum(F.where(F.col_index(z) == F.row_index(z), z, 0.0)))[..., 0]


@case(M=6, N=64)
def cosine_similarity(x: bf16[M, N], y: bf16[M, N]) -> f32[M]:
    return (F.sum(x * y) * F.rsqrt(F.sum(F.square(x)) * F.sum(F.square(y)) + 1e-8))[..., 0]


@case(M=6, V=100)
def accuracy(logits: bf16[M, V], labels: i32[M]) -> f32[1]:
    hit = F.cast(F.argmax(logits) == labels[:, None], f32)
    return F.mean(hit, over=M)[:, 0]
