"""LayerNorm for a product that takes int8, by a scale that was found beforehand."""

from fusegen import bf16, chain, dims, f32, i8
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=4096)
def layernorm_quant_tensor_static(x: bf16[M, N], gamma: bf16[N], beta: bf16[N], scale: f32) -> i8[M, N]:
    """layernorm(x) / scale, rounded to i8; what is beyond -128 to 127 becomes the nearer end."""
    y = F.layernorm(x, gamma, beta, eps=1e-5)
    return F.quantize(y, i8, scale)
