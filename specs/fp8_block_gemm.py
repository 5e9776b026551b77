"""A layer of 8-bit floats, scaled by blocks: 1 x 128 of the activations, 128 x 128 of the weight."""

from fusegen import bf16, chain, dims, f8e4m3, f32
from fusegen import ops as F

M, N, K = dims("M N K")


@chain(M=4096, N=7168, K=16384)
def fp8_block_gemm(
    x: f8e4m3[M, K], w: f8e4m3[N, K], sx: f32[K // 128, M], sw: f32[N // 128, K // 128]
) -> bf16[M, N]:  # fmt: skip
    """dequantize(x) @ dequantize(w).T, as DeepGEMM has it; the scales of x are transposed."""
    return F.dequantize(x, sx.T) @ F.dequantize(w, sw).T
