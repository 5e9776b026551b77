"""What attention reads later: keys, turned by their positions, and values, in the slots of a KV cache."""

from fusegen import bf16, chain, dims, f32, i64
from fusegen import ops as F

T, H, D, P, V = dims("T H D P V")  # tokens, heads, elements of a head, positions, slots


@chain(T=16384, H=8, D=128, P=131072, V=65536)
def kv_cache_write(
    k: bf16[T, H, D], v: bf16[T, H, D], rotations: f32[P, D], positions: i64[T], slots: i64[T],
    k_cache: bf16[V, H, D], v_cache: bf16[V, H, D],
) -> tuple[bf16[V, H, D], bf16[V, H, D]]:  # fmt: skip
    """RoPE of k by halves of a head, then both written in one kernel; a slot of -1 is left out."""
    cos, sin = F.split(F.gather(rotations, positions)[:, None], 2)
    return F.scatter(k_cache, slots, F.rope(k, cos, sin)), F.scatter(v_cache, slots, v)
