"""The gate of a gated MLP, after the two projections.

Where one projection makes both, pass the halves of its output as they lie: `up_gate[:, :N]` and `up_gate[:, N:]` are
views whose rows are 2N apart, and nothing is copied.
"""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=14336)
def swiglu_elementwise(gate: bf16[M, N], up: bf16[M, N]) -> bf16[M, N]:
    """silu(gate) * up."""
    return F.silu(gate) * up
