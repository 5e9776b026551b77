"""Many chains tuned at once, by a crew: processes of this machine, or a Ray cluster.

Every candidate is compiled by a job of its own, which takes a processor. When those of a problem (a chain at its sizes,
for a target) are there, they go with it to a job that takes a GPU, and measures them by the same search as `Tuner`
alone. A problem is not divided between GPUs: its candidates are told apart by a few percent, and times of two GPUs of
one model may differ by as much.

What a job found is kept the moment that it comes; a job that is lost costs its problem, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fusegen.database import Database, Measurement, graph_digest
from fusegen.errors import FusegenError, RequestError
from fusegen.language.graph import Graph
from fusegen.planner.model import Candidates, Plan
from fusegen.runtime.cache import Entry, KernelCache, Key, collecting
from fusegen.spreading import Answer, Crew, Job, spread
from fusegen.targets import Target
from fusegen.tuning import measurable
from fusegen.tuning.bench import DEADLINE_S, Bench
from fusegen.tuning.report import Report, Trial
from fusegen.tuning.search import PRUNE, ROUNDS, Effort, Tuner, Watch, make, searchable, unfit, unwatched

log = logging.getLogger("fusegen.tuning")

Kernels = tuple[tuple[Key, Entry], ...]


# ---------------------------------------------------------------- what workers do


@dataclass(frozen=True, slots=True)
class Order:
    """A problem to measure, and how. `remembered`: rows of what hung or crashed before; `made`: kernels that are
    compiled already."""

    graph: Graph
    target: Target
    effort: Effort
    deadline_s: float
    retry: bool
    remembered: tuple[Measurement, ...]
    made: Kernels


def compile_candidate(plan: Plan) -> Kernels:
    """Its entries for the cache. Raises CompileError and MissingError."""
    with collecting() as made:
        make(Trial(plan, 0))
    return tuple(made.items())


def measure(order: Order, on: str) -> Report:
    """Search a problem on the GPU `on`. Raises MissingError where that is not the target's."""
    with Bench(measurable(order.target, on), on, deadline_s=order.deadline_s) as bench:
        return search(order, bench)


def search(order: Order, bench: Bench) -> Report:
    """Search a problem; the kernels that came with it need not be compiled again."""
    KernelCache().take(dict(order.made))
    return Tuner(bench, None, order.effort, order.retry, order.remembered).tune(order.graph)


# ---------------------------------------------------------------- who deals it out


@dataclass(slots=True)
class Pending:
    """A problem under way: its place among those asked for, how many of its candidates are compiled ahead, how many of
    these are not there yet, and those that are."""

    number: int
    found: Candidates
    ahead: int
    compiling: int
    made: dict[Key, Entry] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Of the measuring, for who watches."""
        return self.ahead + ROUNDS

    @property
    def name(self) -> str:
        graph = self.found.graph
        return f"{graph.name} at {graph.sizes_text()} for {self.found.target}"


@dataclass(frozen=True, slots=True)
class Farm:
    """Tunes many problems. `database` keeps what is found; None keeps nothing. `measure` is what GPUs do (a test has
    its own)."""

    crew: Crew
    database: Database | None
    effort: Effort
    deadline_s: float = DEADLINE_S
    retry: bool = False
    measure: Callable[[Order, str], Report] = measure

    def tune(
        self, wanted: Sequence[tuple[Graph, Target]], watch: Watch = unwatched
    ) -> Iterator[tuple[int, Report | FusegenError]]:
        """The number of each problem among `wanted`, and what came of it, in the order in which they are done."""
        jobs: list[Job] = []
        owners: dict[Job, Pending] = {}
        done, total = 0, 0  # steps: a candidate compiled, a candidate timed, a round of the finalists
        for number, (graph, target) in enumerate(wanted):
            try:
                found = searchable(graph, target)
            except RequestError as error:  # NoPlan among them
                yield number, error
                continue
            plans = self.compiled_first(found)
            pending = Pending(number, found, len(plans), len(plans))
            new = [Job(pending.name, compile_candidate, (plan,)) for plan in plans]
            owners.update(dict.fromkeys(new, pending))
            jobs += new
            total += pending.steps + len(new)
        for job, answer in spread(jobs, self.crew):
            pending = owners.pop(job)
            if job.gpu is not None:
                done += pending.steps
                yield pending.number, self.kept(answer)
            else:
                done += 1
                if answer.error is None:  # else the search meets it again, and says what it makes of it
                    pending.made.update(answer.value)
                pending.compiling -= 1
                if not pending.compiling:
                    owners[measuring := self.measuring(pending)] = pending
                    jobs.append(measuring)
            watch(done, total, job.name)

    def compiled_first(self, found: Candidates) -> tuple[Plan, ...]:
        """The candidates that a search is sure to want, and at most some others."""
        least = found.plans[0].cost.time_us
        return tuple(plan for plan in found.plans[: self.effort.most] if plan.cost.time_us <= PRUNE * least)

    def measuring(self, pending: Pending) -> Job:
        graph, target = pending.found.graph.written, pending.found.target
        remembered = () if self.retry else tuple(row for row in self.rows(graph_digest(graph)) if not row.ok)
        made = tuple(pending.made.items())
        order = Order(graph, target, self.effort, self.deadline_s, self.retry, remembered, made)
        return Job(pending.name, self.measure, (order,), target)

    def kept(self, answer: Answer) -> Report | FusegenError:
        """Keep what a job found; what can't be kept is reported all the same."""
        if answer.error is not None:
            return answer.error
        report: Report = answer.value
        if self.database is not None:
            known = {} if self.retry else unfit(self.rows(report.problem.graph), report.problem, report.tools)
            try:
                report.keep(self.database, known)
            except FusegenError as error:
                log.warning("what was measured of %s is not kept: %s", report.graph.name, error)
        return report

    def rows(self, digest: str) -> list[Measurement]:
        """What the database has of a graph."""
        if self.database is None:
            return []
        try:
            return self.database.rows(digest)
        except FusegenError as error:
            log.warning("%s", error)
            return []
