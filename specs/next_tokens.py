"""Sampling from few sequences: temperature, softmax, and the most probable next tokens of each."""

from fusegen import chain, dims, f32, i32
from fusegen import ops as F

B, V, K = dims("B V K")


@chain(B=64, V=50257, K=50)
def next_tokens(logits: f32[B, V], scale: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The K largest of softmax(logits * scale) and their columns: NaN first, ties by column, -inf never."""
    values, columns = F.topk(F.softmax(logits * scale), K)
    return values, columns
