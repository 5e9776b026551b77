"""LayerNorm backward, its parameters: the gradients of gamma and beta, in one pass over the tokens."""

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def layernorm_param_grads(
    dy: bf16[M, N], x: bf16[M, N], mean: f32[M, 1], rstd: f32[M, 1]
) -> tuple[f32[1, N], f32[1, N]]:
    """dgamma and dbeta of LayerNorm, of its rows' mean and 1 / sqrt(var + eps) as the forward pass left them."""
    normed = (x - mean) * rstd
    dgamma = F.sum(dy * normed, over=M)
    dbeta = F.sum(dy, over=M)
    return dgamma, dbeta
