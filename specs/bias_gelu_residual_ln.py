"""Post-norm transformer MLP output."""

from fusegen import chain, dims, f16
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=4096)
def bias_gelu_residual_ln(
    x: f16[M, N], bias: f16[N], residual: f16[M, N], gamma: f16[N], beta: f16[N],
) -> f16[M, N]:  # fmt: skip
    """LayerNorm(residual + gelu(x + bias))."""
    h = residual + F.gelu(x + bias)
    return F.layernorm(h, gamma, beta, eps=1e-5)
