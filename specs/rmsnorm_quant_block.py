"""Pre-norm of a layer whose product takes 8 bits by blocks: RMSNorm and quantization in one pass over memory."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def rmsnorm_quant_block(x: bf16[M, N], gain: bf16[N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    """rmsnorm(x) * gain as f8e4m3 with a scale for each 128 of a row."""
    y = F.rmsnorm(x, gain, eps=1e-6)
    values, scale = F.quantize(y, f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale
