"""Gate and up of a mixture's experts, with SwiGLU."""

from fusegen import bf16, chain, dims, i32
from fusegen import ops as F

T, N, K, E = dims("T N K E")  # tokens, sorted by expert; columns; what is summed over; experts


@chain(T=16384, N=2048, K=4096, E=16)
def grouped_swiglu(x: bf16[T, K], w_gate: bf16[E, N, K], w_up: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """silu(x @ w_gate[e].T) * (x @ w_up[e].T), where e is the expert of the token."""
    gate = F.grouped_matmul(x, w_gate.mT, ends)
    up = F.grouped_matmul(x, w_up.mT, ends)
    return F.silu(gate) * up
