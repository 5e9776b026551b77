"""What stands behind attention in a decoder layer: output projection, residual, and the next norm."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=4096, K=4096)
def o_proj_residual_rmsnorm(
    x: bf16[M, K], w: bf16[N, K], residual: bf16[M, N], gamma: bf16[N]
) -> tuple[bf16[M, N], bf16[M, N]]:
    """h = x w + residual, rounded, and rmsnorm(h), as a program: a norm needs whole rows, which no tile holds."""
    h = F.cast(x @ w.T + residual, bf16)
    normed = F.rmsnorm(h, gamma)
    return h, normed
