"""The experts of a mixture's feed-forward layer, whole: gate and up, SwiGLU, down, and the router's weights."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

T, H, K, E = dims("T H K E")  # tokens, sorted by expert; hidden numbers; numbers of a token; experts


@chain(T=16384, H=2048, K=4096, E=16)
def moe_mlp(
    x: bf16[T, K], gate: bf16[E, H, K], up: bf16[E, H, K], down: bf16[E, K, H], ends: i32[E], weight: f32[T, 1],
) -> bf16[T, K]:  # fmt: skip
    """weight * down[e](silu(gate[e] x) * up[e] x), where e is the expert of the token."""
    h = F.silu(F.grouped_matmul(x, gate.mT, ends)) * F.grouped_matmul(x, up.mT, ends)
    return F.grouped_matmul(h, down.mT, ends) * weight
