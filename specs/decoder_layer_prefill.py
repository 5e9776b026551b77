"""A decoder layer of Llama 3, reading a prompt: its tokens' rows to the next layer's, with the KV cache they fill."""

import math

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

# tokens, model width, KV heads, queries of each, width of a head, slots of the cache, width of the MLP
S, D, H, G, E, V, U = dims("S D H G E V U")


@chain(S=4096, D=4096, H=8, G=4, E=128, V=8192, U=14336)
def decoder_layer_prefill(
    x: bf16[S, D], norm: bf16[D], wq: bf16[H * G * E, D], wk: bf16[H * E, D], wv: bf16[H * E, D],
    cos: f32[S, 1, E // 2], sin: f32[S, 1, E // 2], slots: i32[S],
    k_cache: bf16[V, H, E], v_cache: bf16[V, H, E], wo: bf16[D, H * G * E],
    norm_2: bf16[D], gate: bf16[U, D], up: bf16[U, D], down: bf16[D, U],
) -> tuple[bf16[S, D], bf16[V, H, E], bf16[V, H, E]]:  # fmt: skip
    """S tokens of one sequence, from its first on: each attends to itself and to those before it, and its keys and
    values go to the caches, in the slots given. A program: norm and q, k, v; RoPE and caches; causal attention; output
    and residual; norm, gate, up; down and residual."""
    normed = F.rmsnorm(x, norm)
    q, k, v = (F.cast(normed @ w.T, bf16) for w in (wq, wk, wv))
    turned = F.cast(F.rope(F.rearrange(q, "s (h e) -> s h e", e=E), cos, sin), bf16)
    keys = F.cast(F.rope(F.rearrange(k, "s (h e) -> s h e", e=E), cos, sin), bf16)
    values = F.rearrange(v, "s (h e) -> s h e", e=E)
    queries = F.rearrange(turned, "s (h g) e -> h g s e", h=H)
    scores = queries @ F.rearrange(keys, "s h e -> h 1 e s") * E**-0.5
    weights = F.softmax(F.where(F.col_index(scores) <= F.row_index(scores), scores, -math.inf))
    mixed = F.cast(F.cast(weights, bf16) @ F.rearrange(values, "s h e -> h 1 s e"), bf16)
    attended = F.rearrange(mixed, "h g s e -> s (h g e)")
    h = F.cast(x + attended @ wo.T, bf16)
    normed_2 = F.rmsnorm(h, norm_2)
    activated = F.cast(F.silu(normed_2 @ gate.T) * (normed_2 @ up.T), bf16)
    out = F.cast(h + activated @ down.T, bf16)
    return out, F.scatter(k_cache, slots, keys), F.scatter(v_cache, slots, values)
