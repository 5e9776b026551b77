"""The search: which candidates are tried, in which order, and which of them wins.

Candidates come in the order of their estimates. One whose estimate is more than twice that of the fastest measured so
far is left out, and so is everything behind it: the estimates' errors are common to the candidates of a chain, so they
rank better than they measure. All are compiled in threads meanwhile; one that the gate refuses is not run.

First every candidate is timed briefly. The fastest few are validated, and with them the cost model's own choice. Then
these finalists take turns, so that a GPU that grows hot treats them alike, and the least median of that contest wins.
A wrong kernel is recorded as failed and can't win; what hangs or crashes is recorded at once, before anything else can
go wrong, and is not tried again with the same compiler and version of fusegen unless asked.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from fusegen.compiling import Binary, compiler_version
from fusegen.database import Database, Measurement, problem_of
from fusegen.database.keys import Problem, Tools
from fusegen.emitting.rendering import render
from fusegen.errors import CompileError, FusegenError, RequestError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.pipeline import gate, graph_of
from fusegen.planner.model import Candidates, Source
from fusegen.planner.programs import kernels_of
from fusegen.runtime.cache import compiled
from fusegen.targets import Target
from fusegen.tuning.bench import Bench, Unfit
from fusegen.tuning.report import Report, Trial
from fusegen.version import VERSION

log = logging.getLogger("fusegen.tuning")

PRUNE = 2.0  # times the estimate of the fastest so far
FINALISTS = 3  # besides the cost model's own choice
CLOSE = 0.05  # a finalist took at most so much longer than the fastest, in the brief timing
BRIEF = 20  # launches of the brief timing
PATIENCE = 4  # candidates that are tried whatever the budget, until one works
BUDGET_S = 30.0  # for the brief timings of one chain
ROUNDS, TURN = 8, 10  # of the contest: rounds, and launches a turn


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search one chain: seconds for the brief timings, the most candidates, and of those the most that are
    validated and timed again, besides the cost model's own choice."""

    budget_s: float = BUDGET_S
    most: int = 32
    finalists: int = FINALISTS

    def __post_init__(self) -> None:
        if not self.budget_s > 0 or self.most < 1 or self.finalists < 1:
            raise RequestError(
                f"a search takes some seconds, one candidate and one finalist at least, and got {self.budget_s:g} s, "
                f"{self.most} and {self.finalists}"
            )


Watch = Callable[[int, int, str], object]
"""Told of progress: steps done, steps in all (it may shrink), and what is under way."""


def unwatched(done: int, total: int, doing: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Tuner:
    """Tunes chains one after the other on one bench. `database` keeps what is found; None keeps nothing, and then
    `remembered` are the rows to know from what hung or crashed before."""

    bench: Bench
    database: Database | None
    effort: Effort = Effort()
    retry: bool = False
    remembered: tuple[Measurement, ...] = ()

    def tune(self, chain: Chain | Graph, watch: Watch = unwatched) -> Report:
        """Search one chain and keep what was found. Raises NoPlan, and MissingError where the operands do not fit."""
        start = time.monotonic()
        found = searchable(chain, self.bench.target)
        problem = problem_of(found)
        assert problem is not None  # searchable() found a plan
        tools = Tools(compiler_version(found.target.vendor), VERSION)
        run = Run(self, found.graph, problem, tools, self.known(problem, tools), start, watch)
        return run.search([Trial(plan, rank) for rank, plan in enumerate(found.plans)])

    def known(self, problem: Problem, tools: Tools) -> dict[str, Measurement]:
        """What hung or crashed before under the same conditions, by configuration."""
        if self.retry:
            return {}
        if self.database is None:
            return unfit(self.remembered, problem, tools)
        try:
            return unfit(self.database.rows(problem.graph), problem, tools)
        except FusegenError as error:
            log.warning("%s", error)
            return {}


def searchable(chain: Chain | Graph, target: Target) -> Candidates:
    """The candidates to search, of a chain of one kernel. Raises NoPlan, and RequestError for other chains."""
    graph = graph_of(chain)
    if graph.rows < 1:
        raise RequestError(f"{graph.name} has no rows at {graph.sizes_text()}; there is nothing to measure")
    found, program = kernels_of(graph, target)
    if program is not None:
        raise RequestError(
            f"{graph.name} is a program of {len(program.steps)} kernels on {target}, and a search is of one\n"
            "  tune each: for step in fusegen.plan(chain).steps: fusegen.tune(step.graph)"
        )
    found.need()
    return found


def unfit(rows: Iterable[Measurement], problem: Problem, tools: Tools) -> dict[str, Measurement]:
    """Which of `rows` say of a candidate for `problem`, made by `tools`, that it hung or crashed; by configuration."""
    bad = [row for row in rows if row.status in ("hung", "crashed")]
    return {row.configuration: row for row in bad if (row.problem, row.tools) == (problem, tools)}


class Run:
    """One search under way."""

    def __init__(
        self, tuner: Tuner, graph: Graph, problem: Problem, tools: Tools, known: dict[str, Measurement], start: float,
        watch: Watch,
    ) -> None:  # fmt: skip
        self.tuner = tuner
        self.bench = tuner.bench
        self.graph = graph
        self.problem = problem
        self.tools = tools
        self.known = known
        self.start = start
        self.watch = watch
        self.at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.made: dict[str, tuple[Source, Binary]] = {}

    def search(self, every: Sequence[Trial]) -> Report:
        trials = every[: self.tuner.effort.most]
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fusegen-compile") as pool:
            futures = [pool.submit(make, trial) for trial in trials]
            try:
                tried, reason = self.try_each(trials, futures)
            finally:
                for future in futures:
                    future.cancel()
        left_out = [
            (len(trials) - len(tried), reason),
            (len(every) - len(trials), f"by the limit of {self.tuner.effort.most}"),
        ]
        skipped = ", ".join(f"{count} {why}" for count, why in left_out if count)
        untuned = next((t for t in tried if t.configuration in self.made), None)
        finalists = self.finalists(tried, untuned)
        self.contest(finalists, len(tried))
        winner = min((t for t in finalists if t.ok and t.validated), key=lambda t: t.us, default=None)
        report = self.report(tried, untuned, winner, skipped)
        self.keep(lambda database: report.keep(database, self.known))
        self.watch(len(tried) + ROUNDS, len(tried) + ROUNDS, self.graph.name)
        return report

    def report(self, tried: Sequence[Trial], untuned: Trial | None, winner: Trial | None, skipped: str) -> Report:
        seconds = time.monotonic() - self.start
        return Report(
            self.graph, self.problem, self.tools, self.bench.device, self.bench.copy_rate, tuple(tried), untuned,
            winner, skipped, seconds, self.at,
        )  # fmt: skip

    def try_each(
        self, trials: Sequence[Trial], futures: Sequence[Future[tuple[Source, Binary]]]
    ) -> tuple[list[Trial], str]:
        """The brief timings, and why they ended before the last candidate; empty where they did not."""
        fastest = trials[0]
        total = len(trials) + ROUNDS
        for number, (trial, future) in enumerate(zip(trials, futures, strict=True)):
            if trial.plan.cost.time_us > PRUNE * fastest.plan.cost.time_us:
                return list(trials[:number]), "by their estimates"
            spent = time.monotonic() - self.start > self.tuner.effort.budget_s
            if spent and (fastest.ok or number >= PATIENCE):
                return list(trials[:number]), f"by the budget of {self.tuner.effort.budget_s:g} s"
            self.watch(number, total, f"{self.graph.name}  {trial.configuration}")
            self.try_one(trial, future)
            if trial.ok and (not fastest.ok or trial.us < fastest.us):
                fastest = trial
        return list(trials), ""

    def try_one(self, trial: Trial, future: Future[tuple[Source, Binary]]) -> None:
        if known := self.known.get(trial.configuration):
            trial.known = known
            trial.fail(known.status, f"{known.reason} (on {known.at}; not tried again)")
            return
        try:
            source, binary = future.result()
        except CompileError as error:
            trial.fail("failed", f"it does not compile: {str(error).splitlines()[0]}")
            return
        if refused := gate(binary.resources):
            trial.fail("failed", f"the gate refuses it: it {refused}")
            return
        self.made[trial.configuration] = source, binary
        self.time(trial, BRIEF)

    def time(self, trial: Trial, repeats: int) -> tuple[float, ...]:
        """Time it, and keep what became of it; the new times."""
        try:
            new = tuple(self.bench.time(*self.made[trial.configuration], repeats))
        except Unfit as error:
            self.fail(trial, error)
            return ()
        trial.times += new
        return new

    def fail(self, trial: Trial, error: Unfit) -> None:
        trial.fail(error.status, error.reason)
        log.info("%s %s: %s: %s", self.graph.name, trial.configuration, error.status, error.reason)
        if error.status in ("hung", "crashed"):
            row = self.report([trial], None, None, "").row(trial)
            self.keep(lambda database: database.record([row]))

    def finalists(self, tried: Sequence[Trial], untuned: Trial | None) -> list[Trial]:
        """The fastest that are right, and the untuned choice if it is."""
        found: list[Trial] = []
        for trial in sorted((t for t in tried if t.ok), key=lambda t: t.us):
            if found and (len(found) == self.tuner.effort.finalists or trial.us > (1 + CLOSE) * found[0].us):
                break
            if self.right(trial):
                found.append(trial)
        if untuned is not None and untuned.ok and untuned not in found and self.right(untuned):
            found.append(untuned)
        return found

    def right(self, trial: Trial) -> bool:
        try:
            self.bench.validate(*self.made[trial.configuration])
        except Unfit as error:
            self.fail(trial, error)
            return False
        trial.validated = True
        return True

    def contest(self, finalists: Sequence[Trial], before: int) -> None:
        """Time the finalists in turns; only these times count then."""
        times: dict[str, tuple[float, ...]] = {t.configuration: () for t in finalists}
        for number in range(ROUNDS):
            self.watch(before + number, before + ROUNDS, f"{self.graph.name}  the fastest {len(finalists)} in turns")
            for trial in finalists if number % 2 else finalists[::-1]:
                if trial.ok:
                    times[trial.configuration] += self.time(trial, TURN)
        for trial in finalists:
            if trial.ok:
                trial.times = times[trial.configuration]

    def keep(self, change: Callable[[Database], None]) -> None:
        """Change the database; what was measured is reported even where it can't be kept."""
        if self.tuner.database is None:
            return
        try:
            change(self.tuner.database)
        except FusegenError as error:
            log.warning("what was measured of %s is not kept: %s", self.graph.name, error)


def make(trial: Trial) -> tuple[Source, Binary]:
    """The candidate's source and machine code. Raises CompileError and MissingError."""
    source = render(trial.plan)
    return source, compiled(source, origin=f"templates/{trial.plan.template}, plan: {trial.plan.regime}")
