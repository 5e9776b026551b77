"""Embeddings and what models begin and end with."""

from fusegen import bf16, dims, f32, i32, i64
from fusegen import ops as F
from tests.corpus.cases import case

B, C, D, H, L, M, N, P, S, V = dims("B C D H L M N P S V")


@case(V=50, M=6, N=64)
def embedding(table: bf16[V, N], ids: i64[M]) -> bf16[M, N]:
    return F.gather(table, ids)


@case(V=50, M=6, N=64)
def scaled_embedding(table: bf16[V, N], ids: i64[M]) -> bf16[M, N]:
    """Gemma."""
    return F.gather(table, ids) * N**0.5


@case(V=50, P=20, B=2, S=6, N=64)
def bert_embeddings(
    words: bf16[V, N], places: bf16[P, N], kinds: bf16[2, N], ids: i64[B, S], at: i64[B, S], kind: i64[B, S],
    gamma: bf16[N], beta: bf16[N],
) -> bf16[B, S, N]:  # fmt: skip
    x = F.gather(words, ids) + F.gather(places, at) + F.gather(kinds, kind)
    return F.layernorm(x, gamma, beta)


@case(V=50, M=6, N=64)
def vocab_parallel_embedding(table: bf16[V, N], ids: i32[M], first: i32) -> bf16[M, N]:
    """A rank's part of the vocabulary; other ids give 0."""
    return F.gather(table, ids - first)


@case(M=6, N=64)
def sinusoidal_timestep(t: f32[M, 1], rate: f32[N // 2]) -> f32[M, N]:
    """DiT."""
    angle = t * F.exp(-rate)
    return F.concat([F.cos(angle), F.sin(angle)])


@case(H=4, S=6, N=6, V=32)
def t5_relative_bias(scores: f32[H, S, N], table: f32[V, H]) -> f32[H, S, N]:
    bucket = F.clip(F.col_index(scores) - F.row_index(scores) + 16, 0, 31)
    return scores + F.rearrange(F.gather(table, bucket), "s n h -> h s n")


@case(B=2, C=3, H=8, L=8)
def normalize_image(x: f32[B, C, H, L], mean: f32[C, 1, 1], std: f32[C, 1, 1]) -> bf16[B, C, H, L]:
    return (x / 255.0 - mean) / std


@case(B=2, H=8, L=8, C=3)
def patchify(x: bf16[B, C, H, L]) -> bf16[B, H // 4, L // 4, C * 16]:
    return F.rearrange(x, "b c (h p) (w q) -> b h w (c p q)", p=4, q=4)


@case(B=2, S=6, N=64)
def mean_pooling(x: bf16[B, S, N], keep: f32[B, S]) -> f32[B, N]:
    """Sentence transformers."""
    w = keep[..., None]
    return (F.sum(x * w, axis=1) / F.sum(w, axis=1))[:, 0]


@case(B=2, S=6, N=64)
def last_token(x: bf16[B, S, N], at: i32[B]) -> bf16[B, N]:
    rows = F.rearrange(x, "b s n -> (b s) n")
    return F.gather(rows, at)


@case(B=2, S=6, N=64)
def token_shift(x: bf16[B, S, N], mix: bf16[N]) -> bf16[B, S, N]:
    """RWKV: beside the token before."""
    before = F.roll(x, 1, axis=1)
    return x * mix + before * (1 - mix)


@case(B=2, L=24, C=16)
def causal_conv_by_taps(x: bf16[B, L + 3, C], w: f32[4, C], bias: f32[C]) -> bf16[B, L, C]:
    """Mamba's short convolution, of padded rows."""
    y = x[:, :L] * w[0] + x[:, 1 : L + 1] * w[1] + x[:, 2 : L + 2] * w[2] + x[:, 3 : L + 3] * w[3]
    return F.silu(y + bias)


@case(M=6, N=64, V=96)
def logits_of_tied_weights(x: bf16[M, N], table: bf16[V, N], gain: bf16[N]) -> f32[M, V]:
    return F.rmsnorm(x, gain) @ table.T


@case(M=6, N=64)
def hyper_connections(x: bf16[M, 4, N], w: f32[4]) -> bf16[M, N]:
    """Streams of a residual, mixed."""
    return F.sum(x * w[:, None], axis=1)[:, 0]
