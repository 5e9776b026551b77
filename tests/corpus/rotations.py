"""Rotary positions."""

from fusegen import bf16, dims, f32, i32, i64
from fusegen import ops as F
from tests.corpus.cases import case

B, D, H, K, P, R, S, T = dims("B D H K P R S T")


@case(T=6, H=4, D=32)
def rope_neox(x: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> bf16[T, H, D]:
    low, high = F.split(x, 2)
    return F.concat([low * cos - high * sin, high * cos + low * sin])


@case(T=6, H=4, D=32)
def rope_gptj(x: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> bf16[T, H, D]:
    return F.rope(x, cos, sin, interleaved=True)


@case(T=6, H=4, K=2, D=32, P=50)
def rotary_embedding(
    q: bf16[T, H, D], k: bf16[T, K, D], cache: f32[P, D], positions: i64[T]
) -> tuple[bf16[T, H, D], bf16[T, K, D]]:
    """vLLM: queries and keys of different heads, by positions."""
    cos, sin = F.split(F.gather(cache, positions)[:, None], 2)
    return F.rope(q, cos, sin), F.rope(k, cos, sin)


@case(T=6, H=4, D=32, R=16)
def partial_rope(x: bf16[T, H, D], cos: f32[T, 1, R // 2], sin: f32[T, 1, R // 2]) -> bf16[T, H, D]:
    """GPT-NeoX, Phi: the first R elements of a head turn."""
    return F.concat([F.rope(x[..., :R], cos, sin), x[..., R:]])


@case(B=2, H=4, S=6, D=32)
def rope_heads_first(x: bf16[B, H, S, D], cos: bf16[B, 1, S, D], sin: bf16[B, 1, S, D]) -> bf16[B, H, S, D]:
    """HF's rotate_half."""
    low, high = F.split(x, 2)
    return x * cos + F.concat([-high, low]) * sin


@case(T=6, H=4, D=32)
def rope_by_angles(x: f32[T, H, D], angle: f32[T, 1, D // 2]) -> f32[T, H, D]:
    return F.rope(x, F.cos(angle), F.sin(angle))


@case(T=6, H=4, K=2, D=32)
def rope_of_packed_qkv(
    qkv: bf16[T, (H + 2 * K) * D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]
) -> tuple[bf16[T, H, D], bf16[T, K, D]]:
    """The query and the key of one projection."""
    q = F.rearrange(qkv[:, : H * D], "t (h d) -> t h d", h=H)
    k = F.rearrange(qkv[:, H * D : (H + K) * D], "t (k d) -> t k d", k=K)
    return F.rope(q, cos, sin), F.rope(k, cos, sin)


@case(T=6, H=4, D=32)
def mrope(
    x: bf16[T, H, D], cos_t: f32[T, 1, D // 4], sin_t: f32[T, 1, D // 4], cos_h: f32[T, 1, D // 4],
    sin_h: f32[T, 1, D // 4],
) -> bf16[T, H, D]:  # fmt: skip
    """Qwen2-VL: sections of a head turn by time and by height."""
    low, high = F.split(x, 2)
    cos, sin = F.concat([cos_t, cos_h]), F.concat([sin_t, sin_h])
    return F.concat([low * cos - high * sin, high * cos + low * sin])


@case(T=6, H=4, D=32, P=50)
def qwen3_qk_norm_rope(x: bf16[T, H, D], weight: bf16[D], cache: f32[P, D], at: i32[T]) -> bf16[T, H, D]:
    low, high = F.split(x, 2)
    w_low, w_high = F.split(weight, 2)
    r = F.rsqrt((F.mean(F.square(low)) + F.mean(F.square(high))) / 2 + 1e-6)
    cos, sin = F.split(F.gather(cache, at)[:, None], 2)
    a, b = low * r * w_low, high * r * w_high
    return F.concat([a * cos - b * sin, b * cos + a * sin])


@case(T=6, K=2, D=32, S=40)
def reshape_and_cache(
    k: bf16[T, K, D], v: bf16[T, K, D], k_cache: bf16[S, K, D], v_cache: bf16[S, K, D], slots: i64[T]
) -> tuple[bf16[S, K, D], bf16[S, K, D]]:
    """vLLM reshape_and_cache_flash."""
    return F.scatter(k_cache, slots, k), F.scatter(v_cache, slots, v)


@case(T=6, K=2, D=32, S=40)
def rope_and_cache(
    k: bf16[T, K, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2], k_cache: bf16[S, K, D], slots: i32[T]
) -> bf16[S, K, D]:
    return F.scatter(k_cache, slots, F.rope(k, cos, sin))


@case(T=6, D=32, R=16, S=40)
def concat_and_cache_mla(latent: bf16[T, D], rope: bf16[T, R], cache: bf16[S, D + R], slots: i64[T]) -> bf16[S, D + R]:
    """vLLM: two parts of one row of the cache."""
    return F.scatter(cache, slots, F.concat([latent, rope]))


@case(T=6, H=4, D=32)
def rope_backward(dy: bf16[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]) -> bf16[T, H, D]:
    """Liger: the other way round."""
    return F.rope(dy, cos, -sin)
