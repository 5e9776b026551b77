"""Several steps in one launch, one after another: a mixture's router by the blocks of one cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Program, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.pipeline import choose_target, compile_program, plan, smaller_program
from fusegen.planner import candidates
from fusegen.planner.programs import joining, one_cluster
from fusegen.planner.programs.dependent import dependent
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.one_cluster import OneClusterPlan, obstacle
from fusegen.runtime.joined import Joined
from fusegen.validation import validate
from tests.routers import judge, tokens
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

T, D, E = dims("T D E")
ROUTING = SHIPPED["moe_routing"].at(T=40, D=512, E=24)
MADE: dict[tuple[object, ...], Program] = {}


@chain(T=24, D=512, E=16)
def best_of_logits(x: bf16[T, D], w: bf16[E, D], scale: f32) -> tuple[f32[T, 2], i32[T, 2]]:
    """Any number of tokens: the kernel is compiled once. With a run-time scalar."""
    return F.topk(x @ w.T * scale, 2)


@chain(T=64, D=7168, E=256)
def logits(x: bf16[T, D], w: bf16[E, D]) -> f32[T, E]:
    return x @ w.T


def by_one(spec: Chain, target: str) -> ProgramPlan:
    """The chain's program with all steps by one cluster, in a block size that all have."""
    found: Any = plan(spec, target)
    own = [joining.by_threads(found, [replace(step, plan=cheapest(found, step))]) for step in found.steps]
    one = joining.together([[step] for step in found.steps], own)
    assert one is not None, f"{spec.name} has steps of no common block size"
    return dependent(replace(found, steps=one))


def cheapest(program: ProgramPlan, step: Any) -> Any:
    return candidates(step.graph, program.target, step.plan.layout).need()[0]


def made(spec: Chain, target: str = "cuda:h200") -> Program:
    key = spec.name, tuple(spec.graph.sizes.items()), target
    if key not in MADE:
        MADE[key] = compile_program(by_one(spec, target), on="emulator", validate=False, tuned=False)
        (kernel,) = MADE[key].kernels
        assert isinstance(kernel, Joined)
        assert isinstance(kernel.plan, OneClusterPlan)
    return MADE[key]


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:b200"])
@pytest.mark.parametrize("count", [1, 8, 33, 100])
def test_a_router_has_the_results_of_its_steps_apart(count: int, target: str) -> None:
    spec = ROUTING.at(T=count)
    given = tokens(count)
    judge(given, made(spec, target)(*given))


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:b200"])
@pytest.mark.parametrize("spec", [ROUTING, best_of_logits], ids=lambda spec: spec.name)
def test_it_is_validated_like_any_program(spec: Chain, target: str) -> None:
    report = validate(made(spec, target))
    assert report.ok, str(report)


def test_any_number_of_rows_is_right_and_far_more_have_launches_of_their_own() -> None:
    program = made(best_of_logits)
    for count, launches in ((24, 1), (1, 1), (0, 0), (200, 1), (3000, 2)):
        x, w = tokens(count, experts=16)
        best, columns = (np.asarray(a) for a in program(x, w, 0.25))
        logits = x.astype(np.float64) @ w.T.astype(np.float64) * 0.25
        np.testing.assert_array_equal(columns, np.argsort(-logits, axis=1, kind="stable")[:, :2])
        np.testing.assert_allclose(best, np.take_along_axis(logits, columns, 1), rtol=1e-3, atol=1e-3)
        record = list(program.records.values())[-1]
        assert sum(own.record.loaded is not None for own in record.launches) == launches, count


def test_operands_that_lie_otherwise_are_taken_as_they_lie() -> None:
    program = made(ROUTING)
    x, router = tokens(40)
    law = [np.asarray(a) for a in program(x, router)]
    wide = np.zeros((40, 513), x.dtype)[:, 1:]
    wide[...] = x
    for one, two in zip(program(wide, router), law, strict=True):
        np.testing.assert_allclose(np.asarray(one), two, rtol=1e-4)


# ---------------------------------------------------------------- what the planner makes of it


def test_decoded_tokens_take_one_launch_and_prompts_several() -> None:
    few: Any = plan(SHIPPED["moe_routing"].at(T=8), "cuda:h200")
    (launch,) = few.launched
    assert isinstance(launch, OneClusterPlan)
    assert launch.cluster == 8
    assert "one after another, by a cluster of 8 blocks of 128 threads" in str(few)
    assert [step.joined for step in few.steps] == ["", "behind", "behind"]
    assert few.lives["matmul"] == (0, 0)
    many: Any = plan(SHIPPED["moe_routing"].at(T=8192), "cuda:h200")
    assert len(many.launches[0]) == 1


def test_a_layer_of_decoded_tokens_is_four_launches() -> None:
    found: Any = plan(SHIPPED["moe_layer"].at(T=32), "cuda:h200")
    assert [len(steps) for steps in found.launches] == [3, 1, 1, 1]
    apart = one_cluster_off(found)
    assert found.time_us < apart.time_us


def test_a_deep_product_of_logits_shares_the_launch_of_what_is_chosen_by_them() -> None:
    """Of a K of 7168 parts take less than one kernel, whose sum is a launch by itself; what is behind one kernel
    shares its launch, and the layer has four for six."""
    layer: Any = plan(SHIPPED["moe_layer"].at(T=64, D=7168, H=2048, E=256), "cuda:h200")
    assert [len(steps) for steps in layer.launches] == [3, 1, 1, 1]
    alone: Any = plan(logits.at(T=64, D=7168, E=256), "cuda:h200")
    assert len(alone.launches) == 2


@pytest.mark.parametrize("count", [8, 256])
def test_many_weights_are_validated_with_the_same_launches(count: int) -> None:
    """At a smaller width and K; else every expert would be judged, which takes minutes."""
    large: Any = plan(SHIPPED["moe_layer"].at(T=count), "cuda:h200")
    small = smaller_program(large)
    assert small is not None
    assert [step.joined for step in small.steps] == [step.joined for step in large.steps]
    assert "behind" in {step.joined for step in small.steps}


def one_cluster_off(program: ProgramPlan) -> ProgramPlan:
    steps = tuple(replace(step, joined="", plan=cheapest(program, step)) for step in program.steps)
    return dependent(replace(program, steps=steps))


def test_floors_and_targets_are_those_of_the_whole_gpu() -> None:
    found: Any = plan(SHIPPED["moe_routing"], "cuda:h200")
    apart = one_cluster_off(found)
    assert {step.plan.target for step in found.steps} == {choose_target("cuda:h200")}
    assert found.floor_us == pytest.approx(apart.floor_us)
    assert one_cluster.narrowed(found.target).sms == 8


def test_without_clusters_steps_stay_apart() -> None:
    for target in ("cuda:a100", "hip:mi300x"):
        found: Any = plan(SHIPPED["moe_routing"], target)
        assert all(len(steps) == 1 for steps in found.launches)


def test_a_program_of_one_order_of_sums_keeps_its_launches() -> None:
    program = fusegen.compile(
        best_of_logits, target="cuda:h200", on="emulator", validate=False, batch_invariant=True
    )  # fmt: skip
    assert all(not isinstance(kernel, Joined) for kernel in program.kernels)  # type: ignore[union-attr]


def test_steps_that_no_others_can_follow_are_told() -> None:
    found: Any = plan(SHIPPED["moe_routing"], "cuda:h200")
    product, choice, sort = (step.plan for step in found.steps)
    assert not obstacle([product, choice, sort])
    wide = replace(choice, tile=replace(choice.tile, threads=256))
    assert "differ in threads" in obstacle([product, wide])
    split = replace(product, tile=replace(product.tile, cluster=2))
    assert "clusters of 2 blocks" in obstacle([split])
    staying = replace(product, tile=replace(product.tile, persistent=True))
    assert "no blocks that others can take" in obstacle([staying])
    assert "more than 8 of them" in obstacle([choice] * 9)
    norms = candidates(SHIPPED["rmsnorm"].graph, found.target).plans
    sharing = next(plan for plan in norms if plan.in_any_block and plan.static_shared_bytes)
    assert not obstacle([sharing])
    assert "bytes of shared memory" in obstacle([replace(sharing, shared_bytes=found.target.shared_bytes)])
    with pytest.raises(ValueError, match="is no launch"):
        _ = OneClusterPlan("x", found.target, (product, wide), ("a", "b")).parts


def test_no_launch_has_more_steps_than_letters() -> None:
    """What was behind the eighth was left out."""
    found: Any = plan(SHIPPED["moe_routing"], "cuda:h200")
    step = found.steps[1]
    own = {step.plan.threads: step.plan}
    assert joining.together([[step]] * 8, [own] * 8) is not None
    assert joining.together([[step]] * 9, [own] * 9) is None


# ---------------------------------------------------------------- what is wrong with one is caught

BARRIER = """  __cluster_barrier_arrive();  // what this block wrote
  __cluster_barrier_wait();    // and the others can be read by all
"""


@pytest.mark.parametrize(("found", "wrong"), [
    (BARRIER, ""),  # of the last two steps
    ("__cluster_barrier_wait();", "if (blockIdx.x) __cluster_barrier_wait();"),
    ("    __syncthreads();  // its", "    // its"),
    ("block += 8", "block += 9"),
    ("block = blockIdx.x", "block = blockIdx.x + 1"),
    ("block < blocks_b", "block + 1 < blocks_b"),
    ("b_experts_ptr, b_softmax_ptr", "reinterpret_cast<int*>(b_softmax_ptr), reinterpret_cast<float*>(b_experts_ptr)"),
])  # fmt: skip
def test_blocks_that_miss_a_turn_or_do_not_wait_are_caught(found: str, wrong: str) -> None:
    program = made(ROUTING.at(T=600))
    (kernel,) = program.kernels
    assert isinstance(kernel, Joined)
    head, entry, body = kernel.source.text.rpartition(f"{kernel.plan.name}(\n")
    body = wrong.join(body.rsplit(found, 1)) if found == BARRIER else body.replace(found, wrong)
    source = replace(kernel.source, text=head + entry + body)
    assert source.text != kernel.source.text
    other = Joined(source, None, program.device, kernel.replan, kernel.make_variant, kernel.make_alone)
    assert not validate(Program(program.plan, [other], program.device), quick=True).ok
