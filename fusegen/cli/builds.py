"""What `compile`, `inspect` and `validate` do and say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fusegen.cli import programs
from fusegen.cli.showing import Progress, mark, mark_style, mebibytes, progress, prose, say, table
from fusegen.compiling import Binary
from fusegen.errors import FusegenError, KernelError, MissingError, RequestError
from fusegen.language.spec import Chain
from fusegen.measuring.profiling import Checklist
from fusegen.planner.programs.side_by_side import JoinedPlan
from fusegen.targets import Target

if TYPE_CHECKING:
    from fusegen.pipeline import Built, BuiltJoined
    from fusegen.validation import Report

ELF = {"cuda": "cubin", "hip": "code object"}


@dataclass(frozen=True, slots=True)
class Validation:
    """What came of validating one kernel. `ok` is None where it was not tried; `text` says what happened."""

    ok: bool | None
    on: str
    text: str
    report: Report | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One chain compiled for one target: `kernels` are those built, with their names, one or a program's. There is none
    where the compiler refused, which `error` tells."""

    chain: Chain
    target: Target
    kernels: tuple[Built | BuiltJoined, ...]
    seconds: float
    validation: Validation
    error: FusegenError | None = None

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error else self.validation.exit_code

    @property
    def ok(self) -> bool | None:
        """None where something is missing here that would tell."""
        return None if self.exit_code == MissingError.exit_code else self.exit_code == 0


def compile_one(chain: Chain, target: Target, validate: bool) -> Outcome:
    """Compile, gate and validate. Raises MissingError without a compiler; a wrong request is an outcome like others."""
    from fusegen import pipeline

    start = time.perf_counter()
    skipped = Validation(None, "", "not validated: --no-validate")
    try:
        programs.program_of(chain, target)  # raises NoPlan
        found = programs.units(chain, target)
        kernels = tuple(
            pipeline.build_joined(own) if isinstance(own, JoinedPlan) else pipeline.build_candidates(own)
            for own in found
        )
    except (KernelError, RequestError) as error:
        return Outcome(chain, target, (), time.perf_counter() - start, skipped, error)
    seconds = time.perf_counter() - start
    if not validate:
        return Outcome(chain, target, kernels, seconds, skipped)
    validation, handed_out = validated(chain, target)
    return Outcome(chain, target, handed_out or kernels, seconds, validation)


def validated(chain: Chain, target: Target) -> tuple[Validation, tuple[Built | BuiltJoined, ...]]:
    """The pipeline's first validation, of small ragged sizes, on a GPU where there is one; and what it hands out."""
    from fusegen import pipeline
    from fusegen.runtime import Program
    from fusegen.runtime.joined import Joined

    try:
        made = pipeline.compile(chain, target)
    except (KernelError, RequestError) as error:
        return Validation(False, "", str(error), None, error.exit_code), ()
    except MissingError as error:
        return Validation(None, "", f"not validated: {error}", None, error.exit_code), ()
    kernels = made.kernels if isinstance(made, Program) else (made,)
    built = tuple(
        pipeline.build_joined(kernel.plan) if isinstance(kernel, Joined)
        else pipeline.Built(kernel.source, kernel.binary, kernel.gate, kernel.choice)
        for kernel in kernels
    )  # fmt: skip
    return Validation(True, str(made.device), gist(made.report), made.report), built


def gist(report: Report) -> str:
    """A report in one line, and the cases that are wrong at length."""
    normal = next((case for case in report.cases if case.name == "normal" and case.elements), None)
    error = f", relative L2 {normal.relative_l2:.1e} on normal inputs" if normal else ""
    line = f"{len(report.cases)} cases on {report.on}{error}, at most {report.share:.2f} of the error bound"
    return "\n".join([line, *(str(case) for case in report.cases if not case.ok)])


# ---------------------------------------------------------------- compile, inspect --what resources


def resource_facts(binary: Binary) -> dict[str, Any]:
    occupancy = binary.occupancy
    return {
        "entry": binary.entry,
        "target": binary.target.name,
        "arch": binary.target.arch,
        "compiler": binary.compiler,
        "compile_seconds": binary.seconds,
        "binary_bytes": len(binary.code),
        "threads": binary.threads,
        "resources": {**asdict(binary.resources), "shared_bytes": binary.resources.shared_bytes},
        "occupancy": asdict(occupancy),
    }


def outcome_facts(outcome: Outcome) -> dict[str, Any]:
    """Of a program each kernel's facts stand under `steps`."""
    facts: dict[str, Any] = {
        "chain": outcome.chain.name,
        "sizes": dict(outcome.chain.graph.sizes),
        "target": outcome.target.name,
        "ok": outcome.exit_code == 0,
        "seconds": outcome.seconds,
        "validation": validation_facts(outcome.validation),
        "error": str(outcome.error) if outcome.error else None,
    }
    if len(outcome.kernels) > 1:
        steps = [{"kernel": built.source.plan.name, **built_facts(built)} for built in outcome.kernels]
        return {**facts, "steps": steps}
    return {**facts, "gate": [], **(built_facts(outcome.kernels[0]) if outcome.kernels else {})}


def built_facts(built: Built | BuiltJoined) -> dict[str, Any]:
    gate = [{"regime": v.plan.regime, "passed": v.passed, "reason": v.reason} for v in built.verdicts]
    return {"gate": gate, **(resource_facts(built.binary) if built.binary else {})}


def validation_facts(validation: Validation) -> dict[str, Any]:
    report = validation.report
    return {
        "ok": validation.ok,
        "on": validation.on or None,
        "text": validation.text,
        "report": report.to_json() if report is not None else None,
    }


def show_resources(binary: Binary) -> None:
    """Everything known of one binary without a GPU."""
    for name, value in resource_lines(binary):
        say(f"{name:<18}{value}")


def resource_lines(binary: Binary) -> list[tuple[str, str]]:
    r, target = binary.resources, binary.target
    spilled = f", {r.scalar_spills} scalar registers" if r.scalar_spills else ""
    shared = f"{r.static_shared_bytes:,} B static + {r.dynamic_shared_bytes:,} B dynamic, of {target.shared_bytes:,} B"
    scalar = [("scalar registers", f"{r.scalar_registers} a wave")] if target.scalar_registers else []
    return [
        ("binary", f"{len(binary.code):,} B {ELF[target.vendor]} for {target.arch}, {r.code_bytes:,} B of it code"),
        ("compiler", f"{binary.compiler}, {binary.seconds:.2f} s"),
        ("registers", f"{r.registers} a thread, of {target.registers_per_thread}"),
        *scalar,
        ("spills", f"{r.spill_bytes} B a thread{spilled}"),
        ("stack frame", f"{r.stack_bytes} B a thread"),
        ("shared memory", f"{shared} a block"),
        ("threads", f"{binary.threads} a block"),
        ("occupancy", f"{binary.occupancy}, {binary.occupancy.blocks_per_sm} blocks"),
    ]


def show_outcome(outcome: Outcome) -> None:
    """One kernel, at length."""
    ok = outcome.ok
    say(f"{mark(ok):<6}{outcome.chain.name}  for {outcome.target} ({outcome.target.arch})", style=mark_style(ok))
    if outcome.error:
        say(str(outcome.error))
        return
    several = len(outcome.kernels) > 1
    for built in outcome.kernels:
        if several:
            say("", prose(f"{built.source.plan.name}:", "bold"))
        if built.binary is not None:
            show_resources(built.binary)
        for verdict in built.verdicts:
            say(f"{'gate':<18}{'passed' if verdict.passed else verdict.reason}: {verdict.plan.regime}")
    first, *rest = outcome.validation.text.splitlines() or [""]
    say(*[""] * several, f"{'validation':<18}{first}", *(f"  {line}" for line in rest))


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Many kernels, a line each; what went wrong follows at length."""
    rows = [
        row for outcome, name in zip(outcomes, told_apart(outcomes), strict=True) for row in outcome_rows(outcome, name)
    ]
    columns = ("!", "kernel!", "registers>", "spills>", "stack>", "shared>", "code>", "occupancy!", "time>")
    say(table(*columns, "valid!", rows=rows), wide=True)
    for outcome in outcomes:
        if outcome.error or outcome.validation.ok is False:
            say("", f"{outcome.chain.name} for {outcome.target}:", str(outcome.error or outcome.validation.text))
    refused = [(b.source.plan.name, v) for o in outcomes for b in o.kernels for v in b.verdicts if not v.passed]
    for name, verdict in refused:
        say(f"{name}: a candidate was refused, which {verdict.reason}: {verdict.plan.regime}")
    unproven = [o.validation.text for o in outcomes if o.validation.ok is None and not o.error]
    for text in dict.fromkeys(unproven):
        say("", text)


def told_apart(outcomes: Sequence[Outcome]) -> list[str]:
    """The chains' names; with sizes where one chain has several, and with targets where there are several."""
    shapes: dict[str, set[str]] = {}
    for outcome in outcomes:
        shapes.setdefault(outcome.chain.name, set()).add(outcome.chain.graph.sizes_text())
    several = len({outcome.target.name for outcome in outcomes}) > 1
    names = []
    for outcome in outcomes:
        name = outcome.chain.name
        sizes = f" {outcome.chain.graph.sizes_text()}" if len(shapes[name]) > 1 else ""
        names.append(f"{name}{sizes}{f' {outcome.target}' if several else ''}")
    return names


def outcome_rows(outcome: Outcome, name: str) -> list[tuple[Any, ...]]:
    """A kernel's row; of a program one of its own, and below it each kernel's."""
    from rich.text import Text

    first = Text(mark(outcome.ok), style=mark_style(outcome.ok)), name
    valid = mark(outcome.validation.ok)
    cells = [resource_cells(built.binary) if built.binary else ("",) * 7 for built in outcome.kernels]
    if len(cells) == 1:
        return [(*first, *cells[0], valid)]
    names = [built.source.plan.name for built in outcome.kernels]
    return [(*first, *("",) * 7, valid), *(("", f"  {n}", *c, "") for n, c in zip(names, cells, strict=True))]


def resource_cells(binary: Binary) -> tuple[str, ...]:
    r, occupancy = binary.resources, binary.occupancy
    scalar = f" + {r.scalar_registers}s" if r.scalar_registers else ""
    return (
        f"{r.registers}{scalar}",
        f"{r.spill_bytes} B",
        f"{r.stack_bytes} B",
        mebibytes(r.shared_bytes),
        mebibytes(r.code_bytes),
        f"{occupancy.fraction:4.0%}, {occupancy.limited_by}",
        f"{binary.seconds:.2f} s",
    )


# ---------------------------------------------------------------- inspect --what profile


def show_checklist(checklist: Checklist) -> None:
    say(f"{checklist.kernel} for {checklist.target}: what to read with a profiler, and what to expect", style="bold")
    for command in checklist.commands:
        say("", f"# {command.tool}", command.text)
    rows = [(c.name, c.meaning, c.expect) for c in checklist.counters]
    say("", table("counter!", "what it is", "expect", rows=rows), "", wide=True)
    for note in checklist.notes:
        say(f"- {note}")


# ---------------------------------------------------------------- validate


def validate_one(chain: Chain, target: Target, on: str, seed: int, quick: bool) -> Validation:
    """Build the kernel for its device and run it against its reference. Raises what makes the request moot."""
    from fusegen import pipeline
    from fusegen.validation import validate

    try:
        kernel = pipeline.compile(chain, target, on=on, validate=False)
        report = validate(kernel, seed=seed, quick=quick)
    except (KernelError, RequestError) as error:
        return Validation(False, "", str(error), None, error.exit_code)
    exit_code = 0 if report.ok else 2 if report.unjudged else 1
    return Validation(report.ok, str(kernel.device), gist(report), report, exit_code)


def at_lengths(chain: Chain, target: Target, on: str) -> list[Chain]:
    """The chain at every row length where its plan changes its ways. Raises RequestError where it has one length."""
    from fusegen import pipeline, validation

    programs.need_kernel(chain, target, "--lengths is for the row lengths of")
    plan = pipeline.compile(chain, target, on=on, validate=False).plan
    return list(validation.at_lengths(chain, plan).values())


def at_all_lengths(chains: Sequence[Chain], target: Target, on: str) -> list[Chain]:
    """Each chain at every length of its own."""
    found = []
    with progress(len(chains)) as bar:
        for chain in chains:
            bar.step(f"{chain.name} for {target} is planned")
            found += at_lengths(chain, target, on)
    return found


def show_validation(bar: Progress, chain: Chain, target: Target, validation: Validation, every: bool) -> None:
    """One kernel's verdict; with `every`, each case of it."""
    line = f"{mark(validation.ok):<6}{chain.name}  {chain.graph.signature}  at {chain.graph.sizes_text()}  for {target}"
    bar.say(line, style=mark_style(validation.ok))
    text = str(validation.report) if every and validation.report else validation.text
    bar.say(*(f"      {part}" for part in text.splitlines()))
