"""Products on Hopper's tensor cores: what the rule plans and refuses, what the kernels compute, what a launch maps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fusegen import Chain, bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.compiling import compile_source
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError, RequestError
from fusegen.language.graph import Graph
from fusegen.language.types import size_of, tf32
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout, Param, Source, Summed
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.products.wgmma_rule import wgmma
from fusegen.reporting.explaining import products
from fusegen.runtime import Kernel, arguments
from fusegen.runtime.arrays import ArrayView, view
from fusegen.runtime.devices import Mapped
from fusegen.runtime.finding import find
from fusegen.runtime.gpu import MAP_ALIGNMENT, MAP_BYTES, Arguments
from fusegen.targets import H200, TARGETS, Target
from fusegen.targets.cuda import ARCHES
from fusegen.validation import validate
from tests import gemms
from tests.tools import needs_check

B, M, N, K, L = dims("B M N K L")


@chain(M=300, N=264, K=136)
def bias_gelu(x: bf16[M, K], w: bf16[K, N], bias: bf16[N]) -> bf16[M, N]:
    return F.gelu(x @ w + bias)


@chain(M=200, N=520, K=72)
def transposed(x: f16[M, K], w: f16[N, K], bias: f16[N]) -> f16[M, N]:
    return F.relu(x @ w.T + bias)


@chain(M=300, N=200, K=136)
def gated(x: bf16[M, K], w_gate: bf16[K, N], w_up: bf16[K, N]) -> bf16[M, N]:
    return F.silu(x @ w_gate) * (x @ w_up)


@chain(M=296, N=264, K=200)
def mixed(
    x: f16[K, M], w: f16[N, K], scale: f32[M, 1], bias: f32[N], residual: f16[M, N], a: f32
) -> tuple[f16[M, N], f32[M, N]]:
    y = (x.T @ w.T) * scale + bias
    return F.relu(y) + residual * a, y


@chain(B=3, M=130, N=136, K=72)
def batched(x: bf16[B, M, K], w: bf16[B, K, N]) -> bf16[B, M, N]:
    return x @ w * 0.5


@chain(M=140, N=70, K=64)
def narrow(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    """Rows of 140 bytes, which tensor copies can't store."""
    return x @ w.T


@chain(M=260, N=264, K=136)
def normed(x: bf16[M, K], gain: bf16[K], w: bf16[K, N]) -> bf16[M, N]:
    return F.rmsnorm(x, gain, eps=1e-6) @ w


@chain(M=140, N=136, K=200)
def normed_gated(x: f16[M, K], w_gate: f16[N, K], w_up: f16[N, K]) -> f16[M, N]:
    h = F.rmsnorm(x, eps=1e-6)
    return F.silu(h @ w_gate.T) * (h @ w_up.T)


@chain(B=2, M=130, N=72, K=72)
def activated(x: bf16[B, M, K], bias: f32[K], w: bf16[B, K, N]) -> bf16[B, M, N]:
    """What is zero beyond the last slice of x is not zero here."""
    return F.exp(x + bias) @ w


@chain(M=130, N=72, K=72)
def rooted(x: bf16[M, K], gain: bf16[K], w: bf16[K, N]) -> bf16[M, N]:
    """A factor and a sum that what lies beyond the last slice would change."""
    square = F.exp(x) * F.exp(x)
    return (F.exp(x) * gain) @ w * F.rsqrt(F.sum(square))


@chain(M=140, N=264, L=72, K=136)
def sides(
    x: bf16[M, K], w: bf16[N, K], v: bf16[L, K], u: bf16[L, K], bias: bf16[N], shift: f32[L], scale: f32[M, 1],
    residual: bf16[M, L],
) -> tuple[bf16[M, N], bf16[M, L], f32[M, L]]:  # fmt: skip
    """Products of two widths, each with an epilogue of its own."""
    return F.gelu(x @ w.T + bias), x @ v.T + residual, (x @ u.T) * scale + shift


@chain(M=140, N=136, L=72, K=72)
def paired(
    x: f16[M, K], a: f16[K, N], b: f16[K, N], c: f16[K, L], d: f16[K, L]
) -> tuple[f16[M, N], f16[M, L]]:  # fmt: skip
    return F.silu(x @ a) * (x @ b), x @ c - x @ d


@chain(M=140, N=136, L=66, K=136)
def normed_sides(x: bf16[M, K], gain: bf16[K], w: bf16[N, K], v: bf16[L, K]) -> tuple[bf16[M, N], bf16[M, L]]:
    h = F.rmsnorm(x, gain, eps=1e-6)
    return h @ w.T, h @ v.T


@chain(B=2, M=130, N=136, L=72, K=72)
def batched_sides(x: bf16[B, M, K], w: bf16[B, K, N], v: bf16[K, L]) -> tuple[bf16[B, M, N], bf16[B, M, L]]:
    """Weights of each product, beside weights of all."""
    return x @ w, x @ v


@chain(M=140, N=264, L=72, K=136)
def askew_sides(
    x: bf16[M, K], w: bf16[N, K], v: bf16[K, L], u: bf16[L, K]
) -> tuple[bf16[M, N], bf16[M, L], bf16[M, L]]:  # fmt: skip
    """Right factors that lie along K, beside one that lies across it."""
    return x @ w.T, x @ v, x @ u.T


@chain(B=2, M=130, N=72, K=72)
def biased(x: f16[B, M, K], gain: f32[K], bias: f16[K], w: f16[B, K, N]) -> f16[B, M, N]:
    """Vectors of two types."""
    return (x * gain + bias) @ w


@chain(M=130, N=72, K=136)
def squared(x: bf16[M, K], gain: bf16[K], w: bf16[K, N]) -> bf16[M, N]:
    """The scale of what has been scaled."""
    h = x * gain
    return h @ w * F.rsqrt(F.sum(F.square(h)))


@chain(M=300, N=264, K=100)
def by_tf32(x: f32[M, K], w: f32[N, K], bias: f32[N]) -> tuple[f32[M, N], bf16[M, N]]:
    y = F.matmul(x, w.T, precision="tf32") + bias
    return y, F.relu(y)


@chain(B=2, M=130, N=136, L=72, K=36)
def tf32_sides(x: f32[B, M, K], w: f32[B, N, K], v: f32[L, K]) -> tuple[f32[B, M, N], f16[B, M, L]]:
    return F.matmul(x, w.mT, precision="tf32"), F.matmul(x, v.T, precision="tf32")


@chain(M=200, N=136, K=68)
def tf32_gated(x: f32[M, K], w_gate: f32[N, K], w_up: f32[N, K]) -> f32[M, N]:
    return F.silu(F.matmul(x, w_gate.T, precision="tf32")) * F.matmul(x, w_up.T, precision="tf32")


TF32 = (by_tf32, tf32_sides, tf32_gated)


@chain(M=130, N=72, K=136)
def normed_bias(x: bf16[M, K], gain: bf16[K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    """A vector that waits in registers beside the sums."""
    return F.gelu(F.rmsnorm(x, gain, eps=1e-6) @ w.T + bias)


@chain(M=130, N=264, K=136)
def gainless(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    """Rows are summed and multiplied as they are."""
    return F.rmsnorm(x, eps=1e-6) @ w.T


PREPARED = (normed, normed_sides, normed_gated, normed_bias, gainless, activated, rooted, biased, squared)
SIDES = (askew_sides, sides, paired, normed_sides, batched_sides)
CHAINS = (*SIDES, *TF32, bias_gelu, transposed, gated, mixed, batched, narrow, normed, normed_gated, activated)


def plans(graph: Graph, layout: Layout = CONTIGUOUS, target: Target = H200) -> list[WgmmaPlan]:
    return list(wgmma(graph, target, layout))


def plan_of(spec: Chain, schedule: str = "pingpong", cluster: int = 1) -> WgmmaPlan:
    return next(p for p in plans(spec.graph) if (p.tile.schedule, p.tile.cluster) == (schedule, cluster))


def kernel_of(plan: WgmmaPlan, edit: Callable[[str], str] = str) -> Kernel:
    """In the checking emulator; for other layouts the same tile, where this rule takes them."""

    def variant(layout: Layout) -> tuple[Source, None]:
        found = candidates(plan.graph, H200, layout).need()
        same = [p for p in found if isinstance(p, WgmmaPlan) and p.tile == plan.tile]
        return render((same or found)[0]), None

    source = render(plan)
    return Kernel(replace(source, text=edit(source.text)), None, find(H200, "emulator", check=True), variant)


# ---------------------------------------------------------------- what is planned


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if not t.wgmma], ids=str)
def test_only_hopper_has_it(target: Target) -> None:
    with pytest.raises(NoMatch, match=f"{target.arch} has no wgmma; sm_90a has"):
        plans(bias_gelu.graph, target=target)


def test_code_for_every_compute_capability_9_has_none() -> None:
    assert not ARCHES["sm_90"].wgmma
    assert not ARCHES["sm_100a"].wgmma


@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.graph.name)
def test_tiles_fit_and_are_told_apart(spec: Chain) -> None:
    found = plans(spec.graph)
    assert len({p.configuration for p in found}) == len(found) >= 4
    for plan in found:
        assert plan.shared_bytes <= H200.shared_bytes
        assert plan.tile.barriers_at % 1024 == 0
        assert plan.threads == 384


def test_rows_and_tiles_are_counted_in_32_bits() -> None:
    assert plan_of(bias_gelu).max_rows == 2**31 - 2**12  # rows
    assert plan_of(bias_gelu.at(N=2**28)).max_rows == (2**31 - 1) // 2**21 * 128  # tiles
    assert plan_of(batched).max_rows == (2**31 - 1) // 2  # products of one row


def test_blocks_stay_for_all_tiles() -> None:
    plan = plan_of(bias_gelu)
    assert [plan.blocks(rows) for rows in (1, 128, 129, 128 * 132)] == [3, 3, 6, 132]
    assert plan.blocks(128 * 50) == 75  # 150 tiles take two rounds, of 132 blocks or of these
    pairs = plan_of(bias_gelu, "cooperative", cluster=2)
    assert [pairs.blocks(rows) for rows in (1, 256, 257, 256 * 132)] == [4, 4, 8, 132]
    assert plan_of(batched).blocks(3, 130) == 3 * 2 * 2


@chain(M=64, N=64, K=64)
def computed(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return x @ F.relu(w)


@chain(M=64, N=64, K=64)
def added(x: bf16[M, K], y: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return (x + y) @ w


@chain(M=64, N=64, K=64)
def shifted(x: bf16[M, K], row: bf16[M, 1], w: bf16[K, N]) -> bf16[M, N]:
    return F.relu(x + row) @ w


@chain(M=64, N=64, K=64)
def topped(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return x @ w + F.max(x)


@chain(M=72, N=64, K=64)
def crowded(x: bf16[M, K], a: f32[K], b: f32[K], c: f32[K], w: bf16[K, N]) -> bf16[M, N]:
    """Slices of vectors for which rings of large tiles leave no room."""
    return (x * a + b * c) @ w


@chain(M=64, K=64)
def residual(x: bf16[M, K], gain: bf16[K], w: bf16[K, K]) -> bf16[M, K]:
    return (x * gain) @ w + x


@chain(M=64, N=64, K=64)
def tf32_across(x: f32[M, K], w: f32[K, N]) -> f32[M, N]:
    return F.matmul(x, w, precision="tf32")


@chain(M=64, N=64, K=64)
def tf32_normed(x: f32[M, K], w: f32[N, K]) -> f32[M, N]:
    return F.matmul(F.rmsnorm(x), w.T, precision="tf32")


@chain(M=64, N=64, K=64)
def three(x: f16[M, K], a: f16[K, N], b: f16[K, N], c: f16[K, N]) -> f16[M, N]:
    return (x @ a) * (x @ b) * (x @ c)


@chain(M=64, N=64, K=64, L=32)
def uneven(x: f16[M, K], a: f16[K, N], b: f16[K, N], c: f16[K, L]) -> tuple[f16[M, N], f16[M, L]]:
    return (x @ a) * (x @ b), x @ c


@chain(M=64, N=64, K=64)
def askew(x: bf16[M, K], w_gate: bf16[K, N], w_up: bf16[N, K]) -> bf16[M, N]:
    return F.silu(x @ w_gate) * (x @ w_up.T)


@chain(M=64, N=64, K=64)
def normed_askew(x: bf16[M, K], w: bf16[K, N], v: bf16[N, K]) -> tuple[bf16[M, N], bf16[M, N]]:
    h = F.rmsnorm(x)
    return h @ w, h @ v.T


@chain(M=64, K=64)
def gram(x: f16[M, K]) -> f32[M, M]:
    return x @ x.T


@pytest.mark.parametrize(
    ("rows", "rule", "schedule"),
    [(8, "gemm", ""), (64, "gemm", ""), (512, "wgmma", "cooperative"), (4096, "wgmma", "cooperative")],
)
def test_f32_streams_where_rows_are_few_and_shares_tiles_where_they_are_many(
    rows: int, rule: str, schedule: str
) -> None:
    """4096 x 4096 on an H200: of 512 rows tiles took 54 us ping-pong and 90 cooperative, of 4096 rows 395 and 333."""
    best = candidates(by_tf32.at(M=rows, N=4096, K=4096).graph, H200).plans[0]
    assert best.rule == rule
    assert not isinstance(best, WgmmaPlan) or best.tile.schedule == schedule


REFUSED = [
    (computed, {}, "right factor of the product at .* is computed"),
    (added, {}, "is computed from x, y; wgmma prepares one matrix of its own type"),
    (shifted, {}, "left factor needs .*, one value a row, before it is multiplied"),
    (topped, {}, "max of f32 at .*: wgmma takes sums of f32 along the rows alone"),
    (residual, {}, "x is used in two ways"),
    (tf32_across, {}, "w is of f32 and lies across the summed axis; wgmma takes f32 along it only"),
    (tf32_normed, {}, "the left factor is computed from x of f32; wgmma prepares halves"),
    (by_tf32, {"K": 98}, "x has lines of 98 elements; tensor copies need multiples of 16 bytes"),
    (three, {}, "3 products are used together; wgmma has registers for the sums of 2"),
    (uneven, {}, "the outputs need 2 and 1 products each"),
    (sides, {"L": 33}, "rows of 33 columns; a thread of wgmma holds pairs"),
    (askew, {}, "w_gate and w_up are multiplied side by side, and one lies along the summed axis and the other"),
    (normed_askew, {}, "w and v are multiplied side by side, and one lies along the summed axis and the other"),
    (gram, {}, "x is used in two ways"),
    (transposed, {"N": 65}, "rows of 65 columns; a thread of wgmma holds pairs"),
    (bias_gelu, {"K": 68}, "x has lines of 68 elements; tensor copies need multiples of 16 bytes"),
    (bias_gelu, {"N": 68}, "w has lines of 68 elements"),
]


@pytest.mark.parametrize(("spec", "sizes", "reason"), REFUSED)
def test_refusals_are_sentences(spec: Chain, sizes: dict[str, int], reason: str) -> None:
    with pytest.raises(NoMatch, match=reason):
        plans(spec.at(**sizes).graph)


def test_a_refusal_names_the_first_value_that_stands_in_the_way() -> None:
    """Whatever the order of a set of nodes, which is another one in every graph."""
    for rows in range(8, 40):
        with pytest.raises(NoMatch, match="left factor needs sum at"):
            plans(gemms.layernorm_before.at(M=rows).graph)


def test_rings_are_as_long_as_there_is_room_for() -> None:
    assert [p.tile.stages for p in plans(crowded.graph) if p.tile.cols == 64] == [7]
    assert not [p for p in plans(crowded.graph) if p.tile.cols == 256]
    small = replace(H200, shared_bytes=64 << 10)
    with pytest.raises(NoMatch, match="take more than the 65536 bytes of shared memory of a block"):
        plans(crowded.graph, target=small)


def test_unaligned_factors_are_the_general_rules() -> None:
    with pytest.raises(NoMatch, match="w has an address or a stride that is no multiple of 16 bytes"):
        plans(bias_gelu.graph, Layout(unaligned=frozenset({"w"})))
    assert plans(bias_gelu.graph, Layout(unaligned=frozenset({"bias", "out"})))


def test_f32_turned_across_the_depth_is_the_general_rules() -> None:
    with pytest.raises(NoMatch, match="x is of f32 and lies across the summed axis"):
        plans(by_tf32.graph, Layout(transposed=frozenset({"x"})))
    assert plans(tf32_across.graph, Layout(transposed=frozenset({"w"})))


def test_factors_turned_one_by_one_are_the_general_rules() -> None:
    with pytest.raises(NoMatch, match="w_gate and w_up are multiplied side by side"):
        plans(gated.graph, Layout(transposed=frozenset({"w_up"})))
    assert plans(gated.graph, Layout(transposed=frozenset({"w_gate", "w_up"})))


@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.graph.name)
def test_sums_are_used_behind_their_fence(spec: Chain) -> None:
    """wgmma writes registers until it is waited for, which nothing else in the text says of the sums."""
    for made in {plan.tile.schedule: plan for plan in plans(spec.graph)}.values():
        _, behind = render(made).text.split('asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n')
        assert "fence_sums(sums[" in behind.splitlines()[1 if made.tile.parts > 1 else 0]


# ---------------------------------------------------------------- what the kernels compute


@needs_check
@pytest.mark.pairwise("spec", "schedule", "cluster")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("spec", [bias_gelu, transposed, mixed, batched, *TF32], ids=lambda spec: spec.graph.name)
def test_every_tile_is_right(spec: Chain, schedule: str, cluster: int) -> None:
    plan = next(
        (p for p in plans(spec.graph) if (p.tile.schedule, p.tile.cluster) == (schedule, cluster)),
        None,
    )
    assert plan is not None
    assert validate(kernel_of(plan), quick=True).ok


@needs_check
@pytest.mark.pairwise("spec", "schedule", "cluster")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("spec", SIDES, ids=lambda spec: spec.graph.name)
def test_products_of_several_widths_lie_side_by_side(spec: Chain, schedule: str, cluster: int) -> None:
    found = [p for p in plans(spec.graph) if (p.tile.schedule, p.tile.cluster) == (schedule, cluster)]
    if not found:  # 32 columns of a factor whose lines are 64, or nobody to multiply while a group prepares
        assert (spec, schedule, cluster) == (paired, "pingpong", 2) or (spec, schedule) == (normed_sides, "pingpong")
        return
    plan = found[0]
    assert len(plan.output_groups) == len(plan.graph.outputs)
    assert validate(kernel_of(plan), rows=(plan.graph.sizes["M"],), cases=("rows", "again", "apart")).ok


@needs_check
def test_several_widths_in_any_layout() -> None:
    assert validate(kernel_of(plan_of(sides)), cases=("layout",)).ok


@needs_check
@pytest.mark.pairwise("old", "schedule", "cluster")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("at.group = across < {first} ? 0 :", "at.group = across < {first} + 1 ? 0 :"),
        ("? 0 : at.group == 1 ? {first} :", "? 0 : at.group == 1 ? 0 :"),
        ("if (at.group == 1) {{", "if (at.group == 2) {{"),
    ],
)
def test_tiles_of_the_wrong_output_group_are_caught(schedule: str, cluster: int, old: str, new: str) -> None:
    plan = plan_of(sides, schedule, cluster)

    def edit(text: str) -> str:
        first = plan.output_groups[1].first_tile
        assert old.format(first=first) in text
        return text.replace(old.format(first=first), new.format(first=first))

    kernel = kernel_of(plan, edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, rows=(140,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize(("schedule", "cluster"), [("pingpong", 1), ("cooperative", 1), ("cooperative", 2)])
def test_two_products_share_a_tile(schedule: str, cluster: int) -> None:
    assert validate(kernel_of(plan_of(gated, schedule, cluster)), quick=True).ok


@needs_check
@pytest.mark.by_values("spec", "cluster")  # chains meet clusters in test_every_tile_is_right
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    "spec", [normed, normed_gated, normed_bias, activated, rooted], ids=lambda spec: spec.graph.name
)
def test_left_factors_are_prepared_in_registers(spec: Chain, cluster: int) -> None:
    plan = plan_of(spec, "cooperative", cluster)
    assert plan.prologue
    assert validate(kernel_of(plan), quick=True).ok


@needs_check
def test_prepared_factors_whose_type_nothing_else_has() -> None:
    @chain(M=40, N=72, K=64)
    def widened(x: f16[M, K], w: f16[K, N]) -> f32[M, N]:
        return F.relu(x) @ w

    assert validate(kernel_of(plan_of(widened, "cooperative")), rows=(40,), cases=("rows",)).ok


@needs_check
def test_prepared_factors_in_any_layout() -> None:
    assert validate(kernel_of(plan_of(normed, "cooperative")), cases=("layout",)).ok


@needs_check
@pytest.mark.parametrize(("spec", "depth"), [(normed, 520), (biased, 520), (biased, 72)])
def test_slices_of_vectors_come_around_the_ring(spec: Chain, depth: int) -> None:
    """Several tiles for a block, and more slices than the ring has places or fewer."""
    graph = spec.at(M=390, N=264, K=depth).graph
    plan = next(p for p in plans(graph, target=replace(H200, sms=2)) if p.cluster == 1)
    assert plan.prologue
    assert validate(kernel_of(plan), rows=(390,), cases=("rows",)).ok


def test_pairs_are_scaled_at_once_where_that_rounds_alike() -> None:
    """By a vector of the matrix's own type, whose product f32 holds exactly; a statistic may still need the product."""
    found = {spec.graph.name: plan_of(spec, "cooperative").prologue for spec in (normed, biased, activated, squared)}
    assert {name: bool(each and each.scale) for name, each in found.items()} == {
        "normed": True, "biased": False, "activated": False, "squared": True,
    }  # fmt: skip
    bodies = {name: [s.name for s in each.body] for name, each in found.items() if each}
    assert bodies["squared"] == ["h", "square"]
    assert bodies["normed"] == ["square"]


@needs_check
def test_statistics_of_what_is_scaled() -> None:
    assert validate(kernel_of(plan_of(squared, "cooperative")), quick=True).ok


@needs_check
def test_rows_that_tensor_copies_cannot_store_go_by_pairs() -> None:
    plan = plan_of(narrow)
    assert not plan.output_groups[0].boxes
    assert validate(kernel_of(plan), quick=True).ok


@needs_check
def test_operands_may_have_the_kernels_own_names() -> None:
    @chain(M=40, N=72, K=64)
    def named(left: bf16[M, K], right: bf16[K, N], shift: f32[N], stage: f32[M, 1], at: bf16[M, N]) -> bf16[M, N]:
        return (left @ right) * stage + shift + at

    assert validate(kernel_of(plan_of(named)), rows=(40,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize("spec", [bias_gelu, mixed], ids=lambda spec: spec.graph.name)
def test_any_layout_is_right(spec: Chain) -> None:
    assert validate(kernel_of(plan_of(spec)), cases=("layout",)).ok


@needs_check
def test_many_tiles_on_few_blocks() -> None:
    """The ring and the turns go on from tile to tile; 7 tiles for each of two blocks."""
    few = replace(H200, sms=2)
    plan = next(iter(plans(transposed.at(M=850, N=240, K=200).graph, target=few)))
    assert plan.blocks(850) == 2
    assert validate(kernel_of(plan), rows=(850,), cases=("rows",)).ok


# ---------------------------------------------------------------- where tiles are few


@chain(B=2, M=140, N=200, K=136)
def two_skips(
    x: bf16[B, M, K], w: bf16[B, K, N], skip: bf16[B, M, N], scale: f32[M, N], more: f16[B, M, N]
) -> bf16[B, M, N]:  # fmt: skip
    """Operands that tensor copies bring behind the factors, beside one that they can't."""
    return F.relu(x @ w + skip) * scale + more


@chain(M=140, N=200, K=136)
def gated_skip(x: f16[M, K], w_gate: f16[N, K], w_up: f16[N, K], skip: f16[M, N]) -> f16[M, N]:
    return F.silu(x @ w_gate.T) * (x @ w_up.T) + skip


@chain(M=296, N=264, K=200)
def skipped(
    x: f16[M, K], w: f16[N, K], scale: f32[M, 1], bias: f32[N], residual: f16[M, N], a: f32
) -> tuple[f16[M, N], f32[M, N]]:
    y = (x @ w.T) * scale + bias
    return F.relu(y) + residual * a, y


WIDTHS = ("cooperative 128x192 4", "cooperative 128x160 5", "cooperative 128x128 6", "cooperative 128x64 8")
COLS, PARTS = ("128x128 6", "128x64 8"), ("split_k=2", "split_k=4")
SHARED = tuple(f"{cols} {parts}" for cols in COLS for parts in PARTS)


def named(spec: Chain, configuration: str) -> WgmmaPlan | None:
    return next((p for p in plans(spec.graph) if p.configuration == f"wgmma {configuration}"), None)


def shared(spec: Chain, configuration: str, **sizes: int) -> WgmmaPlan:
    """At a K that has slices for four blocks, the last one of which is not whole."""
    cols, _, split_k = configuration.split()
    found = plans(spec.at(**{"M": 140, "N": 136, "K": 1040} | sizes).graph)
    return next(p for p in found if f"x{cols.split('x')[1]} " in p.configuration and p.configuration.endswith(split_k))


@needs_check
@pytest.mark.by_values("spec", "configuration")  # a width is a number of boxes, whatever is made of them
@pytest.mark.parametrize("configuration", WIDTHS)
@pytest.mark.parametrize(
    "spec", [bias_gelu, mixed, gated_skip, two_skips, by_tf32, sides, normed], ids=lambda s: s.graph.name
)
def test_every_width_is_right(spec: Chain, configuration: str) -> None:
    rows = f"{plans(spec.graph)[-1].tile.rows}x"
    plan = named(spec, configuration.replace("128x", rows, 1))
    if plan is None:  # a factor whose lines are 64 columns
        assert configuration.endswith("128x160 5")
        assert not all(right.along for right in plans(spec.graph)[0].rights)
        return
    assert validate(kernel_of(plan), rows=(plan.graph.sizes["M"],), cases=("rows", "apart")).ok


@needs_check
@pytest.mark.pairwise("spec", "cols", "parts")
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("spec", [skipped, batched, by_tf32, normed], ids=lambda s: s.graph.name)
def test_blocks_that_share_a_tile_are_right(spec: Chain, cols: str, parts: str) -> None:
    depth = 1040 if parts == PARTS[1] else 528  # two slices for each block
    plan = shared(spec, f"{cols} {parts}", M=76, K=depth)
    assert plan.cluster == plan.tile.split_k
    assert plan.summed == Summed(plan.tile.split_k, plan.steps * plan.line)
    assert validate(kernel_of(plan), rows=(76,), cases=("rows", "again", "apart")).ok


@needs_check
@pytest.mark.parametrize("spec", [gated_skip, sides, normed_gated, rooted], ids=lambda s: s.graph.name)
def test_what_shares_a_tile_is_shared_as_well(spec: Chain) -> None:
    assert validate(kernel_of(shared(spec, SHARED[1])), rows=(140,), cases=("rows",)).ok


def of_two_blocks(spec: Chain, width: str) -> WgmmaPlan:
    """Of two blocks, each of which goes over several tiles of few columns."""
    found = plans(spec.at(M=140, N=232, K=136).graph, target=replace(H200, sms=2))
    return next(p for p in found if f"80x{width}" in p.configuration and p.tile.split_k == 1)


ODD = [(transposed, "64 8"), (transposed, "192 4"), (normed, "64 8"), (normed, "192 4")]  # one box, and three


@needs_check
@pytest.mark.parametrize(("spec", "width"), ODD)
def test_an_odd_number_of_boxes_leaves_no_buffer_in_use(spec: Chain, width: str) -> None:
    plan = of_two_blocks(spec, width)
    assert plan.uneven_boxes
    assert validate(kernel_of(plan), rows=(140,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize(("spec", "width"), ODD[:3])
def test_a_buffer_in_use_is_caught(spec: Chain, width: str) -> None:
    def edit(text: str) -> str:
        found = [line for line in text.splitlines() if "wait_stores<0>();  // of an odd" in line]
        assert len(found) == 1
        return text.replace(found[0], "")

    assert not validate(kernel_of(of_two_blocks(spec, width), edit), rows=(140,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize("depth", [64, 136, 200, 520])
def test_pairs_are_asked_for_ahead_where_tiles_are_narrow(depth: int) -> None:
    """Of one slice, of an odd number, of several tiles for a block; of wide tiles one at a time."""
    found = plans(normed.at(M=140, N=232, K=depth).graph, target=replace(H200, sms=2))
    assert {p.pairs_ahead for p in found if p.tile.cols == 256} == {1}
    plan = next(p for p in found if p.tile.cols == 128 and p.tile.split_k == 1)
    assert plan.pairs_ahead == (2 if depth > 64 else 1)
    assert validate(kernel_of(plan), rows=(140,), cases=("rows",)).ok


def test_clusters_share_lines_that_start_between_sectors() -> None:
    """Where tiles are few, too: K = 1000 is 2000 bytes, no multiple of 32."""

    def clusters(depth: int) -> set[tuple[int, int]]:
        found = plans(transposed.at(M=512, N=4096, K=depth).graph)
        return {(p.tile.cols, p.tile.cluster) for p in found if p.tile.schedule == "cooperative" and p.tile.cols < 256}

    assert clusters(1000) == {(cols, cluster) for cols in (64, 128, 160, 192) for cluster in (1, 2)}
    assert clusters(1024) == {(cols, 1) for cols in (64, 128, 160, 192)}
    costs = {p.configuration: p.cost.time_us for p in plans(transposed.at(M=4096, N=4096, K=4104).graph)}
    assert costs["wgmma cooperative 128x256 4 cluster=2"] < 0.8 * costs["wgmma cooperative 128x256 4"]


@needs_check
@pytest.mark.parametrize("spec", [skipped, normed], ids=lambda s: s.graph.name)
def test_few_tiles_in_clusters_are_right(spec: Chain) -> None:
    sized = spec.at(M=300, N=72, K=136)
    plan = next(p for p in plans(sized.graph) if p.tile.cluster == 2 and p.tile.cols == 128 and p.tile.rows < 128)
    assert validate(kernel_of(plan), rows=(300, 130), cases=("rows",)).ok


@needs_check
def test_few_tiles_in_any_layout() -> None:
    assert validate(kernel_of(shared(skipped, SHARED[0])), quick=True).ok
    assert validate(kernel_of(shared(skipped, SHARED[2])), cases=("layout",)).ok


def test_parts_of_tiles_are_told_from_tiles() -> None:
    plan = shared(skipped, SHARED[1])
    assert products(plan)[-1] == "16 parts of 4 tiles in 0.1 waves, 12% full"


def test_rows_that_may_lie_askew_are_summed_by_one_block() -> None:
    assert not [p for p in plans(mixed.at(M=128, N=1024, K=4096).graph) if p.tile.split_k > 1]


def test_blocks_share_tiles_where_all_have_room_at_once() -> None:
    def found(rows: int, cols: int, depth: int) -> set[tuple[int, int]]:
        sized = transposed.at(M=rows, N=cols, K=depth)
        return {(p.tile.cols, p.tile.split_k) for p in plans(sized.graph) if p.tile.split_k > 1}

    assert found(128, 1024, 4096) == {(128, 2), (128, 4), (64, 2), (64, 4)}
    assert found(128, 4096, 4096) == {(128, 2), (64, 2)}  # 32 tiles of 4 blocks: 120 SMs have room for those
    assert found(512, 4096, 4096) == set()
    assert found(128, 1024, 512) == {(128, 2), (64, 2)}  # of 8 slices
    assert {p.tile.cols for p in plans(transposed.at(M=16384, N=4096, K=4096).graph)} == {128, 256}


def test_tiles_have_rows_alike() -> None:
    """As few are beyond the last one as 16 rows of a box allow."""

    def rows(count: int) -> int:
        return min(p.tile.rows for p in plans(transposed.at(M=count, N=1024, K=1024).graph))

    assert [rows(n) for n in (64, 65, 96, 128, 129, 200, 333, 1000)] == [128, 80, 96, 128, 80, 112, 112, 128]


def test_operands_of_whole_rows_come_by_tensor_copies() -> None:
    plan = named(two_skips, "cooperative 80x128 6")
    assert plan is not None
    assert [load.access.tensor for load in plan.output_groups[0].brought] == ["skip", "more"]
    assert [load.access.name for load in plan.output_groups[0].loads if load.transport == "plain"] == ["scale"]
    assert (plan.brought, plan_of(two_skips).brought) == (2, 0)  # ping-pong they would hold up the ring
    assert not plan_of(sides, "cooperative").brought  # a tile of the other output group has none
    unaligned = next(p for p in plans(two_skips.graph, Layout(unaligned=frozenset({"skip"}))) if p.brought)
    assert [load.access.tensor for load in unaligned.output_groups[0].brought] == ["more"]


def test_boxes_are_as_wide_as_what_a_block_finishes() -> None:
    def box(spec: Chain, configuration: str) -> tuple[tuple[int, ...], int]:
        (found,) = (p for p in shared(spec, configuration).params if p.kind == "map" and p.box[0] == 16)
        return found.box, found.swizzle

    assert box(transposed, SHARED[0]) == ((16, 64), 128)
    assert box(transposed, SHARED[1]) == ((16, 32), 64)
    assert box(transposed, SHARED[3]) == ((16, 16), 32)


BROKEN_FEW = [
    (skipped, "__cluster_barrier_arrive();  // all", "__cluster_barrier_arrive_relaxed();  // all"),
    (skipped, "wait_for_all(summed + 8 * own_warp, 0);", ""),
    (skipped, "start_barrier(summed + 8 * warp, 4)", "start_barrier(summed + 8 * warp, 3)"),
    (skipped, "exchange + rank * (8 * 32 * 4), block", "exchange + block * (8 * 32 * 4), rank"),
    (skipped, "__syncwarp();  // of all lanes", ""),
    (skipped, "(rank * steps + step) * tile_k", "step * tile_k"),
    (skipped, "at.col0 + rank * 32;", "at.col0;"),
    (skipped, "wait_at(full + 8 * stage, parity);\n    residual_stage", "residual_stage"),
    (skipped, "n8 ^ lane / 8", "n8 ^ lane / 4"),
    (skipped, "at.col0 + rank * 32, at.row0", "at.col0, at.row0"),
    (skipped, "= {};\n  }\n  asm volatile", ";\n  }\n  asm volatile"),
    (skipped, "lane == 0 && inside", "lane == 0"),
    (normed, "rows_there[32] = sum_of_squares_all[1];", "rows_there[32] = sum_of_squares_all[0];"),
    (normed, "sum_of_squares_all[0] = 0.0f;", ""),
]


@needs_check
@pytest.mark.parametrize(("spec", "old", "new"), BROKEN_FEW)
def test_broken_kernels_for_few_tiles_are_caught(spec: Chain, old: str, new: str) -> None:
    plan = shared(spec, SHARED[1])

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(plan, edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, rows=(140,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize("spec", [skipped, normed], ids=lambda s: s.graph.name)
def test_unbroken_kernels_for_few_tiles_are_not(spec: Chain) -> None:
    assert validate(kernel_of(shared(spec, SHARED[1])), rows=(140,), cases=("rows",)).ok


# Each would be seen on a GPU as wrong numbers, sometimes, or as a launch that does not end.
BROKEN = [
    ("pingpong", 1, "wait_at(full + 8 * stage, parity);", ""),
    ("pingpong", 1, "wait_at(empty + 8 * stage, parity);", ""),
    ("pingpong", 1, "wait_at(pingpong + 8 * own, pingpong_parity);", ""),
    ("pingpong", 1, "expect_bytes(arrived, slice_bytes);", "expect_bytes(arrived, slice_bytes / 2);"),
    ("pingpong", 1, "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
    ("pingpong", 1, "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
    ("pingpong", 1, "+ k * (16 * line_bytes / 16), (step", "+ k * (8 * line_bytes / 16), (step"),
    ("pingpong", 1, "(step | k) != 0", "true"),
    ("pingpong", 1, "if (lane == 0) wait_stores<1>();", ""),
    ("pingpong", 1, "^ lane % 8", ""),
    ("pingpong", 1, "chunk % 2 * box_bytes", "0"),
    ("pingpong", 2, "(address & address_bits)", "address"),
    ("pingpong", 2, "start_barrier(empty + 8 * stage, 8)", "start_barrier(empty + 8 * stage, 4)"),
    ("pingpong", 2, "__cluster_barrier_arrive();  // until", "//"),
    ("pingpong", 1, 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ""),
    ("pingpong", 1, 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', ""),
    ("pingpong", 1, 'asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");', ""),  # nothing is given back
    ("pingpong", 1, "setmaxnreg.inc.sync.aligned.u32 232;", "setmaxnreg.inc.sync.aligned.u32 240;"),
    ("pingpong", 1, 'asm volatile("setmaxnreg.dec', 'if (threadIdx.x < 32) asm volatile("setmaxnreg.dec'),
    ("pingpong", 2, 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', ""),
    ("cooperative", 1, "left + own * segment_bytes", "left"),
    ("cooperative", 1, "start_barrier(empty + 8 * stage, 8)", "start_barrier(empty + 8 * stage, 4)"),
]  # fmt: skip


@cache
def deep(schedule: str, cluster: int) -> WgmmaPlan:
    """More slices than the ring has places, and several tiles for a block."""
    spec = bias_gelu.at(M=520, N=264, K=520)
    few = replace(H200, sms=2)
    return next(p for p in plans(spec.graph, target=few) if (p.tile.schedule, p.tile.cluster) == (schedule, cluster))


@needs_check
@pytest.mark.parametrize(("schedule", "cluster", "old", "new"), BROKEN)
def test_broken_kernels_are_caught(schedule: str, cluster: int, old: str, new: str) -> None:
    def edit(text: str) -> str:
        assert old in text
        text = text.replace(old, new)
        if old.startswith("__cluster_barrier_arrive();  // until"):
            head, _, tail = text.rpartition("__cluster_barrier_wait();")
            text = head + tail
        return text

    kernel = kernel_of(deep(schedule, cluster), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    kernel.device.seed = 1  # type: ignore[attr-defined]  # one warp runs far ahead of the others
    assert not validate(kernel, rows=(520,), cases=("rows",)).ok


BROKEN_FRAGMENTS = [  # at K = 72, whose last slice is mostly zeros, or of more slices than the ring has places
    (72, "unsigned& word = to[k][quarter]", "unsigned& word = prepared[0][k][quarter]"),
    (72, "^ lane % 8) * 16", ") * 16"),
    (72, "sum_of_square_all[r8], 2);", "sum_of_square_all[r8], 1);"),
    (72, "k_at < 72 ? exp_from_x_times_gain : 0.0f", "gain == 0.0f ? 1.0f / gain : exp_from_x_times_gain"),
    (72, "if (k_at < 72) ", ""),
    (72, "sum_of_square_part[quarter % 2]", "sum_of_square_part[quarter / 2]"),
    (72, "lane % 4 * 8 + lane / 4", "lane"),
    (72, "k_at < 72 ? load<2>(gain_ptr + k_at) : Vec<__nv_bfloat16, 2>{}", "load<2>(gain_ptr + k_at)"),
    (520, "__syncwarp();  // all lanes have read", "// all lanes have read"),
    (520, "start_barrier(full + 8 * stage, 2)", "start_barrier(full + 8 * stage, 1)"),
    (520, "__syncwarp();  // all pairs are there", ""),
    (520, "wait_at(empty + 8 * stage, parity);\n          gain_slices", "gain_slices"),
    (520, "if (lane == 0) arrive_at(pingpong + 8 * (own ^ 1));", ""),
    (520, "prepared[1]", "prepared[0]"),  # what is being multiplied does not stay
]


@needs_check
@pytest.mark.parametrize(("depth", "old", "new"), BROKEN_FRAGMENTS)
def test_broken_fragments_are_caught(depth: int, old: str, new: str) -> None:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(plan_of(rooted.at(K=depth), "cooperative"), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, rows=(130,), cases=("rows",)).ok


BROKEN_KEPT = [  # an even number of slices, one, or an odd number, in several tiles for a block
    (200, "kept_at = at;", ""),
    (200, "if (tile != blockIdx.x) {", "if (tile == blockIdx.x) {"),
    (200, "prepare_next(1, prepared[0]);", "prepare_next(1, prepared[1]);"),
    (200, "sum_of_squares_part[r8] = 0.0f;", ""),
    (200, "= sum_of_squares_all[r8];", "= sum_of_squares_part[r8];"),
    (200, "if (tile + gridDim.x >= tiles) return;", ""),
    (64, "for (int chunk = 0; chunk < 4; ++chunk) store_kept(chunk);", ""),
    (64, "prepared[0][k][quarter] = prepared[1][k][quarter];", ";"),
    (136, "prepared[0][k][quarter] = prepared[1][k][quarter];", ";"),
    (136, "multiply(2, prepared[0]);", "multiply(2, prepared[1]);"),
]


def kept(depth: int) -> WgmmaPlan:
    graph = normed.at(M=390, N=264, K=depth).graph
    plan = next(p for p in plans(graph, target=replace(H200, sms=2)) if p.cluster == 1)
    assert plan.deferred_store
    return plan


@needs_check
@pytest.mark.parametrize(("depth", "old", "new"), BROKEN_KEPT)
def test_broken_tiles_that_are_kept_are_caught(depth: int, old: str, new: str) -> None:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(kept(depth), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, rows=(390,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize("depth", [64, 136, 200, 264])
def test_unbroken_tiles_that_are_kept_are_not(depth: int) -> None:
    assert validate(kernel_of(kept(depth)), rows=(390,), cases=("rows",)).ok


def test_tiles_are_kept_where_registers_are_left() -> None:
    found = {spec.graph.name: plan_of(spec, "cooperative").deferred_store for spec in (*PREPARED, bias_gelu)}
    assert found == {
        "normed": True, "normed_sides": False, "normed_gated": False, "normed_bias": False, "gainless": False,
        "activated": False, "rooted": False, "biased": False, "squared": True, "bias_gelu": False,
    }  # fmt: skip


@needs_check
@pytest.mark.parametrize("depth", [72, 520])
def test_an_unbroken_one_is_not(depth: int) -> None:
    assert validate(kernel_of(plan_of(rooted.at(K=depth), "cooperative")), rows=(130,), cases=("rows",)).ok


@needs_check
@pytest.mark.parametrize(("schedule", "cluster"), [("pingpong", 1), ("pingpong", 2), ("cooperative", 1)])
def test_unbroken_ones_are_not(schedule: str, cluster: int) -> None:
    assert validate(kernel_of(deep(schedule, cluster)), rows=(520,), cases=("rows",)).ok


@pytest.mark.by_values("spec", "schedule")  # golden sources have both
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize(
    "spec", [bias_gelu, gated, mixed, sides, askew_sides, by_tf32], ids=lambda spec: spec.graph.name
)
def test_nothing_spills(spec: Chain, schedule: str) -> None:
    large = spec.at(**{str(d): 1024 for d in spec.graph.sizes})
    plan = next(p for p in plans(large.graph) if p.tile.schedule == schedule)
    try:
        binary = compile_source(render(plan).text, plan.name, H200, filename="k.cu", threads=plan.threads)
    except MissingError as missing:
        pytest.skip(str(missing))
    assert (binary.resources.spill_bytes, binary.resources.stack_bytes) == (0, 0)
    assert "C75" not in binary.log  # ptxas: wgmma serialized, setmaxnreg ignored


@pytest.mark.parametrize("spec", PREPARED, ids=lambda spec: spec.graph.name)
def test_nothing_spills_where_factors_are_prepared(spec: Chain) -> None:
    test_nothing_spills(spec, "cooperative")


# ---------------------------------------------------------------- what a launch maps


def views_of(plan: WgmmaPlan, **others: np.ndarray) -> dict[str, ArrayView]:
    found = {}
    for t in (*plan.graph.inputs, *plan.graph.outputs):
        if t.shape:
            shape = [size_of(s, plan.graph.sizes) for s in t.shape]
            found[t.name] = view(others.get(t.name, np.zeros(shape, t.dtype.numpy)), t.name)
    return found


def maps_of(plan: WgmmaPlan, **others: np.ndarray) -> dict[str, Mapped]:
    views = views_of(plan, **others)
    bound = arguments.bind(plan, arguments.measure(plan, views), views)
    return {found.name: found for found in bound.maps}


def test_maps_have_the_strides_of_the_call() -> None:
    dtype = bf16.numpy
    found = maps_of(plan_of(bias_gelu), x=np.zeros((300, 160), dtype)[:, :136], w=np.zeros((136, 272), dtype)[:, :264])
    assert (found["x_map"].shape, found["x_map"].strides, found["x_map"].box) == ((300, 136), (320,), (128, 64))
    assert (found["w_map"].shape, found["w_map"].strides, found["w_map"].box) == ((136, 264), (544,), (64, 64))
    assert (found["out_map"].shape, found["out_map"].strides, found["out_map"].box) == ((300, 264), (528,), (16, 64))
    assert [found[name].pointer for name in ("x_map", "w_map", "out_map")] == [0, 1, 3]


def test_maps_of_f32_factors_round_to_tf32() -> None:
    found = maps_of(plan_of(by_tf32))
    assert {name: each.dtype for name, each in found.items()} == {"x_map": tf32, "w_map": tf32, "relu_map": bf16}
    assert (found["x_map"].shape, found["x_map"].strides, found["x_map"].box) == ((300, 100), (400,), (128, 32))


@needs_check
def test_f32_that_is_not_rounded_is_caught() -> None:
    plan = plan_of(by_tf32)
    cut = replace(plan, params=tuple(replace(p, dtype=f32) if p.dtype is tf32 else p for p in plan.params))
    found = validate(kernel_of(cut), quick=True)
    assert {case.name for case in found.cases if not case.ok} >= {"normal", "below a tf32"}


def test_maps_of_batches_have_three_axes() -> None:
    found = maps_of(plan_of(batched))
    assert found["x_map"].shape == (3, 130, 72)
    assert found["x_map"].strides == (130 * 144, 144)
    assert found["w_map"].box == (1, 64, 64)


def test_one_row_has_a_stride_all_the_same() -> None:
    found = maps_of(plan_of(bias_gelu), x=np.zeros((1, 136), bf16.numpy), out=np.zeros((1, 264), bf16.numpy))
    assert found["x_map"].shape == (1, 136)
    assert found["x_map"].at(256).strides == (16,)


def test_repeated_rows_are_the_general_rules() -> None:
    plan = plan_of(bias_gelu)
    views = views_of(plan, x=np.broadcast_to(np.zeros((1, 136), bf16.numpy), (300, 136)))
    assert arguments.layout_needed(plan, views) == Layout(unaligned=frozenset({"x"}))


def test_a_map_must_be_one_that_copies_can_move_along() -> None:
    found = maps_of(plan_of(bias_gelu))["x_map"]
    with pytest.raises(RequestError, match="x_map lies at address 0x8; a tensor copy needs a multiple of 16"):
        found.at(8)


def test_maps_lie_aligned_behind_the_arguments() -> None:
    kinds = (("map", "a"), ("pointer", "b"), ("extent", ""), ("map", "c"))
    params = tuple(Param(kind, f"{tensor}_{kind}", tensor) for kind, tensor in kinds)  # type: ignore[arg-type]
    found = Arguments(params, lead=40)
    given = [Mapped("a", 0, bf16, (8, 64), (128,), (8, 64), 128), Mapped("c", 2, bf16, (8, 64), (128,), (8, 64), 128)]
    found.place_maps(given, (16, 32, 48), lambda one, address: f"{one.name}{address}".encode().ljust(MAP_BYTES))
    places = [found.table[i] or 0 for i in range(4)]
    assert [ctypes.string_at(places[i], 3) for i in (0, 3)] == [b"a16", b"c48"]
    assert not any(places[i] % MAP_ALIGNMENT for i in (0, 3))
    found.pack_into(found.block, 40, 1, 2, 3, 4)
    assert [ctypes.c_longlong.from_address(places[i]).value for i in (1, 2)] == [2, 4]
