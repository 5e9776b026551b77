"""The first half of a gated MLP whose second product takes 8 bits by blocks."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=14336, K=4096)
def gemm_swiglu_quant_block(
    x: bf16[M, K], gate: bf16[N, K], up: bf16[N, K]
) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:  # fmt: skip
    """silu(x @ gate.T) * (x @ up.T) as f8e4m3, with a scale for each 128 of a row, quantized where the sums are."""
    values, scale = F.quantize(F.silu(x @ gate.T) * (x @ up.T), f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale
