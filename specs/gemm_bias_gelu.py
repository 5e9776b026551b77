"""The first half of a transformer's MLP."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=4096, K=4096)
def gemm_bias_gelu(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    """gelu(x @ w.T + bias), the weight as torch's Linear keeps it."""
    return F.gelu(x @ w.T + bias)
