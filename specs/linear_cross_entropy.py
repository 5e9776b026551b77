"""The loss of a language model's last layer: its logits are made, reduced and never written."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

M, H, V = dims("M H V")


@chain(M=4096, H=4096, V=128256)
def linear_cross_entropy(x: bf16[M, H], w: bf16[V, H], labels: i32[M, 1]) -> f32[M, 1]:
    """Each token's cross entropy, of logits x w, as a program: tiles of logits reduced in the product's kernel."""
    return F.cross_entropy(x @ w.T, labels)
