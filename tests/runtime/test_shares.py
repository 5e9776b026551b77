"""Several steps in one launch of many clusters, each of which has rows of its own: a mixture's router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import Chain, Program, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.pipeline import choose_target, compile_program, plan, smaller_program
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.programs import joining, kernels_of, one_cluster, shares, step_candidates
from fusegen.planner.programs.dependent import dependent
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.one_cluster import OneClusterPlan
from fusegen.planner.sorting.plan import SlotsPlan
from fusegen.runtime.joined import Joined
from fusegen.validation import validate
from fusegen.validation.programs import rows_by_themselves
from tests.routers import judge, tokens
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

T, D, H, E = dims("T D H E")
ROUTING = SHIPPED["moe_routing"].at(T=200, D=512, E=24)
MADE: dict[tuple[object, ...], Program] = {}


@chain(T=200, D=512, E=24)
def weighed(x: bf16[T, D], w: bf16[E, D], scale: f32) -> f32[T, E]:
    """Rows of which nothing is left to do when all are made: no cluster is counted."""
    return F.softmax(F.round(x @ w.T * scale))


@chain(T=200, D=512, E=24)
def twice(x: bf16[T, D], w: bf16[E, D], v: bf16[D, E]) -> bf16[T, D]:
    """Products one after another, and a row of all that they made."""
    return F.rmsnorm(F.cast(F.silu(x @ w.T) @ v.T, bf16) + x)


@chain(T=200, D=512, E=24)
def turned_over(x: bf16[T, D], w: bf16[E, D]) -> f32[T, E]:
    return F.softmax(F.flip(x @ w.T, axis=0))


@chain(T=200, D=512, E=24)
def less_the_first(x: bf16[T, D], w: bf16[E, D]) -> f32[T, E]:
    logits = x @ w.T
    return F.softmax(logits - logits[:1])


@chain(T=200, D=512, E=24)
def by_column(x: bf16[T, D], w: bf16[E, D]) -> f32[T, E]:
    return F.softmax(x @ w.T, over=T)


def shared(spec: Chain, shared_out: int, target: str = "cuda:h200") -> ProgramPlan:
    """The chain's program as one launch, with the rows of the first steps shared out."""
    found: Any = plan(spec, target)
    steps = [[replace(step, joined="", share=0)] for step in found.steps]
    clusters = one_cluster.clusters_of(found.target)
    narrow = [joining.by_threads(found, step) for step in steps]
    wide = [joining.by_threads(found, step, clusters) for step in steps]
    assert shared_out <= shares.following(steps, wide)
    one = joining.together(steps, [*wide[:shared_out], *narrow[shared_out:]], shared_out)
    assert one is not None, f"{spec.name} has steps of no common block size"
    return dependent(replace(found, steps=one))


def made(spec: Chain, shared_out: int, target: str = "cuda:h200") -> Program:
    key = spec.name, tuple(spec.graph.sizes.items()), shared_out, target
    if key not in MADE:
        program = shared(spec, shared_out, target)
        MADE[key] = compile_program(program, on="emulator", validate=False, tuned=False)
        (kernel,) = MADE[key].kernels
        assert isinstance(kernel, Joined)
        assert isinstance(kernel.plan, OneClusterPlan)
        assert kernel.plan.shared_out == shared_out
    return MADE[key]


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:b200"])
@pytest.mark.parametrize("shared_out", [1, 2])
@pytest.mark.parametrize("count", [1, 15, 200, 333])
def test_a_router_has_the_results_of_its_steps_apart(count: int, shared_out: int, target: str) -> None:
    given = tokens(count)
    judge(given, made(ROUTING.at(T=count), shared_out, target)(*given))


@pytest.mark.parametrize(("spec", "shared_out", "target"), [
    (ROUTING, 1, "cuda:h200"), (ROUTING, 2, "cuda:h200"), (ROUTING, 2, "cuda:b200"), (weighed, 2, "cuda:h200"),
    (weighed, 2, "cuda:b200"), (twice, 3, "cuda:h200"),
])  # fmt: skip
def test_it_is_validated_like_any_program(spec: Chain, shared_out: int, target: str) -> None:
    report = validate(made(spec, shared_out, target))
    assert report.ok, str(report)


def test_clusters_are_counted_only_where_one_goes_on_alone() -> None:
    counted, alone = shared(ROUTING, 2), shared(weighed, 2)
    assert list(counted.counters.values()) == [0]
    assert not alone.counters
    (launch,) = alone.launched
    assert "by clusters of 8 blocks" in str(launch)
    assert f"rows     each cluster takes {alone.steps[0].share}\n" in str(launch)
    (launch,) = counted.launched
    assert "in the first 2 steps; the last one to arrive does what follows" in str(launch)
    sizes = counted.graph.sizes
    offsets = counted.arena(sizes).offsets
    (word,) = counted.counters
    spans = {name: range(at, at + 8 if name == word else at + 1) for name, at in offsets.items()}
    assert all(offsets[word] not in span for name, span in spans.items() if name != word)


def test_any_number_of_rows_is_right() -> None:
    """In more turns than were planned for, and of none at all."""
    program = made(weighed, 2)
    for count in (0, 1, 31, 200, 1500):
        x, w = tokens(count)
        found = np.asarray(program(x, w, 0.25))
        logits = np.round(x.astype(np.float64) @ w.T.astype(np.float64) * 0.25)
        law = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
        agree = np.isclose(found, law / law.sum(1, keepdims=True), rtol=1e-3, atol=1e-6).all(1)
        assert agree.sum() >= 0.95 * count  # f32 sums that lie halfway round to either side
        record = list(program.records.values())[-1]
        assert sum(own.record.loaded is not None for own in record.launches) == (count > 0)


def test_what_the_workspace_held_before_does_not_matter() -> None:
    """Nor that a launch before it counted there, or other clusters than its own."""
    program, given = made(ROUTING, 2), tokens(200)
    none = program.kernels[0].plan.none_arrived  # type: ignore[union-attr]
    words = [0, none, none ^ (1 << 40), none ^ (1 << 21), 2**64 - 1, 2**63]
    size = program.workspace_bytes(T=200)
    for word in words:
        room = np.zeros(size + 256, np.uint8)
        room = room[-room.ctypes.data % 256 :][:size]
        room.view(np.uint64)[:] = word
        for _ in range(3):
            judge(given, program(*given, workspace=room))


# ---------------------------------------------------------------- what the planner makes of it


def test_rows_that_other_rows_are_made_of_are_not_shared_out() -> None:
    for spec in (turned_over, less_the_first, by_column):
        found: Any = plan(spec, "cuda:h200")
        steps = [[replace(step, joined="", share=0)] for step in found.steps]
        clusters = one_cluster.clusters_of(found.target)
        wide = [joining.by_threads(found, step, clusters) for step in steps]
        assert shares.following(steps, wide) <= 1, spec.name
        assert all(step.share == 0 for step in found.steps[1:])


def test_a_prompts_router_is_one_launch_too() -> None:
    for count in (256, 512, 1024):
        found: Any = plan(SHIPPED["moe_routing"].at(T=count), "cuda:h200")
        (launch,) = found.launched
        assert isinstance(launch, OneClusterPlan)
        assert launch.counts
        assert [step.joined for step in found.steps] == ["", "behind", "behind"]


@pytest.mark.parametrize(
    ("tokens", "launches"), [(64, 4), (256, 4), (2048, 4), (4096, 4), (16384, 4), (32768, 5), (65536, 4)]
)
def test_a_layer_of_experts_in_few_launches(tokens: int, launches: int) -> None:
    """The router's product, the choice of experts and their sort are one, but where that is estimated to cost more than
    0.75 % of the layer. From the logits on there are 4 in any case."""
    layer: Any = plan(SHIPPED["moe_layer"].at(T=tokens), "cuda:h200")
    assert len(layer.launches) == launches
    product, *behind = layer.launches
    assert len(behind) + (len(product) > 1) == 4


@chain(T=65536, D=7168, H=2048, E=256)
def behind_the_logits(
    x: bf16[T, D], logits: f32[T, E], gate: bf16[E, H, D], up: bf16[E, H, D], down: bf16[E, D, H]
) -> bf16[T, D]:
    """As large as DeepSeek-V3's, of 65536 tokens."""
    best, experts = F.topk(logits, 8)
    order, ends, places = F.sort_by_group(experts, E)
    tokens = F.gather(x, order // 8)
    h = F.silu(F.grouped_matmul(tokens, gate.mT, ends)) * F.grouped_matmul(tokens, up.mT, ends)
    return F.gather_sum(F.cast(F.grouped_matmul(h, down.mT, ends), bf16), places, F.softmax(best))


def test_the_choice_of_many_tokens_experts_shares_the_sorts_launch() -> None:
    """Which takes longer than two launches do, by less than a launch is worth in so long a layer."""
    layer: Any = plan(behind_the_logits, "cuda:h200")
    assert len(layer.launches) == 4
    assert layer.steps[0].plan.cost.time_us > one_cluster.SHORT_US


@pytest.mark.parametrize("experts", [64, 256])
@pytest.mark.parametrize("threads", [128, 256])
def test_tiles_of_prompts_are_validated_beside_the_choice_and_the_sort(experts: int, threads: int) -> None:
    """Whose warps share no K, in blocks of both sizes that a choice and a sort have too."""
    spec = SHIPPED["moe_routing"].at(T=2048, D=256, E=experts, K=4)
    found: Any = plan(spec, "cuda:h200")
    steps = [[replace(step, joined="", share=0)] for step in found.steps]
    many = one_cluster.clusters_of(found.target)
    tile = next(
        p
        for p in joining.on_few(found, steps[0][0], many)
        if isinstance(p, GemmPlan)
        and (p.threads, p.tile.slice_k, p.tile.cluster) == (threads, 1, 1)
        and (p.tile.cols >= experts and not one_cluster.obstacle([p]))
    )
    wide = {threads: one_cluster.on(found.target, tile, 1.0)}
    one = joining.together(
        steps, [wide, joining.by_threads(found, steps[1], many), joining.by_threads(found, steps[2])], 2
    )
    assert one is not None
    program = compile_program(dependent(replace(found, steps=one)), on="emulator", validate=False, tuned=False)
    (kernel,) = program.kernels
    assert isinstance(kernel, Joined)
    report = validate(program, quick=True)
    assert report.ok, str(report)[:2000]


@chain(T=4096, D=512, E=256)
def within_groups(x: bf16[T, D], router: bf16[E, D]) -> tuple[f32[T, 8], i32[8 * T], i32[E], i32[T, 8]]:
    """As DeepSeek-V3's: keys that are limited to groups, a choice of lanes that have several delegates."""
    best, experts = F.topk(F.sigmoid(x @ router.T), 8, groups=8, best_groups=4)
    order, ends, places = F.sort_by_group(experts, E)
    return best, order, ends, places


def test_a_choice_within_groups_shares_a_sort_s_large_blocks() -> None:
    """Blocks of 128 were all that there were: 25.4 us were estimated for what is 18.2 now."""
    found: Any = plan(within_groups, "cuda:h200")
    steps = [[replace(step, joined="", share=0)] for step in found.steps[1:]]
    wide, narrow = (joining.by_threads(found, own, n) for own, n in zip(steps, (14, 1), strict=True))
    one = joining.together(steps, [wide, narrow], 1)
    assert one is not None
    assert [step.plan.threads for step in one] == [512, 512]
    assert one[0].plan.configuration.endswith("delegates=8")
    assert joining.turn_cost(one).time_us < 19


def test_a_sort_costs_the_same_however_few_sms_are_said_to_be_there() -> None:
    layer: Any = plan(SHIPPED["moe_layer"].at(T=16384), "cuda:h200")
    sort = next(step for step in layer.steps if step.plan.rule == "slot_sort")
    same = next(p for p in step_candidates(layer, sort).plans if p.configuration == sort.plan.configuration)
    assert sort.plan.cost.time_us == same.cost.time_us


def test_many_weights_are_validated_with_the_same_shares() -> None:
    large: Any = plan(SHIPPED["moe_layer"].at(T=256), "cuda:h200")
    small = smaller_program(large)
    assert small is not None
    assert [(step.joined, step.share) for step in small.steps] == [(step.joined, step.share) for step in large.steps]
    assert any(step.share for step in small.steps)


@pytest.mark.parametrize(("name", "tokens"), [("moe_layer", 1024), ("moe_layer", 4096), ("moe_routing", 16384)])
def test_tokens_that_are_constants_are_validated_as_fewer(name: str, tokens: int) -> None:
    """A layer of 1024 took 12 s to be judged, of 4096 400. Launches are the same, and so are a sort's warps and blocks,
    several of which have slots."""
    large: Any = plan(SHIPPED[name].at(T=tokens), "cuda:h200")
    small = smaller_program(large)
    assert small is not None
    assert small.graph.sizes["T"] == 512
    assert [(step.joined, step.share) for step in small.steps] == [(step.joined, step.share) for step in large.steps]
    wgmma = [step.plan.configuration for step in large.steps if step.plan.rule == "wgmma"]
    assert [step.plan.configuration for step in small.steps if step.plan.rule == "wgmma"] == wgmma
    sort, fewer = (next(p for s in found.steps if isinstance(p := s.plan, SlotsPlan)) for found in (large, small))
    assert (fewer.threads, fewer.cluster) == (sort.threads, sort.cluster)
    assert fewer.threads * fewer.tile.turns < fewer.slots


def test_tokens_that_are_constants_are_drawn_by_every_pattern() -> None:
    """But not the heads of an indexer, which are summed: what one NaN reaches, no other can be judged by."""
    router: Any = plan(SHIPPED["moe_routing"], "cuda:h200")
    assert rows_by_themselves(router) == ["T"]
    _, program = kernels_of(SHIPPED["lightning_indexer"].graph, choose_target("cuda:h200"))
    assert program is not None
    assert rows_by_themselves(program) == []


def test_no_more_clusters_share_rows_than_run_at_once() -> None:
    """15 of 8 blocks do on an H200."""
    assert one_cluster.clusters_of(choose_target("cuda:h200")) == 14
    found = shared(SHIPPED["moe_routing"].at(T=4096), 2)
    assert -(-4096 // found.steps[0].share) <= 14


def test_no_launch_has_more_clusters_than_can_be_counted() -> None:
    """Nor an exported one, which is told the most blocks."""
    (launch,) = shared(ROUTING, 2).launched
    (alone,) = shared(weighed, 2).launched
    assert isinstance(launch, OneClusterPlan)
    assert launch.max_blocks == 8 * (2**20 - 1)
    assert alone.max_blocks > launch.max_blocks
    each = launch.each
    assert launch.blocks([each[0] * (2**20 - 1), each[1] * (2**20 - 1), 1]) == launch.max_blocks
    assert launch.blocks([each[0] * 2**20, each[1] * 2**20, 1]) is None


def test_rows_that_are_no_share_are_told() -> None:
    found = shared(ROUTING, 2)
    (launch,) = found.launched
    assert isinstance(launch, OneClusterPlan)
    assert not launch.obstacle(launch.plans)
    other = replace(launch, rows=launch.rows + 1)
    assert "are a share" in other.obstacle(other.plans)
    with pytest.raises(ValueError, match="is no launch"):
        _ = other.parts


# ---------------------------------------------------------------- what is wrong with one is caught

MEETING = """  __cluster_barrier_arrive();  // what this block wrote
  __cluster_barrier_wait();    // and the others of its cluster
"""


@pytest.mark.parametrize(("found", "wrong"), [
    ("    __threadfence();\n    const bool", "    const bool"),
    ("gridDim.x / 8 - 1;", "gridDim.x / 8 - 2;"),
    ("    if (is_last) atomicExch", "    if (!is_last) atomicExch"),
    ("    if ((found ^ none_arrived) > most_arrived) atomicCAS", "    if (false) atomicCAS"),
    ("if (!last_to_arrive(arrived, found)) return;", "last_to_arrive(arrived, found);"),
    ("share = blockIdx.x / 8;", "share = blockIdx.x / 8 + 1;"),
    ("block = share + blockIdx.x % 8; block < (share + 1)", "block = share + 1 + blockIdx.x % 8; block < (share + 2)"),
])  # fmt: skip
def test_clusters_that_miscount_or_take_other_rows_are_caught(found: str, wrong: str) -> None:
    catch(made(ROUTING, 2), found, wrong)


def test_a_count_before_all_blocks_of_a_cluster_are_done_is_caught() -> None:
    catch(made(ROUTING, 1), MEETING, "")


def catch(program: Program, found: str, wrong: str) -> None:
    (kernel,) = program.kernels
    assert isinstance(kernel, Joined)
    source = replace(kernel.source, text=kernel.source.text.replace(found, wrong))
    assert source.text != kernel.source.text
    other = Joined(source, None, program.device, kernel.replan, kernel.make_variant, kernel.make_alone)
    assert not validate(Program(program.plan, [other], program.device), quick=True).ok
