"""Behind a product of 8 bits whose result was stored as 8 bits: its scales, the bias and the activation."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=4096)
def dequantize_bias_gelu(values: f8e4m3[M, N], scale: f32[M, 1], bias: bf16[N]) -> bf16[M, N]:
    """gelu(values * scale + bias), with a scale for each row."""
    return F.gelu(F.dequantize(values, scale) + bias)
