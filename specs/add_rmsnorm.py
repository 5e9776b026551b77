"""Residual add and pre-norm between two transformer blocks: two outputs, one pass over memory."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")


@chain(M=16384, N=4096)
def add_rmsnorm(
    x: bf16[M, N], residual: bf16[M, N], gain: bf16[N],
) -> tuple[bf16[M, N], bf16[M, N]]:  # fmt: skip
    """h = x + residual, and rmsnorm(h) * gain; the norm sees h before it is rounded."""
    h = x + residual
    y = F.rmsnorm(h, gain, eps=1e-6)
    return h, y
