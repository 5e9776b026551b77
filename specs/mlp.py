"""The feed-forward layer of Llama: two projections, SwiGLU, and the projection back."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, H, K = dims("M H K")


@chain(M=4096, H=14336, K=4096)
def mlp(x: bf16[M, K], gate: bf16[H, K], up: bf16[H, K], down: bf16[K, H]) -> bf16[M, K]:
    """down(silu(gate x) * up x), as a program: the products back need whole rows of the products before."""
    h = F.silu(x @ gate.T) * (x @ up.T)
    return h @ down.T
