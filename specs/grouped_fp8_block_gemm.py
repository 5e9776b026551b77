"""The experts of a mixture in 8-bit floats, scaled by blocks: 1 x 128 of the tokens, 128 x 128 of the weights."""

from fusegen import bf16, chain, dims, f8e4m3, f32, i32
from fusegen import ops as F

T, N, K, E = dims("T N K E")  # tokens, sorted by expert; columns; what is summed over; experts


@chain(T=8192, N=4096, K=7168, E=8)
def grouped_fp8_block_gemm(
    x: f8e4m3[T, K], sx: f32[K // 128, T], w: f8e4m3[E, N, K], sw: f32[E, N // 128, K // 128], ends: i32[E]
) -> bf16[T, N]:  # fmt: skip
    """dequantize(x) @ dequantize(w[e]).T, where e is the expert of the token, as DeepSeek-V3's gate and up."""
    return F.grouped_matmul(F.dequantize(x, sx.T), F.dequantize(w, sw).mT, ends)
