"""Greedy decoding: the one next token of each row."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

B, V = dims("B V")


@chain(B=256, V=128256)
def argmax(logits: bf16[B, V]) -> i32[B, 1]:
    """The column of the largest logit, the first of them where several are; -1 where all are -inf."""
    return F.argmax(logits)
