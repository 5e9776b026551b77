"""Between the two halves of a gated MLP whose products take 8 bits."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=14336)
def silu_mul_quant_row(gate: bf16[M, N], up: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, 1]]:
    """silu(gate) * up as f8e4m3 with a scale for each row."""
    values, scale = F.quantize(F.silu(gate) * up, f8e4m3)
    return values, scale
