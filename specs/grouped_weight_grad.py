"""The gradient of a mixture's weights: for each expert its tokens' inputs times what comes back of their outputs."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

T, N, K, E = dims("T N K E")  # tokens, sorted by expert; columns; numbers of a token; experts


@chain(T=16384, N=2048, K=4096, E=16)
def grouped_weight_grad(x: bf16[T, K], dy: bf16[T, N], ends: i32[E]) -> bf16[E, N, K]:
    """dy[rows of e].T @ x[rows of e] for each expert e; 0 of one without tokens."""
    return F.grouped_matmul(dy.mT, x, ends)
