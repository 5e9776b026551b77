"""From a chain to a kernel one can call: plan, render, compile, gate, validate.

    kernel = fusegen.compile(bias_gelu_residual_ln, target="cuda:h200")

Candidates come in the cost model's order, but for one that was measured as the best on a problem like this one, which
comes first (`fusegen.database.lookup`). The *gate* reads the binary's own resource report: a candidate that spills
registers or has a stack frame loses to the next one that does not, since either sends row values through memory; and
where it is to run on a GPU here, one whose clusters this GPU has no room for, as a part of one may not, loses to the
next with smaller ones or none. One that fails its validation loses to the next as well, after a warning: the chain is
right on another path, and the fault is fusegen's. The choice and the verdicts stay with the kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

from fusegen.compiling import Binary, Resources
from fusegen.database import Choice, choose
from fusegen.emitting.joined import render_joined
from fusegen.emitting.rendering import render
from fusegen.emitting.sources import remembered
from fusegen.errors import KernelError, MissingError, NoPlan, RequestError, ValidationError
from fusegen.language.graph import Graph
from fusegen.language.sizes import dims_in
from fusegen.language.spec import Chain
from fusegen.planner import CONTIGUOUS, alike, candidates
from fusegen.planner.launching import reading_late
from fusegen.planner.model import Candidates, Layout, Plan, Source
from fusegen.planner.programs import kernels_of, step_candidates
from fusegen.planner.programs.axes_as_rows import ways_over_axes
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.planner.programs.side_by_side import JoinedPlan, JoinedSource
from fusegen.planner.smaller import needs_smaller, smaller
from fusegen.runtime import Kernel, Program, finding
from fusegen.runtime.cache import Entry, KernelCache, Key, compiled, key_of
from fusegen.runtime.devices import Device
from fusegen.runtime.joined import Joined
from fusegen.targets import Target
from fusegen.targets import target as target_named
from fusegen.validation import Report

log = logging.getLogger("fusegen.pipeline")

JOINED_CHOICE = Choice((), None, ("the cost model's, as one of several steps in a launch",))
MOST_GATED = 6  # candidates to compile before the least bad one is taken
MOST_VALIDATED = 3  # candidates to validate before the chain is refused: what three get wrong is no candidate's fault


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate, or the validation, said of one candidate; `resources` is None where nothing could be compiled."""

    plan: Plan | JoinedPlan
    resources: Resources | None
    reason: str  # empty when it passed

    @property
    def passed(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Built:
    """A rendered and compiled candidate. `binary` is None where the runtime compiler is missing: emulation only.

    `choice` says in which order the candidates were tried, and why.
    """

    source: Source
    binary: Binary | None
    verdicts: tuple[Verdict, ...]
    choice: Choice


@dataclass(frozen=True, slots=True)
class BuiltJoined:
    """The same of several steps in one launch, of which there is one candidate."""

    source: JoinedSource
    binary: Binary
    verdicts: tuple[Verdict, ...]
    choice: Choice = JOINED_CHOICE


def alike_to(plan: Plan, layout: Layout, one_order: bool) -> Candidates:
    """The candidates for arrays that lie otherwise; with `one_order`, those of products sum in the plan's order too."""
    if not one_order:
        return alike(plan, layout)
    found: Candidates = import_module("fusegen.planner.orders").alike_in_order(plan, layout)
    return found


def choose_target(target: str | Target | None) -> Target:
    """The target named, or that of the GPU present, or cuda:h200."""
    if isinstance(target, Target):
        return target
    if isinstance(target, str):
        return target_named(target)
    if target is not None:
        raise RequestError(f"target={target!r} is no target; name one, as in target='cuda:h200'")
    return finding.target_here() or target_named("cuda")


def launching(target: Target, dependent_launch: bool) -> Target:
    """The target, on which each kernel of a program begins when the one before it has ended unless `dependent_launch`,
    and the target can."""
    return target if dependent_launch else replace(target, dependent_launches=False)


def graph_of(chain: Chain | Graph) -> Graph:
    """The graph behind what was passed for a chain. Raises RequestError for anything that has none."""
    if isinstance(chain, Chain):
        return chain.graph
    if not isinstance(chain, Graph):
        raise RequestError(
            f"{chain!r} is not a chain: pass a function under @chain(...), or one that fusegen.load_chains finds"
        )
    return chain


def plan(
    chain: Chain | Graph, target: str | Target | None = None, *, tuned: bool = True, dependent_launch: bool = True,
    batch_invariant: bool = False,
) -> Plan | Any:  # Any: a ProgramPlan, as of `compile`  # fmt: skip
    """The plan that `compile` tries first for `chain` on `target` (the GPU present, else cuda:h200): the one that
    measured best, else, and with `tuned=False`, the cheapest by the cost model. Of a chain that is compiled to several
    kernels, a ProgramPlan; `dependent_launch` and `batch_invariant` as of `compile`. Raises NoPlan."""
    graph = in_one_order(graph_of(chain), batch_invariant)
    found, program = kernels_of(graph, launching(choose_target(target), dependent_launch))
    if program is not None:
        return tuned_steps(program, tuned)
    return choose(found, tuned=tuned).plan


def in_one_order(graph: Graph, asked: bool) -> Graph:
    """The graph, which asks for one order of sums where its spec does or the caller."""
    return graph if graph.batch_invariant or not asked else replace(graph, batch_invariant=True)


def steps_candidates(program: ProgramPlan) -> tuple[Candidates, ...]:
    """Each step's candidates, for arrays that lie as the program has them lie, launched as the program launches it."""
    return tuple(step_candidates(program, step) for step in program.steps)


def step_choice(program: ProgramPlan, step: Step, found: Candidates) -> Choice:
    """Which of a step's candidates is tried first, and why."""
    together = next(steps for steps in program.launches if step in steps)
    if len(together) == 1:
        return choose(found)
    return replace(JOINED_CHOICE, plans=first(found, step.plan).plans)


def units_of(program: ProgramPlan) -> tuple[Candidates | JoinedPlan, ...]:
    """What is built for each launch."""
    found = dict(zip(map(id, program.steps), steps_candidates(program), strict=True))
    pairs = zip(program.launches, program.launched, strict=True)
    return tuple(plan if isinstance(plan, JoinedPlan) else found[id(steps[0])] for steps, plan in pairs)


def first(found: Candidates, plan: Plan) -> Candidates:
    """The candidates, those of the plan's configuration first."""
    return replace(found, plans=tuple(sorted(found.plans, key=lambda p: p.configuration != plan.configuration)))


def tuned_steps(program: ProgramPlan, tuned: bool = True) -> ProgramPlan:
    """The program with each step's plan as it is tried first. Where it is cut, and what steps are one launch, is the
    cost model's choice, and so are the plans of such steps."""
    together = {id(step) for steps in program.launches if len(steps) > 1 for step in steps}
    steps = (
        step if id(step) in together else replace(step, plan=choose(own, tuned=tuned).plan)
        for step, own in zip(program.steps, steps_candidates(program), strict=True)
    )  # fmt: skip
    return replace(program, steps=tuple(steps))


def build(
    graph: Graph, target: Target, layout: Layout = CONTIGUOUS, need_binary: bool = True, tuned: bool = True,
    device: Device | None = None, like: Plan | None = None, without: Container[str] = (),
    known: Candidates | None = None, meanwhile: Callable[[Source], None] | None = None,
) -> Built:  # fmt: skip
    """The first candidate that passes the gate, and for whose clusters `device` has room. `like`: of those that compute
    the same bits as this plan. `without`: of other configurations than these. `known`: the candidates for this
    layout, where they are at hand. `meanwhile` is done with a source in a thread while a compiler works on it.

    Raises NoPlan, CompileError, MissingError if `need_binary`, and KernelError where `device` has room for none.
    """
    if like is not None:
        found = alike(like, layout)
    else:
        found = known if known is not None else candidates(graph, target, layout)
    choice = choose(found, tuned=tuned)
    verdicts: list[Verdict] = []
    least: tuple[int, Source, Binary] | None = None
    refused: KernelError | None = None
    fitting = [plan for plan in choice.plans if plan.configuration not in without]
    if not fitting:
        raise NoPlan(f"{graph.name} on {target}: every candidate for this layout is one that failed its validation")
    for _ in range(MOST_GATED):
        if not fitting:
            break
        plan = fitting.pop(0)
        source = remembered(plan, render)
        try:
            work = None if meanwhile is None else partial(meanwhile, source)
            binary = compiled(source, origin=f"templates/{plan.template}, plan: {plan.regime}", meanwhile=work)
        except MissingError as missing:
            if need_binary:
                raise
            log.debug("%s is not gated: %s", plan.name, missing)
            return Built(source, None, (), choice)
        if device is not None and plan.cluster > 1 and (refused := refusal(device, source, binary)):
            log.info("%s: %s", plan.regime, refused)
            verdicts.append(Verdict(plan, binary.resources, str(refused).splitlines()[0]))
            fitting = [other for other in fitting if other.cluster < plan.cluster]
            continue
        verdict = Verdict(plan, binary.resources, gate(binary.resources))
        verdicts.append(verdict)
        if verdict.passed:
            return Built(source, binary, tuple(verdicts), choice)
        log.debug("gate refuses %s: %s", plan.regime, verdict.reason)
        if plan.reads_ahead:
            fitting.insert(0, reading_late(plan))
        badness = binary.resources.spill_bytes + binary.resources.stack_bytes
        if least is None or badness < least[0]:
            least = (badness, source, binary)
    if least is None:
        assert refused is not None  # choose() raises NoPlan where there is no candidate
        raise refused
    return Built(least[1], least[2], tuple(verdicts), choice)


def build_joined(plan: JoinedPlan) -> BuiltJoined:
    """Several steps in one launch. Raises CompileError and MissingError."""
    source = render_joined(plan)
    binary = compiled(source, origin=f"templates/{plan.template}, plan: {plan.regime}")
    return BuiltJoined(source, binary, (Verdict(plan, binary.resources, gate(binary.resources)),))


def build_candidates(found: Candidates) -> Built:
    """The first of `found` that passes the gate. Raises NoPlan, CompileError and MissingError."""
    layout = found.plans[0].layout if found.plans else CONTIGUOUS
    return build(found.graph.written, found.target, layout, known=found)


def refusal(device: Device, source: Source, binary: Binary) -> KernelError | None:
    """Why `device` can't hold the kernel at all; None where it can, and where it is no GPU."""
    if not device.asynchronous:
        return None
    try:
        device.load(source, binary)
    except KernelError as error:
        return error
    return None


def gate(resources: Resources) -> str:
    """Why a binary is refused; empty when it is not."""
    reasons = []
    if resources.spill_bytes:
        reasons.append(f"spills {resources.spill_bytes} B of registers")
    if resources.stack_bytes:
        reasons.append(f"has a stack frame of {resources.stack_bytes} B a thread")
    if resources.serialized:
        reasons.append(f"lets wgmma's products wait for one another: {resources.serialized}")
    return " and ".join(reasons)


def compile(
    chain: Chain | Graph,
    target: str | Target | None = None,
    *,
    on: str = "auto",
    validate: bool = True,
    tuned: bool = True,
    dependent_launch: bool = True,
    batch_invariant: bool = False,
) -> Kernel | Any:  # Any: a Program, of chains of which the caller knows that they are
    """What computes `chain` at its sizes, to be called: any number of rows, rows of exactly this length. It is a
    Kernel, or where no one kernel can hold the chain, or several take much less time, a Program of several. Both are
    called alike.

    `target` names a GPU ("cuda:h200", "hip:gfx90a"); without one, the GPU present, else cuda:h200. `on` says what
    runs it: "gpu", "emulator", or "auto" (a matching GPU if there is one). The first build is validated against the
    generated reference; the verdict is kept with the cached binary. A candidate that fails is reported by a warning,
    and the next one is tried. Raises ValidationError rather than hand out a kernel that failed, and RequestError where
    no input would show whether it is right; with `validate=False` it comes unproven, with None as its `kernel.report`.
    With `tuned=False` nothing that was measured has a say in which candidate it is. With `dependent_launch=False` each
    kernel of a program begins when the one before it has ended, as they all do but on Hopper and later.
    With `batch_invariant=True`, or where the spec says so, a row's bits are the same at whatever sizes of its rows the
    chain is compiled: one cut, and one order of each kernel's sums, serves all of them. Raises NoPlan for chains that
    sum over all that counts their rows.
    """
    graph = in_one_order(graph_of(chain), batch_invariant)
    found, program = kernels_of(graph, launching(choose_target(target), dependent_launch))
    if program is not None:
        return compile_program(program, on=on, validate=validate, tuned=tuned)
    return compile_kernel(found, on=on, validate=validate, tuned=tuned)


def compile_program(
    program: ProgramPlan, *, on: str = "auto", validate: bool = True, tuned: bool = True, as_planned: bool = False,
    whole: Graph | None = None,
) -> Program:  # fmt: skip
    """The program, compiled: a kernel for each step. Validated as a whole against the reference of its chain, at a
    smaller width and K where its products are large; raises ValidationError where that fails. `as_planned`: each step's
    own plan is the first that is tried. `whole`: the chain in whose place one of smaller products is validated."""
    device = finding.find(program.target, on)
    found = iter(steps_candidates(program))
    steps: list[Step] = []
    kernels: list[Kernel | Joined] = []
    for together in program.launches:
        own = [next(found) for _ in together]
        if len(together) > 1:
            joined = compile_joined(program, together, own, device, on)
            if joined is not None:
                kernels.append(joined)
                steps += together
                continue
        for step, one in zip(together, own, strict=True):
            one = first(one, step.plan) if as_planned else one
            kernel = compile_kernel(one, on=on, validate=False, tuned=tuned, one_order=program.graph.batch_invariant)
            kernels.append(kernel)
            steps.append(replace(step, plan=kernel.plan, joined="", share=0))
    made = Program(replace(program, steps=tuple(steps)), kernels, device)
    made.again = partial(compile, program.graph, program.target, on=on, validate=validate, tuned=tuned)
    by_rows = any(node.over for step in program.steps for node in step.graph.scans)  # whose columns lie side by side
    by_rows = by_rows or len(ways_over_axes(program.graph)) > 1
    if by_rows and not program.graph.batch_invariant:  # which has one order of sums
        apart = replace(program.graph, axes_apart=True)
        made.compile_by_axes = partial(compile, apart, program.target, on=on, validate=validate, tuned=tuned)
    if program.graph.batch_invariant:
        made.elsewhere = partial(elsewhere, made, whole or program.graph, on)
    small = smaller_program(made.plan) if validate and whole is None else None
    if small is not None:
        made.report = compile_program(small, on=on, tuned=False, as_planned=True, whole=program.graph).report
    elif validate:
        made.report = proven(made)
        if made.report.unjudged:
            raise RequestError(f"{program.name}: {made.report.unjudged}")
        if not made.report.ok:
            raise ValidationError(f"{program.name} on {program.target} failed its validation\n{made.report}")
    return made


def smaller_program(program: ProgramPlan, always: bool = False) -> ProgramPlan | None:
    found: ProgramPlan | None = import_module("fusegen.planner.programs.smaller").smaller(program, always)
    return found


def elsewhere(
    made: Kernel | Program, whole: Graph, on: str, sizes: Mapping[str, int], seen: set[object]
) -> Kernel | Program | None:
    """What a chain of one order of sums is compiled to at other numbers of rows, for validation to compare its bits
    with; None where it is what was made, or one that was `seen`. `whole`: the chain that is called, of which `made`
    may be of smaller products."""

    def known(plans: Sequence[Plan | JoinedPlan], at: Graph) -> bool:
        constants = [(dim.name, at.sizes[dim.name]) for dim in dims_in(tuple(at.fixed))]
        key = tuple(plan.configuration for plan in plans), tuple(dict.fromkeys(constants))
        before = key in seen
        seen.add(key)
        return before

    found, program = kernels_of(whole.at(**sizes), made.target)
    if isinstance(made, Kernel):
        plan = found.need()[0]
        plan = smaller(plan) if needs_smaller(plan) and made.op_graph.sizes != whole.sizes else plan
        known([made.plan], made.plan.graph.written)
        if known([plan], plan.graph.written):
            return None
        only = Candidates(plan.graph, plan.target, (plan,), ())
        return compile_kernel(only, on=on, validate=False, tuned=False)
    assert program is not None  # as `made` is one, and the cut is the same for all
    if made.op_graph.sizes != whole.sizes:
        program = smaller_program(program, always=True)
    known(made.plan.launched, made.plan.graph)
    if program is None or known(program.launched, program.graph):
        return None
    return compile_program(program, on=on, validate=False, tuned=False, as_planned=True)


def compile_joined(
    program: ProgramPlan, steps: Sequence[Step], found: Sequence[Candidates], device: Device, on: str
) -> Joined | None:
    """The steps as one launch; None where that passes no gate."""
    one_order = program.graph.batch_invariant

    def built(plan: JoinedPlan) -> tuple[JoinedSource, Binary | None] | None:
        try:
            found = build_joined(plan)
        except MissingError:
            if device.asynchronous:
                raise
            return render_joined(plan), None
        if not found.verdicts[0].passed:
            log.info("%s %s in one launch, so each step has its own", plan.name, found.verdicts[0].reason)
            return None
        return found.source, found.binary

    def replan(place: int, layout: Layout) -> Plan:
        return alike_to(steps[place].plan, layout, one_order).need()[0]

    def variant(plans: Sequence[Plan]) -> tuple[JoinedSource, Binary | None] | None:
        whole = program.joined_plan(steps)
        return None if whole.obstacle(plans) else built(replace(whole, plans=tuple(plans)))

    def alone(place: int) -> Kernel:
        return compile_kernel(first(found[place], steps[place].plan), on=on, validate=False, one_order=one_order)

    made = built(program.joined_plan(steps))
    return None if made is None else Joined(*made, device, replan, variant, alone)


def compile_kernel(
    found: Candidates, *, on: str = "auto", validate: bool = True, tuned: bool = True, one_order: bool = False
) -> Kernel:
    """One kernel for the chain of which `found` are the candidates: see `compile`. `one_order`: for arrays that lie
    otherwise, too, it sums as it does for these."""
    graph, chosen = found.graph.written, found.target
    one_order = one_order or graph.batch_invariant
    usual = found.plans[0].layout if found.plans else CONTIGUOUS
    device = finding.find(chosen, on)
    emulated = not device.asynchronous
    meanwhile = build_twin if validate and not emulated else None
    refuted: dict[str, Verdict] = {}  # by configuration
    failure = ""

    def built(layout: Layout = usual, like: Plan | None = None) -> Built:
        known = found if layout == usual else None
        if like is not None and one_order:
            known, like = alike_to(like, layout, one_order), None
        return build(graph, chosen, layout, not emulated, tuned, device, like, refuted, known, meanwhile)

    def variant(layout: Layout) -> tuple[Source, Binary | None]:
        made = built(layout, like=kernel.plan)
        return made.source, made.binary

    while True:
        made = built()
        kernel = Kernel(made.source, made.binary, device, variant)
        kernel.gate, kernel.choice = (*refuted.values(), *made.verdicts), made.choice
        kernel.again = partial(compile, graph, chosen, on=on, validate=validate, tuned=tuned)
        if one_order:
            kernel.elsewhere = partial(elsewhere, kernel, graph, on)
        if not validate:
            return kernel
        kernel.report = proven(judged_for(kernel, on))
        if kernel.report.unjudged:
            raise RequestError(f"{graph.name}: {kernel.report.unjudged}")
        if kernel.report.ok:
            return kernel
        failure = failure or f"{graph.name} on {chosen} failed its validation\n{kernel.report}"
        plan, resources = made.source.plan, made.binary.resources if made.binary else None
        refuted[plan.configuration] = Verdict(plan, resources, f"failed its validation: {kernel.report.failure}")
        left = any(other.configuration not in refuted for other in made.choice.plans)
        if not left or len(refuted) == MOST_VALIDATED:
            raise ValidationError(failure)
        log.warning(
            "%s on %s: the next candidate is tried, since one failed its validation; this is a fault of fusegen, "
            "please report it\n  %s: %s",
            graph.name, chosen, plan.configuration, kernel.report.failure,
        )  # fmt: skip


def build_twin(source: Source) -> None:
    """What a kernel on a GPU is validated with beside the GPU, in the cache before it is asked for."""
    if not needs_smaller(source.plan):  # of which another kernel is validated
        import_module("fusegen.validation.emulated").build(source)


def judged_for(kernel: Kernel, on: str) -> Kernel:
    """What is validated for a kernel: itself, or where that would take minutes one of the same configuration for a
    smaller product."""
    if not needs_smaller(kernel.plan) or (small := smaller(kernel.plan)) is kernel.plan:
        return kernel
    alone = Candidates(small.graph, small.target, (small,), ())
    made = compile_kernel(alone, on=on, validate=False, tuned=False)
    if made.elsewhere is not None:
        made.elsewhere = partial(elsewhere, made, kernel.op_graph, on)
    return made


def proven(kernel: Kernel | Program) -> Report:
    """The quick validation of a kernel or program: remembered with its binary, or run now. Only good verdicts are
    remembered; a program's in an entry of its own, without code.

    A verdict holds for the device and the reference text it was given on: an op's meaning may change under a kernel.
    """
    binary: Binary | None
    if isinstance(kernel, Program):
        last = kernel.kernels[-1].binary
        compiled_all = all(own.binary is not None for own in kernel.kernels)
        binary = replace(last, code=b"") if last is not None and compiled_all else None
        reference = kernel.plan.reference
    else:
        binary, reference = kernel.binary, kernel.source.reference
    if binary is None:
        return run_validation(kernel, quick=True)
    store = KernelCache()
    key = program_key(kernel) if isinstance(kernel, Program) else key_of(kernel.source)
    entry = store.load(key, kernel.target)
    where = str(kernel.device)
    grounds = {"device": where, "reference": sha256(reference.encode()).hexdigest()}
    if entry is not None and entry.verdict is not None and grounds.items() <= entry.verdict.items():
        try:
            report = Report.from_json(entry.verdict["report"])
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
        ) as error:  # kept by another version, or by nobody we know
            log.debug("%s: the verdict kept with it can't be read: %r", kernel.name, error)
        else:
            log.debug("%s was validated before on %s", kernel.name, where)
            return report
    report = run_validation(kernel, quick=True)
    if report.ok:
        store.store(key, Entry(binary, {**grounds, "report": report.to_json()}))
    return report


def program_key(program: Program) -> Key:
    """What a program's verdict depends on: every kernel, and which arrays each one is launched with."""
    parts = [key_of(source).digest for source in program.sources]
    parts += [repr((step.bindings, step.values, dict(step.sizes))) for step in program.plan.steps]
    parts += [repr(stored) for stored in program.plan.between]
    text = sha256("\n".join(parts).encode()).hexdigest()
    return replace(key_of(program.sources[-1]), entry=program.name, text=text)


def run_validation(kernel: Kernel | Program, *, quick: bool) -> Report:
    """`fusegen.validate`, imported only where no verdict is kept."""
    from fusegen.validation import validate

    return validate(kernel, quick=quick)
