"""Which kernels of a program begin while others run, what they read before they wait, and their texts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import fusegen
from fusegen import chain, dims, f16, f32, i32, pipeline
from fusegen import ops as F
from fusegen.compiling import ptx
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.language.spec import Chain
from fusegen.planner.launching import launched
from fusegen.planner.model import Plan
from fusegen.planner.products.asked_ahead import Asked, fewest_rows
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.programs.dependent import in_memory, leaves_memory
from fusegen.planner.programs.model import ProgramPlan
from fusegen.targets import A100, H200, MI300X, Target
from tests.chains_cut import logits_topk, mlp, residual_norm, routed
from tests.specs import FEW, SHIPPED

M, N, K = dims("M N K")
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
LAYER = SHIPPED["decoder_layer"].at(**FEW["decoder_layer"])


@chain(M=24, N=96)
def put_and_read(x: f32[M, N], table: f32[M, N], slots: i32[M]) -> tuple[f32[M, N], f32[M, 1]]:
    """Rows are written into a table, which is read behind that."""
    written = F.scatter(table, slots, F.exp(x))
    return written, F.sum(written * x)


def planned(spec: Chain, target: Target = H200) -> ProgramPlan:
    found = fusegen.plan(spec, target)
    assert isinstance(found, ProgramPlan)
    return found


# ---------------------------------------------------------------- what the planner decides


def test_each_kernel_but_the_first_waits_and_each_but_the_last_triggers() -> None:
    for spec in (mlp, logits_topk, LAYER):
        steps = planned(spec).steps
        assert [s.plan.waits for s in steps] == [False, *[True] * (len(steps) - 1)]
        assert [bool(s.plan.dependent and s.plan.dependent.triggers) for s in steps] == [
            *[True] * (len(steps) - 1),
            False,
        ]


def test_very_many_small_blocks_do_not_say_that_the_next_kernel_may_begin() -> None:
    """The GPU takes 1.26 ns for each that does: 65536 of them took 82.5 us in place of 54.6 on an H200."""
    small, large = (planned(SHIPPED["w8a16_gemm"].at(M=4096, N=n, K=8192)).steps for n in (384, 8192))
    assert [bool(s.plan.dependent and s.plan.dependent.triggers) for s in small] == [True, False]
    assert [bool(s.plan.dependent and s.plan.dependent.triggers) for s in large] == [False, False]
    assert [s.plan.waits for s in large] == [False, True]
    assert LAUNCH not in render(large[0].plan).text
    assert LAUNCH in render(small[0].plan).text


def test_what_no_kernel_before_writes_may_be_read_ahead() -> None:
    first, second = planned(mlp).steps
    assert second.plan.early == {"down"}
    assert {p.tensor: p.shared for p in second.plan.params if p.kind == "pointer"} == {
        "down": False, "h": True, "out": False,
    }  # fmt: skip
    assert not any(p.shared for p in first.plan.params)
    assert second.plan.before_wait == "the first 2 slices of down"
    assert "begins while the kernels before it run, and waits for them behind the first 2 slices of down" in str(
        planned(mlp)
    )


def test_what_a_step_of_the_same_launch_writes_is_not_read_ahead() -> None:
    """At more rows each step is a launch, and the product's began while its right factor was still written."""

    @chain(M=5, N=64, K=2048)
    def unpacked(x: f16[M, K], q: i32[N, K // 8], scale: f16[N, K // 128], zero: i32[N, K // 128]) -> f16[M, N]:
        w = F.rearrange(F.stack([(q >> (4 * i)) & 15 for i in range(8)]), "n k e -> n (k e)")
        grouped = (F.groups(w, 128) - zero[..., None]) * scale[..., None]
        return x @ F.cast(F.rearrange(grouped, "n g k -> n (g k)"), f16).T

    program = planned(unpacked)
    written: set[str] = set()
    for step in program.steps:
        ahead = step.plan.dependent.ahead if step.plan.dependent else frozenset()
        assert not {b.base for b in step.reads if b.tensor in ahead} & written
        written |= {b.base for b in step.writes}
    assert any(len(steps) > 1 and steps[-1].joined == "behind" for steps in program.launches)


def test_an_operand_that_is_written_in_place_is_not_read_ahead() -> None:
    steps = planned(put_and_read).steps
    assert next(binding.base for step in steps for binding in step.writes) == "written"
    assert all("written" not in step.plan.early for step in steps)
    assert in_memory({"written", "h"}, {"written": "table"}) == {"written", "h", "table"}


def test_weights_of_groups_are_asked_for_behind_a_kernel_that_leaves_the_memory_idle() -> None:
    plan = planned(routed).steps[-1].plan
    assert isinstance(plan, GemmPlan)
    assert plan.asked_ahead == Asked(blocks=16, down=8, run=64, least_rows=4)  # 8 groups of 2 tiles each: all of them
    assert plan.before_wait == "asking the L2 cache for 64 of each column of gate, up for the first 16 blocks"
    how = plan.dependent
    assert how is not None
    assert how.idle
    for other in (replace(how, idle=False), replace(how, waits=False), replace(how, ahead=frozenset({"gate"})), None):
        assert getattr(launched(plan, other), "asked_ahead", None) is None
    for tile in (replace(plan.tile, persistent=True), replace(plan.tile, cluster=2), replace(plan.tile, group=16)):
        assert replace(plan, tile=tile).asked_ahead is None
    assert replace(plan, target=replace(H200, l2_bytes=16 * 8192 // 2)).asked_ahead is None  # not a slice for each
    assert all(getattr(s.plan, "asked_ahead", None) is None for s in planned(routed, A100).steps)


def test_groups_that_have_no_rows_are_asked_for_in_vain() -> None:
    """Of 64 groups 32 rows leave 39 empty, 8 tokens' by 4 experts each; 16 rows 50."""
    assert [fewest_rows(groups) for groups in (1, 2, 8, 64, 256)] == [1, 1, 4, 28, 111]
    few = planned(routed.at(T=3)).steps[-1].plan
    assert isinstance(few, GemmPlan)
    assert few.waits
    assert few.asked_ahead is None


def test_what_moves_much_does_not_leave_the_memory_idle() -> None:
    large, small = (fusegen.plan(SHIPPED["rmsnorm"].at(M=rows), H200) for rows in (16384, 8))
    assert not leaves_memory(large.cost, H200)
    assert leaves_memory(small.cost, H200)


@pytest.mark.parametrize(
    "target", [A100, MI300X, replace(H200, dependent_launches=False)], ids=["a100", "mi300x", "off"]
)
def test_others_begin_when_the_one_before_has_ended(target: Target) -> None:
    program = planned(mlp, target)
    assert not any(step.plan.dependent for step in program.steps)
    assert "griddepcontrol" not in "".join(render(step.plan).text for step in program.steps)
    assert program.time_us == sum(step.plan.cost.time_us for step in program.steps)


def test_what_begins_early_is_expected_to_take_less() -> None:
    apart = fusegen.plan(mlp, H200, dependent_launch=False)
    assert isinstance(apart, ProgramPlan)
    assert not any(step.plan.dependent for step in apart.steps)
    assert planned(mlp).time_us == pytest.approx(apart.time_us - H200.dependent_us)


def test_one_kernel_alone_waits_for_nothing() -> None:
    source = render(fusegen.plan(SHIPPED["rmsnorm"], H200))
    assert "griddepcontrol" not in source.text


# ---------------------------------------------------------------- the texts

TOUCHING = re.compile(
    r"\b(?:ld|st|red|atom)\.(?:global|weak|volatile|relaxed|acquire)|ld\.\S*\.nc"
    r"|cp\.async\.(?!commit|wait|bulk\.(?:commit|wait))"
)


def before_the_wait(text: str, filename: str) -> list[str]:
    """What PTX has of memory's instructions before its first wait."""
    try:
        made = ptx(text, H200, filename=filename)
    except MissingError as missing:
        pytest.skip(str(missing))
    body = made[made.index(".entry") :]
    return [found.group() for found in TOUCHING.finditer(body[: body.index(WAIT)])]


def test_compilers_move_no_access_before_the_wait() -> None:
    """Of a kernel of rows, and one by mma.sync; each takes some 0.3 s of NVRTC. Kernels by wgmma wait in each role."""
    norm = render(planned(residual_norm).steps[1].plan)
    assert before_the_wait(norm.text, norm.filename) == []
    product = render(planned(mlp).steps[1].plan)
    early = before_the_wait(product.text, product.filename)
    assert early
    assert all(found.startswith("cp.async") for found in early), "slices of the weights, by asynchronous copies"


def test_a_promise_of_no_other_pointers_would_let_them() -> None:
    """Why operands that kernels write are read without __restrict__."""
    plan = planned(residual_norm).steps[1].plan
    shared = [p.name for p in plan.params if p.shared]
    assert shared
    kept = replace(plan, params=tuple(replace(p, shared=False) for p in plan.params))
    for name in shared:
        assert f"__restrict__ {name}" in render(kept).text
        assert f"__restrict__ {name}" not in render(plan).text


# ---------------------------------------------------------------- the gate


def test_what_spills_by_reading_ahead_is_tried_without(monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(mlp).steps[1]
    asked: list[bool] = []

    def gate(resources: Any) -> str:
        asked.append(True)
        return "spills 16 B of registers" if len(asked) == 1 else ""

    monkeypatch.setattr(pipeline, "gate", gate)
    (_, found) = pipeline.steps_candidates(planned(mlp))
    try:
        built = pipeline.build(step.graph, H200, step.plan.layout, known=found)
    except MissingError as missing:
        pytest.skip(str(missing))
    first, second = (verdict.plan for verdict in built.verdicts)
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.reads_ahead
    assert built.source.plan is second
    assert not second.reads_ahead
    assert second.waits
    assert first.configuration == second.configuration
    assert built.source.text.index(WAIT) < built.source.text.index("extern __shared__")
