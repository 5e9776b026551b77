"""Row kernels in Triton, one program a row and the whole row in registers: peers for `fusegen bench`.

A row is padded to the next power of two, which is what `tl.arange` takes. A causal
`softmax` reads only up to the diagonal, by its load's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

LONGEST = 1 << 17  # elements of a row: 128 a thread of the largest program


@triton.jit
def layernorm_row(x_ptr, bias_ptr, residual_ptr, gamma_ptr, beta_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * cols
    col = tl.arange(0, BLOCK)
    inside = col < cols
    x = tl.load(x_ptr + start + col, inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + start + col, inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + col, inside, other=0.0).to(tl.float32)
    gelu = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    h = tl.where(inside, residual + gelu, 0.0)
    centered = tl.where(inside, h - tl.sum(h, 0) / cols, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / cols + eps)
    gamma = tl.load(gamma_ptr + col, inside, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + col, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + col, centered * scale * gamma + beta, inside)


@triton.jit
def softmax_row(x_ptr, out_ptr, cols, scale, QUERIES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row.to(tl.int64) * cols
    col = tl.arange(0, BLOCK)
    inside = col < cols
    kept = inside
    if QUERIES > 0:
        kept = inside & (col <= row % QUERIES)
    x = tl.load(x_ptr + start + col, kept, other=-float("inf")).to(tl.float32) * scale
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + start + col, e / tl.sum(e, 0), inside)


def bias_gelu_residual_layernorm(
    x: Any, bias: Any, residual: Any, gamma: Any, beta: Any, eps: float
) -> Callable[[], object]:
    """LayerNorm(residual + gelu(x + bias)) of [rows, cols] into fresh memory. Raises ValueError for too long rows."""
    rows, cols = x.shape
    block, warps = shape_of(cols)
    out = torch.empty_like(x)
    return lambda: layernorm_row[(rows,)](x, bias, residual, gamma, beta, out, cols, eps, BLOCK=block, num_warps=warps)


def softmax(x: Any, scale: float, queries: int) -> Callable[[], object]:
    """softmax(x * scale) of [rows, cols] into fresh memory; row i keeps columns up to i % queries, all for queries=0.

    Raises ValueError for too long rows.
    """
    rows, cols = x.shape
    block, warps = shape_of(cols)
    out = torch.empty_like(x)
    return lambda: softmax_row[(rows,)](x, out, cols, scale, QUERIES=queries, BLOCK=block, num_warps=warps)


def shape_of(cols: int) -> tuple[int, int]:
    """Elements and warps of a program: the more, the longer the row. Raises ValueError for too long rows."""
    block = triton.next_power_of_2(cols)
    if block > LONGEST:
        raise ValueError(f"a row of {cols} is too long for one Triton program that keeps it in registers")
    return block, 8 if block <= 8192 else 16 if block <= 32768 else 32
