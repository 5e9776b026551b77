"""Pre-norm of most large language models."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def rmsnorm(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """x / sqrt(mean(x^2) + 1e-6) * gain."""
    return F.rmsnorm(x, gain, eps=1e-6)
