"""Between the two halves of a gated MLP whose products take 8 bits by blocks."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=14336)
def silu_mul_quant_block(gate: bf16[M, N], up: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    """silu(gate) * up as f8e4m3 with a scale for each 128 of a row."""
    values, scale = F.quantize(F.silu(gate) * up, f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale
