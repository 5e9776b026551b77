"""Validating programs: every kind of cut is right on every target, and what is wrong with one is caught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fusegen
from fusegen import Chain, Program, bf16, chain, dims, f32, i32, pipeline
from fusegen import ops as F
from fusegen.cli.programs import ask_plan
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError, KernelError
from fusegen.planner.products.factors import lacking
from fusegen.planner.programs import search
from fusegen.planner.programs.model import Arena, ProgramPlan
from fusegen.planner.programs.smaller import smaller
from fusegen.targets import target as target_named
from fusegen.validation import validate
from tests.chains_cut import CHAINS, best_masked, lora, mlp
from tests.specs import FEW, PROGRAMS, SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)


K, M, N, H, V = dims("K M N H V")


def made(spec: Chain, target: str = "cuda:h200") -> Program:
    found = fusegen.compile(spec, target=target, on="emulator", validate=False)
    assert isinstance(found, Program)
    return found


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.by_values("spec", "target")
@pytest.mark.parametrize("target", ["cuda:h200", "cuda:sm_80", "hip:mi300x"])
@pytest.mark.parametrize("spec", CHAINS, ids=lambda c: c.name)
def test_every_cut_is_right(spec: Chain, target: str) -> None:
    report = validate(made(spec, target), quick=True)
    assert report.ok, str(report)


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.by_values("spec", "target")  # golden sources have each spec for each; kinds of cuts meet each target above
@pytest.mark.parametrize("target", ["cuda:h200", "cuda:sm_80", "hip:mi300x"])
@pytest.mark.parametrize("spec", PROGRAMS.values(), ids=lambda c: c.name)
def test_every_shipped_program_is_right(spec: Chain, target: str) -> None:
    if kinds := lacking(spec.graph, target_named(target)):
        pytest.skip(f"{target} multiplies no {kinds}")
    most = 256 if spec.graph.computed_sizes else 136  # blocks of up to 128 columns come out even
    small = spec.at(**(FEW.get(spec.name) or {name: min(size, most) for name, size in spec.graph.sizes.items()}))
    report = validate(made(small, target), quick=True)
    assert report.ok, str(report)


def test_other_layouts_sizes_and_settings() -> None:
    report = validate(made(lora))
    assert report.ok, str(report)
    assert {"layout: padded rows", "layout: odd stride", "rows: 0", "rows: 1"} <= {case.name for case in report.cases}


def test_the_first_build_is_validated_as_a_whole() -> None:
    program = fusegen.compile(mlp, target="cuda:h200", on="emulator")
    assert program.report.ok


def test_the_verdict_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    calls: list[str] = []
    run = pipeline.run_validation

    def counted(program: Any, *, quick: bool) -> Any:
        calls.append(program.name)
        return run(program, quick=quick)

    monkeypatch.setattr(pipeline, "run_validation", counted)
    first: Any = fusegen.compile(mlp, target="cuda:h200", on="emulator")
    if any(kernel.binary is None for kernel in first.kernels):
        pytest.skip("nothing compiles here, so nothing is kept")
    again: Any = fusegen.compile(mlp, target="cuda:h200", on="emulator")
    assert calls == ["mlp"]
    assert str(again.report) == str(first.report)
    fusegen.compile(mlp.at(H=104), target="cuda:h200", on="emulator")
    assert calls == ["mlp", "mlp"], "other kernels have a verdict of their own"
    assert pipeline.program_key(again).digest == pipeline.program_key(first).digest
    step, *others = again.plan.steps
    bindings = tuple(replace(b, base="x" if b.base == "gate" else b.base) for b in step.reads)
    other = replace(again.plan, steps=(replace(step, reads=bindings), *others))
    moved = Program(other, again.kernels, again.device)
    assert pipeline.program_key(moved).digest != pipeline.program_key(first).digest


# ---------------------------------------------------------------- what is wrong is caught


class Elsewhere(ProgramPlan):
    """A plan whose workspace is another one than what its tensors need."""

    moved: Mapping[str, int]

    def arena(self, sizes: Mapping[str, int]) -> Arena:
        right = super().arena(sizes)
        return Arena({**right.offsets, **self.moved}, right.bytes)


def elsewhere(program: Program, moved: Mapping[str, int]) -> Program:
    plan = program.plan
    other = Elsewhere(plan.graph, plan.target, plan.steps, plan.between)
    object.__setattr__(other, "moved", moved)
    return Program(other, program.kernels, program.device)


def caught(program: Program) -> bool:
    try:
        return not validate(program, quick=True).ok
    except ArgumentError:
        return True


def test_tensors_on_top_of_each_other_are_caught() -> None:
    program = made(best_masked)
    places = program.plan.arena(program.plan.graph.sizes).offsets
    assert len(set(places.values())) == 2
    assert caught(elsewhere(program, dict.fromkeys(places, 0)))


def test_kernels_in_another_order_are_caught() -> None:
    program = made(mlp)
    plan = replace(program.plan, steps=program.plan.steps[::-1])
    with pytest.raises(KernelError, match="mlp_out reads h, which no kernel before it writes"):
        Program(plan, program.kernels[::-1], program.device)

    class Swapped(Program):
        def record(self, *given: Any) -> Any:
            right = Program.record(self, *given)
            return replace(right, launches=right.launches[::-1])

    assert caught(Swapped(program.plan, program.kernels, program.device))


@pytest.mark.parametrize("by", [256, -256, 2])
def test_a_wrong_offset_is_caught(by: int) -> None:
    """What a kernel writes is looked for where the plan has it."""
    program = made(mlp)
    record = Program.record

    class Shifted(Program):
        def record(self, *given: Any) -> Any:
            right = record(self, *given)
            first, *others = right.launches
            pointers = tuple(
                replace(p, offset=p.offset + by) if p.base == len(self.names) else p for p in first.pointers
            )
            return replace(right, launches=(replace(first, pointers=pointers), *others))

    assert caught(Shifted(program.plan, program.kernels, program.device))


def test_a_step_that_sums_columns_in_parts_is_right_by_itself() -> None:
    """As `fusegen tune` compiles it; some rows of results are parts of sums, and other ones are rows."""
    program = ask_plan(PROGRAMS["layernorm_backward"].graph.at(M=16384, N=1024), target_named("cuda:h200")).program
    assert program is not None
    dx = pipeline.compile_kernel(pipeline.steps_candidates(program)[0], on="emulator")
    assert dx.plan.graph.parts
    assert dx.report is not None
    assert dx.report.ok


def test_large_products_are_validated_at_a_smaller_width_and_k() -> None:
    """By the same rules and, for what multiplies, the same configuration; the report says at which sizes."""

    @chain(M=4096, H=2048, V=40064)
    def loss(x: bf16[M, H], w: bf16[V, H], labels: i32[M, 1]) -> f32[M, 1]:
        return F.cross_entropy(x @ w.T, labels)

    program: Any = fusegen.compile(loss, target="cuda:h200", on="emulator")
    assert program.report.ok
    small = smaller(program.plan)
    assert small is not None
    assert small.graph.sizes == {"M": 4096, "H": 512, "V": 640}
    assert small.steps[0].plan.configuration == program.plan.steps[0].plan.configuration


def test_a_choice_among_many_logits_is_validated_among_few() -> None:
    """By the rule that the wide rows have, though the cheapest for short ones is another. It takes the seconds that a
    first compile does; at full size these were minutes."""
    found: Any = fusegen.plan(PROGRAMS["logits_argmax"], "cuda:h200", tuned=False)
    small = smaller(found)
    assert small is not None
    assert small.graph.sizes == {"M": 32, "V": 512, "K": 512}
    assert [step.plan.rule for step in small.steps] == [step.plan.rule for step in found.steps]
    assert small.steps[0].plan.configuration == found.steps[0].plan.configuration
    assert [step.plan.waits for step in small.steps] == [False, True]
    program: Any = fusegen.compile(PROGRAMS["logits_argmax"], target="cuda:h200", on="emulator", tuned=False)
    assert program.report.ok
    assert "x512" in str(program.report)


def test_rows_that_are_too_short_for_a_rule_stay_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = fusegen.plan(PROGRAMS["logits_argmax"], "cuda:h200", tuned=False)

    def for_wide_rows(step: Any, large: Any) -> Any:
        return step if step.plan.cols > 512 or step.graph.products else None

    monkeypatch.setattr("fusegen.planner.programs.smaller.same_way", for_wide_rows)
    small = smaller(found)
    assert small is not None
    assert small.graph.sizes == {"M": 32, "V": 128256, "K": 512}


def test_what_is_cut_otherwise_at_smaller_sizes_keeps_its_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels, where at the smaller sizes two are cheaper. At full size it took the emulator ten minutes."""
    monkeypatch.setattr(search, "UNTOLD_FACTOR", 1.0)  # two are said to take no longer than 1.0002 of the time
    program: Any = fusegen.compile(SHIPPED["mlp"], target="cuda:a100", on="emulator", tuned=False)
    assert program.report.ok
    small = smaller(program.plan)
    assert small is not None
    assert len(small.steps) == len(program.plan.steps) == 3
    shown = {dim: size for dim, size in small.graph.sizes.items() if size != program.plan.graph.sizes[dim]}
    assert shown == {"K": 512, "H": 512}
    assert [s.plan.rule for s in small.steps] == [s.plan.rule for s in program.plan.steps]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("w4a16_gemm", {"K": 2048, "N": 512}), ("paged_attention", {"P": 64})],  # of slices for 8 groups; of 64 x 16 keys
)
def test_smaller_sizes_leave_products_their_configuration(name: str, sizes: dict[str, int]) -> None:
    """At its own sizes the first took 39 s; the second, of pages, was taken for smaller than itself without end."""
    found = ask_plan(SHIPPED[name].graph, target_named("cuda:h200")).program
    assert found is not None
    small = smaller(found)
    assert small is not None
    assert {dim: size for dim, size in small.graph.sizes.items() if size != found.graph.sizes[dim]} == sizes
    assert [step.plan.configuration for step in small.steps] == [step.plan.configuration for step in found.steps]
    again = smaller(small)
    assert again is None or again.graph.sizes != small.graph.sizes


def test_small_products_are_validated_as_they_are() -> None:
    assert smaller(made(mlp).plan) is None


def sharp(scale: float) -> Chain:
    """Two products, then weights of logits so large that what the first product may be off is any of them."""

    @chain(M=40, K=64, N=64)
    def sharp(x: bf16[M, K], w: bf16[N, K], u: bf16[N, N], v: bf16[M, N]) -> bf16[M, N]:
        hidden = F.cast(F.rmsnorm(x @ w.T), bf16)
        return F.cast(F.softmax(hidden @ u.T * scale) * v, bf16)

    return sharp


def test_kernels_behind_bounds_that_say_nothing_are_held_to_what_they_read() -> None:
    right, other = (made(sharp(scale)) for scale in (1000.0, 1010.0))
    report = validate(right, quick=True)
    assert report.ok, str(report)
    assert not report.unjudged, str(report)
    assert len(right.kernels) > 1
    assert caught(Program(right.plan, [*right.kernels[:-1], other.kernels[-1]], right.device))
    turned = replace(right.plan, graph=sharp(-1000.0).graph)  # the chain says what no kernel was made for
    assert caught(Program(turned, right.kernels, right.device))


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_a_factor_that_a_kernel_casts_is_what_the_cast_makes_of_it(target: str) -> None:
    """The kernel that casts stores its operand as another type, and was taken to copy it."""

    @chain(M=37, K=64, N=96)
    def cast_weights(x: bf16[M, K], w: f32[N, K]) -> f32[M, N]:
        return x @ F.cast(w, bf16).T

    program = fusegen.compile(cast_weights, target, on="emulator")
    assert isinstance(program, Program)
    assert program.report.ok


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:a100", "hip:mi300x"])
def test_a_factor_that_is_read_elsewhere_too_is_in_memory_as_both_want_it(target: str) -> None:
    """A contrastive loss: a product reads normalized rows as bf16, a dot product as f32. No cut was found."""

    @chain(N=37, K=24)
    def contrastive(a: bf16[N, K], b: bf16[N, K]) -> f32[N]:
        a, b = F.l2norm(a), F.l2norm(b)
        own = F.sum(a * b, keepdims=False)
        return F.logsumexp(a @ b.T * 14.3, keepdims=False) - 14.3 * own

    program = fusegen.compile(contrastive, target, on="emulator")
    assert isinstance(program, Program)
    assert program.report.ok
    stored = {one.type.dtype for one in program.plan.between if one.type.shape == (N, K)}
    assert stored == {bf16}, "the product's factor; what the dot product takes is made anew"
