"""A layer of a language model whose weights are kept in 4 bits, at the few rows of a decode step."""

from fusegen import bf16, chain, dims, i4
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=8, N=8192, K=8192)
def w4a16_gemm(x: bf16[M, K], w: i4[N, K], scale: bf16[N, K // 128]) -> bf16[M, N]:
    """x @ w.T, with a scale for each 128 weights of a column."""
    return x @ F.dequantize(w, scale).T
