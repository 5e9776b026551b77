"""The first half of a gated MLP: two products of one left operand, neither of them written."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=14336, K=4096)
def gemm_swiglu(x: bf16[M, K], w_gate: bf16[N, K], w_up: bf16[N, K]) -> bf16[M, N]:
    """silu(x @ w_gate.T) * (x @ w_up.T) (Shazeer 2020)."""
    return F.silu(x @ w_gate.T) * (x @ w_up.T)
