"""Chains that write attention's weights out, and kernels of chosen candidates for them."""

from __future__ import annotations

from math import inf

from fusegen import Chain, b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.attention.weights import WeightsPlan
from fusegen.planner.attention.weights_wgmma import WgmmaWeightsPlan
from fusegen.planner.model import Layout
from fusegen.targets import Target, target

B, G, R, H, S, T, D = dims("B G R H S T D")


@chain(B=1, H=2, S=100, T=100, D=32)
def full(q: f16[B, H, S, D], k: f16[B, H, T, D]) -> f16[B, H, S, T]:
    return F.softmax(q @ k.mT * 0.125)


@chain(B=2, H=2, S=70, T=136, D=24)
def causal(q: bf16[B, H, S, D], k: bf16[B, H, T, D]) -> tuple[bf16[B, H, S, T], f32[B, H, S, 1]]:
    s = F.causal(q @ k.mT * 0.125, 62)  # the first row sees all keys but one of a tile
    return F.softmax(s), F.logsumexp(s)


@chain(B=2, G=2, R=3, S=70, T=152, D=16)
def window(q: bf16[B, G, R, S, D], k: bf16[B, G, 1, T, D]) -> bf16[B, G, R, S, T]:
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    return F.softmax(F.where((col <= row) & (col > row - 33), s, -inf))


@chain(B=2, H=2, S=150, T=151, D=16)
def document(q: bf16[B, H, S, D], k: bf16[B, H, T, D], start: i32[B, 1, S, 1], end: i32[B, 1, S, 1]) -> f32[B, H, S, T]:
    """An odd number of keys, and results that no tensor copy stores."""
    s = q @ k.mT * 0.25
    col = F.col_index(s)
    return F.softmax(F.where((col >= start) & (col < end), s, -inf))


@chain(B=2, H=2, S=150, T=150, D=16)
def sink(q: bf16[B, H, S, D], k: bf16[B, H, T, D], sink: f32[H, 1, 1]) -> bf16[B, H, S, T]:
    """A pivot of the chain's own."""
    s = F.causal(q @ k.mT * 0.25)
    top = F.maximum(F.max(s), sink)
    e = F.exp(s - top)
    return e / (F.sum(e) + F.exp(sink - top))


@chain(B=2, H=2, S=50, T=90, D=16)
def bias(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], bias: bf16[H, S, T], keep: b8[B, 1, 1, T], gate: f32[S, 1]
) -> bf16[B, H, S, T]:
    """Operands of elements, of keys, and of rows behind the softmax."""
    s = F.where(keep, q @ k.mT * 0.25 + bias, -inf)
    return F.softmax(s) * F.sigmoid(gate)


@chain(B=2, H=2, S=40, T=70, D=16)
def base_2(q: bf16[B, H, S, D], k: bf16[B, H, T, D]) -> tuple[bf16[B, H, S, T], f32[B, H, S, 1]]:
    """Written out, with powers of 2, and a row's largest logit."""
    s = q @ k.mT * 0.25
    top = F.max(s)
    e = F.exp2(s - top)
    return e / F.sum(e), top


@chain(B=2, H=2, S=100, T=136, D=16)
def scores_too(q: bf16[B, H, S, D], k: bf16[B, H, T, D], b: bf16[S, T]) -> tuple[bf16[B, H, S, T], bf16[B, H, S, T]]:
    """Weights, and the logits as they are softmaxed: each tile has something of its own to be written."""
    s = F.causal(q @ k.mT * 0.25 + b)
    return F.softmax(s), s


@chain(B=2, H=2, S=100, T=136, D=16)
def logs(q: bf16[B, H, S, D], k: bf16[B, H, T, D]) -> f32[B, H, S, T]:
    """No exponential is written."""
    return F.log_softmax(F.causal(q @ k.mT * 0.25))


@chain(B=2, H=2, S=100, T=264, D=16)
def unguarded(q: bf16[B, H, S, D], k: bf16[B, H, T, D], lowest: i32[S, 1]) -> bf16[B, H, S, T]:
    """As on paper: rows that see no key are NaN, wherever a tile is left out."""
    s = q @ k.mT * 0.25
    col = F.col_index(s)
    e = F.exp(F.where(col >= lowest, s, -inf) - F.max(F.where(col >= lowest, s, -inf)))
    return e / F.sum(e)


@chain(S=40, T=72, D=16)
def unnormalised(q: bf16[S, D], k: bf16[T, D], floor: f32[S, 1]) -> bf16[S, T]:
    """An operand that the pivot alone is made of, and no sum."""
    s = q @ k.mT * 0.25
    return F.exp(s - F.maximum(F.max(s), floor))


@chain(B=2, S=33, T=1, D=16)
def one(q: bf16[B, S, D], k: bf16[B, T, D]) -> bf16[B, S, T]:
    return F.softmax(q @ k.mT * 0.25)


@chain(H=2, S=70, T=200, D=256)
def wide(q: bf16[H, S, D], k: bf16[H, T, D], scale: f32) -> bf16[H, S, T]:
    """Queries that stay in shared memory, and a scale of the launch."""
    return F.softmax(F.causal(q @ k.mT * scale))


@chain(B=2, S=70, T=148, D=16)
def dropped(q: bf16[B, S, D], k: bf16[B, T, D], seed: i32, offset: i32[1]) -> tuple[bf16[B, S, T], bf16[B, S, T]]:
    s = F.causal(q @ k.mT * 0.25, 70)
    weights = F.softmax(s)
    return weights, F.dropout(weights, 0.25, seed, offset)


@chain(B=2, S=70, T=148, D=16)
def hidden(q: bf16[B, S, D], k: bf16[B, T, D], own: i32[S, 1], other: i32[T]) -> tuple[bf16[B, S, T], f32[B, S, T]]:
    """By what is hidden, as torch's masked_fill has it."""
    s = q @ k.mT * 0.25
    weights = F.softmax(F.where(F.col_index(s) > F.row_index(s) + 60, -inf, s))
    return weights, F.where(own == other, weights, 0.0)


ALL: tuple[Chain, ...] = (
    full, causal, window, document, sink, bias, base_2, scores_too, logs, unguarded, unnormalised, one, wide, dropped,
    hidden,
)  # fmt: skip


# ---- what the rule refuses, and a part of what it says


@chain(S=8, T=8, D=16)
def two_softmaxes(q: bf16[S, D], k: bf16[T, D]) -> bf16[S, T]:
    return F.softmax(F.softmax(q @ k.mT))


@chain(S=8, T=8, D=16)
def rows_alone(q: bf16[S, D], k: bf16[T, D]) -> f32[S, 1]:
    return F.logsumexp(q @ k.mT)


@chain(S=8, T=8, D=16)
def scores_alone(q: bf16[S, D], k: bf16[T, D]) -> tuple[bf16[S, T], f32[S, 1]]:
    s = q @ k.mT
    return s, F.logsumexp(s)


@chain(S=8, T=8, D=16)
def across(q: bf16[S, D], k: bf16[D, T]) -> bf16[S, T]:
    return F.softmax(q @ k)


@chain(S=8, T=8, D=16)
def computed(q: bf16[S, D], k: bf16[T, D]) -> bf16[S, T]:
    return F.softmax(F.silu(q) @ k.mT)


@chain(S=8, T=8, D=12)
def uneven(q: bf16[S, D], k: bf16[T, D]) -> bf16[S, T]:
    return F.softmax(q @ k.mT)


REFUSED: tuple[tuple[Chain, str], ...] = (
    (two_softmaxes, "2 maxima along the keys"),
    (rows_alone, "no output has an element for each score"),
    (scores_alone, "no output with an element for each score is made of the softmax"),
    (across, r"rows of queries and rows of keys, q @ k.mT"),
    (computed, "the left factor of the product at .* is computed"),
    (uneven, "in eights and up to 256"),
)


def weights_plans(spec: Chain, on: str | Target, layout: Layout = CONTIGUOUS, **sizes: int) -> list[WeightsPlan]:
    """The candidates for that target, or the one of that name, in order."""
    chosen = target(on) if isinstance(on, str) else on
    found = candidates(spec.at(**sizes).graph, chosen, layout)
    return [plan for plan in found.plans if isinstance(plan, WeightsPlan)]


def plan_for(spec: Chain, on: str | Target, tile: str = "", layout: Layout = CONTIGUOUS, **sizes: int) -> WeightsPlan:
    """The first candidate in whose configuration `tile` stands, as `64x32`; on Hopper the first by wgmma, where tensor
    copies move its operands. For a layout that has no such tile, its first plan."""
    plans = weights_plans(spec, on, layout, **sizes)
    hopper = [plan for plan in plans if isinstance(plan, WgmmaWeightsPlan)]
    fitting = [plan for plan in (*hopper, *plans) if tile in plan.configuration]
    if not fitting and layout != CONTIGUOUS:
        fitting = plans
    assert fitting, f"no candidate for {spec.name} at {sizes} on {on} of {tile}"
    return fitting[0]
