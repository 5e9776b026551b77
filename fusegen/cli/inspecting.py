"""What `inspect` shows of one kernel, or of each of a program's: text such as its source, or facts such as its
resources.

Source, reference and plan are of the candidate that is tried first, in which no compiler has a say. The rest comes from
the binary that the gate let through, usually the same; where it is another candidate, a line on stderr says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusegen.cli import builds, plans, programs, simulations
from fusegen.cli.asking import spec_text
from fusegen.cli.showing import complain, prose, say, show_code
from fusegen.compiling import Binary
from fusegen.database import choose
from fusegen.emitting.joined import render_joined
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError, RequestError
from fusegen.language.spec import Chain
from fusegen.measuring.profiling import checklist
from fusegen.pipeline import Built, build_candidates, build_joined, units_of
from fusegen.planner.model import Candidates, Source
from fusegen.planner.programs.side_by_side import JoinedPlan
from fusegen.targets import Target


@dataclass(frozen=True, slots=True)
class Shown:
    """One thing to look at: as JSON's fields, and by showing it."""

    facts: Mapping[str, Any]
    show: Callable[[], None]


def look(chain: Chain, target: Target, what: str) -> Shown:
    """Raises NoPlan, CompileError, MissingError, and RequestError for what the target has none of."""
    program = programs.program_of(chain, target)
    if program is None:
        return LOOKS[what](programs.kernel_candidates(chain, target)[0], chain)
    if what == "plan":
        facts = programs.program_facts(program)
        return Shown({"plan": facts}, lambda: programs.show_program(program, every=False))
    if what == "reference":
        return code(program.reference, "python")
    parts = [
        (own.name, joined(own, what)) if isinstance(own, JoinedPlan) else (own.graph.name, LOOKS[what](own, chain))
        for own in units_of(program)
    ]  # fmt: skip
    facts = {"kernels": [{"kernel": name, **shown.facts} for name, shown in parts]}
    return Shown(facts, lambda: show_each(parts, what))


def show_each(parts: Sequence[tuple[str, Shown]], what: str) -> None:
    """One kernel after another, in the order of their launches."""
    for number, (name, shown) in enumerate(parts):
        say(*[""] * bool(number))
        if what != "source":  # which opens with its name
            say(*([f"{COMMENTS[what]}{name}"] if what in COMMENTS else [prose(f"{name}:", "bold")]))
        shown.show()


def first_choice(found: Candidates) -> Source:
    return render(choose(found).plan)


def code(text: str, language: str) -> Shown:
    return Shown({"text": text}, lambda: show_code(text, language))


def source(found: Candidates, chain: Chain) -> Shown:
    return code(first_choice(found).text, "cuda")


def reference(found: Candidates, chain: Chain) -> Shown:
    return code(first_choice(found).reference, "python")


def plan(found: Candidates, chain: Chain) -> Shown:
    choice = choose(found)
    return Shown({"plan": plans.choice_facts(choice)}, lambda: plans.show_plan(found, choice, every=False))


def gated(found: Candidates) -> tuple[Built, Binary]:
    """The kernel that is handed out. Raises MissingError without a compiler."""
    built = build_candidates(found)
    assert built.binary is not None  # build() was asked for one
    refused = [v for v in built.verdicts if v.plan is not built.source.plan]
    if refused:
        complain(f"the first choice {refused[0].reason}; this is another candidate: {built.source.plan.regime}\n")
    return built, built.binary


def joined(plan: JoinedPlan, what: str) -> Shown:
    """What there is to see of several steps in one launch."""
    from fusegen import compiling

    if what == "source":
        return code(render_joined(plan).text, "cuda")
    if what == "profile":
        raise RequestError(f"a checklist is of one kernel, and {plan.name} is a launch of {len(plan.parts)} steps")
    if what == "ptx" and plan.target.vendor != "cuda":
        return code(compiling.ptx("", plan.target, filename=""), "ptx")
    built = build_joined(plan)
    binary = built.binary
    if what == "ptx":
        return code(compiling.ptx(built.source.text, plan.target, filename=built.source.filename), "ptx")
    if what == "sass":
        return code(compiling.disassemble(binary).rstrip("\n") + "\n", "asm")
    return Shown(builds.resource_facts(binary), lambda: builds.show_resources(binary))


def ptx(found: Candidates, chain: Chain) -> Shown:
    from fusegen import compiling

    if found.target.vendor != "cuda":  # says what to ask for instead, before anything is compiled
        return code(compiling.ptx("", found.target, filename=""), "ptx")
    built, _ = gated(found)
    return code(compiling.ptx(built.source.text, found.target, filename=built.source.filename), "ptx")


def sass(found: Candidates, chain: Chain) -> Shown:
    from fusegen import compiling

    _, binary = gated(found)
    text = compiling.disassemble(binary).rstrip("\n") + "\n"
    return code(text, "asm")


def resources(found: Candidates, chain: Chain) -> Shown:
    built, binary = gated(found)
    facts = builds.resource_facts(binary)
    if found.target.vendor != "hip":
        return Shown(facts, lambda: builds.show_resources(binary))
    came_of, reason = simulations.tried(built.source.plan, binary)

    def show() -> None:
        builds.show_resources(binary)
        simulations.show(came_of, reason)

    return Shown({**facts, **simulations.facts(came_of, reason)}, show)


def profile(found: Candidates, chain: Chain) -> Shown:
    """The checklist; where nothing compiles here, the planner's estimates stand in and the checklist says so."""
    try:
        built, binary = gated(found)
        made = checklist(built.source.plan, binary, spec_text(chain), chain.graph.sizes)
    except MissingError:
        made = checklist(first_choice(found).plan, None, spec_text(chain), chain.graph.sizes)
    return Shown({"checklist": asdict(made)}, lambda: builds.show_checklist(made))


COMMENTS = {"ptx": "// ", "sass": "// "}  # before a name, in texts that are read on by other tools
LOOKS: Mapping[str, Callable[[Candidates, Chain], Shown]] = {
    "source": source,
    "reference": reference,
    "plan": plan,
    "ptx": ptx,
    "sass": sass,
    "resources": resources,
    "profile": profile,
}
