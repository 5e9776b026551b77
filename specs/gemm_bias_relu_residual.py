"""A layer with a skip connection."""

from fusegen import chain, dims, f16
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=8192, N=4096, K=4096)
def gemm_bias_relu_residual(x: f16[M, K], w: f16[K, N], bias: f16[N], residual: f16[M, N]) -> f16[M, N]:
    """relu(x @ w + bias) + residual."""
    return F.relu(x @ w + bias) + residual
