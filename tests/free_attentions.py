"""Chains of two products with elementwise steps and no softmax between them, and those that no one kernel takes."""

from __future__ import annotations

from math import inf

from fusegen import Chain, b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F

B, G, R, H, S, T, D, E = dims("B G R H S T D E")


@chain(B=2, H=3, S=70, D=32, E=40)
def retained(
    q: bf16[B, H, S, D], k: bf16[B, H, S, D], v: bf16[B, H, S, E], log_rate: f32[H, 1, 1],
) -> bf16[B, H, S, E]:  # fmt: skip
    """The mask is a factor of the scores, 0 where it hides."""
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    decay = F.where(row >= col, F.exp(-F.exp(log_rate) * F.cast(row - col, f32)), 0.0)
    return (s * decay) @ v


@chain(B=2, H=3, S=100, D=16, E=24)
def chunked(
    c: bf16[B, 1, S, D], b: bf16[B, 1, S, D], x: bf16[B, H, S, E], rows: f32[B, H, S, 1], keys: f32[B, H, 1, S],
) -> bf16[B, H, S, E]:  # fmt: skip
    """Mamba-2 within a chunk: scores that heads share, and powers of differences of running sums."""
    s = c @ b.mT
    a = F.where(F.row_index(s) >= F.col_index(s), rows - keys, -inf)
    return (s * F.exp(a)) @ x


@chain(B=1, H=2, S=70, T=130, D=64)
def sigmoids(q: f16[B, H, S, D], k: f16[B, H, T, D], v: f16[B, H, T, D], bias: f32) -> f16[B, H, S, D]:
    """Causal with more keys than queries; a sigmoid of -inf is 0."""
    return F.sigmoid(F.causal(q @ k.mT * 0.125 + bias, 60)) @ v


@chain(B=2, H=2, S=70, T=90, D=16)
def squares(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    """ReLU squared, without a mask."""
    return F.square(F.relu(q @ k.mT * 0.25)) @ v


@chain(B=1, H=2, S=90, D=24)
def linear(q: f16[B, H, S, D], k: f16[B, H, S, D], v: f16[B, H, S, D]) -> f16[B, H, S, D]:
    """Scores themselves, masked by a factor of ones and zeros."""
    s = q @ k.mT
    return (s * F.cast(F.row_index(s) >= F.col_index(s), f32) * 0.125) @ v


@chain(G=2, R=3, S=70, T=150, D=16)
def grouped(
    q: bf16[G, R, S, D], k: bf16[G, 1, T, D], v: bf16[G, 1, T, D], gate: bf16[G, R, S, D],
) -> bf16[G, R, S, D]:  # fmt: skip
    """Heads that share keys, a window, and a gate behind it."""
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    weights = F.where((col <= row) & (col > row - 33), F.tanh(s), 0.0)
    return weights @ v * F.sigmoid(gate)


@chain(B=2, H=2, S=50, T=90, D=16)
def kept(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], bias: bf16[H, S, T], keep: b8[B, 1, 1, T],
    start: i32[B, 1, S, 1],
) -> bf16[B, H, S, D]:  # fmt: skip
    """A bias, a mask in memory, and the start of a document, behind which rows may see nothing."""
    s = F.silu(q @ k.mT * 0.25 + bias)
    return F.where(F.col_index(s) >= start, F.where(keep, s, 0.0), 0.0) @ v


@chain(S=33, T=8, D=16)
def bare(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> f32[S, D]:
    """Nothing between the products."""
    return (q @ k.mT) @ v


@chain(B=1, H=1, S=70, T=70, D=256)
def wide(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.square(F.relu(F.causal(q @ k.mT * 0.0625))) @ v


@chain(B=2, H=2, S=40, T=72, D=16)
def dropped(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    """Some weights are 0 by chance."""
    return F.dropout(F.sigmoid(q @ k.mT * 0.25), 0.25, 7, 1) @ v


@chain(H=2, S=40, T=70, D=16)
def recent(q: bf16[H, S, D], k: bf16[H, T, D], v: bf16[H, T, D]) -> bf16[H, S, D]:
    """A weight that is infinite at the first column behind the last."""
    s = q @ k.mT * 0.25
    return (s / F.cast(T - F.col_index(s), f32)) @ v


FREE: tuple[Chain, ...] = (
    retained, chunked, sigmoids, squares, linear, grouped, kept, bare, wide, dropped, recent,
)  # fmt: skip


# ---- what stays several kernels


@chain(S=40, T=72, D=16)
def weights_too(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> tuple[bf16[S, D], bf16[S, T]]:
    p = F.sigmoid(q @ k.mT)
    return p @ v, p


@chain(S=40, T=72, D=16)
def normed(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    """Weights that are divided by a sum of theirs."""
    p = F.square(q @ k.mT)
    return (p / F.sum(p)) @ v


@chain(S=40, T=72, D=16)
def told_apart(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    """A condition on the results."""
    o = F.relu(F.causal(q @ k.mT)) @ v
    return F.where(o > 0.0, o, 1.0)


@chain(S=40, T=72, D=512)
def long_rows(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    return F.relu(q @ k.mT) @ v


CUT: tuple[Chain, ...] = (weights_too, normed, told_apart, long_rows)
