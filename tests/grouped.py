"""Chains with grouped products that tests are made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusegen import Chain, bf16, chain, dims, f8e4m3, f16, f32, i8, i32
from fusegen import ops as F

T, N, K, E, L = dims("T N K E L")


@chain(T=70, N=136, K=136, E=5)
def plain(x: bf16[T, K], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    return F.grouped_matmul(x, w.mT, ends)


@chain(T=70, N=136, K=136, E=5)
def across(x: f16[T, K], w: f16[E, K, N], ends: i32[E]) -> f32[T, N]:
    """Weights whose columns are next to each other."""
    return F.grouped_matmul(x, w, ends)


@chain(T=70, N=136, K=136, E=5)
def gated(x: bf16[T, K], gate: bf16[E, N, K], up: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """Two products of the same groups."""
    return F.silu(F.grouped_matmul(x, gate.mT, ends)) * F.grouped_matmul(x, up.mT, ends)


@chain(T=70, N=136, K=136, E=5)
def weighed(
    x: bf16[T, K], y: bf16[T, K], w: bf16[E, N, K], ends: i32[E], weight: f32[T, 1], residual: bf16[T, N], bias: bf16[N]
) -> bf16[T, N]:  # fmt: skip
    """Computed on its way in, weighed by row, with a vector and rows on its way out."""
    return F.grouped_matmul(F.silu(x) * y, w.mT, ends) * weight + bias + residual


@chain(T=70, N=136, K=136, E=5)
def biased(x: bf16[T, K], w: bf16[E, N, K], ends: i32[E], bias: f32[E, N]) -> bf16[T, N]:
    """A vector for each group, added to its rows."""
    return F.grouped_matmul(x, w.mT, ends, bias)


@chain(T=70, N=136, K=136, E=5)
def gated_biased(
    x: bf16[T, K], gate: bf16[E, N, K], up: bf16[E, N, K], ends: i32[E], gate_bias: bf16[E, N], up_bias: f32[E, N],
    weight: f32[T, 1],
) -> bf16[T, N]:  # fmt: skip
    """SwiGLU with a bias in both products, as gpt-oss has it."""
    left = F.grouped_matmul(x, gate.mT, ends, gate_bias)
    return F.silu(left) * (F.grouped_matmul(x, up.mT, ends, up_bias) + 1.0) * weight


@chain(T=70, N=136, K=136, E=5)
def normed(x: bf16[T, K], gain: bf16[K], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """A sum of each row beside its product."""
    return F.grouped_matmul(F.rmsnorm(x, gain), w.mT, ends)


@chain(T=70, N=136, L=72, K=136, E=5)
def side_by_side(
    x: bf16[T, K], w: bf16[E, N, K], v: bf16[E, L, K], ends: i32[E]
) -> tuple[bf16[T, N], bf16[T, L]]:  # fmt: skip
    """Two widths."""
    return F.grouped_matmul(x, w.mT, ends), F.relu(F.grouped_matmul(x, v.mT, ends))


@chain(T=300, N=136, K=144, E=3)
def by_rows(x: f8e4m3[T, K], w: f8e4m3[E, N, K], ends: i32[E], scale: f32[T, 1]) -> bf16[T, N]:
    """8-bit floats, with a scale for each row."""
    return F.grouped_matmul(x, w.mT, ends) * scale


@chain(T=300, N=136, K=144, E=3)
def whole(x: i8[T, K], w: i8[E, N, K], ends: i32[E]) -> i32[T, N]:
    return F.grouped_matmul(x, w.mT, ends)


@chain(T=300, N=136, K=144, E=3)
def by_channels(
    x: i8[T, K], w: i8[E, N, K], ends: i32[E], bias: bf16[E, N], columns: f32[E, N], scale: f32[T, 1]
) -> bf16[T, N]:  # fmt: skip
    """Whole numbers, with a scale for each column of an expert, and for each row."""
    return F.grouped_matmul(x, w.mT, ends, bias, columns) * scale


@chain(T=300, N=256, K=384, E=3)
def blocks(
    x: f8e4m3[T, K], sx: f32[T, K // 128], w: f8e4m3[E, N, K], sw: f32[E, N // 128, K // 128], ends: i32[E]
) -> bf16[T, N]:  # fmt: skip
    return F.grouped_matmul(F.dequantize(x, sx), F.dequantize(w, sw).mT, ends)


@chain(T=300, N=128, K=256, E=3)
def gated_blocks(
    x: f8e4m3[T, K], sx: f32[K // 128, T], gate: f8e4m3[E, N, K], s_gate: f32[E, N // 128, K // 128],
    up: f8e4m3[E, N, K], s_up: f32[E, N // 128, K // 128], ends: i32[E], bias: bf16[E, N],
) -> bf16[T, N]:  # fmt: skip
    """Two products of one left factor, each with scales of its own."""
    rows = F.dequantize(x, sx.T)
    left = F.grouped_matmul(rows, F.dequantize(gate, s_gate).mT, ends, bias)
    return F.silu(left) * F.grouped_matmul(rows, F.dequantize(up, s_up).mT, ends)


NARROW: tuple[Chain, ...] = (by_rows, whole, by_channels, blocks, gated_blocks)
ALL: tuple[Chain, ...] = (plain, across, gated, weighed, biased, gated_biased, normed, side_by_side)


def group_of(rows: int, ends: np.ndarray) -> np.ndarray:
    """The group of each row by its definition: the first one whose end lies behind it; -1 of no group."""
    beyond = ends[None, :].astype(np.int64) > np.arange(rows)[:, None]
    return np.where(beyond.any(1), beyond.argmax(1), -1)


def by_definition(x: np.ndarray, w: np.ndarray, ends: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Rows times the matrix [K, N] of their group, and its bias, row by row."""
    found = np.zeros((len(x), w.shape[-1]))
    for row, group in enumerate(group_of(len(x), ends)):
        if group >= 0:
            found[row] = x[row].astype(float) @ w[group].astype(float)
            found[row] += 0.0 if bias is None else bias[group].astype(float)
    return found


def check_biases(made: Callable[..., np.ndarray]) -> None:
    """Of `biased` at N=K=64: of an empty group, one of a single row, and none; what is NaN stays in its own group."""
    rng, ends = np.random.default_rng(0), np.array([130, 130, 131, 260, 290], np.int32)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((300, 64), (5, 64, 64)))
    bias = rng.integers(-9, 10, (5, 64)).astype(np.float32)
    want = by_definition(x, w.swapaxes(1, 2), ends, bias).astype(bf16.numpy)
    assert np.array_equal(made(x, w, ends, bias), want)
    bias[[1, 3, 4]] = np.nan
    lost = np.isnan(made(x, w, ends, bias).astype(float))
    assert np.array_equal(lost.any(1), lost.all(1))
    assert np.flatnonzero(lost.all(1)).tolist() == list(range(131, 290))
