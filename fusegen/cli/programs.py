"""What `plan`, `explain`, `inspect` and others say of a chain that several kernels hold: its steps, what lies between
them and why, its workspace, and the other cuts that were looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusegen.cli import plans
from fusegen.cli.showing import heading, labelled, mebibytes, points, progress, prose, say, table, times
from fusegen.errors import NoPlan, RequestError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.language.types import f32
from fusegen.pipeline import step_choice, steps_candidates, tuned_steps, units_of
from fusegen.planner import candidates
from fusegen.planner.heading import plural, summary
from fusegen.planner.model import Candidates
from fusegen.planner.programs import kernels_of, program_instead
from fusegen.planner.programs.model import Cut, ProgramPlan, Step, Stored
from fusegen.planner.programs.side_by_side import LETTERS, JoinedPlan
from fusegen.reporting.explaining import Point, Section, explanation, written
from fusegen.targets import Target

FEW = 3  # other cuts worth naming in an explanation
WRITTEN = "operators, as written"  # the section that a program has once, and not for each of its kernels


@dataclass(frozen=True, slots=True)
class Planned:
    """What was planned for one chain: one kernel's candidates, the program in their place, or why there is neither."""

    found: Candidates
    program: ProgramPlan | None = None
    error: NoPlan | None = None
    least_us: float | None = None  # of candidates for one order of sums: what others would take


def ask_plan(graph: Graph, target: Target) -> Planned:
    """As `compile` would plan it."""
    if graph.batch_invariant:
        return ask_invariant(graph, target)
    found = candidates(graph, target)
    try:
        program = program_instead(found)
    except NoPlan as error:
        return Planned(found, None, error)
    return Planned(found, program and tuned_steps(program))


def ask_invariant(graph: Graph, target: Target) -> Planned:
    """As `compile(batch_invariant=True)` would plan it."""
    usual = ask_plan(replace(graph, batch_invariant=False), target)
    try:
        found, program = kernels_of(replace(graph, batch_invariant=True), target)
        if program is None:
            found.need()
    except NoPlan as error:
        return Planned(usual.found, None, error)
    least = usual.program.time_us if usual.program else usual.found.plans[0].cost.time_us
    return Planned(found, program and tuned_steps(program), None, least)


def program_of(chain: Chain, target: Target) -> ProgramPlan | None:
    """The program that a chain is compiled to; None where it is one kernel. Raises NoPlan."""
    planned = ask_plan(chain.graph, target)
    if planned.error is not None:
        raise planned.error
    return planned.program


def need_kernel(chain: Chain, target: Target, what: str) -> None:
    """Raises RequestError where the chain is a program, of which `what` (`tune measures`) is not to be had."""
    if (program := program_of(chain, target)) is not None:
        names = " and ".join(step.name for step in program.steps)
        count = plural(len(program.launches), "kernel", "kernels")
        raise RequestError(
            f"{what} one kernel, and {chain.name} on {target} is a program of {count}: {names}\n"
            "  write what one of them computes as a chain of its own; `fusegen explain` shows where it was cut"
        )


def ask_all(
    chains: Sequence[Chain], target: Target, ask: Callable[[Graph, Target], Planned] = ask_plan
) -> list[Planned]:
    """What is planned of each chain; to plan one of forty steps takes seconds."""
    planned = []
    with progress(len(chains)) as bar:
        for chain in chains:
            bar.step(f"{chain.name} for {target} is planned")
            planned.append(ask(chain.graph, target))
    return planned


def kernel_graphs(chain: Chain, target: Target) -> list[Graph]:
    """What is planned kernel by kernel: the chain, or each step of its program."""
    return [found.graph.written for found in kernel_candidates(chain, target)]


def kernel_candidates(chain: Chain, target: Target) -> tuple[Candidates, ...]:
    """Those of the chain's one kernel, or of each of its program's."""
    planned = ask_plan(chain.graph, target)
    return (planned.found,) if planned.program is None else steps_candidates(planned.program)


def units(chain: Chain, target: Target) -> tuple[Candidates | JoinedPlan, ...]:
    """What is built: the chain's one kernel, or each of its program's launches."""
    planned = ask_plan(chain.graph, target)
    return (planned.found,) if planned.program is None else units_of(planned.program)


def need_all(planned: Iterable[Planned], every: bool = False) -> None:
    """Raises NoPlan for all that have no plan, each with the nearest rule's reason, or `every` rule's."""
    refusals = []
    for each in planned:
        if each.error is None:
            continue
        lines = str(each.error).splitlines()
        if every:
            try:
                each.found.need(every)
            except NoPlan as error:
                rest = [line for line in lines if line.strip() not in str(error) and "`fusegen explain" not in line]
                lines = [*str(error).splitlines(), *rest]
        refusals.append("\n".join(lines))
    if refusals:
        raise NoPlan("\n".join(refusals))


# ---------------------------------------------------------------- plan


def program_facts(program: ProgramPlan, every: bool = False) -> dict[str, Any]:
    graph = program.graph
    return {
        "chain": program.name,
        "signature": graph.signature,
        "sizes": dict(graph.sizes),
        "target": program.target.name,
        "arch": program.target.arch,
        "steps": [step_facts(program, *pair) for pair in zip(program.steps, steps_candidates(program), strict=True)],
        "joined": [list(plan.said) for plan in program.launched if isinstance(plan, JoinedPlan)],
        "boundaries": [boundary_facts(program, stored) for stored in program.boundaries],
        "workspace_bytes": program.arena(graph.sizes).bytes,
        "bytes": {"unfused": unfused_bytes(program), "moved": moved_bytes(program)},
        "launches": {"fused": len(program.launches), "unfused": unfused_launches(program)},
        "floor_us": program.floor_us,
        "time_us": program.time_us,
        "cuts": [cut_facts(program, cut) for cut in program.cuts] if every else [],
    }


def step_facts(program: ProgramPlan, step: Step, found: Candidates) -> dict[str, Any]:
    return {
        "kernel": step.name,
        "reads": [binding.base for binding in step.reads],
        "writes": [binding.base for binding in step.writes],
        "values": list(step.values),
        "plan": plans.choice_facts(step_choice(program, step, found)),
        "launch": launch_facts(step),
    }


def launch_facts(step: Step) -> dict[str, Any]:
    how = step.plan.dependent
    return {
        "waits": step.plan.waits,
        "triggers": how is not None and how.triggers,
        "before_wait": step.plan.before_wait,
    }


def boundary_facts(program: ProgramPlan, stored: Stored) -> dict[str, Any]:
    written_by, read_by = program.ends(stored)
    sizes = program.graph.sizes
    return {
        "name": stored.name,
        "dtype": str(stored.type.dtype),
        "shape": [str(size) for size in stored.type.shape],
        "bytes": stored.bytes(sizes),
        "home": stored.home,
        "offset": program.arena(sizes).offsets.get(stored.name),
        "written_by": written_by,
        "read_by": list(read_by),
        "why": stored.why,
    }


def cut_facts(program: ProgramPlan, cut: Cut) -> dict[str, Any]:
    taken = set(cut.stored) == {stored.name for stored in program.boundaries}
    kernels = cut.kernels if cut.time_us is not None else None
    return {
        "taken": taken, "stored": list(cut.stored), "kernels": kernels, "time_us": cut.time_us, "reason": cut.reason,
    }  # fmt: skip


def unfused_bytes(program: ProgramPlan) -> int:
    return sum(step.plan.cost.traffic.unfused for step in program.steps)


def moved_bytes(program: ProgramPlan) -> int:
    return sum(step.plan.cost.traffic.moved for step in program.steps)


def unfused_launches(program: ProgramPlan) -> int:
    return sum(step.plan.cost.traffic.launches_unfused for step in program.steps)


def title(program: ProgramPlan) -> str:
    graph = program.graph
    return f"{program.name}  {graph.signature}  at {graph.sizes_text()}"


def show_program(program: ProgramPlan, every: bool, least_us: float | None = None) -> None:
    """The steps, what lies between them, and where; with `every`, the cuts that were looked at. `least_us`: of kernels
    of one order of sums, what the cheapest of any cut and order would take."""
    graph, target = program.graph, program.target
    doc = summary(graph)
    say(prose(title(program), "bold"), *([prose(doc)] if doc else []), "", labelled(numbers(program, least_us), 10), "")
    rows = [
        (f"{number}. {step.name}", microseconds(step.plan.cost.time_us), microseconds(step.plan.cost.floor_us),
         "\n".join(filter(None, (arrow(step), step.plan.regime, step.plan.launched))))
        for number, step in numbered(program)
    ]  # fmt: skip
    say(table("kernel", "estimate>", "floor>", "from what to what, and how", rows=rows))
    if program.boundaries:
        say("", between(program))
    if every:
        say("", cuts(program))
        if refused := [cut for cut in program.cuts if cut.time_us is None]:
            say("", points(f"not with {stored_text(cut)} between kernels: {cut.reason}" for cut in refused))
    say("", prose(f"`fusegen inspect --what source` shows the kernels for {target}", "dim"))


def numbered(program: ProgramPlan) -> Iterator[tuple[str, Step]]:
    """The steps by the numbers of their launches: `2a` and `2b` are done in one."""
    for number, steps in enumerate(program.launches, 1):
        for letter, step in zip(LETTERS, steps, strict=False):
            yield f"{number}{letter if len(steps) > 1 else ''}", step


def numbers(program: ProgramPlan, least_us: float | None) -> list[tuple[str, str]]:
    target, moved, unfused = program.target, moved_bytes(program), unfused_bytes(program)
    fewer = f", {times(unfused, moved)} fewer" if unfused > moved else ""
    return [
        ("target", f"{target.vendor} {target.arch}, facts of {target.model}"),
        ("launches", f"{len(program.launches)} fused, {unfused_launches(program)} unfused"),
        ("bytes", f"{mebibytes(moved)} moved, {mebibytes(unfused)} unfused{fewer}"),
        ("workspace", workspace(program)),
        ("floor", f"{microseconds(program.floor_us)}: of all kernels"),
        ("estimate", f"{microseconds(program.time_us)}, launches included"),
        *([("batch", plans.batch_text(program.time_us, least_us))] if least_us is not None else []),
    ]


def workspace(program: ProgramPlan) -> str:
    if not program.between:
        return "none: nothing lies between kernels but operands and outputs"
    sizes = program.graph.sizes
    held = sum(stored.bytes(sizes) for stored in program.between)
    return f"{mebibytes(program.arena(sizes).bytes)} for {mebibytes(held)} between kernels"


def arrow(step: Step) -> str:
    """`x, w and scale -> h`."""
    given = ", ".join(dict.fromkeys(map(str, step.reads)))  # rows of one are looked up by several indices
    values = f" and {', '.join(step.values)}" if step.values else ""
    return f"{given}{values} -> {', '.join(map(str, step.writes))}"


def between(program: ProgramPlan) -> Any:
    rows = []
    for stored in program.boundaries:
        facts = boundary_facts(program, stored)
        readers = ", ".join(str(place + 1) for place in facts["read_by"])
        offset = "an output" if facts["offset"] is None else f"byte {facts['offset']:,}"
        rows.append(
            (stored.name, str(stored.type), mebibytes(facts["bytes"]), offset,
             f"{facts['written_by'] + 1} to {readers}", stored.why)
        )  # fmt: skip
    return table("between!", "type", "bytes>", "place!", "kernels!", "because", rows=rows)


def cuts(program: ProgramPlan) -> Any:
    rows = []
    for cut in program.cuts:
        if cut.time_us is None:
            continue
        taken = "*" if cut_facts(program, cut)["taken"] else ""
        rows.append((taken, microseconds(cut.time_us), str(cut.kernels), stored_text(cut)))
    return table("!", "estimate>", "kernels>", "between kernels", rows=rows)


def stored_text(cut: Cut) -> str:
    return ", ".join(cut.stored) or "nothing"


def microseconds(us: float) -> str:
    return f"{us:.1f} us"


# ---------------------------------------------------------------- explain


def program_sections(program: ProgramPlan) -> tuple[Section, ...]:
    """What is of the program as a whole."""
    sections = (
        Section(WRITTEN, tuple(map(Point, written(program.graph)))),
        Section("kernels", tuple(map(Point, kernel_lines(program)))),
        Section("between kernels", tuple(map(Point, boundary_lines(program)))),
        Section("rounding between kernels", tuple(map(Point, rounding(program)))),
        Section("workspace", tuple(map(Point, workspace_lines(program)))),
        Section("launches", tuple(map(Point, launch_lines(program)))),
        Section("why these cuts", tuple(map(Point, why_lines(program)))),
    )
    return tuple(section for section in sections if section.points)


def kernel_lines(program: ProgramPlan) -> list[str]:
    lines = [f"{step.name}: {arrow(step)}; {microseconds(step.plan.cost.time_us)} expected" for step in program.steps]
    for plan in program.launched:
        if isinstance(plan, JoinedPlan):
            lines.append(f"{' and '.join(plan.said)} are one launch, {plan.name}: {plan.why}")
    return lines


def boundary_lines(program: ProgramPlan) -> list[str]:
    lines = []
    for stored in program.boundaries:
        written_by, read_by = program.ends(stored)
        launched = program.launched
        readers = " and ".join(launched[place].name for place in read_by)
        lines.append(
            f"{stored}, {mebibytes(stored.bytes(program.graph.sizes))}, written by {launched[written_by].name}, "
            f"read by {readers}: {stored.why}"
        )
    return lines


def rounding(program: ProgramPlan) -> list[str]:
    rounded = [stored for stored in program.boundaries if stored.type.dtype.kind == "float"]
    return [
        f"{stored.name} is stored as it is, f32" if stored.type.dtype is f32
        else f"{stored.name} to {stored.type.dtype}, as the chain casts it or the products that read it take it"
        for stored in rounded
    ]  # fmt: skip


def workspace_lines(program: ProgramPlan) -> list[str]:
    if not program.between:
        return [workspace(program)]
    arena = program.arena(program.graph.sizes)
    lines = [f"{workspace(program)}, made with the first call and used again; `workspace=` takes the caller's own"]
    for stored in program.between:
        first, last = program.lives[stored.name]
        offset = arena.offsets[stored.name]
        lines.append(f"{stored.name} at byte {offset:,}, in use from kernel {first + 1} to {last + 1}")
    return lines


def launch_lines(program: ProgramPlan) -> list[str]:
    """Which kernels begin while others run."""
    said = [f"{step.name} {step.plan.launched}" for step in program.steps if step.plan.launched]
    early = sum(step.plan.waits for step in program.steps)
    saved = f"{microseconds(early * program.target.dependent_us)} less than one kernel behind the other's end"
    return [*said, saved] if early else said


def why_lines(program: ProgramPlan) -> list[str]:
    """The cut taken, the nearest others, and why not one kernel."""
    lines = [f"{plural(len(program.launches), 'kernel', 'kernels')}, {microseconds(program.time_us)} expected in all"]
    others = [c for c in program.cuts if c.time_us is not None and not cut_facts(program, c)["taken"]]
    for cut in others[:FEW]:
        assert cut.time_us is not None
        lines.append(f"{stored_text(cut)} between {cut.kernels} kernels: {microseconds(cut.time_us)}")
    lines += [f"nothing between kernels: {c.reason}" for c in program.cuts if not c.stored and c.time_us is None]
    return lines


def explain_facts(program: ProgramPlan) -> dict[str, Any]:
    kernels = [{"kernel": name, "sections": section_facts(found)} for name, _, found in each_kernel(program)]
    return {
        "chain": program.name,
        "target": program.target.name,
        "sections": section_facts(program_sections(program)),
        "kernels": kernels,
    }


def section_facts(sections: Iterable[Section]) -> dict[str, Any]:
    return {s.title: [{"text": p.text, "bytes_saved": p.bytes_saved} for p in s.points] for s in sections}


def each_kernel(program: ProgramPlan) -> list[tuple[str, Any, tuple[Section, ...]]]:
    """Each kernel's name, plan, and explanation."""
    found = []
    for step, own in zip(program.steps, steps_candidates(program), strict=True):
        choice = step_choice(program, step, own)
        sections = tuple(section for section in explanation(own, choice) if section.title != WRITTEN)
        found.append((step.name, choice.plan, sections))
    return found


def show_explanation(program: ProgramPlan) -> None:
    say(prose(f"{title(program)}  for {program.target}", "bold"))
    for section in program_sections(program):
        heading(section.title)
        say(points(map(plans.point_text, section.points)))
    for number, (_, plan, sections) in enumerate(each_kernel(program), 1):
        say("", prose(f"kernel {number} of {len(program.steps)}:", "bold"))
        plans.show_explanation(plan, sections)
