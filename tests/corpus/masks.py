"""Masked softmaxes, biases and scans."""

from fusegen import b8, bf16, dims, f16, f32, i32
from fusegen import ops as F
from tests.corpus.cases import case

B, D, H, M, N, S = dims("B D H M N S")
NONE = -float("inf")


@case(B=2, H=2, S=6, N=20)
def scaled_masked_softmax(x: f16[B, H, S, N], mask: b8[B, 1, S, N], scale: f32) -> f16[B, H, S, N]:
    """Megatron."""
    return F.softmax(F.where(mask, x * scale, -10000.0))


@case(H=2, S=20, N=20)
def upper_triangular_softmax(x: f16[H, S, N], scale: f32) -> f16[H, S, N]:
    """Megatron."""
    return F.softmax(F.causal(x * scale))


@case(H=2, S=20, N=20)
def sliding_window_softmax(x: bf16[H, S, N]) -> bf16[H, S, N]:
    row, col = F.row_index(x), F.col_index(x)
    return F.softmax(F.where((col <= row) & (col > row - 8), x, NONE))


@case(H=2, S=20, N=20)
def prefix_lm_softmax(x: bf16[H, S, N], prefix: i32) -> bf16[H, S, N]:
    row, col = F.row_index(x), F.col_index(x)
    return F.softmax(F.where((col <= row) | (col < prefix), x, NONE))


@case(H=2, S=20, N=20)
def alibi_softmax(x: bf16[H, S, N], slope: f32[H, 1, 1]) -> bf16[H, S, N]:
    z = x + slope * F.cast(F.col_index(x) - F.row_index(x), f32)
    return F.softmax(F.causal(z))


@case(H=2, S=6, N=20)
def softmax_with_sink(x: bf16[H, S, N], sink: f32[H, 1, 1]) -> bf16[H, S, N]:
    """gpt-oss: one more logit that takes its share."""
    top = F.maximum(F.max(x), sink)
    e = F.exp(x - top)
    return e / (F.sum(e) + F.exp(sink - top))


@case(B=2, S=6, N=20)
def document_mask(x: f32[B, S, N], of_row: i32[B, S, 1], of_col: i32[B, 1, N]) -> f32[B, S, N]:
    return F.softmax(F.where(of_row == of_col, x, NONE))


@case(B=2, S=6, N=20)
def padded_lengths(x: bf16[B, S, N], length: i32[B, 1, 1]) -> bf16[B, S, N]:
    return F.softmax(F.where(F.col_index(x) < length, x, NONE))


@case(M=6, N=20)
def softmax_backward(p: f16[M, N], dp: f16[M, N], scale: f32) -> f16[M, N]:
    return (dp - F.sum(dp * p)) * p * scale


@case(M=6, N=20)
def log_softmax_backward(y: f32[M, N], dy: f32[M, N]) -> f32[M, N]:
    return dy - F.exp(y) * F.sum(dy)


@case(M=6, N=20)
def softmax_one(x: f32[M, N]) -> f32[M, N]:
    """Off by one: it may attend to nothing."""
    top = F.maximum(F.max(x), 0.0)
    e = F.exp(x - top)
    return e / (F.exp(-top) + F.sum(e))


@case(H=2, S=6, D=32)
def delta_preprocess(o: bf16[H, S, D], do: bf16[H, S, D]) -> f32[H, S]:
    """flash-attention backward."""
    return F.sum(o * do)[..., 0]


@case(H=2, S=6, D=32)
def merge_attention_states(
    a: bf16[S, H, D], b: bf16[S, H, D], lse_a: f32[S, H], lse_b: f32[S, H]
) -> tuple[bf16[S, H, D], f32[S, H]]:
    """FlashInfer, vLLM merge_attn_states."""
    top = F.maximum(lse_a, lse_b)
    wa, wb = F.exp(lse_a - top), F.exp(lse_b - top)
    total = wa + wb
    return a * (wa / total)[..., None] + b * (wb / total)[..., None], top + F.log(total)


@case(B=2, S=24, H=4)
def cumulative_decay(g: f32[B, H, S]) -> f32[B, H, S]:
    """Mamba2's and gated delta net's logs of decays."""
    return F.cumsum(g)


@case(B=3, N=20)
def lengths_to_offsets(length: i32[B, N]) -> tuple[i32[B, N], i32[B, 1]]:
    return F.cumsum(length, exclusive=True), F.sum(length)


@case(B=2, N=20)
def positions_of_mask(mask: i32[B, N]) -> i32[B, N]:
    """HF: the position of each token that is no padding."""
    return F.cumsum(mask) * mask - 1
