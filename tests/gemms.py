"""Chains with products, and kernels of chosen candidates for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusegen import Chain, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.graph import Graph
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.model import Layout, Source
from fusegen.planner.products.gemm import GemmPlan
from fusegen.runtime import Kernel, finding
from fusegen.targets import Target, target

B, M, N, K, L = dims("B M N K L")
Fits = Callable[[GemmPlan], bool]


@chain(M=64, N=96, K=264)
def bias_gelu(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    return F.gelu(x @ w.T + bias)


@chain(M=64, N=96, K=264)
def residual(x: f16[M, K], w: f16[K, N], bias: f32[N], r: f16[M, N], s: f32[M, 1]) -> tuple[f16[M, N], f32[M, N]]:
    y = (x @ w + bias) * s
    return F.relu(y) + r, y


@chain(M=64, N=96, K=264)
def norm_swiglu(x: bf16[M, K], gain: bf16[K], w_gate: bf16[K, N], w_up: bf16[K, N]) -> bf16[M, N]:
    h = F.rmsnorm(x, gain)
    return F.silu(h @ w_gate) * (h @ w_up)


@chain(M=64, N=96, K=264)
def norm(x: f16[M, K], w: f16[N, K]) -> tuple[f16[M, N], f32[M, 1]]:
    rrms = F.rsqrt(F.mean(F.square(x)) + 1e-6)
    return (x * rrms) @ w.T, rrms


@chain(B=2, M=60, N=96, L=40, K=72)
def qkv(
    x: f16[B, M, K], wq: f16[K, N], wk: f16[K, L], wv: f16[K, L], bias: f16[N]
) -> tuple[f16[B, M, N], f16[B, M, L], f16[B, M, L]]:
    return x @ wq + bias, x @ wk, x @ wv


@chain(M=64, N=96, K=264)
def turned(x: f16[K, M], w: f16[K, N]) -> f16[M, N]:
    return x.T @ w


@chain(B=3, M=33, N=48, K=72)
def batched(x: f16[B, M, K], w: f16[B, K, N], bias: f16[B, 1, N]) -> f16[B, M, N]:
    return x @ w + bias


@chain(B=2, M=60, N=256, L=512, K=256)
def side_by_side(x: bf16[B, M, K], wq: bf16[B, N, K], wk: bf16[L, K]) -> tuple[bf16[B, M, N], bf16[B, M, L]]:
    return x @ wq.mT, x @ wk.T


@chain(M=64, N=96, L=40, K=72)
def crossed(x: bf16[M, K], w: bf16[K, N], v: bf16[L, K]) -> tuple[bf16[M, N], bf16[M, L]]:
    """Right factors that lie both ways round."""
    return x @ w, x @ v.T


@chain(M=64, N=96, K=264)
def prepared(x: bf16[M, K], r: bf16[M, K], g: bf16[K], s: f32[M, 1], w: bf16[K, N], a: f32) -> bf16[M, N]:
    return F.relu((x + r) * g - s) @ w * a


@chain(M=64, N=96, K=264)
def cast(x: f32[M, K], w: f16[K, N]) -> f16[M, N]:
    return F.cast(x, f16) @ w


@chain(M=40, K=72)
def gram(x: f16[M, K]) -> f32[M, M]:
    return x @ x.T


@chain(M=40, K=72)
def square(x: bf16[M, K], w: bf16[K, K]) -> bf16[M, K]:
    return x + x @ w


@chain(M=64, N=96, K=72)
def positions(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return F.causal(x @ w, 5)


# ---- values [.., M, 1] that meet elements of the left factor, and of its rows' sums


@chain(M=40, N=72, K=104)
def norm_of_scaled(x: bf16[M, K], s: f32[M, 1], gain: bf16[K], w: bf16[K, N]) -> bf16[M, N]:
    return F.rmsnorm(x * s, gain) @ w


@chain(M=40, N=72, K=104)
def over_their_sum(x: bf16[M, K], s: f32[M, 1], w: bf16[K, N]) -> bf16[M, N]:
    t = x + s
    return (t @ w) / (F.sum(t) + 1000.0)


@chain(B=2, M=40, N=72, K=104)
def beside_a_sum(x: f16[B, M, K], s: f32[B, M, 1], w: f16[N, K]) -> f16[B, M, N]:
    return x @ w.T + F.mean(F.square(x + s * 2.0)) - s


@chain(M=40, K=104)
def one_column(x: bf16[M, K], s: f32[M, 1], w: bf16[K, 1]) -> f32[M, 1]:
    return ((x + s) @ w) * s


@chain(N=72, K=104)
def one_row(x: bf16[1, K], gain: f32[K], w: bf16[K, N]) -> bf16[1, N]:
    return (F.relu(x) + gain) @ w


@chain(M=8, N=40, K=72)
def scaled(x: bf16[M, K], s: f32[M, 1], w: bf16[K, N]) -> f32[M, N]:
    return (x * s) @ w


@chain(M=8, N=40, K=72)
def scaled_by_one(x: bf16[M, K], w: bf16[K, N], a: f32) -> f32[M, N]:
    return (x * a) @ w


@chain(M=8, N=40, K=72)
def over_a_sum(x: bf16[M, K], w: bf16[K, N]) -> f32[M, N]:
    return (x / (F.sum(abs(x)) + 1e-3)) @ w


@chain(M=8, N=8, K=8)
def norm_of_nothing(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return F.rmsnorm(x, eps=0.0) @ w


@chain(M=8, N=8, K=8)
def scaled_columns(x: bf16[M, K], w: bf16[K, N], s: f32[N]) -> bf16[M, N]:
    return x @ (w * s)


BY_ROWS: tuple[Chain, ...] = (norm_of_scaled, over_their_sum, beside_a_sum, one_column, one_row)


# ---- f32 as tf32


@chain(M=64, N=96, K=264)
def tf32(x: f32[M, K], w: f32[N, K], bias: f32[N]) -> f32[M, N]:
    return F.gelu(F.matmul(x, w.T, precision="tf32") + bias)


@chain(M=64, N=96, K=264)
def tf32_across(x: f32[M, K], w: f32[K, N], r: bf16[M, N]) -> tuple[f32[M, N], f16[M, N]]:
    y = F.matmul(x, w, precision="tf32")
    return y, y + r


@chain(M=64, N=96, K=264)
def tf32_turned(x: f32[K, M], w: f32[K, N]) -> f32[M, N]:
    return F.matmul(x.T, w, precision="tf32")


@chain(M=64, N=96, K=264)
def tf32_norm_swiglu(x: f32[M, K], gain: f32[K], w_gate: f32[K, N], w_up: f32[K, N]) -> f32[M, N]:
    h = F.rmsnorm(x, gain)
    return F.silu(F.matmul(h, w_gate, precision="tf32")) * F.matmul(h, w_up, precision="tf32")


@chain(B=2, M=60, N=96, L=40, K=72)
def tf32_qkv(x: f32[B, M, K], wq: f32[B, N, K], wk: f32[L, K]) -> tuple[f32[B, M, N], f16[B, M, L]]:
    return F.matmul(x, wq.mT, precision="tf32"), F.matmul(x, wk.T, precision="tf32")


@chain(M=64, N=96, K=264)
def tf32_cast(x: bf16[M, K], g: f16[K], s: f32[M, 1], w: f32[K, N]) -> bf16[M, N]:
    return F.matmul(x * g - s, w, precision="tf32")


TF32: tuple[Chain, ...] = (tf32, tf32_across, tf32_turned, tf32_norm_swiglu, tf32_qkv, tf32_cast)
ALL: tuple[Chain, ...] = (
    bias_gelu, residual, norm_swiglu, norm, qkv, crossed, turned, batched, prepared, cast, gram, square, positions,
    *TF32,
)  # fmt: skip


# ---- what gemm refuses, and a part of what it says


@chain(M=8, N=8, K=8)
def two_lefts(x: f16[M, K], y: f16[M, K], w: f16[K, N]) -> f16[M, N]:
    return x @ w + y @ w


@chain(M=8, N=8, K=8)
def computed_right(x: f16[M, K], w: f16[K, N]) -> f16[M, N]:
    return x @ F.relu(w)


@chain(M=8, N=8, K=8)
def layernorm_before(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return F.layernorm(x) @ w


@chain(M=8, N=8, K=8)
def by_maximum(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return (x / F.max(x)) @ w


@chain(M=8, N=8, K=8, L=8)
def uneven(x: f16[M, K], v: f16[K, N], w: f16[K, N], u: f16[K, L]) -> tuple[f16[M, N], f16[M, L]]:
    return F.silu(x @ v) * (x @ w), x @ u


@chain(M=8, N=8, K=8)
def softmax_behind(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    return F.softmax(x @ w.T)


@chain(M=8, N=8, K=8)
def layernorm_behind(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    return F.layernorm(x @ w.T)


@chain(M=8, N=8, K=8)
def argmax_behind(x: bf16[M, K], w: bf16[N, K]) -> i32[M, 1]:
    return F.argmax(x @ w.T)


@chain(M=8, N=8, K=8)
def topk_behind(x: bf16[M, K], w: bf16[N, K], b: f32[N]) -> tuple[f32[M, 4], i32[M, 4]]:
    return F.topk(F.relu(x @ w.T) + b, 4)


@chain(M=8, N=8, K=8)
def topk_of_softmax_behind(x: bf16[M, K], w: bf16[N, K]) -> tuple[f32[M, 4], i32[M, 4]]:
    return F.topk(F.softmax(x @ w.T), 4)


@chain(M=8, N=8)
def no_product(x: f16[M, N]) -> f16[M, N]:
    return F.relu(x)


BEHIND: tuple[Chain, ...] = (layernorm_behind, argmax_behind, topk_behind, topk_of_softmax_behind)
REFUSED: tuple[tuple[Chain, str], ...] = (
    (two_lefts, "2 left factors"),
    (computed_right, "the right factor of the product at .* is computed"),
    (scaled_columns, r"the right factor of the product at .* is computed .*\n.* write \(x @ w\) \* s"),
    (norm_of_nothing, "the left factor needs sum at .*\n  only a scale .* that is surely finite"),
    (layernorm_before, "the left factor needs sum at .* of its own row before it is multiplied"),
    (by_maximum, "max of f32 at .*: gemm takes sums of f32 along the rows"),
    (uneven, "2 and 1 products each"),
    (softmax_behind, "softmax at .*gemms.py:.* reduces rows of a product, .*\n  write it as two chains"),
    (argmax_behind, "argmax at .*gemms.py:.* chooses columns of a product, .*\n  write it as two chains"),
    (topk_behind, "topk at .*gemms.py:.* chooses columns of a product, .*\n  write it as two chains"),
    (topk_of_softmax_behind, "softmax at .*gemms.py:.* reduces rows of a product, .*\n  write it as two chains"),
    (no_product, "the chain multiplies no matrices"),
)


def tiled(plan: GemmPlan) -> bool:
    """Several warps share slices, and a block has all of K."""
    return plan.tile.warps > 1 and plan.cluster == 1 and plan.tile.bands == 1


FEW = replace(target("cuda:h200"), sms=2)  # where blocks take several tiles of a small product


def persistent(plan: GemmPlan) -> bool:
    """Once around the ring at a time, with copies among the products."""
    return plan.tile.persistent


def persistent_with_short_slices(plan: GemmPlan) -> bool:
    """The same with slices half as deep, for which every GPU has room."""
    return plan.tile.persistent and plan.tile.k == 32


def of_96(plan: GemmPlan) -> bool:
    """Rows that are no power of 2."""
    return plan.tile.rows == 96 and plan.cluster == 1


def of_192(plan: GemmPlan) -> bool:
    return plan.tile.rows == 192 and plan.cluster == 1


def streamed(plan: GemmPlan) -> bool:
    """Teams of one warp share K."""
    return plan.tile.slice_k > 1 and plan.cluster == 1 and plan.tile.stages > 2


def clustered(plan: GemmPlan) -> bool:
    return plan.cluster == 2 and plan.tile.slice_k > 1


def clustered_tiles(plan: GemmPlan) -> bool:
    return plan.cluster == 2 and plan.tile.slice_k == 1


def banded(plan: GemmPlan) -> bool:
    """Sums that go through shared memory in parts."""
    return plan.tile.bands > 1


def streamed_waves(plan: GemmPlan) -> bool:
    """The same where slices come through registers."""
    return plan.tile.slice_k == 4 and not plan.copies


def any_plan(plan: GemmPlan) -> bool:
    return True


def gemm_plans(graph: Graph, on: str | Target, layout: Layout = CONTIGUOUS) -> list[GemmPlan]:
    """The gemm candidates for that target, or the one of that name, in order."""
    chosen = target(on) if isinstance(on, str) else on
    return [p for p in candidates(graph, chosen, layout).plans if isinstance(p, GemmPlan)]


def plan_for(
    spec: Chain, on: str | Target, fits: Fits = any_plan, layout: Layout = CONTIGUOUS, **sizes: int
) -> GemmPlan:
    """The first candidate that fits; under another layout than the usual one the first of all if none does."""
    plans = gemm_plans(spec.at(**sizes).graph, on, layout)
    fitting = [p for p in plans if fits(p)] or (plans[:1] if layout != CONTIGUOUS else [])
    assert fitting, f"no candidate for {spec.name} at {sizes} on {on} that {fits.__name__} fits"
    return fitting[0]


def kernel(spec: Chain, on: str | Target, fits: Fits = any_plan, **sizes: int) -> Kernel:
    """The first candidate that fits, in the emulator, in every layout."""

    def variant(layout: Layout) -> tuple[Source, None]:
        return render(plan_for(spec, on, fits, layout, **sizes)), None

    chosen = target(on) if isinstance(on, str) else on
    return Kernel(*variant(Layout()), finding.find(chosen, "emulator"), variant)
