"""The best next tokens as they are: logits in, logits and columns out."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

B, V, K = dims("B V K")


@chain(B=256, V=128256, K=50)
def topk(logits: bf16[B, V]) -> tuple[bf16[B, K], i32[B, K]]:
    """The K largest logits of each row and their columns: NaN first, ties by column, -inf never."""
    values, columns = F.topk(logits, K)
    return values, columns
