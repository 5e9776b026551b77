"""LayerNorm backward, whole: the gradients of the input, gamma and beta, of rows that are read once."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=1024, N=12288)
def layernorm_backward(
    dy: bf16[M, N], x: bf16[M, N], gamma: bf16[N], mean: f32[M, 1], rstd: f32[M, 1]
) -> tuple[bf16[M, N], f32[1, N], f32[1, N]]:  # fmt: skip
    """dx, dgamma and dbeta of layernorm(x) * gamma + beta, of the rows' statistics as the forward pass left them."""
    normed = (x - mean) * rstd
    g = dy * gamma
    dx = rstd * (g - F.mean(g) - normed * F.mean(g * normed))
    dgamma = F.sum(dy * normed, over=M)
    dbeta = F.sum(dy, over=M)
    return dx, dgamma, dbeta
