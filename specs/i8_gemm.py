"""A layer of whole numbers of 8 bits, scaled by rows and by channels."""

from fusegen import bf16, chain, dims, f32, i8
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=4096, K=4096)
def i8_gemm(x: i8[M, K], w: i8[N, K], sx: f32[M, 1], sw: f32[N], bias: bf16[N]) -> bf16[M, N]:
    """relu((x @ w.T) * sx * sw + bias): sums are exact."""
    return F.relu((x @ w.T) * sx * sw + bias)
