"""Bias, activation, residual and quantization to int8 with a scale for each row."""

from fusegen import bf16, chain, dims, f32, i8
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=4096)
def bias_gelu_residual_quant_row(
    x: bf16[M, N], bias: bf16[N], residual: bf16[M, N],
) -> tuple[i8[M, N], f32[M, 1]]:  # fmt: skip
    """gelu(x + bias) + residual as i8: the largest of each row is 127 times its scale."""
    h = F.gelu(x + bias) + residual
    values, scale = F.quantize(h, i8)
    return values, scale
