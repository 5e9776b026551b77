"""Chains of attention, and kernels of chosen candidates for them."""

from __future__ import annotations

from math import inf

from fusegen import Chain, b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.model import Layout
from fusegen.targets import Target, target

B, G, R, H, S, N, P, L, T, D, E = dims("B G R H S N P L T D E")


@chain(B=1, H=2, S=100, T=100, D=32)
def plain(q: f16[B, H, S, D], k: f16[B, H, T, D], v: f16[B, H, T, D]) -> f16[B, H, S, D]:
    return F.softmax(q @ k.mT * 0.125) @ v


@chain(B=2, H=2, S=70, T=130, D=24, E=40)
def lse(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, E]) -> tuple[bf16[B, H, S, E], f32[B, H, S, 1]]:
    s = F.causal(q @ k.mT * 0.125, 60)
    return F.softmax(s) @ v, F.logsumexp(s)


@chain(B=2, G=2, R=3, S=70, T=150, D=16)
def window(q: bf16[B, G, R, S, D], k: bf16[B, G, 1, T, D], v: bf16[B, G, 1, T, D]) -> bf16[B, G, R, S, D]:
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    return F.softmax(F.where((col <= row) & (col > row - 33), s, -inf)) @ v


@chain(B=2, H=3, S=70, T=70, D=16)
def alibi(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], slope: f32[H, 1, 1]) -> bf16[B, H, S, D]:
    s = q @ k.mT * 0.25
    s = s - slope * F.cast(F.row_index(s) - F.col_index(s), f32)
    return F.softmax(F.causal(s)) @ v


@chain(B=2, H=3, S=70, T=70, D=16)
def softcap(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], cap: f32) -> bf16[B, H, S, D]:
    s = F.tanh(q @ k.mT * 0.25 / cap) * cap
    return F.softmax(F.causal(s)) @ v


@chain(B=2, H=2, S=150, T=150, D=16)
def document(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], start: i32[B, 1, S, 1], end: i32[B, 1, S, 1]
) -> bf16[B, H, S, D]:
    s = q @ k.mT * 0.25
    col = F.col_index(s)
    return F.softmax(F.where((col >= start) & (col < end), s, -inf)) @ v


@chain(B=2, H=2, S=150, T=150, D=16)
def sink(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], sink: f32[H, 1, 1]) -> bf16[B, H, S, D]:
    s = F.causal(q @ k.mT * 0.25)
    top = F.maximum(F.max(s), sink)
    e = F.exp(s - top)
    return e @ v / (F.sum(e) + F.exp(sink - top))


@chain(B=2, H=2, S=50, T=90, D=16)
def bias(
    q: bf16[B, H, S, D],
    k: bf16[B, H, T, D],
    v: bf16[B, H, T, D],
    bias: bf16[H, S, T],
    keep: b8[B, 1, 1, T],
    gate: bf16[B, H, S, D],
) -> bf16[B, H, S, D]:
    s = F.where(keep, q @ k.mT * 0.25 + bias, -inf)
    return F.softmax(s) @ v * F.sigmoid(gate)


@chain(B=2, H=2, S=50, T=190, D=16)
def prefix(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], n: i32[B, 1, 1, 1]) -> bf16[B, H, S, D]:
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    return F.softmax(F.where((col <= row) | (col < n), s, -inf)) @ v


@chain(B=2, H=2, S=150, T=150, D=16)
def chunks(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    return F.softmax(F.where((col <= row) & (col // 20 == row // 20), s, -inf)) @ v


@chain(B=1, H=1, S=70, T=70, D=256)
def wide(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT * 0.0625) @ v


@chain(S=33, T=8, D=16)
def tiny(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    return F.softmax(q @ k.mT * 0.25) @ v


@chain(B=2, S=33, T=1, D=16)
def one(q: bf16[B, S, D], k: bf16[B, T, D], v: bf16[B, T, D]) -> bf16[B, S, D]:
    return F.softmax(q @ k.mT * 0.25) @ v


@chain(B=2, H=2, S=40, T=70, D=16)
def base_2(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:
    """Written out, with powers of 2, the weights rounded by a cast of its own, and a row's largest logit."""
    s = q @ k.mT * 0.25
    top = F.max(s)
    e = F.exp2(s - top)
    return F.cast(e / F.sum(e), bf16) @ v, top


@chain(B=2, S=40, T=70, D=16)
def gated(q: bf16[B, S, D], k: bf16[B, T, D], v: bf16[B, T, D], gate: bf16[B, 1, T], a: f32) -> bf16[B, S, D]:
    """Weights that are scaled key by key, and by a run-time scalar."""
    return (F.softmax(q @ k.mT * a) * gate) @ v


@chain(S=40, T=70, D=16)
def unnormalised(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D], floor: f32[S, 1]) -> f32[S, D]:
    """An operand that the pivot alone is made of, and no sum."""
    s = q @ k.mT * 0.25
    return F.exp(s - F.maximum(F.max(s), floor)) @ v


@chain(B=2, H=3, S=70, T=148, D=16)
def dropped(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], p: f32, seed: i32[B, 1, 1, 1],
    offset: i32[1],
) -> tuple[bf16[B, H, S, D], f32[B, H, S, 1]]:  # fmt: skip
    """Random numbers of four neighbours at a time, a seed of each sequence, and masks."""
    s = F.causal(q @ k.mT * 0.25, 70)
    return F.dropout(F.softmax(s), p, seed, offset) @ v, F.logsumexp(s)


@chain(B=2, H=2, S=40, T=71, D=16)
def dropped_twice(
    q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], seed: i32,
) -> bf16[B, H, S, D]:  # fmt: skip
    """Rows that begin anywhere, and noise before the softmax."""
    s = q @ k.mT * 0.25
    return F.dropout(F.softmax(s + F.uniform(s, 3, 4)), 0.25, seed, 1) @ v


@chain(B=2, H=2, S=70, T=152, D=16)
def hidden(q: bf16[B, H, S, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D], pad: b8[B, 1, 1, T]) -> bf16[B, H, S, D]:
    """By what is hidden, as torch's masked_fill has it."""
    s = q @ k.mT * 0.25
    row, col = F.row_index(s), F.col_index(s)
    s = F.where(col > row + 82, -inf, s)
    return F.softmax(F.where(~(col >= row - 40) | pad, -inf, s)) @ v


@chain(B=2, H=2, S=70, D=16)
def demoted(q: bf16[B, H, S, D], k: bf16[B, H, S, D], v: bf16[B, H, S, D], gate: bf16[B, H, S, 1]) -> bf16[B, H, S, D]:
    """Hidden by a number that is no infinity: all keys are seen."""
    s = q @ k.mT * 0.25
    return F.softmax(F.where(F.col_index(s) > F.row_index(s), -1e9, s)) @ v * F.sigmoid(gate)


@chain(B=2, H=2, S=70, D=16)
def others(q: bf16[B, H, S, D], k: bf16[B, H, S, D], v: bf16[B, H, S, D]) -> bf16[B, H, S, D]:
    """A key of each row is hidden, in the midst of those that are seen."""
    s = q @ k.mT * 0.25
    return F.softmax(F.where(F.row_index(s) == F.col_index(s), -inf, s)) @ v


ALL: tuple[Chain, ...] = (
    plain, lse, window, alibi, softcap, document, sink, bias, prefix, chunks, wide, tiny, one, base_2, gated,
    unnormalised, dropped, dropped_twice, hidden, demoted, others,
)  # fmt: skip


# ---- rows that one warp has no room for the sums of


@chain(B=2, S=40, T=150, D=288, E=320)
def long_rows(q: bf16[B, S, D], k: bf16[B, T, D], v: bf16[B, T, E]) -> tuple[bf16[B, S, E], f32[B, S, 1]]:
    s = F.causal(q @ k.mT * 0.0625, 60)
    return F.softmax(s) @ v, F.logsumexp(s)


@chain(B=2, S=40, T=150, D=288)
def latent(q: bf16[B, S, D], k: bf16[B, T, D], start: i32[B, S, 1]) -> bf16[B, S, D]:
    """Keys that are the values too; each row has an end of its own."""
    s = q @ k.mT * 0.0625
    return F.softmax(F.where(F.col_index(s) >= start, s, -inf)) @ k


@chain(B=1, S=20, T=70, D=32, E=288)
def long_values(
    q: f16[B, S, D], k: f16[B, T, D], v: f16[B, T, E], bias: f32[S, T], gate: f16[B, S, E], sink: f32[B, 1, 1],
) -> f16[B, S, E]:  # fmt: skip
    s = q @ k.mT * 0.25 + bias
    top = F.maximum(F.max(s), sink)
    e = F.exp(s - top)
    return e @ v / (F.sum(e) + F.exp(sink - top)) * F.sigmoid(gate)


# ---- latent attention, whose values are the first columns of the keys


@chain(B=2, S=2, H=12, T=2100, D=288, E=256)
def drafted(q: bf16[B, S, H, D], kv: bf16[B, T, D], length: i32[B, 1, 1]) -> bf16[B, S, H, E]:
    rows = F.rearrange(q, "b s h d -> b (s h) d")
    scores = rows @ kv.mT * 0.0625
    last = length + F.row_index(scores) // 12
    out = F.softmax(F.where(F.col_index(scores) < last, scores, -inf)) @ kv[..., :E]
    return F.rearrange(out, "b (s h) e -> b s h e", h=H)


@chain(B=2, H=20, N=11, P=9, L=16, D=288, E=256)
def paged(
    q: bf16[B, H, D], cache: bf16[N, L, D], table: i32[B, P], length: i32[B, 1, 1],
) -> bf16[B, H, E]:  # fmt: skip
    kv = F.rearrange(F.gather(cache, table), "b p l d -> b (p l) d")
    scores = q @ kv.mT * 0.0625
    return F.softmax(F.where(F.col_index(scores) < length, scores, -inf)) @ kv[..., :E]


WIDE: tuple[Chain, ...] = (long_rows, latent, long_values)


# ---- what the rule refuses, and a part of what it says


@chain(S=8, T=8, D=16)
def two_softmaxes(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    return F.softmax(F.softmax(q @ k.mT)) @ v


@chain(S=8, T=8, D=16)
def no_softmax(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    return (q @ k.mT - F.max(q @ k.mT)) @ v


@chain(S=8, T=8, D=16)
def weights_too(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> tuple[bf16[S, D], bf16[S, T]]:
    p = F.softmax(q @ k.mT)
    return p @ v, p


@chain(S=8, T=8, D=16)
def not_linear(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    return F.square(F.softmax(q @ k.mT)) @ v


@chain(S=8, T=8, D=16)
def across(q: bf16[S, D], k: bf16[D, T], v: bf16[T, D]) -> bf16[S, D]:
    return F.softmax(q @ k) @ v


@chain(S=8, T=8, D=12)
def uneven(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
    return F.softmax(q @ k.mT) @ v


REFUSED: tuple[tuple[Chain, str], ...] = (
    (two_softmaxes, "2 maxima along the keys"),
    (no_softmax, "0 exponentials of max's argument less its maximum"),
    (weights_too, "has a value for each key"),
    (not_linear, "square at .* is not the softmax's exponentials times something"),
    (across, r"takes rows of queries and rows of keys, q @ k.mT"),
    (uneven, "takes them in eights: pad them"),
)


def attention_plans(spec: Chain, on: str | Target, layout: Layout = CONTIGUOUS, **sizes: int) -> list[AttentionPlan]:
    """The candidates for that target, or the one of that name, in order."""
    chosen = target(on) if isinstance(on, str) else on
    found = candidates(spec.at(**sizes).graph, chosen, layout)
    return [plan for plan in found.plans if isinstance(plan, AttentionPlan)]


def plan_for(spec: Chain, on: str | Target, tile: str = "", layout: Layout = CONTIGUOUS, **sizes: int) -> AttentionPlan:
    """The first candidate whose configuration begins with `tile`, as `64x32`, or `wide 64x32`."""
    plans = attention_plans(spec, on, layout, **sizes)
    begins = (f"attention {tile}", f"attention_{tile}") if tile else "attention"
    fitting = [plan for plan in plans if plan.configuration.startswith(begins)]
    assert fitting, f"no candidate for {spec.name} at {sizes} on {on} of {tile}"
    return fitting[0]
