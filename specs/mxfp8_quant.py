"""Values for products in microscaling formats: 8 bits, and for each 32 of a row a power of 2."""

from fusegen import bf16, chain, dims, f8e4m3, f8e8m0
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def mxfp8_quant(x: bf16[M, N]) -> tuple[f8e4m3[M, N], f8e8m0[M, N // 32]]:
    """x as f8e4m3 with a scale of f8e8m0 for each 32 of a row."""
    values, scale = F.quantize(x, f8e4m3, rule="mx")
    return values, scale
