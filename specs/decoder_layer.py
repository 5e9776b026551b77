"""A decoder layer of Llama 3, decoding: from a token's row to the next layer's, with the KV cache that it extends."""

import math

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

# sequences, model width, KV heads, queries of each, width of a head, slots of a sequence, width of the MLP
B, D, H, G, E, T, U = dims("B D H G E T U")


@chain(B=8, D=4096, H=8, G=4, E=128, T=2048, U=14336)
def decoder_layer(
    x: bf16[B, D], norm: bf16[D], wq: bf16[H * G * E, D], wk: bf16[H * E, D], wv: bf16[H * E, D],
    cos: f32[B, 1, E // 2], sin: f32[B, 1, E // 2], position: i32[B, 1, 1, 1], slots: i32[B],
    k_cache: bf16[B * T, H, E], v_cache: bf16[B * T, H, E], wo: bf16[D, H * G * E],
    norm_2: bf16[D], gate: bf16[U, D], up: bf16[U, D], down: bf16[D, U],
) -> tuple[bf16[B, D], bf16[B * T, H, E], bf16[B * T, H, E]]:  # fmt: skip
    """One token of each of B sequences, at its position: its keys and values go to the caches, in the slot given, and
    it attends to all slots up to its position. A program: norm and q, k, v; RoPE and caches; attention; output and
    residual; norm, gate, up; down and residual."""
    normed = F.rmsnorm(x, norm)
    q, k, v = normed @ wq.T, normed @ wk.T, normed @ wv.T
    turned = F.cast(F.rope(F.rearrange(q, "b (h e) -> b h e", e=E), cos, sin), bf16)
    keys = F.scatter(k_cache, slots, F.rope(F.rearrange(k, "b (h e) -> b h e", e=E), cos, sin))
    values = F.scatter(v_cache, slots, F.rearrange(v, "b (h e) -> b h e", e=E))
    queries = F.rearrange(turned, "b (h g) e -> b h g e", h=H)
    scores = queries @ F.rearrange(keys, "(b t) h e -> b h e t", b=B) * E**-0.5
    weights = F.softmax(F.where(F.col_index(scores) <= position, scores, -math.inf))
    mixed = F.cast(F.cast(weights, bf16) @ F.rearrange(values, "(b t) h e -> b h t e", b=B), bf16)
    h = F.cast(x + F.rearrange(mixed, "b h g e -> b (h g e)") @ wo.T, bf16)
    normed_2 = F.rmsnorm(h, norm_2)
    activated = F.cast(F.silu(normed_2 @ gate.T) * (normed_2 @ up.T), bf16)
    return F.cast(h + activated @ down.T, bf16), keys, values
