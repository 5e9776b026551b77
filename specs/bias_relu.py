"""The smallest layer: bias and activation after a projection."""

from fusegen import chain, dims, f16
from fusegen import ops as F

M, N = dims("M N")


@chain(M=65536, N=4096)
def bias_relu(x: f16[M, N], bias: f16[N]) -> f16[M, N]:
    """relu(x + bias)."""
    return F.relu(x + bias)
