"""A Triton kernel of six operands, for `benchmarks/overheads.py`: Triton reads a kernel's source from its file."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def six_operands(x, bias, residual, gamma, beta, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < cols
    row = tl.program_id(0) * cols
    h = tl.load(x + row + at, mask=inside) + tl.load(bias + at, mask=inside) + tl.load(residual + row + at, mask=inside)
    y = h * tl.load(gamma + at, mask=inside) + tl.load(beta + at, mask=inside)
    tl.store(out + row + at, y, mask=inside)
