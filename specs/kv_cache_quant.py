"""Keys and values of new tokens, written to a cache of 8-bit floats with a scale for each head of a token."""

from fusegen import bf16, chain, dims, f8e4m3, f32, i64
from fusegen import ops as F

T, H, D, V = dims("T H D V")  # tokens, heads, elements of a head, slots


@chain(T=16384, H=8, D=128, V=65536)
def kv_cache_quant(
    k: bf16[T, H, D], v: bf16[T, H, D], slots: i64[T], k_cache: f8e4m3[V, H, D], v_cache: f8e4m3[V, H, D],
    k_scales: f32[V, H, 1], v_scales: f32[V, H, 1],
) -> tuple[f8e4m3[V, H, D], f8e4m3[V, H, D], f32[V, H, 1], f32[V, H, 1]]:  # fmt: skip
    """Each head of a token by its own largest; a slot of -1 is left out."""
    keys, k_scale = F.quantize(k, f8e4m3, per="row")
    values, v_scale = F.quantize(v, f8e4m3, per="row")
    new_keys, new_values = F.scatter(k_cache, slots, keys), F.scatter(v_cache, slots, values)
    return new_keys, new_values, F.scatter(k_scales, slots, k_scale), F.scatter(v_scales, slots, v_scale)
