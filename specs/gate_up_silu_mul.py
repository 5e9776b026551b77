"""The gate of a transformer's MLP, of one array that a single product has made of both."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=14336)
def gate_up_silu_mul(gate_up: bf16[M, 2 * N]) -> bf16[M, N]:
    """silu(gate) * up."""
    gate, up = F.split(gate_up, 2)
    return F.silu(gate) * up
