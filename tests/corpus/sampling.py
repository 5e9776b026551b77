"""What samplers do to logits."""

from fusegen import b8, bf16, dims, f32, i32, i64
from fusegen import ops as F
from tests.corpus.cases import case

K, M, N, V = dims("K M N V")
NONE = -float("inf")


@case(M=4, V=100)
def temperature(logits: bf16[M, V], heat: f32[M, 1]) -> f32[M, V]:
    return logits / heat


@case(M=4, V=100)
def apply_penalties(
    logits: f32[M, V], counts: i32[M, V], prompt: b8[M, V], presence: f32[M, 1], frequency: f32[M, 1],
    repetition: f32[M, 1],
) -> f32[M, V]:  # fmt: skip
    """vLLM."""
    seen = prompt | (counts > 0)
    r = F.where(seen, repetition, 1.0)
    z = F.where(logits > 0, logits / r, logits * r)
    return z - frequency * counts - F.where(counts > 0, presence, 0.0)


@case(M=4, V=100)
def logit_bias(logits: f32[M, V], bias: f32[M, V], allowed: b8[M, V]) -> f32[M, V]:
    return F.where(allowed, logits + bias, NONE)


@case(M=4, V=96)
def token_bitmask(logits: bf16[M, V], bits: i32[M, V // 32]) -> bf16[M, V]:
    """xgrammar: 32 tokens a word."""
    words = F.rearrange(F.broadcast(bits[..., None], (M, V // 32, 32)), "m w b -> m (w b)")
    keep = (words >> (F.col_index(logits) % 32)) & 1
    return F.where(keep != 0, logits, NONE)


@case(M=4, V=100)
def min_p_filter(logits: f32[M, V], share: f32[M, 1]) -> f32[M, V]:
    return F.where(F.min_p(F.softmax(logits), share), logits, NONE)


@case(M=4, V=100)
def top_k_filter(logits: f32[M, V], k: i32[M, 1]) -> f32[M, V]:
    return F.where(F.top_k(logits, k), logits, NONE)


@case(M=4, V=100)
def top_k_top_p_filter(logits: bf16[M, V], k: i32[M, 1], p: f32[M, 1]) -> f32[M, V]:
    z = F.where(F.top_k(logits, k), logits, NONE)
    return F.where(F.top_p(F.softmax(z), p), z, NONE)


@case(M=4, V=100)
def top_p_renormalized(probs: f32[M, V], p: f32[M, 1]) -> f32[M, V]:
    """FlashInfer top_p_renorm_probs."""
    kept = F.where(F.top_p(probs, p), probs, 0.0)
    return kept / F.sum(kept)


@case(M=4, V=100)
def gumbel_max(logits: f32[M, V], seed: i32[1], step: i32[1]) -> i64[M]:
    return F.argmax(logits - F.log(-F.log(F.uniform(logits, seed, step))))[..., 0]


@case(M=4, V=100)
def greedy(logits: bf16[M, V]) -> i64[M]:
    return F.argmax(logits)[..., 0]


@case(M=4, V=100)
def greedy_with_probability(logits: bf16[M, V]) -> tuple[i64[M, 1], f32[M, 1]]:
    p, token = F.topk(F.log_softmax(logits), 1)
    return token, p


@case(M=4, V=100, K=5)
def top_logprobs(logits: f32[M, V]) -> tuple[f32[M, K], i64[M, K]]:
    return F.topk(F.log_softmax(logits), K)


@case(M=4, V=100)
def logprob_of_token(logits: bf16[M, V], token: i64[M]) -> f32[M]:
    return F.take(F.log_softmax(logits), token)[..., 0]


@case(M=4, V=100)
def rank_of_token(logits: f32[M, V], token: i64[M]) -> i32[M]:
    """vLLM batched_count_greater_than."""
    return F.sum(F.cast(logits >= F.take(logits, token), i32))[..., 0]


@case(M=4, V=100)
def entropy(logits: bf16[M, V]) -> f32[M]:
    z = F.log_softmax(logits)
    return -F.sum(F.exp(z) * z)[..., 0]


@case(M=4, V=100)
def speculative_accept(target: f32[M, V], draft: f32[M, V], token: i32[M], u: f32[M]) -> tuple[b8[M, 1], f32[M, V]]:
    """Rejection sampling: accepted or not, and the distribution to draw from if not."""
    p, q = F.take(target, token), F.take(draft, token)
    rest = F.maximum(target - draft, 0.0)
    return u[:, None] * q < p, rest / F.sum(rest)


@case(M=4, V=100)
def inverse_transform(probs: f32[M, V], u: f32[M, 1]) -> i32[M]:
    """The first token at which the running sum passes u."""
    return F.sum(F.cast(F.cumsum(probs) <= u * F.sum(probs), i32))[..., 0]


@case(M=4, V=100)
def classifier_free_guidance(cond: f32[M, V], uncond: f32[M, V], scale: f32) -> f32[M, V]:
    a, b = F.log_softmax(cond), F.log_softmax(uncond)
    return F.log_softmax(b + scale * (a - b))


@case(M=4, V=100)
def typical_filter(logits: f32[M, V], mass: f32) -> f32[M, V]:
    """Meister et al. 2023: what is nearest to the entropy, up to a mass; here by a bound on the distance."""
    z = F.log_softmax(logits)
    distance = abs(-z + F.sum(F.exp(z) * z))
    return F.where(distance <= mass, logits, NONE)
