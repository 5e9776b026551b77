"""Log-probabilities over a vocabulary."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

T, V = dims("T V")


@chain(T=4096, V=32000)
def log_softmax(logits: bf16[T, V]) -> f32[T, V]:
    """logits - max - log(sum(exp(logits - max)))."""
    return F.log_softmax(logits)
