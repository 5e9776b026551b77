"""GroupNorm (Wu & He 2018) and SiLU, as the residual blocks of diffusion models have them."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

B, C, S = dims("B C S")


@chain(B=16, C=10, S=4096)
def groupnorm_silu(x: bf16[B, 32 * C, S], gamma: bf16[32 * C], beta: bf16[32 * C]) -> bf16[B, 32 * C, S]:
    """silu(GroupNorm(x)) of 32 groups of C channels: what is normalized together is one row, which is read once."""
    return F.silu(F.groupnorm(x, 32, gamma, beta, eps=1e-5))
