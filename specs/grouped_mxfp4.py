"""Gate and up of a mixture's experts in MXFP4, as gpt-oss has them: codes of 4 bits, a power of 2 for each 32."""

from fusegen import bf16, chain, dims, f4e2m1, f8e8m0, i32
from fusegen import ops as F

T, N, K, E = dims("T N K E")  # tokens, sorted by expert; columns; what is summed over; experts


@chain(T=32, N=2880, K=2880, E=128)
def grouped_mxfp4(
    x: bf16[T, K], w_gate: f4e2m1[E, N, K], w_up: f4e2m1[E, N, K], gate_scale: f8e8m0[E, N, K // 32],
    up_scale: f8e8m0[E, N, K // 32], gate_bias: bf16[E, N], up_bias: bf16[E, N], ends: i32[E],
) -> bf16[T, N]:  # fmt: skip
    """(up + 1) * gate * sigmoid(1.702 * gate) of the token's expert, both kept within 7."""
    gate = F.grouped_matmul(x, F.dequantize(w_gate, gate_scale).mT, ends, gate_bias)
    up = F.grouped_matmul(x, F.dequantize(w_up, up_scale).mT, ends, up_bias)
    gate, up = F.minimum(gate, 7.0), F.minimum(F.maximum(up, -7.0), 7.0)
    return (up + 1.0) * gate * F.sigmoid(1.702 * gate)
