"""Residual add, pre-norm and quantization between two transformer blocks: three outputs."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def add_rmsnorm_quant_row(
    x: bf16[M, N], residual: bf16[M, N], gain: bf16[N],
) -> tuple[bf16[M, N], f8e4m3[M, N], f32[M, 1]]:  # fmt: skip
    """h = x + residual, and rmsnorm(h) * gain as f8e4m3 with a scale for each row."""
    h = x + residual
    y = F.rmsnorm(h, gain, eps=1e-6)
    values, scale = F.quantize(y, f8e4m3)
    return h, values, scale
