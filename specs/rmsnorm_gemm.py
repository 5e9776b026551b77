"""Pre-norm and projection: the rows' scales wait until the products are summed."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=6144, K=4096)
def rmsnorm_gemm(x: bf16[M, K], gain: bf16[K], w: bf16[N, K]) -> bf16[M, N]:
    """rmsnorm(x) * gain @ w.T."""
    return F.rmsnorm(x, gain) @ w.T
