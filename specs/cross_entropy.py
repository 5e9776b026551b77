"""Cross entropy of logits and labels, as the loss of a language model has it."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=128256)
def cross_entropy(logits: bf16[M, N], labels: i32[M]) -> f32[M]:
    """log(sum(exp(logits))) - logits[label] of each row, and 0 of those whose label is -100."""
    return F.cross_entropy(logits, labels)
