"""collect(chains, target): everything that is known of them, as a `State`.

Nothing is decided or counted here. Plans come from the planner, resources from the binary, verdicts from the gate and
the validation, times from the database and from `fusegen bench`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusegen import compiling, pipeline
from fusegen.compiling import Binary
from fusegen.database import Choice, choose
from fusegen.emitting.joined import rendered
from fusegen.emitting.rendering import render
from fusegen.emitting.sources import remembered
from fusegen.errors import KernelError, MissingError, NoPlan, RequestError, ValidationError
from fusegen.language.spec import Chain as Spec
from fusegen.planner.heading import header_facts, summary
from fusegen.planner.model import Access, Candidates, Plan, Source
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.planner.programs.side_by_side import LETTERS, JoinedPlan, JoinedSource
from fusegen.reporting import machine_code
from fusegen.reporting.benches import Benches
from fusegen.reporting.explaining import explanation
from fusegen.reporting.items import Picture, picture
from fusegen.reporting.lines import linked, names_in
from fusegen.reporting.reading import AnyFloat
from fusegen.reporting.state import (
    FORMAT,
    Boundary,
    Bytes,
    Candidate,
    Case,
    Chain,
    Cut,
    Kernel,
    Measured,
    Part,
    Point,
    Resources,
    Section,
    Share,
    State,
    Validation,
)
from fusegen.runtime import Program, finding
from fusegen.targets import Target
from fusegen.validation import Report
from fusegen.version import VERSION

UNTRIED = Validation(None, "", "not validated: nobody asked for it", ())
WRITTEN = "operators, as written"  # a chain's, which its picture shows


@dataclass(frozen=True, slots=True)
class Launch:
    """What is known of one launch: its steps with their candidates and why they are tried in that order, its text, and
    what came of compiling it."""

    plan: Plan | JoinedPlan
    found: tuple[Candidates, ...]
    choices: tuple[Choice, ...]
    source: Source | JoinedSource
    binary: Binary | None
    verdicts: tuple[pipeline.Verdict, ...]


def state(chains: Iterable[Chain]) -> State:
    return State(FORMAT, VERSION, tuple(chains))


def collect(
    spec: Spec, target: Target, *, on: str = "auto", validate: bool = True, benches: Benches | None = None
) -> Chain:
    """All that is known of one chain. Raises NoPlan and CompileError; what fails its validation is told as such."""
    if not isinstance(spec, Spec):
        raise RequestError(f"{spec!r} is no chain: pass a function under @chain(...)")
    found, program = kernels_of(spec.graph, target)
    validation = validated(spec, target, on) if validate else Validated(UNTRIED)
    if program is None:
        launches = [validated_launch(validation.made, found) if validation.made else built(found)]
    else:
        program = validation.made.plan if isinstance(validation.made, Program) else pipeline.tuned_steps(program)
        launches = program_launches(program, validation.made)
    return told(spec, target, launches, program, validation.said, benches or Benches())


# ---------------------------------------------------------------- what is built


@dataclass(frozen=True, slots=True)
class Validated:
    """The verdict, and the kernel or program that has it; None where there is none."""

    said: Validation
    made: Any = None


def validated(spec: Spec, target: Target, on: str) -> Validated:
    """The pipeline's own validation. Raises NoPlan, CompileError, and RequestError for a device that is none."""
    finding.find(target, on)
    try:
        made = pipeline.compile(spec, target, on=on)
    except ValidationError as error:
        return Validated(Validation(False, "", str(error), ()))
    except NoPlan:
        raise
    except (MissingError, RequestError) as error:  # no compiler, or a chain that no input would show to be right
        return Validated(Validation(None, "", f"not validated: {error}", ()))
    return Validated(verdict(made.report, str(made.device)), made)


def verdict(found: Report, on: str) -> Validation:
    """A report's cases, each with its worst element, as they stand on the page."""
    cases = tuple(
        Case(
            case.name, case.reason, case.sizes, case.elements, AnyFloat(case.bounded), AnyFloat(case.relative_l2),
            AnyFloat(case.max_abs), AnyFloat(case.share),
            str(case.worst) if case.worst is not None else "", case.problem, case.bitwise,
        )
        for case in found.cases
    )  # fmt: skip
    return Validation(found.ok, on, f"{len(cases)} cases on {found.on}, seed {found.seed}", cases)


def validated_launch(kernel: Any, found: Candidates) -> Launch:
    return Launch(kernel.plan, (found,), (kernel.choice,), kernel.source, kernel.binary, tuple(kernel.gate))


def built(found: Candidates) -> Launch:
    """The first candidate that passes the gate; where nothing compiles here, the first."""
    choice = choose(found)
    try:
        made = pipeline.build_candidates(found)
    except MissingError:
        return Launch(choice.plan, (found,), (choice,), remembered(choice.plan, render), None, ())
    return Launch(made.source.plan, (found,), (made.choice,), made.source, made.binary, made.verdicts)


def program_launches(program: ProgramPlan, made: Any) -> list[Launch]:
    """One of each launch of a program; `made` is the Program, where one was compiled."""
    steps = dict(zip(map(id, program.steps), pipeline.steps_candidates(program), strict=True))
    launches = []
    for place, (together, plan) in enumerate(zip(program.launches, program.launched, strict=True)):
        found = tuple(steps[id(step)] for step in together)
        kernel = made.kernels[place] if isinstance(made, Program) else None
        if not isinstance(plan, JoinedPlan):
            launches.append(validated_launch(kernel, found[0]) if kernel is not None else built(found[0]))
            continue
        pairs = zip(together, found, strict=True)
        choices = tuple(pipeline.step_choice(program, step, own) for step, own in pairs)
        launches.append(joined_launch(plan, found, choices))
    return launches


def joined_launch(plan: JoinedPlan, found: tuple[Candidates, ...], choices: tuple[Choice, ...]) -> Launch:
    try:
        made = pipeline.build_joined(plan)
    except MissingError:
        return Launch(plan, found, choices, rendered(plan), None, ())
    return Launch(plan, found, choices, made.source, made.binary, made.verdicts)


# ---------------------------------------------------------------- what is told of it


def told(
    spec: Spec, target: Target, launches: Sequence[Launch], program: ProgramPlan | None, validation: Validation,
    benches: Benches,
) -> Chain:  # fmt: skip
    graph = spec.graph
    seen = picture(graph, program)
    bench = benches.of(graph.name, graph.sizes, target.name)
    times = benches.times(bench, "" if program else launches[0].plan.name)
    kernels = tuple(
        kernel_of(launch, program.launches[place] if program else (), seen, times)
        for place, launch in enumerate(launches)
    )
    reference = program.reference if program else ""  # a kernel has its own
    traffic = [launch.plan.cost.traffic for launch in launches]
    cost = program or launches[0].plan.cost
    return Chain(
        name=graph.name, doc=summary(graph), signature=graph.signature, sizes=dict(graph.sizes),
        where=str(graph.where), target=target.name, arch=target.arch, model=target.model, dram_gbs=target.dram_gbs,
        fp32_tflops=target.fp32_tflops, spec=seen.spec, first_line=seen.first_line, items=seen.items, kernels=kernels,
        between=boundaries(program) if program else (), cuts=cuts(program) if program else (), reference=reference,
        reference_links=linked(reference, {graph.name: names_in(graph, seen.operators, seen.operands)}, "#"),
        workspace_bytes=program.arena(graph.sizes).bytes if program else 0, time_us=cost.time_us,
        floor_us=cost.floor_us, ideal=sum(t.ideal for t in traffic), moved=sum(t.moved for t in traffic),
        unfused=sum(t.unfused for t in traffic), launches_unfused=sum(t.launches_unfused for t in traffic),
        validation=validation, bench=bench,
    )  # fmt: skip


def boundaries(program: ProgramPlan) -> tuple[Boundary, ...]:
    sizes = program.graph.sizes
    return tuple(
        Boundary(stored.name, str(stored.type), stored.bytes(sizes), *program.ends(stored), stored.why)
        for stored in program.boundaries
    )


def cuts(program: ProgramPlan) -> tuple[Cut, ...]:
    taken = {stored.name for stored in program.boundaries}
    return tuple(
        Cut(cut.stored, cut.kernels, cut.time_us, cut.reason, cut.time_us is not None and set(cut.stored) == taken)
        for cut in program.cuts
    )


def kernel_of(launch: Launch, steps: tuple[Step, ...], seen: Picture, times: Mapping[str, Measured]) -> Kernel:
    plan, cost = launch.plan, launch.plan.cost
    own = plan.plans if isinstance(plan, JoinedPlan) else (plan,)
    step_of: tuple[Step | None, ...] = steps or (None,)
    functions = [f"part_{letter}" for letter in LETTERS] if isinstance(plan, JoinedPlan) else [plan.name]
    names = {
        function: names_in(part.lowered, seen.operators, seen.tensors_of(step))
        for function, part, step in zip(functions, own, step_of, strict=False)
    }
    reference = launch.source.reference if isinstance(launch.source, Source) else ""
    meaning = {plan.name: names_in(own[0].graph, seen.operators, seen.tensors_of(step_of[0]))} if reference else {}
    mixed, unmixed = mix_of(launch.binary)
    return Kernel(
        name=plan.name, regime=plan.regime,
        parts=tuple(part_of(launch, place, part) for place, part in enumerate(own)),
        time_us=cost.time_us, floor_us=cost.floor_us, bound=cost.bound, moved=cost.traffic.moved,
        ideal=cost.traffic.ideal, flops=cost.traffic.flops, product_flops=cost.traffic.product_flops,
        roof_tflops=plan.matrix_tflops if cost.traffic.product_flops else plan.target.fp32_tflops,
        measured=times.get(plan.name) or remembered_time(launch), filename=launch.source.filename,
        source=launch.source.text, links=linked(launch.source.text, names), reference=reference,
        reference_links=linked(reference, meaning, "#"),
        resources=resources_of(launch.binary) if launch.binary else None,
        uncompiled="" if launch.binary else compiler_missing(plan.target), mix=mixed, unmixed=unmixed,
    )  # fmt: skip


def remembered_time(launch: Launch) -> Measured | None:
    """What the database has of this very problem on this very GPU, where it is of the plan that is shown."""
    if len(launch.choices) != 1 or (hit := launch.choices[0].hit) is None or not isinstance(launch.plan, Plan):
        return None
    row, plan = hit.row, launch.plan
    same = hit.relative == 0 and row.sizes == plan.graph.sizes_text() and plan is launch.choices[0].plan
    if not same:
        return None
    return Measured(row.time_us, f"fusegen tune on {row.target}, {row.at}; {'shipped' if hit.shipped else 'your own'}")


def part_of(launch: Launch, place: int, plan: Plan) -> Part:
    found, choice = launch.found[place], launch.choices[place]
    traffic = plan.cost.traffic
    counted = {t.tensor: t for t in traffic.tensors}
    tried = {v.plan.configuration: v.reason or "passed" for v in launch.verdicts if isinstance(v.plan, Plan)}
    return Part(
        name=plan.name, regime=plan.regime, configuration=plan.configuration, chosen_by=str(choice),
        facts=tuple(header_facts(plan)),
        tensors=tuple(
            Bytes(a.tensor, a.output, f"{a.dtype}[{', '.join(map(str, a.shape))}]", access_text(a),
                  counted[a.tensor].per_element, counted[a.tensor].ideal, counted[a.tensor].moved)
            for a in plan.accesses
        ),
        per_element_unfused=traffic.per_element_unfused, unfused=traffic.unfused,
        candidates=tuple(candidate_of(p, p.configuration == plan.configuration, tried) for p in found.plans),
        sections=tuple(
            Section(s.title, tuple(Point(p.text, p.bytes_saved) for p in s.points))
            for s in explanation(found, choice) if s.title != WRITTEN
        ),
    )  # fmt: skip


def access_text(access: Access) -> str:
    """`vector, 16 B`."""
    return f"{access.mode if access.by_column else 'one a row'}, {access.vector_bytes} B"


def candidate_of(plan: Plan, chosen: bool, tried: Mapping[str, str]) -> Candidate:
    return Candidate(
        configuration=plan.configuration, rule=plan.rule, regime=plan.regime, time_us=plan.cost.time_us,
        moved=plan.cost.traffic.moved, registers=plan.cost.registers,
        shared_bytes=plan.shared_bytes + plan.static_shared_bytes, blocks_per_sm=plan.cost.blocks_per_sm,
        chosen=chosen, tried=tried.get(plan.configuration, ""),
    )  # fmt: skip


# ---------------------------------------------------------------- what a binary tells


def resources_of(binary: Binary) -> Resources:
    r, occupancy, target = binary.resources, binary.occupancy, binary.target
    return Resources(
        registers=r.registers, scalar_registers=r.scalar_registers, spill_bytes=r.spill_bytes,
        stack_bytes=r.stack_bytes, static_shared_bytes=r.static_shared_bytes,
        dynamic_shared_bytes=r.dynamic_shared_bytes, code_bytes=r.code_bytes, threads=binary.threads,
        blocks_per_sm=occupancy.blocks_per_sm, warps_per_sm=occupancy.warps_per_sm, occupancy=occupancy.fraction,
        limited_by=occupancy.limited_by, compiler=binary.compiler, most_registers=target.registers_per_thread,
        most_shared_bytes=target.shared_bytes,
    )  # fmt: skip


def mix_of(binary: Binary | None) -> tuple[tuple[Share, ...], str]:
    """The mix of instructions, or why there is none."""
    if binary is None:
        return (), "nothing was compiled"
    try:
        return machine_code.mix(compiling.disassemble(binary), binary.target.vendor), ""
    except MissingError as error:
        return (), str(error)


def compiler_missing(target: Target) -> str:
    """Why nothing was compiled, in the compiler's own words."""
    try:
        compiling.compiler_version(target.vendor)
    except (MissingError, KernelError) as error:
        return str(error)
    return "nothing was compiled"
