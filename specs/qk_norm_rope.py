"""RMSNorm of every head of queries and keys, then rotary positions, as in Qwen3."""

from typing import Any

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

T, H, K, D = dims("T H K D")


def normed_and_turned(x: Any, gain: Any, cos: Any, sin: Any) -> Any:
    """rope(rmsnorm(x) * gain), by halves of heads: pairs meet, and the mean is that of both halves."""
    low, high = F.split(x, 2)
    low_gain, high_gain = F.split(gain, 2)
    mean = (F.mean(F.square(low)) + F.mean(F.square(high))) / 2
    rrms = F.rsqrt(mean + 1e-6)
    first, second = low * rrms * low_gain, high * rrms * high_gain
    return F.concat([first * cos - second * sin, second * cos + first * sin])


@chain(T=16384, H=32, K=8, D=128)
def qk_norm_rope(
    q: bf16[T, H, D], k: bf16[T, K, D], q_gain: bf16[D], k_gain: bf16[D],
    cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2],
) -> tuple[bf16[T, H, D], bf16[T, K, D]]:  # fmt: skip
    """rmsnorm of each head of q and k, times a gain, then rope; q and k in one launch."""
    q_turned = normed_and_turned(q, q_gain, cos, sin)
    k_turned = normed_and_turned(k, k_gain, cos, sin)
    return q_turned, k_turned
