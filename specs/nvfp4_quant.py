"""Values for products in NVFP4: 4 bits, for each 16 of a row a scale of 8 bits, and one scale for the tensor, known."""

from fusegen import bf16, chain, dims, f4e2m1, f8e4m3, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def nvfp4_quant(x: bf16[M, N], whole: f32[1]) -> tuple[f4e2m1[M, N], f8e4m3[M, N // 16]]:
    """x as f4e2m1 with a scale of f8e4m3 for each 16 of a row; x is near values * (scale * whole)."""
    values, scale = F.quantize(x, f4e2m1, whole, rule="nvfp4")
    return values, scale
