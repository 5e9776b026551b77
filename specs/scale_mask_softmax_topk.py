"""What sampling looks at: the best next tokens of every position under a mask, and their probabilities."""

from fusegen import b8, chain, dims, f32, i32
from fusegen import ops as F

B, T, V, K = dims("B T V K")


@chain(B=32, T=128, V=32000, K=128)
def scale_mask_softmax_topk(
    logits: f32[B, T, V], mask: b8[B, T, V], scale: f32,
) -> tuple[f32[B, T, K], i32[B, T, K]]:  # fmt: skip
    """The K largest of softmax(logits * scale) and their columns, best first, among what `mask` keeps; scale is 1 over
    the temperature. Where fewer than K are kept, the rest has probability 0 and column -1."""
    z = F.where(mask, logits * scale, -float("inf"))
    values, columns = F.topk(F.softmax(z), K)
    return values, columns
