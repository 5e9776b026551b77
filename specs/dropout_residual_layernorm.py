"""Post-norm transformer sublayer in training: dropout of its output, residual, LayerNorm."""

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=4096)
def dropout_residual_layernorm(
    x: bf16[M, N], bias: bf16[N], residual: bf16[M, N], gamma: bf16[N], beta: bf16[N],
    p: f32, seed: i32, offset: i32[1],
) -> tuple[bf16[M, N], bf16[M, N]]:  # fmt: skip
    """h = residual + dropout(x + bias), LayerNorm(h)."""
    h = residual + F.dropout(x + bias, p, seed, offset)
    return h, F.layernorm(h, gamma, beta, eps=1e-5)
