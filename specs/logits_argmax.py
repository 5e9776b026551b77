"""The last step of greedy decoding: the token of the largest logit."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

M, V, K = dims("M V K")


@chain(M=32, V=128256, K=4096)
def logits_argmax(x: bf16[M, K], head: bf16[V, K]) -> i32[M, 1]:
    """argmax of head x over the vocabulary, as a program: a choice needs whole rows, which no tile holds."""
    logits = x @ head.T
    return F.argmax(logits)
