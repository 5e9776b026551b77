"""The experts of a mixture: each takes its own tokens."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

T, N, K, E = dims("T N K E")  # tokens, sorted by expert; columns; what is summed over; experts


@chain(T=16384, N=4096, K=2048, E=16)
def grouped_gemm(x: bf16[T, K], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """Tokens of each expert times its weights. Those of expert e are rows ends[e - 1] up to ends[e] of x."""
    return F.grouped_matmul(x, w.mT, ends)
