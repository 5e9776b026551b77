"""A layer in f32, at the rate of the tensor cores."""

from fusegen import chain, dims, f32
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=4096, K=4096)
def gemm_tf32(x: f32[M, K], w: f32[N, K], bias: f32[N]) -> f32[M, N]:
    """gelu(x @ w.T + bias), of each factor 11 significant bits at least, summed in f32."""
    return F.gelu(F.matmul(x, w.T, precision="tf32") + bias)
