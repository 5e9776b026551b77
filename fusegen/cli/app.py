"""The verbs. Each asks for chains and a target, calls the public API, and shows what came of it.

Whatever takes time to import is imported inside the verb that needs it, so that `fusegen --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fusegen.cli import authoring, caching, exporting, reporting
from fusegen.cli.options import AsJson, Dtype, Jobs, Ray, Sets, Spec, Specs, TargetName, TargetNames, launches
from fusegen.cli.showing import (
    PASSED_OVER,
    Group,
    complain,
    going_out,
    pass_over,
    print_json,
    progress,
    say,
    show_code,
    verb,
    worst,
)
from fusegen.errors import KernelError, NoPlan, NoUnits, OutputError, RequestError
from fusegen.version import VERSION

app = typer.Typer(
    cls=Group,
    help="Fused GPU kernels from small Python op graphs: readable CUDA and HIP source, checked against numpy.",
    epilog="SPEC is a file, a folder, or file.py:chain. Exit codes: 0 all is well, 1 a kernel is wrong or a golden "
    "file drifted, 2 the request is wrong, 3 something is missing on this machine, 74 the output can't be written.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(caching.app, name="cache")
app.command()(verb(authoring.new))
app.command()(verb(authoring.diff))
app.command()(verb(authoring.watch))
app.command()(verb(exporting.export))
app.command()(verb(reporting.report))

DEFAULT_OUT = Path("generated")


class What(StrEnum):
    """What `inspect` can show."""

    source = "source"
    reference = "reference"
    plan = "plan"
    ptx = "ptx"
    sass = "sass"
    resources = "resources"
    profile = "profile"


def main() -> None:
    """The command `fusegen`. A reader that closes the pipe early (`| head`) ends it quietly, as it does other tools."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.stderr is None:  # 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:  # >&-
        complain("the output can't be written: it is closed\n")
        sys.exit(OutputError.exit_code)
    elif sys.stdout.errors == "strict":  # a file's name may hold what no encoding has
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with going_out():  # typer's own output, such as --help; a verb's is its own business
            try:
                app(prog_name="fusegen")
            finally:
                sys.stdout.flush()
    except OutputError as error:
        complain(f"{error}\n")
        sys.exit(error.exit_code)


def show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"fusegen {VERSION}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say on stderr what the planner, the gate and the cache do.")
    ] = False,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Choose by the cost model alone, whatever was measured.")
    ] = False,
    dependent_launch: Annotated[
        bool,
        typer.Option("--dependent-launch/--no-dependent-launch",
                     help="A program's kernels begin while those before them run, on Hopper and later."),
    ] = True,
) -> None:  # fmt: skip
    launches.dependent = dependent_launch
    if untuned:
        from fusegen.database.lookup import SWITCH

        os.environ[SWITCH] = "off"
    if verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        logging.getLogger("fusegen").setLevel(logging.DEBUG)


@app.command("list")
@verb
def list_(
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="A spec or a folder; without it, specs/.")] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Show the ops that specs are made of instead.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show the chains of a file or folder: signatures and sizes. With --ops, every op."""
    from fusegen.cli import asking, plans

    if ops:
        print_json({"ops": plans.op_facts()}) if as_json else plans.show_ops()
        return 0
    chains = asking.ask_chains([path or asking.default_specs()])
    print_json({"chains": [plans.chain_facts(c) for c in chains]}) if as_json else plans.show_chains(chains)
    return 0


@app.command()
@verb
def plan(
    specs: Specs, target: TargetName = None, sets: Sets = None, dtype: Dtype = None,
    every: Annotated[bool, typer.Option("--all", help="Show every candidate, and why rules refused.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="As compile(batch_invariant=True), and what that costs.")
    ] = False,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Show how a chain is tiled, vectorized and kept, and what it costs: bytes, flops, launches, time."""
    from fusegen.cli import asking, plans, programs
    from fusegen.database import choose

    chosen = asking.ask_target(target)
    ask = programs.ask_invariant if batch_invariant else programs.ask_plan
    planned = programs.ask_all(asking.ask_chains(specs, sets or (), dtype), chosen, ask)
    if not as_json:
        for number, each in enumerate(each for each in planned if each.error is None):
            say(*[""] * bool(number))
            if each.program is not None:
                programs.show_program(each.program, every, each.least_us)
            else:
                plans.show_plan(each.found, choose(each.found), every, each.least_us)
        programs.need_all(planned, every)
        return 0
    facts = []
    for each in planned:
        if each.error is not None:
            raise each.error
        program, found = each.program, each.found
        fact = plans.choice_facts(choose(found)) if program is None else programs.program_facts(program, every)
        if each.least_us is not None:
            fact["batch_invariant"] = {"least_us": each.least_us}
        fact["candidates"] = [plans.candidate_facts(p) for p in found.plans] if every else []
        fact["refusals"] = [{"rule": r.rule, "reason": r.reason} for r in found.refusals]
        facts.append(fact)
    print_json({"plans": facts})
    return 0


@app.command()
@verb
def explain(
    specs: Specs, target: TargetName = None, sets: Sets = None, dtype: Dtype = None, as_json: AsJson = False
) -> int:
    """Say why: what was fused, what is kept where, where values are rounded, which regime, what refused."""
    from fusegen.cli import asking, plans, programs
    from fusegen.database import choose
    from fusegen.reporting.explaining import explanation

    chosen = asking.ask_target(target)
    documents = []
    planned = programs.ask_all(asking.ask_chains(specs, sets or (), dtype), chosen)
    for number, each in enumerate(each for each in planned if each.error is None):
        if not as_json:
            say(*[""] * bool(number))
        if each.program is not None:
            if as_json:
                documents.append(programs.explain_facts(each.program))
            else:
                programs.show_explanation(each.program)
            continue
        choice = choose(each.found)
        sections = explanation(each.found, choice)
        if not as_json:
            plans.show_explanation(choice.plan, sections)
        facts = programs.section_facts(sections)
        documents.append({"chain": each.found.graph.name, "target": chosen.name, "sections": facts})
    if as_json:
        programs.need_all(planned, every=False)
        print_json({"explanations": documents})
    programs.need_all(planned, every=True)
    return 0


@app.command()
@verb
def emit(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", show_default=False,
                       help="As of compile; without any, specs/ for all targets, and stale files are removed."),
    ] = None,
    target: TargetName = None, sets: Sets = None, dtype: Dtype = None,
    all_targets: Annotated[bool, typer.Option("--all-targets", help="Every target kept under generated/.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where targets' folders go.")] = DEFAULT_OUT,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; show what would change, and exit 1.")] = False,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Write kernels and their numpy references: DIR/cuda-h200/chain.cu and chain_reference.py."""
    from fusegen.cli import asking
    from fusegen.emitting import golden

    files: list[golden.File] = []
    everything = not specs  # then the folder is to hold exactly this
    named = specs or [asking.default_specs()]
    kept = all_targets or (everything and target is None)
    targets = asking.ask_targets(target, kept)
    chains = asking.ask_chains(named, sets or (), dtype)
    skipped: list[NoPlan] = []
    with progress(sum(not kept or golden.is_kept(chain, each) for each in targets for chain in chains)) as bar:
        for pair in golden.all_emitted(chains, targets, skipped.append, kept=kept):
            bar.step(str(pair[0].path))
            files += pair
    if skipped and not files:
        raise skipped[0]
    pass_over(*(error for error in skipped if not isinstance(error, NoUnits)))
    everything = everything and not PASSED_OVER  # what is passed over leaves its files as they are
    if check:
        whole = all(Path(name).is_dir() for name in named) and not PASSED_OVER
        differences = golden.compare(files, out, stale_in=targets if whole else ())
        return report_drift(differences, len(files), out, as_json)
    changes = golden.write(files, out, prune=targets if everything else ())
    if as_json:
        kinds = ("written", "removed", "unchanged")
        print_json({kind: [str(path) for path in getattr(changes, kind)] for kind in kinds})
        return 0
    say(*(f"wrote {path}" for path in changes.written), *(f"removed {path}" for path in changes.removed))
    say(f"{len(changes.written)} written, {len(changes.removed)} removed, {len(changes.unchanged)} as they were")
    return 0


def report_drift(differences: Any, count: int, out: Path, as_json: bool) -> int:
    """Show what `emit --check` found."""
    from fusegen.emitting import golden

    if as_json:
        found = [{"file": str(d.path), "kind": d.kind, "diff": d.diff} for d in differences]
        print_json({"ok": not found, "files": count, "differences": found})
        return 1 if found else 0
    if not differences:
        say(f"{count} files in {out} are what is emitted now")
        return 0
    for difference in differences:
        show_code(difference.diff, "diff")
    raise golden.drift(differences, out)


@app.command("compile")
@verb
def compile_(
    specs: Specs, target: TargetNames = None, sets: Sets = None, dtype: Dtype = None,
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Hand the kernel out unproven.")] = False,
    jobs: Jobs = None, ray: Ray = None, as_json: AsJson = False,
) -> int:  # fmt: skip
    """Compile, gate and validate: registers, spills, shared memory, occupancy, size, time, verdicts. Needs no GPU."""
    from fusegen.cli import asking, builds, farms

    targets = asking.ask_several_targets(target)
    chains = asking.ask_chains(specs, sets or (), dtype)
    pairs = [(chain, chosen) for chosen in targets for chain in chains]
    outcomes = farms.compile_all(pairs, not no_validate, ray, jobs)
    if len(outcomes) == 1 and isinstance(outcomes[0].error, RequestError):
        raise outcomes[0].error
    code = worst(outcome.exit_code for outcome in outcomes)
    if as_json:
        print_json({"ok": code == 0, "kernels": [builds.outcome_facts(o) for o in outcomes]})
    elif len(outcomes) == 1:
        builds.show_outcome(outcomes[0])
    else:
        builds.show_outcomes(outcomes)
    return code


@app.command()
@verb
def inspect(
    spec: Spec, target: TargetName = None,
    what: Annotated[What, typer.Option("--what", "-w", help="What to show.")] = What.source,
    sets: Sets = None, dtype: Dtype = None, as_json: AsJson = False,
) -> int:  # fmt: skip
    """Show one kernel: its source, reference, plan, PTX, machine code, resources, or what to read with a profiler."""
    from fusegen.cli import asking, inspecting

    chain, chosen = asking.ask_chain(spec, sets or (), dtype), asking.ask_target(target)
    with progress(1) as bar:
        bar.step(f"{chain.name} for {chosen}")
        shown = inspecting.look(chain, chosen, what.value)
    if as_json:
        print_json({"chain": chain.name, "target": chosen.name, "what": what.value, **shown.facts})
    else:
        shown.show()
    return 0


@app.command()
@verb
def validate(
    specs: Specs, target: TargetName = None,
    on: Annotated[str, typer.Option("--on", metavar="auto|gpu|emulator", show_default=False,
                                    help="What runs it: auto is a matching GPU, else the emulator.")] = "auto",
    sets: Sets = None, dtype: Dtype = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the inputs drawn.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Only what compile does: one launch of each kind.")] = False,
    lengths: Annotated[bool, typer.Option("--lengths", help="At each row length where the plan changes.")] = False,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Run kernels on inputs drawn by seed and by malice, and compare with the generated numpy reference."""
    from fusegen.cli import asking, builds
    from fusegen.runtime.finding import find

    chosen = asking.ask_target(target)
    chains = list(asking.ask_chains(specs, sets or (), dtype))
    find(chosen, on)  # says at once when there is no such device
    if lengths:
        chains = builds.at_all_lengths(chains, chosen, on)
    results = []
    with progress(len(chains)) as bar:
        for chain in chains:
            bar.step(f"{chain.name} for {chosen}")
            results.append(result := builds.validate_one(chain, chosen, on, seed, quick))
            if not as_json:
                builds.show_validation(bar, chain, chosen, result, every=len(chains) == 1)
    code = worst(result.exit_code for result in results)
    if as_json:
        facts = [{"chain": c.name, "target": chosen.name, "sizes": dict(c.graph.sizes), **builds.validation_facts(r)}
                 for c, r in zip(chains, results, strict=True)]  # fmt: skip
        print_json({"ok": code == 0, "kernels": facts})
    elif len(results) > 1:
        say(f"{sum(bool(r.ok) for r in results)} of {len(results)} kernels agree with their references")
    return code


@app.command()
@verb
def bench(
    specs: Specs, target: TargetName = None,
    on: Annotated[str, typer.Option("--on", metavar="gpu|gpu:1", show_default=False, help="Which GPU.")] = "auto",
    sets: Sets = None, dtype: Dtype = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time torch and hand-written kernels too.")] = True,
    peers_file: Annotated[
        Path | None,
        typer.Option("--peers-file", metavar="FILE", show_default=False,
                     help="Python with PEERS, hand-written kernels by chain; else benchmarks/peers.py, if it is here."),
    ] = None,
    alone: Annotated[bool, typer.Option("--unfused/--no-unfused", help="Time each operator as its own kernel.")] = True,
    counters: Annotated[bool, typer.Option("--counters/--no-counters", help="Read DRAM's bytes with ncu.")] = True,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Timed launches of each.")] = 30,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a roofline: .svg, .png or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Time kernels on a GPU against their floor, the chain unfused, torch, torch.compile and hand-written peers."""
    from fusegen.cli import asking, benching

    if plot is not None:
        from fusegen.measuring import plotting

        plotting.check_file(plot)
        plotting.pyplot()  # says at once when there is none
    chosen = asking.ask_target(target)
    chains = asking.ask_chains(specs, sets or (), dtype)
    others = benching.ask_peers(peers, peers_file)
    watch = benching.ask_watch(chosen, on)
    found = []
    with progress(len(chains)) as bar:
        for number, chain in enumerate(chains):
            bar.step(f"{chain.name} for {chosen}")
            against = others.get(chain.name, {}) if peers else None
            try:
                found.append(benching.bench_one(chain, chosen, watch, against, alone, counters, repeats))
            except (RequestError, KernelError) as error:
                if len(chains) == 1:
                    raise
                pass_over(error)
                continue
            if not as_json:
                bar.say(*[""] * bool(number), *benching.shown(found[-1]), wide=True)
    if plot is not None:
        plotting.roofline(found, plot)
    if as_json:
        print_json(benching.bench_facts(found, plot))
    elif plot is not None:
        say("", f"wrote {plot}")
    return 0


@app.command()
@verb
def doctor(as_json: AsJson = False) -> int:
    """Say what is here, what is missing, and how to get it."""
    from fusegen.cli import health
    from fusegen.cli.doctor import examine

    found = examine()
    print_json(health.facts(found)) if as_json else health.show(found)
    return 0 if found.ready else 3


@app.command()
@verb
def tune(
    specs: Specs, target: TargetNames = None, sets: Sets = None, dtype: Dtype = None,
    on: Annotated[str, typer.Option("--on", metavar="gpu|gpu:1", show_default=False, help="Which GPU.")] = "gpu",
    budget: Annotated[float, typer.Option("--budget", metavar="S", min=0.1,
                                          help="Seconds for the first timings of one chain's candidates.")] = 30.0,
    most: Annotated[int, typer.Option("--most", metavar="N", min=1, help="Candidates of a chain to try at most.")] = 32,
    deadline: Annotated[float, typer.Option("--deadline", metavar="S", min=1,
                                            help="A candidate that takes longer has hung.")] = 20.0,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what hung or crashed before.")] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep nothing of what is measured.")] = False,
    jobs: Jobs = None, ray: Ray = None, as_json: AsJson = False,
) -> int:  # fmt: skip
    """Measure the planner's candidates on this GPU, of each kernel of a program; show and remember the winners."""
    from fusegen.cli import asking
    from fusegen.cli import tuning as words

    asked = asking.ask_chains(specs, sets or (), dtype)
    targets = asking.ask_several_targets(target)
    how = words.How(on, budget, most, deadline, retry, not no_save)
    reports, errors = words.tune(asked, targets, how, ray, jobs)
    if as_json:
        print_json({"reports": [report.facts() for report in reports], "errors": [str(error) for error in errors]})
    elif len(reports) + len(errors) == 1:
        words.show_report(reports[0])
    else:
        words.show_reports(reports)
    return worst([*(error.exit_code for error in errors), *(0 if report.winner else 1 for report in reports)])


db = typer.Typer(help="What was measured: show it, take it elsewhere, bring it together.", no_args_is_help=True)
app.add_typer(db, name="db")

DatabaseFile = Annotated[
    Path | None,
    typer.Option("--database", "-d", metavar="FILE", show_default=False,
                 help="Another database than the one FUSEGEN_DATABASE names, else the user's own."),
]  # fmt: skip
Shipped = Annotated[bool, typer.Option("--shipped", help="Of the measurements that come with fusegen instead.")]


@db.command()
@verb
def show(
    chain: Annotated[str | None, typer.Argument(metavar="CHAIN", help="Of the chain of that name alone.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every row, not only each problem's winner.")] = False,
    shipped: Shipped = False, database: DatabaseFile = None, as_json: AsJson = False,
) -> int:  # fmt: skip
    """Show the winners: chain, sizes, GPU, configuration, time, share of the copy rate."""
    from fusegen.cli import tuning as words
    from fusegen.database import Database

    kept = Database(database)
    rows = words.chosen_rows(shipped, every, chain, kept)
    where = "the shipped measurements" if shipped else str(kept.path)
    if as_json:
        print_json({"database": where, "rows": [words.row_facts(row) for row in rows]})
    else:
        words.show_rows(rows, where)
    return 0


@db.command()
@verb
def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to; - is stdout.")] = "-",
    shipped: Shipped = False, database: DatabaseFile = None,
) -> int:  # fmt: skip
    """Write every row as a line of JSON, sorted: to be read, compared, kept, and imported elsewhere."""
    from fusegen.cli import tuning as words
    from fusegen.database import Database

    rows = words.chosen_rows(shipped, True, None, Database(database))
    words.write_rows(rows, file)
    return 0


@db.command("import")
@verb
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Of lines of JSON, as export writes them.")],
    database: DatabaseFile = None, as_json: AsJson = False,
) -> int:  # fmt: skip
    """Take in rows that `export` wrote; of two rows for the same thing the newer, better-founded one is kept."""
    from fusegen.cli import tuning as words

    return words.take_in([(str(file), words.read_file(file)) for file in files], database, as_json)


@db.command()
@verb
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="DATABASE", help="Other machines' databases.")],
    database: DatabaseFile = None, as_json: AsJson = False,
) -> int:  # fmt: skip
    """Take in the rows of other databases, by the same rule as `import`."""
    from fusegen.cli import tuning as words
    from fusegen.database import Database

    return words.take_in([(str(file), Database(file).need()) for file in files], database, as_json)


@app.command(hidden=True)
@verb
def launch(
    spec: Spec, target: TargetName = None, sets: Sets = None, dtype: Dtype = None,
    on: Annotated[str, typer.Option("--on", help="gpu, gpu:1, emulator or auto.")] = "gpu",
    launches: Annotated[int, typer.Option("--launches", metavar="N", min=1, help="How often.")] = 5,
) -> int:  # fmt: skip
    """Launch one kernel at its sizes, on noise: what a profiler is given to run."""
    from fusegen.cli import asking
    from fusegen.measuring.profiling import run

    chain = asking.ask_chain(spec, sets or (), dtype)
    say(f"{chain.name}: {launches} launches on {run(chain, asking.ask_target(target), on=on, launches=launches)}")
    return 0
