"""What `tune` does and says, and what `db` shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusegen.cli import farms
from fusegen.cli.showing import Progress, complain, print_json, progress, put, say, table
from fusegen.database import Database, Measurement, Merged, Unsound, read_lines, read_shipped, write_lines
from fusegen.emitting.golden import write_whole
from fusegen.errors import FusegenError, MissingError, RequestError, writing

if TYPE_CHECKING:
    from fusegen.language.graph import Graph
    from fusegen.language.spec import Chain
    from fusegen.targets import Target
    from fusegen.tuning import Report, Trial, Tuner

SHOWN_CONFLICTS = 10

# ---------------------------------------------------------------- tune


@dataclass(frozen=True, slots=True)
class How:
    """What `tune` is told besides chains and targets."""

    on: str
    budget_s: float
    most: int
    deadline_s: float
    retry: bool
    save: bool


def tune(
    chains: Sequence[Chain], targets: Sequence[Target], how: How, ray: str | None, jobs: int | None
) -> tuple[list[Report], list[FusegenError]]:
    """Tune each kernel of chains for each target: by this process and one GPU, or as `ray` and `jobs` say."""
    from fusegen import tuning

    effort = tuning.Effort(how.budget_s, how.most)
    spread = farms.ask_crew(ray, jobs)
    gpus = how.on.split(",")
    if len(gpus) > 1 and jobs is None:
        raise RequestError(f"--on {how.on} names several GPUs, which takes --jobs\n  --ray finds its GPUs by itself")
    if ray is None:
        for target in targets:
            for on in gpus:
                tuning.measurable(target, on)
    if spread:
        return farms.tune_all(chains, targets, ray, jobs, gpus, effort, how.deadline_s, how.retry, how.save)
    wanted = farms.planned(chains, targets)
    reports, errors = [], []
    database = Database() if how.save else None
    with progress(len(wanted) * how.most) as bar:
        for target in targets:
            with tuning.Bench(target, how.on, deadline_s=how.deadline_s) as bench:
                own = [graph for graph, other in wanted if other is target]
                found = tune_each(tuning.Tuner(bench, database, effort, how.retry), own, bar)
            reports += found[0]
            errors += found[1]
    return reports, errors


def tune_each(tuner: Tuner, chains: Sequence[Graph], bar: Progress) -> tuple[list[Report], list[FusegenError]]:
    """Tune chains of one kernel each, one after the other, and say which could not be. The only one's error is raised.

    A step of the bar is one thing measured; chains to come count like the one under way.
    """
    reports: list[Report] = []
    errors: list[FusegenError] = []
    for number, chain in enumerate(chains):

        def watch(done: int, total: int, doing: str, number: int = number) -> None:
            bar.reach(number * total + done, len(chains) * total, doing)

        try:
            reports.append(tuner.tune(chain, watch))
        except (RequestError, MissingError) as error:  # no plan, or no memory for its operands
            if len(chains) == 1:
                raise
            errors.append(error)
            complain(f"{chain.name} at {chain.sizes_text()} is not tuned: {error}\n")
    return reports, errors


def show_report(report: Report) -> None:
    """One chain: every candidate that was tried, the fastest first."""
    say(f"{report.graph.name}  {report.graph.signature}  at {report.graph.sizes_text()}  on {report.gpu}", style="bold")
    order = sorted(report.trials, key=lambda t: (not t.ok, t.us, t.rank))
    columns = ("", "candidate!", "time>", "estimate>", "share>", "what became of it")
    say(table(*columns, rows=[line(report, trial) for trial in order]), wide=True)
    if report.skipped:
        say(f"not tried: {report.skipped}")
    say(verdict(report))


def line(report: Report, trial: Trial) -> tuple[str, ...]:
    marks = ("*" if trial is report.winner else "") + ("u" if trial is report.untuned else "")
    became = trial.reason and f"{trial.status}: {trial.reason}"
    if trial.ok:
        became = "validated" if trial.validated else ""
    return (
        marks, trial.configuration, microseconds(trial.us) if trial.ok else "-",
        microseconds(trial.plan.cost.time_us), f"{report.share(trial):.2f}" if trial.ok else "-", became,
    )  # fmt: skip


def microseconds(us: float) -> str:
    return f"{us:.1f} us"


def verdict(report: Report) -> str:
    """`* 112.3 us is the fastest; untuned (u) it takes 115.0 us, 2.4 % longer`."""
    if report.winner is None:
        return "no candidate could be measured and validated; the cost model's choice stays"
    best = f"* {microseconds(report.winner.us)} is the fastest"
    if report.regret is None:
        return f"{best}; the untuned choice (u) can't be used"
    untuned = microseconds(report.untuned.us if report.untuned else 0.0)
    return f"{best}; untuned (u) it takes {untuned}, {regret_text(report)}"


def regret_text(report: Report) -> str:
    regret = report.regret
    if regret is None:
        return "-"
    return "the same" if report.untuned is report.winner else f"{regret:+.1%}"


def show_reports(reports: Sequence[Report]) -> None:
    """Many chains, a line each: the untuned choice beside the winner."""
    rows = []
    several = len({report.problem.target for report in reports}) > 1
    for report in reports:
        winner, untuned = report.winner, report.untuned
        rows.append(
            (
                f"{report.graph.name} {report.problem.target}" if several else report.graph.name,
                report.graph.sizes_text(),
                ", ".join(dict.fromkeys(str(t.dtype) for t in report.graph.inputs if t.shape)),
                microseconds(untuned.us) if untuned and untuned.ok else "-",
                microseconds(winner.us) if winner else "-",
                f"{report.share(winner):.2f}" if winner else "-",
                regret_text(report),
                winner.configuration if winner else "nothing could be measured and validated",
            )
        )
    columns = ("chain!", "sizes!", "types!", "untuned>", "tuned>", "share>", "untuned is>", "the winner")
    say(table(*columns, rows=rows), wide=True)
    say(summary(reports))


def summary(reports: Sequence[Report]) -> str:
    """The cost model's own choices against the winners."""
    from fusegen.tuning import WANTED_REGRET

    found = [report.regret for report in reports if report.regret is not None]
    if not found:
        return "nothing could be compared"
    poor = [r for r in reports if r.regret is not None and r.regret > WANTED_REGRET]
    beyond = [f"{r.graph.name} at {r.graph.sizes_text()}" for r in poor]
    text = f"untuned takes {sum(found) / len(found):+.1%} in the mean, {max(found):+.1%} at worst"
    return f"{text}; more than {WANTED_REGRET:+.0%}: {', '.join(beyond)}" if beyond else text


# ---------------------------------------------------------------- db


def row_facts(row: Measurement) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Measurement.__dataclass_fields__}


def winners(rows: Iterable[Measurement]) -> list[Measurement]:
    """The best row of each problem and set of tools: what a lookup would find."""
    best: dict[Any, Measurement] = {}
    for row in rows:
        if row.may_win and ((key := (row.problem, row.tools)) not in best or row.share > best[key].share):
            best[key] = row
    return list(best.values())


def chosen_rows(shipped: bool, every: bool, chain: str | None, database: Database) -> list[Measurement]:
    """What `db show` and `db export` are asked for, in reading order."""
    rows = read_shipped() if shipped else database.rows()
    if chain is not None:
        rows = [row for row in rows if row.chain.partition(" ")[0] == chain]
    return [row for row in read_lines(write_lines(rows if every else winners(rows))) if isinstance(row, Measurement)]


def show_rows(rows: Sequence[Measurement], where: str) -> None:
    if not rows:
        say(f"{where} holds nothing that was asked for; `fusegen tune SPEC` measures on a GPU")
        return
    cells = []
    for row in rows:
        cells.append(
            (
                row.chain.partition(" ")[0], row.sizes, types_text(row), row.target, row.configuration,
                microseconds(row.time_us) if row.ok else row.status, f"{row.share:.2f}" if row.ok else "-",
                "yes" if row.validated else "no", row.compiler, row.fusegen, row.at[:10], row.reason,
            )
        )  # fmt: skip
    columns = (
        "chain!", "sizes!", "types!", "target!", "configuration!", "time>", "share>", "validated", "compiler!",
        "fusegen!", "on!", "reason",
    )  # fmt: skip
    say(table(*columns, rows=cells), f"{len(rows)} rows of {where}", wide=True)


def types_text(row: Measurement) -> str:
    """The types of its operands that are arrays, each once."""
    operands = row.chain.partition("->")[0]
    return ", ".join(dict.fromkeys(re.findall(r"\b[a-z]+\d+(?=\[)", operands)))


def write_rows(rows: Sequence[Measurement], file: str) -> None:
    """As lines of JSON to a file, or to stdout for `-`. Raises OutputError where that can't be written."""
    if file == "-":
        put(write_lines(rows))
        return
    with writing(file, "name another file"):
        write_whole(Path(file), write_lines(rows))
    say(f"wrote {len(rows)} rows to {file}")


def read_file(file: Path) -> list[Measurement]:
    """The rows in a file of JSON lines. Raises RequestError for a file that is none, naming its first wrong line."""
    try:
        found = list(read_lines(file.read_text("utf-8")))
    except OSError as error:
        raise RequestError(f"{file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} can't be read as lines of JSON: {error}") from error
    for row in found:
        if isinstance(row, Unsound):
            raise RequestError(f"{file}: {row}\n  nothing was taken from it; `fusegen db export` writes such files")
    return [row for row in found if isinstance(row, Measurement)]


def take_in(sources: Sequence[tuple[str, list[Measurement]]], file: Path | None, as_json: bool) -> int:
    """Merge rows, each source all or none, and say what came of it."""
    database = Database(file)
    found = [(source, database.merge(rows)) for source, rows in sources]
    if as_json:
        print_json({"database": str(database.path), "merged": [merged_facts(*each) for each in found]})
    else:
        for source, merged in found:
            show_merged(source, merged)
    return 0


def merged_facts(source: str, merged: Merged) -> dict[str, Any]:
    return {
        "from": source, "added": merged.added, "replaced": merged.replaced, "kept": merged.kept, "same": merged.same,
        "conflicts": [
            {"kept": row_facts(kept), "dropped": row_facts(dropped), "why": why}
            for kept, dropped, why in merged.conflicts
        ],
    }  # fmt: skip


def show_merged(source: str, merged: Merged) -> None:
    say(
        f"{source}: {merged.added} rows added, {merged.replaced} replaced, {merged.kept} kept as they were, "
        f"{merged.same} the same"
    )
    for kept, _, why in merged.conflicts[:SHOWN_CONFLICTS]:
        name = kept.chain.partition(" ")[0]
        say(f"  conflict: {name} at {kept.sizes} on {kept.target}, {kept.configuration}: {why}; kept is {kept.status} "
            f"of {kept.at}")  # fmt: skip
    if (more := len(merged.conflicts) - SHOWN_CONFLICTS) > 0:
        say(f"  and {more} conflicts more; --json has them all")
