"""A layer of 8-bit floats, scaled by rows and by channels."""

from fusegen import bf16, chain, dims, f8e4m3, f32

M, N, K = dims("M N K")


@chain(M=4096, N=4096, K=4096)
def fp8_gemm(x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[M, 1], sw: f32[N], bias: bf16[N]) -> bf16[M, N]:
    """(x @ w.T) * sx * sw + bias, a scale for each row of x and for each row of the weight."""
    return (x @ w.T) * sx * sw + bias
