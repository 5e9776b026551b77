"""Pre-norm gated MLP, first half, for a batch that decodes."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=8, N=14336, K=4096)
def rmsnorm_gemm_swiglu(x: bf16[M, K], gain: bf16[K], w_gate: bf16[N, K], w_up: bf16[N, K]) -> bf16[M, N]:
    """silu(h @ w_gate.T) * (h @ w_up.T) with h = rmsnorm(x) * gain."""
    h = F.rmsnorm(x, gain)
    return F.silu(h @ w_gate.T) * (h @ w_up.T)
