"""RMSNorm backward, whole: the gradients of the input and of gamma, of rows that are read once."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def rmsnorm_backward(
    dy: bf16[M, N], x: bf16[M, N], gamma: bf16[N], rstd: f32[M, 1]
) -> tuple[bf16[M, N], f32[1, N]]:  # fmt: skip
    """dx and dgamma of rmsnorm(x) * gamma, of each row's 1 / sqrt(mean(x^2) + eps) as the forward pass left it."""
    normed = x * rstd
    g = dy * gamma
    dx = rstd * (g - normed * F.mean(g * normed))
    dgamma = F.sum(dy * normed, over=M)
    return dx, dgamma
