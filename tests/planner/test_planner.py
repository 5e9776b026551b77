"""Plans: what the cost model promises, what candidates must never do, and random chains from end to end of planning."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import Chain, b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import NoPlan
from fusegen.language.graph import Extent, Graph
from fusegen.planner import CONTIGUOUS, candidates, plan
from fusegen.planner.model import Layout, RowPlan, Until, Value
from fusegen.planner.rewrites import simplify
from fusegen.planner.rows.duration import resident_blocks
from fusegen.planner.rows.rowwise import rowwise
from fusegen.runtime import Kernel, finding
from fusegen.targets import A100, H200, MI300X, TARGETS, Target
from tests.chains import random_chain
from tests.row_plans import row_plan, row_plans
from tests.sizes import sizes_at
from tests.specs import ROWS as SPECS
from tests.tools import needs_check

pytestmark = pytest.mark.usefixtures("emulated_only")

B, H, S, M, N, K = dims("B H S M N K")
LENGTHS = (1, 2, 7, 8, 31, 32, 33, 255, 1000, 1024, 4096, 4097, 12288, 50257, 65536, 131072, 1048576)


@chain(M=4096, N=4096)
def mission(y: f16[M, N], bias: f16[N], residual: f16[M, N], gamma: f16[N], beta: f16[N]) -> f16[M, N]:
    h = residual + F.gelu(y + bias)
    return F.layernorm(h, gamma, beta, eps=1e-5)


def test_traffic_of_the_mission_example() -> None:
    """6 + 4 + 6 + 10 B an element unfused, 12 B fused; 416 and 192 MiB at S = H = 4096; ideal 96 MiB and vectors."""
    traffic = row_plan(mission.graph, H200).cost.traffic
    assert traffic.bytes_per_element_unfused == 26
    assert traffic.bytes_per_element_fused == 12
    assert traffic.per_element_unfused == 416 * 2**20
    assert traffic.per_element_fused == 192 * 2**20
    assert traffic.ideal == 96 * 2**20 + 3 * 4096 * 2
    assert traffic.moved == traffic.ideal
    assert traffic.launches_unfused == 4


def test_bias_relu_intensity() -> None:
    """Two flops for an element's 12 bytes in f32 (its bias counted too): 0.167 flop/B."""
    traffic = row_plan(SPECS["bias_relu"].with_dtype(f32).graph, H200).cost.traffic
    assert traffic.flops / traffic.per_element_fused == pytest.approx(1 / 6)


def test_fused_decisions_name_the_users_values() -> None:
    found = {d.subject: d for d in row_plan(mission.graph, H200).decisions}
    assert "layernorm" in found["h"].verdict
    assert found["h"].bytes_saved == 3 * 4096 * 4096 * 2  # written once, read twice


@pytest.mark.pairwise("name", "gpu", "cols")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("gpu", [H200, A100, MI300X], ids=str)
@pytest.mark.parametrize("cols", LENGTHS)
def test_every_length_has_a_plan(name: str, gpu: Target, cols: int) -> None:
    graph = SPECS[name].graph
    for made in row_plans(graph.at(**sizes_at(graph, cols)), gpu):
        check(made)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), cols=st.sampled_from(LENGTHS), gpu=st.sampled_from((H200, MI300X)))
def test_random_chains_have_sound_plans(seed: int, cols: int, gpu: Target) -> None:
    graph = random_chain(seed).graph.at(N=cols)
    for made in row_plans(graph, gpu):
        check(made)
    split = Layout(split=True, unaligned=frozenset({graph.outputs[0].name}))
    check(row_plan(graph, gpu, split))


def check(made: RowPlan) -> None:
    """What no plan may break."""
    tile, target = made.tile, made.target
    passes = (*made.passes, *(made.selection.picked if made.selection else ()))
    stores = [s.access.tensor for row_pass in passes for s in (*row_pass.stores, *row_pass.row_stores)]
    stores += [s.access.tensor for s in made.row_stores]
    assert sorted(stores) == sorted(t.name for t in made.graph.outputs), "every output is written exactly once"
    assert tile.threads % tile.row_threads == 0
    assert tile.threads_per_row == tile.row_threads * tile.cluster
    assert tile.cluster <= target.max_cluster
    assert tile.rows_per_block >= 1
    assert tile.threads <= target.threads_per_block
    assert made.shared_bytes + made.static_shared_bytes <= target.shared_bytes
    picked = {t.name for t in made.graph.outputs if t.node in made.graph.picked}
    for access in made.accesses:
        assert access.vector_bytes in (1, 2, 4, 8, 16)
        assert access.vector_bytes % access.dtype.bytes == 0
        if access.mode == "vector" and not made.flat and access.strided:
            chosen = access.tensor in picked
            assert (made.graph.picks if chosen else made.cols) % access.vector == 0
    if not made.flat:
        covered = tile.cols * tile.col_tiles + tile.remainder
        assert tile.remainder <= tile.threads_per_row, "one a thread"
        assert covered >= made.cols, "the tile covers the row"
        if made.tail == "none":
            assert covered == made.cols
    traffic = made.cost.traffic
    assert traffic.moved >= traffic.ideal
    # the one case where fusing moves more: a long row, read again, of which an operator would have read a part
    if made.staging != "stream" and (made.staging != "shared" or tile.kept == tile.per_thread):
        assert traffic.moved <= max(traffic.unfused, traffic.ideal)
    assert made.cost.time_us > 0
    names = [s.name for s in made.launch_body + made.row_body]
    for row_pass in made.passes:
        names += [s.name for s in row_pass.row_body]
        inner = (
            [load.value for load in row_pass.loads]
            + [k.value for k in row_pass.takes]
            + [s.name for s in row_pass.body]
        )
        assert len(inner) == len(set(inner)), "single assignment"
        for statement in row_pass.body:
            assert statement.name not in statement.uses
    assert len(names) == len(set(names))


def test_values_are_kept_by_staged_plans_and_recomputed_by_streamed_ones() -> None:
    plans = row_plans(mission.graph, H200)
    staged = next(p for p in plans if p.staging == "registers")
    streamed = next(p for p in plans if p.staging == "stream")
    assert [len(s.reads) for s in staged.passes] in ([5, 0, 0], [3, 0, 2]), "what rows share is read ahead, or late"
    assert [len(s.reads) for s in streamed.passes] == [3, 5], "the mean and the variance in one pass"
    assert streamed.passes[0].reductions[0].kind == "welford"


def test_what_a_later_pass_keeps_is_copied_only_where_copies_take_it() -> None:
    """Two masks are 2 bytes, and cp.async takes 4, 8 or 16."""

    def spec(x: bf16[M, N], mask: b8[M, N]) -> bf16[M, N]:
        centered = x - F.mean(x)
        kept = F.where(mask, centered, 0.0)
        return x * F.rsqrt(F.sum(F.square(kept))) + kept

    plans = row_plans(chain(M=3, N=513)(spec).graph, TARGETS["cuda:a100"])
    kept = {(p.tile.vector, p.copies) for p in plans if (p.staging, p.keeps) == ("shared", "inputs")}
    assert kept == {(1, False), (2, False), (4, True), (8, True)}


@pytest.mark.parametrize("shown", ["nothing", "total", "mean", "centered", "unless"])
def test_an_infinite_sum_stays_one_where_it_shows(shown: str) -> None:
    """Welford's mean is NaN once it has been infinite; behind the deviations, which are NaN too, none sees it."""

    def spec(x: f16[M, N]) -> tuple[f16[M, N], f32[M, N]]:
        centered = x - F.mean(x)
        variance = F.mean(F.square(centered))
        normal = centered * F.rsqrt(variance + 1e-5)
        unless = F.where(variance > 0, F.rsqrt(variance), 1.0)
        others = {"total": F.sum(x) + x, "mean": x * F.mean(x), "centered": centered * 2, "unless": centered * unless}
        return normal, others.get(shown, normal * 2)

    streamed = next(p for p in row_plans(chain(M=3, N=2048)(spec).graph, H200) if p.staging == "stream")
    (pair,) = [r for row_pass in streamed.passes for r in row_pass.reductions]
    assert (pair.kind, pair.guarded) == ("welford", shown != "nothing")


def test_what_rows_share_is_read_ahead_or_where_it_is_used() -> None:
    """gamma and beta, which the last pass uses; bias is needed at once, and by no later pass."""
    found = set()
    for rows in (8, 8192):
        for made in row_plans(mission.at(M=rows).graph, A100):
            if made.staging != "registers":
                continue
            first, *later = made.passes
            ahead = [load.value for load in first.loads if load.when == "ahead"]
            assert ahead in (["gamma", "beta"], [])
            assert not ahead or made.tile.per_thread * made.tile.vector <= 32
            kept = [load.value for row_pass in later for load in row_pass.loads if load.when == "kept"]
            assert kept == ahead
            assert first.title.startswith("read gamma, beta ahead; read y" if ahead else "read y")
            assert [row_pass.late for row_pass in made.passes] == [False, False, not ahead]
            found.add(bool(ahead))
    assert found == {True, False}


def test_rules_yield_every_way_to_read_and_the_cheapest_is_a_candidate() -> None:
    ways: dict[str, list[float]] = {}
    for made in rowwise(simplify(mission.graph), H200, CONTIGUOUS):
        ways.setdefault(made.configuration, []).append(made.cost.time_us)
    assert max(map(len, ways.values())) == 3  # late, fetched, ahead
    found = candidates(mission.graph, H200).plans
    assert {p.configuration: p.cost.time_us for p in found} == {name: min(times) for name, times in ways.items()}
    assert len(found) == len(ways)


def test_few_rows_prefetch_the_vectors_they_share_by_bulk_copies() -> None:
    """Where a barrier stands between who asks for gamma and beta and who takes them, and a launch has few waves."""
    for made in row_plans(mission.at(M=1024).graph, H200):
        barrier = made.staging == "registers" and made.threads >= 128 and made.rows_per_block == 1
        assert [access.name for access in made.prefetched] == (["gamma", "beta"] if barrier else []), made.configuration
    made = row_plan(mission.at(M=1024).graph, H200)
    assert made.prefetched
    assert made.passes[0].title.endswith("; prefetch gamma, beta")
    assert made.passes[-1].title == "take gamma, beta; write out"
    assert made.static_shared_bytes > 2 * made.prefetched[0].dtype.bytes * made.cols
    text = render(made).text
    assert text.index("copy_bulk(gamma_prefetched") < text.index("wait_arrivals(arrivals);\n", text.index("// pass 1"))
    assert not any(p.prefetched for p in row_plans(mission.at(M=65536).graph, H200)), "the caches have them"
    assert not any(p.prefetched for p in row_plans(mission.at(M=1024).graph, A100)), "which has no bulk copies"
    assert not any(p.prefetched for p in row_plans(SPECS["add_rmsnorm"].at(M=1024).graph, H200)), "of one vector"
    assert not any(p.prefetched for p in row_plans(mission.at(M=8, N=2048).graph, H200)), "vectors of 4 KB"
    assert not any(p.prefetched for p in row_plans(mission.at(M=8, N=16384).graph, H200)), "64 KB of them"
    assert not any(p.prefetched for p in row_plans(normed.at(M=8, N=4096).graph, H200)), "a row has less"


def test_halves_stay_packed_in_registers_where_that_takes_fewer() -> None:
    """A row of f16 whose deviations are computed again; f32 would take as many as they are."""
    made = {p.configuration: p for p in row_plans(normed.at(N=24576).with_dtype(f16).graph, H200)}
    packed = made["rowwise registers 512/512 6x8 keeps=inputs"]
    assert packed.packed
    assert packed.cost.registers < made["rowwise registers 512/512 6x8"].cost.registers
    assert not any(
        row_pass.takes or any(r.kind == "welford" for r in row_pass.reductions) for row_pass in packed.passes
    )
    text = render(packed).text
    assert text.count("leave_packed(x_vec[v]);") == 2
    assert not any(p.packed for p in row_plans(normed.at(N=24576).with_dtype(f32).graph, H200))


def test_a_row_in_shared_memory_gets_one_more_pass() -> None:
    """Not so one that is read again from memory."""
    for made in row_plans(normed.at(N=24576).with_dtype(f16).graph, H200):
        welford = any(r.kind == "welford" for row_pass in made.passes for r in row_pass.reductions)
        assert welford == (made.staging == "stream" or made.tile.kept not in (0, made.tile.per_thread))


def test_softmax_streams_in_two_passes() -> None:
    streamed = next(p for p in row_plans(SPECS["log_softmax"].graph, H200) if p.staging == "stream")
    assert [r.kind for r in streamed.passes[0].reductions] == ["softmax"]
    assert len(streamed.passes) == 2


@chain(M=3, N=577)
def two_softmaxes(x: f32[M, N]) -> tuple[f32[M, 1], f32[M, N]]:
    top = F.max(x)
    return F.log(F.sum(F.exp(x - top))) + top, F.softmax(x)


@chain(M=3, N=577)
def two_variances(x: f32[M, N]) -> tuple[f32[M, 1], f32[M, N]]:
    centered = x - F.mean(x)
    return F.sum(centered * centered), F.layernorm(x)


@chain(M=3, N=577)
def fourth_moment(x: f32[M, N]) -> f32[M, 1]:
    """The squares whose spread is asked for are squared deviations."""
    return F.var(F.square(x - F.mean(x)))


@chain(M=3, N=577)
def spread_of_exponentials(x: f32[M, N]) -> f32[M, 1]:
    return F.var(F.exp(x - F.max(x)))


def kernel_of(plan: RowPlan) -> Kernel:
    """In the emulator, with this one plan for every layout."""
    source = render(plan)
    return Kernel(source, None, finding.find(plan.target, "emulator"), lambda layout: (source, None))


@needs_check
@pytest.mark.parametrize("spec", [two_softmaxes, two_variances, fourth_moment, spread_of_exponentials])
def test_a_reduction_is_merged_with_one_other(spec: Chain) -> None:
    """However rows are kept between passes: pairs are merged where values are computed anew."""
    from fusegen.validation import validate

    for made in {(p.staging, p.keeps): p for p in row_plans(spec.graph, H200)}.values():
        validate(kernel_of(made), quick=True).raise_for_error()


def test_long_rows_take_clusters_or_are_read_again_and_short_ones_share_a_block() -> None:
    longest = row_plan(mission.graph.at(N=1048576), H200)
    assert longest.tile.cluster > 1
    assert row_plan(mission.graph.at(N=1048576), MI300X).staging == "stream"
    assert row_plan(mission.graph.at(N=1048576), MI300X).cost.traffic.moved > longest.cost.traffic.ideal
    assert row_plan(mission.graph.at(N=64), H200).tile.rows_per_block > 1


@chain(M=8, N=1048576)
def row_max(x: bf16[M, N]) -> bf16[M, 1]:
    return F.max(x)


def test_few_long_rows_take_clusters_where_nothing_is_kept() -> None:
    few = row_plan(row_max.graph, H200)
    assert few.cluster == 16, "128 of 132 SMs read, not 8"
    assert few.cost.time_us < 0.5 * row_plan(row_max.graph, A100).cost.time_us, "which has no clusters"
    assert row_plan(row_max.at(M=65536, N=8192).graph, H200).cluster == 1


@chain(M=16384, N=5120)
def softened(x: bf16[M, N]) -> bf16[M, N]:
    return F.softmax(x)


def test_a_kept_value_takes_the_place_of_the_one_it_is_made_of() -> None:
    """x as it was read, then e: NVRTC 13.0 took 47 registers for 4 x 8 elements a thread at 4096, 77 for 8 x 8."""
    found = {
        p.tile.per_thread: p.cost.registers
        for p in row_plans(softened.at(N=4096).graph, H200)
        if p.configuration in ("rowwise registers 128/128 4x8", "rowwise registers 64/64 8x8")
    }
    assert found == {4: 48, 8: 80}


@chain(M=8192, N=20480)
def normed(x: f32[M, N], gamma: f32[N], beta: f32[N]) -> f32[M, N]:
    return F.layernorm(x, gamma, beta)


def test_what_the_rows_of_a_sample_share_is_read_ahead_of_the_row() -> None:
    """Each block asks the L2 cache for it, which takes longer where it is used."""
    found = row_plans(SPECS["adaln_modulate"].graph, H200)
    first = found[0]
    assert [load.value for load in first.passes[0].loads] == ["scale", "shift_value", "x"]
    assert {load.when for load in first.passes[0].loads[:2]} == {"ahead"}
    at_own = next(made for made in found if all(load.when != "ahead" for load in made.passes[0].loads))
    assert at_own.cost.time_us > first.cost.time_us


def test_vectors_are_read_ahead_where_registers_have_room() -> None:
    """With 1024 threads there are 64 registers, and NVRTC 13.0 spilled 60 B of 5 x 4 elements and two vectors ahead."""
    made = {p.configuration: p for p in row_plans(normed.graph, H200)}["rowwise registers 1024/1024 5x4"]
    assert not any(load.when == "ahead" for load in made.passes[0].loads)
    short = row_plans(normed.at(M=8, N=4096).graph, H200)[0]
    assert sum(load.when == "ahead" for load in short.passes[0].loads) == 2


def test_a_cluster_is_for_rows_that_fill_a_block() -> None:
    for cols, clusters in ((4096, {1}), (65536, {1, 2, 4, 8, 16})):
        assert {p.tile.cluster for p in row_plans(mission.graph.at(N=cols), H200)} == clusters
    assert {p.tile.cluster for p in row_plans(mission.graph.at(N=65536), A100)} == {1}


def test_what_does_not_fit_is_read_again_from_where_the_last_pass_ended() -> None:
    graph = SPECS["scale_softmax"].graph.at(N=131072)
    partly = [p for p in row_plans(graph, H200) if p.staging == "shared" and p.tile.kept < p.tile.per_thread]
    assert partly
    for made in partly:
        assert [row_pass.backward for row_pass in made.passes] == [False, True]
        assert made.copies
        (scores,) = [t for t in made.cost.traffic.tensors if t.tensor == "scores"]
        assert 1 < scores.times < 2
        assert scores.moved >= scores.ideal
        if 4 * made.tile.kept >= 3 * made.tile.per_thread:  # by the counters of an H200: the rest is still in the L2
            assert scores.moved == scores.ideal


def test_mask_and_scalar_shapes_keep_their_strides() -> None:
    made = row_plan(SPECS["masked_softmax"].graph, H200)
    by_name = {a.tensor: a for a in made.accesses}
    assert [d.axes for d in made.row_dims] == [(0,), (1, 2)]
    assert by_name["scores"].strided == (0, 1)
    assert by_name["mask"].strided == (0,)
    assert [p.name for p in made.params if p.kind == "value"] == ["scale"]


def test_layout_split_keeps_every_axis() -> None:
    made = row_plan(SPECS["masked_softmax"].graph, H200, Layout(split=True))
    assert [d.axes for d in made.row_dims] == [(0,), (1,), (2,)]


@chain(B=2, S=3, N=8)
def numbered(x: f16[B, 4, 4, S, S, N], y: f32[B, 4, 1, S, 1, N]) -> f16[B, 4, 4, S, S, N]:
    """Leading axes of numbers, and of a dim that stands there twice; values with the names that axes would take."""
    axis1_at = x + y
    return axis1_at * 2.0


@chain(M=3, N=8, K=8)
def numbered_products(x: f16[4, M, K], w: f16[4, K, N]) -> f16[4, M, N]:
    """Products of their own along an axis that has no name."""
    return x @ w


@pytest.mark.parametrize("numbers", [numbered, numbered_products], ids=lambda one: one.name)
def test_leading_axes_without_a_name_of_their_own_have_one_in_the_kernel(numbers: Chain) -> None:
    found = plan(numbers.graph, H200, Layout(split=True))
    names = [param.name for param in found.params] + [dim.index for dim in found.row_dims]
    assert all(name.isidentifier() for name in names)
    assert len({*names, "axis1_at"}) == len(names) + 1


@needs_check
@pytest.mark.parametrize("numbers", [numbered, numbered_products], ids=lambda one: one.name)
def test_leading_axes_without_a_name_of_their_own_are_passed_over(numbers: Chain) -> None:
    from fusegen.pipeline import compile
    from fusegen.validation import validate

    kernel = compile(numbers, H200, on="emulator")
    validate(kernel, cases=("normal", "layout")).raise_for_error()


def test_layout_unaligned_moves_single_elements() -> None:
    made = row_plan(mission.graph, H200, Layout(unaligned=frozenset({"y", "out"})))
    modes = {a.tensor: a.mode for a in made.accesses}
    assert modes == {"y": "element", "out": "element", "residual": "vector", "bias": "vector", "gamma": "vector",
                     "beta": "vector"}  # fmt: skip


def test_ragged_rows_move_across_blocks_and_what_they_share_by_vectors() -> None:
    found = [p for p in row_plans(mission.graph.at(N=4097), H200) if p.tile.vector == 8]
    modes = {a.tensor: a.mode for a in found[0].accesses}
    assert modes["y"] == modes["residual"] == modes["out"] == "misaligned"
    assert modes["bias"] == modes["gamma"] == modes["beta"] == "vector"


def test_common_subexpressions_are_computed_once() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return (x - F.mean(x)) * (x - F.mean(x))

    graph = chain(M=2, N=16)(spec).graph
    assert len(graph.reductions) == 2
    assert len(simplify(graph).reductions) == 1


def test_a_plan_prints_as_the_header_of_its_kernel() -> None:
    """The kernel's own header also has the spec's body, behind the title."""
    made = row_plan(mission.graph, H200)
    commented = [f"// {line}".rstrip() for line in str(made).splitlines()]
    opening = render(made).text.partition("\n\n")[0].splitlines()
    start = opening.index("//     def mission(y, bias, residual, gamma, beta):")
    end = opening.index("//", start)
    assert opening[:start] + opening[end + 1 :] == commented


def test_refusals_speak_the_users_words() -> None:
    found = candidates(mission.graph, H200)
    rules = [
        "elementwise",
        "topk",
        "topk_small_k",
        "topk_large_k",
        "columns",
        "row_parts",
        "slot_sort",
        "attention",
        "attention_wgmma",
        "attention_wide",
        "attention_wide_wgmma",
    ]
    rules += ["gemm", "wgmma", "wgmma_codes", "tcgen05", "weights", "weights_wgmma"]
    assert [r.rule for r in found.refusals] == rules
    assert "sum at" in found.refusals[0].reason
    assert "test_planner.py" in found.refusals[0].reason


def test_no_plan_gives_the_nearest_reason() -> None:
    """Of a rule for such chains, where there is one; all of them for whoever asks."""
    found = candidates(mission.graph, H200)
    assert all(refusal.other_kind for refusal in found.refusals)
    with pytest.raises(NoPlan) as every:
        replace(found, plans=()).need()
    assert str(every.value).count("\n  ") == len(found.refusals)
    long = candidates(SPECS["rmsnorm"].graph.at(N=2**32), H200)
    with pytest.raises(NoPlan) as nearest:
        long.need()
    first, reason, advice = str(nearest.value).splitlines()
    assert first == "no rule can plan rmsnorm on cuda:h200"
    assert reason.startswith("  rowwise: a row of 4294967296 elements")
    assert re.fullmatch(r"  `fusegen explain .*rmsnorm\.py:rmsnorm` says what every rule refused", advice)
    with pytest.raises(NoPlan, match=r"elementwise: (.|\n)*rowwise: (.|\n)*wgmma: "):
        long.need(every=True)


def test_resident_blocks_by_hand() -> None:
    """H200: 65536 registers, 2048 threads, 32 blocks, 228 KiB of shared memory of which each block costs 1 KiB more."""
    assert resident_blocks(H200, 256, 32, 0) == 8
    assert resident_blocks(H200, 256, 64, 0) == 4
    assert resident_blocks(H200, 64, 32, 0) == 32
    assert resident_blocks(H200, 128, 32, 100 * 1024) == 2


def test_storage_dtypes_appear_in_traffic() -> None:
    graph: Graph = SPECS["masked_softmax"].graph
    sizes = {t.tensor: t.ideal for t in row_plan(graph, H200).cost.traffic.tensors}
    assert sizes["mask"] == 4 * 1024
    assert sizes["scores"] == sizes["out"] == 4 * 16 * 1024 * 1024 * 2


def test_extent_of_masks_and_vectors() -> None:
    def spec(x: bf16[M, N], m: b8[M, 1]) -> bf16[M, N]:
        return F.where(m, x, 0.0)

    graph = chain(M=2, N=16)(spec).graph
    assert {graph.names[t.node]: graph.extents[t.node] for t in graph.inputs} == {"x": Extent.ELEMENT, "m": Extent.ROW}


# ---------------------------------------------------------------- columns that a mask rules out are not read


def limit_texts(graph: Graph) -> dict[str, str]:
    """The condition under which each operand is read, where it has one."""
    made = row_plan(graph, H200)
    return {
        load.access.tensor: until_text(load.until) for row_pass in made.passes for load in row_pass.loads if load.until
    }


def until_text(until: Until | None) -> str:
    """`<= last`; empty without a limit."""
    if until is None:
        return ""
    return f"{until.sign} {until.bound.name if isinstance(until.bound, Value) else until.bound.value}"


def test_causal_rows_are_read_up_to_the_diagonal() -> None:
    graph = SPECS["scale_causal_softmax"].graph.at(S=4096, N=4096)
    made = row_plan(graph, H200)
    assert limit_texts(graph) == {"scores": "<= last"}
    elements = 32 * 4096 * 4096
    read = {t.tensor: t.moved for t in made.cost.traffic.tensors}["scores"] / (2 * elements)
    assert 0.5 < read < 0.5 + 8 / 4096, "half, and part of a vector a row"
    assert made.decisions[0].subject == "scores"


def test_masked_rows_that_are_read_again_count_again() -> None:
    """A mask that hides most of a row makes its tensor small, not shared: every pass asks DRAM for what is left."""
    graph = SPECS["scale_causal_softmax"].graph.at(S=4096, N=1048576)
    made = row_plan(graph, H200)
    scores = {t.tensor: t for t in made.cost.traffic.tensors}["scores"]
    assert made.staging == "stream"
    assert len(made.passes) == 2
    assert scores.moved == 2 * scores.ideal


def test_every_use_must_pass_the_mask() -> None:
    def leaks(x: f16[M, N]) -> f16[M, N]:
        return F.causal(x) + x

    def output(x: f16[M, N]) -> tuple[f16[M, N], f16[M, N]]:
        return F.causal(x), x

    def condition(x: f16[M, N]) -> f16[M, N]:
        return F.where((F.col_index(x) <= F.row_index(x)) & (x > 0), 1.0, x)

    def reduced_first(x: f16[M, N]) -> f16[M, N]:
        return F.causal(x - F.max(x))

    def bound_by_a_reduction(x: f16[M, N], y: f16[M, N]) -> f16[M, N]:
        return F.where(F.col_index(x) <= F.cast(F.max(y), i32), x, 0.0)

    for function in (leaks, output, condition, reduced_first, bound_by_a_reduction):
        assert limit_texts(chain(M=8, N=64)(function).graph) == {}, function.__name__


def test_limits_of_other_forms() -> None:
    def window(x: f16[M, N], y: f16[M, N], k: i32) -> f16[M, N]:
        row = F.row_index(x)
        keep = (row >= F.col_index(x)) & (y > 0)
        return F.where(keep, F.exp(x) * y, 0.0) + F.where(F.col_index(x) < k, x, 0.0) * 0.0

    assert limit_texts(chain(M=8, N=64)(window).graph) == {}, "x has two limits, y is part of the mask"

    def prefix(x: f16[M, N], k: i32) -> f16[M, N]:
        return F.softmax(F.where(k > F.col_index(x), x * 2, -float("inf")))

    assert limit_texts(chain(M=8, N=64)(prefix).graph) == {"x": "< k"}


@pytest.mark.parametrize("cols", [40, 45, 1000, 70001])
def test_masked_rows_compute_what_they_mean(cols: int) -> None:
    """NaN and infinities beyond the limit must not be seen, in every staging."""

    def prefix(x: f16[M, N], n: i32) -> tuple[f16[M, N], f32[M, 1]]:
        z = F.where(F.col_index(x) < n, x * 2, -float("inf"))
        return F.softmax(z), F.max(z)

    from fusegen.pipeline import compile

    for gpu in ("cuda:h200", "hip:mi300x"):
        kernel = compile(chain(M=3, N=cols)(prefix), gpu, on="emulator")
        x = np.full((3, cols), np.nan, np.float16)
        x[:, :7] = np.arange(7)
        p, top = kernel(x, 7)
        assert top.tolist() == [[12.0]] * 3
        assert p.astype(np.float32).sum(-1) == pytest.approx(1, abs=1e-3)
        assert not p[:, 7:].any()


def test_no_block_is_read_that_a_mask_has_left_unwritten() -> None:
    """By blocks a vector of shared memory may end beyond the limit, where nothing was copied."""

    def prefix(x: f16[M, N], n: i32) -> f16[M, N]:
        return F.softmax(F.where(F.col_index(x) < n, x * 2, -float("inf")))

    plans = row_plans(chain(M=3, N=70001)(prefix).graph, MI300X)
    shared = [p for p in plans if p.staging == "shared" and not p.copies]
    assert shared
    for made in shared:
        kept = [row_pass for row_pass in made.passes if any(load.when == "kept" for load in row_pass.loads)]
        assert not any(row_pass.until and row_pass.blocks_of for row_pass in kept), made.configuration


def test_vectors_beyond_the_diagonal_are_not_computed_one_by_one() -> None:
    plans = row_plans(SPECS["scale_causal_softmax"].graph, H200)
    made = next(p for p in plans if p.staging == "registers")
    assert [until_text(s.until) for s in made.passes] == ["<= last"] * 3
    assert all(p.passes[0].until for p in plans)
    once = {p.configuration for p in plans if any(a.evict_first for a in p.accesses if a.vector == 8)}
    again = {p.configuration for p in plans if p.staging == "stream" or 0 < p.tile.kept < p.tile.per_thread}
    assert once == {p.configuration for p in plans if p.tile.vector == 8} - again, "what is read again may stay"
    names = [s.name for row_pass in made.passes for s in row_pass.masked_body]
    assert names == ["z_minus_pivot_masked", "e_masked", "softmax_masked"]
    ragged = row_plan(SPECS["scale_causal_softmax"].graph.at(N=4097), H200)
    assert [until_text(s.until) for s in ragged.passes] == ["<= last"] * len(ragged.passes)

    def varies(x: f16[M, N], y: f16[M, N]) -> tuple[f16[M, N], f16[M, N]]:
        return F.softmax(F.causal(x)), y + 1

    assert not any(s.until for s in row_plan(chain(M=8, N=64)(varies).graph, H200).passes)


def test_what_rows_share_stays_in_the_caches() -> None:
    def spec(x: f16[M, N], bias: f16[N]) -> f16[M, N]:
        return F.softmax(F.causal(x + bias))

    for made in row_plans(chain(M=512, N=2048)(spec).graph, H200):
        assert not any(a.evict_first for a in made.accesses if a.tensor == "bias")


@pytest.mark.parametrize("gpu", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_a_masked_operand_is_zero_beyond_its_limit_however_it_is_kept(gpu: str) -> None:
    """What is added varies along the row, so no pass passes over whole vectors; yet nothing is copied past the mask."""

    def spec(x: f16[M, N], y: f16[M, N]) -> f16[M, N]:
        return F.softmax(F.causal(x * 0.125)) + y

    from fusegen.validation import validate

    graph = chain(M=64, N=2048)(spec).graph
    kinds = {(p.staging, p.keeps, p.tile.kept < p.tile.per_thread): p for p in row_plans(graph, TARGETS[gpu])}
    for made in kinds.values():
        report = validate(kernel_of(made), quick=True)
        assert report.ok, f"{made.regime}\n{report}"


STAGINGS = ((64, "registers"), (2048, "registers"), (2048, "shared"), (2048, "stream"), (40000, "stream"))


@pytest.mark.parametrize(("cols", "staging"), STAGINGS)
@pytest.mark.parametrize("gpu", ["cuda:h200", "hip:mi300x"])
def test_values_beyond_a_limit_count_as_what_they_are(cols: int, staging: str, gpu: str) -> None:
    """Every reduction, with a rest that is neutral for none of them; the longest row is a cluster's on the H200."""

    def spec(x: f16[M, N], y: f16[N], n: i32) -> tuple[f16[M, N], f32[M, 1], f32[M, 1], f32[M, 1], f32[M, 1]]:
        z = F.where(F.col_index(x) < n, x * y, 0.75)
        return F.layernorm(z) + F.softmax(z), F.sum(z), F.max(z), F.min(z), F.var(z)

    from fusegen.validation import validate

    plans = row_plans(chain(M=3, N=cols)(spec).graph, TARGETS[gpu])
    chosen = next(p for p in plans if p.staging == staging)
    assert all(row_pass.until for row_pass in chosen.passes)
    made = kernel_of(chosen)
    if cols <= 2048:
        validate(made, quick=True).raise_for_error()
    x = np.random.default_rng(0).normal(size=(3 if cols < 40000 else 1, cols)).astype(np.float16)
    y = np.ones(cols, np.float16)
    for count in (0, 1, 7, 8, cols // 2 + 3, cols, cols + 5):
        z = np.where(np.arange(cols) < count, x.astype(np.float64), 0.75)
        _, total, top, low, spread = made(x, y, count)
        np.testing.assert_allclose(total, z.sum(-1, keepdims=True), rtol=1e-5, atol=1e-3)
        np.testing.assert_array_equal(top, z.max(-1, keepdims=True))
        np.testing.assert_array_equal(low, z.min(-1, keepdims=True))
        np.testing.assert_allclose(spread, z.var(-1, keepdims=True), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- sizes at the edges


@pytest.mark.parametrize("name", SPECS)
def test_zero_rows_have_a_plan(name: str) -> None:
    graph = SPECS[name].graph
    rows = [str(s) for s in graph.shape[:-1] if s != graph.shape[-1]]
    if rows:
        check(row_plan(graph.at(**{rows[-1]: 0}), H200))


def test_rows_that_32_bits_can_not_count_are_refused() -> None:
    with pytest.raises(NoPlan, match="count a row's columns in 32 bits"):
        row_plan(SPECS["rmsnorm"].graph.at(N=2**32), H200)
    with pytest.raises(NoPlan, match="count a row's columns in 32 bits"):
        row_plan(SPECS["bias_relu"].graph.at(N=2**31), H200)
    check(row_plan(SPECS["copy"].graph.at(n=2**36), H200))


def test_long_chains_need_no_recursion() -> None:
    def spec(x: f32[M, N]) -> f32[M, N]:
        for _ in range(1500):
            x = x * 1.0001 + 0.5
        return F.softmax(x)

    check(row_plan(chain(M=8, N=64)(spec).graph, H200))
