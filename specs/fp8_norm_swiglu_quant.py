"""The first half of a gated MLP in 8-bit floats, from bf16 to what its second product takes."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=14336, K=4096)
def fp8_norm_swiglu_quant(
    x: bf16[M, K], gamma: bf16[K], gate: f8e4m3[N, K], up: f8e4m3[N, K], gate_scale: f32[N], up_scale: f32[N]
) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:  # fmt: skip
    """rmsnorm, quantize by rows, two products, SwiGLU, quantize by blocks: a kernel of rows and one of tiles.

    Weights have a scale for each channel. Sums are of 14 bits over all of K, as fast accumulation has it elsewhere.
    """
    normed, row_scale = F.quantize(F.rmsnorm(x, gamma), f8e4m3, per="row")
    gated = F.matmul(normed, gate.T, promote=0) * row_scale * gate_scale
    raised = F.matmul(normed, up.T, promote=0) * row_scale * up_scale
    values, scale = F.quantize(F.silu(gated) * raised, f8e4m3, per="block", block=128, rule="deepseek")
    return values, scale
