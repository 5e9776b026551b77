"""What `inspect` shows of one kernel: text such as its source, or facts such as its resources.

Source, reference and plan are of the candidate that is tried first, in which no compiler has a say. The rest comes from
the binary that the gate let through, usually the same; where it is another candidate, a line on stderr says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fusegen import pipeline, planner
from fusegen.cli import builds, plans
from fusegen.cli.asking import spec_text
from fusegen.cli.showing import complain, show_code
from fusegen.compiling import Binary
from fusegen.database import choose
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.language.spec import Chain
from fusegen.measuring.profiling import checklist
from fusegen.pipeline import Built, build
from fusegen.planner.model import Source
from fusegen.targets import Target


@dataclass(frozen=True, slots=True)
class Shown:
    """One thing to look at: as JSON's fields, and by showing it."""

    facts: Mapping[str, Any]
    show: Callable[[], None]


def look(chain: Chain, target: Target, what: str) -> Shown:
    """Raises NoPlan, CompileError, MissingError, and RequestError for what the target has none of."""
    return LOOKS[what](chain, target)


def first_choice(chain: Chain, target: Target) -> Source:
    return render(pipeline.plan(chain, target))


def code(text: str, language: str) -> Shown:
    return Shown({"text": text}, lambda: show_code(text, language))


def source(chain: Chain, target: Target) -> Shown:
    return code(first_choice(chain, target).text, "cuda")


def reference(chain: Chain, target: Target) -> Shown:
    return code(first_choice(chain, target).reference, "python")


def plan(chain: Chain, target: Target) -> Shown:
    found = planner.candidates(chain.graph, target)
    choice = choose(found)
    return Shown({"plan": plans.choice_facts(choice)}, lambda: plans.show_plan(found, choice, every=False))


def gated(chain: Chain, target: Target) -> tuple[Built, Binary]:
    """The kernel that is handed out. Raises MissingError without a compiler."""
    built = build(chain.graph, target)
    assert built.binary is not None  # build() was asked for one
    refused = [v for v in built.verdicts if v.plan is not built.source.plan]
    if refused:
        complain(f"the first choice {refused[0].reason}; this is another candidate: {built.source.plan.regime}\n")
    return built, built.binary


def ptx(chain: Chain, target: Target) -> Shown:
    from fusegen import compiling

    if target.vendor != "cuda":  # says what to ask for instead, before anything is compiled
        return code(compiling.ptx("", target, filename=""), "ptx")
    built, _ = gated(chain, target)
    return code(compiling.ptx(built.source.text, target, filename=built.source.filename), "ptx")


def sass(chain: Chain, target: Target) -> Shown:
    from fusegen import compiling

    _, binary = gated(chain, target)
    text = compiling.disassemble(binary).rstrip("\n") + "\n"
    return code(text, "asm")


def resources(chain: Chain, target: Target) -> Shown:
    _, binary = gated(chain, target)
    return Shown(builds.resource_facts(binary), lambda: builds.show_resources(binary))


def profile(chain: Chain, target: Target) -> Shown:
    """The checklist; where nothing compiles here, the planner's estimates stand in and the checklist says so."""
    try:
        built, binary = gated(chain, target)
        found = checklist(built.source.plan, binary, spec_text(chain))
    except MissingError:
        found = checklist(first_choice(chain, target).plan, None, spec_text(chain))
    return Shown({"checklist": asdict(found)}, lambda: builds.show_checklist(found))


LOOKS: Mapping[str, Callable[[Chain, Target], Shown]] = {
    "source": source,
    "reference": reference,
    "plan": plan,
    "ptx": ptx,
    "sass": sass,
    "resources": resources,
    "profile": profile,
}
