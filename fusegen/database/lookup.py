"""Which candidate to take: the one that measured best on a problem like this one, else the cost model's first.

`choose(found)` asks, in this order, and stops at the first answer that still is a candidate:

    1  the user's database, for this graph, row length, bucket of rows, layout and GPU model
    2  the database that comes with fusegen, for the same
    3  both, for neighbouring buckets of rows, the nearest first
    4  both, for other models of the GPU's family, the most alike first
    5  the cost model's estimate

An answer for other sizes, within its bucket or beside it, is not taken where the estimate is clearly against it: from
64 rows to 127 a launch of clusters may need another wave. Among answers of one step, one by the same compiler and
version of fusegen comes first, then the largest share of the copy rate: a share compares across sizes and sessions, a
time does not. Only validated rows count. A configuration that failed, hung or crashed on this very model by the user's
own database comes last whoever else speaks for it.

The order of candidates is all that changes: a tuned plan goes through the gate and the validation like any other, and
a database that is wrong costs time, never correctness. FUSEGEN_TUNED=off leaves the choice to the cost model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from fusegen.compiling.versions import known_version
from fusegen.database.keys import Problem, Tools, family, problem_of
from fusegen.database.rows import Measurement, Unsound, read_lines
from fusegen.database.store import Database
from fusegen.errors import FusegenError, MissingError, RequestError
from fusegen.planner.model import Candidates, Plan
from fusegen.targets import Target
from fusegen.version import PACKAGE, VERSION

log = logging.getLogger("fusegen.database")

SWITCH = "FUSEGEN_TUNED"
ON, OFF = frozenset({"", "1", "on", "yes", "true"}), frozenset({"0", "off", "no", "false"})
FARTHEST = 2  # buckets: up to four times as many rows, or a quarter; a GPU that is full stays full
# Times the first candidate's estimate, from which a winner at other sizes is doubted. At their own sizes 31 of 32
# shipped winners among row chains had at most 1.08 times it, and one 1.15.
DOUBTED = 1.25
SHIPPED = PACKAGE / "data" / "tuned.jsonl"


@dataclass(frozen=True, slots=True)
class Hit:
    """A measurement that answers a lookup, and how far from the question it was made."""

    row: Measurement
    shipped: bool
    relative: int = 0  # 0: this model; else the place of the other one in the family
    distance: int = 0  # buckets of rows, up or down
    other_tools: bool = False

    @property
    def step(self) -> int:
        """Of the lookup, as numbered above."""
        return 4 if self.relative else 3 if self.distance else 2 if self.shipped else 1

    @property
    def order(self) -> tuple[object, ...]:
        """Of answers: the nearest first, of two as near the one with more rows, which fills the GPU better."""
        nearest = (self.step, self.relative, self.distance, -self.row.rows)
        return (*nearest, self.shipped, self.other_tools, -self.row.share, self.row.time_us, self.row.values)

    def __str__(self) -> str:
        """`measured 112.3 us, 0.84 of the copy rate, at M=16384 N=4096; from h100; with nvrtc 13.0; shipped`."""
        row = self.row
        parts = [f"measured {row.time_us:.1f} us, {row.share:.2f} of the copy rate, at {row.sizes}"]
        if self.relative:
            parts.append(f"from {row.target.partition(':')[2]}")
        if self.other_tools:
            parts.append(f"with {row.compiler}, fusegen {row.fusegen}")
        return "; ".join([*parts, "shipped" if self.shipped else "your database"])


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates in the order to try them. `hit` is what put the first one there, None where the estimate did;
    `steps` says what each step of the lookup found."""

    plans: tuple[Plan, ...]
    hit: Hit | None
    steps: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def __str__(self) -> str:
        return str(self.hit) if self.hit else self.steps[-1]


def enabled() -> bool:
    """Whether measurements are looked up; FUSEGEN_TUNED=off says no. Raises RequestError for another word."""
    text = os.environ.get(SWITCH, "")
    word = text.strip().lower()
    if word not in ON | OFF:
        raise RequestError(f"{SWITCH}={text} is neither on nor off\n  off asks the cost model alone")
    return word in ON


def choose(found: Candidates, *, tuned: bool = True, database: Database | None = None) -> Choice:
    """The candidates of `found` with the tuned one first. Raises NoPlan; a database that can't be read is said in the
    log and passed over."""
    plans = found.need()
    problem = problem_of(found)
    assert problem is not None  # need() found a plan
    if not tuned or not enabled():
        return Choice(plans, None, ("the cost model's first: measurements are switched off",))
    by_name = {plan.configuration: plan for plan in plans}
    yours = read_yours(database or Database(), problem.graph)
    refused = unfit(yours, problem)
    theirs = shipped(problem.graph)
    hits = []
    if yours or theirs:  # asking for the compiler's version loads it, which takes a while
        tools = Tools(own_compiler(found.target), VERSION)
        hits += matching(yours, False, problem, tools, found.target)
        hits += matching(theirs, True, problem, tools, found.target)
    hits.sort(key=lambda hit: hit.order)
    steps = []
    for number, name in STEPS.items():
        answers = [hit for hit in hits if hit.step == number]
        for hit in answers:
            wanted = hit.row.configuration
            if wanted in refused:
                steps.append(f"{name}: {wanted} measured best, and {refused[wanted]} here")
            elif (plan := by_name.get(wanted)) is None:
                steps.append(f"{name}: {wanted} measured best, and is no candidate any more")
            elif doubted(hit, plan, plans[0], found):
                times = plan.cost.time_us / plans[0].cost.time_us
                steps.append(
                    f"{name}: {wanted} measured best at {hit.row.sizes}; here it should take {times:.2f} times as long "
                    "as the cost model's first"
                )
            else:
                steps.append(f"{name}: {wanted}, {hit}")
                log.debug("%s for %s: %s", plan.name, found.target, "; ".join(steps))
                return Choice(ordered(plans, plan, refused), hit, tuple(steps))
        if not answers:
            steps.append(f"{name}: nothing")
    steps.append(f"the cost model's first: {'none of these can be taken' if hits else 'nothing like it was measured'}")
    log.debug("%s for %s: %s", plans[0].name, found.target, "; ".join(steps))
    return Choice(ordered(plans, None, refused), None, tuple(steps))


def doubted(hit: Hit, plan: Plan, first: Plan, found: Candidates) -> bool:
    """Is the estimate against a winner that was measured at other sizes?"""
    elsewhere = hit.row.sizes != found.graph.sizes_text()
    return elsewhere and plan.cost.time_us > DOUBTED * first.cost.time_us


def ordered(plans: Iterable[Plan], first: Plan | None, last: Container[str]) -> tuple[Plan, ...]:
    """`first` to the front and what is refused to the back; the rest as it was."""
    return tuple(sorted(plans, key=lambda plan: (plan is not first, plan.configuration in last)))


STEPS: Mapping[int, str] = {
    1: "your database",
    2: "the shipped database",
    3: "neighbouring numbers of rows",
    4: "the GPU's family",
}


def matching(
    rows: Iterable[Measurement], from_package: bool, problem: Problem, tools: Tools, target: Target
) -> list[Hit]:
    """The rows of one database that answer the question at all."""
    models = {problem.target: 0, **{name: place for place, name in enumerate(family(target), 1)}}
    hits = []
    for row in rows:
        distance = abs(row.rows.bit_length() - problem.rows.bit_length())
        like = (row.graph, row.cols, row.layout) == (problem.graph, problem.cols, problem.layout)
        if row.may_win and like and row.target in models and distance <= FARTHEST:
            hits.append(Hit(row, from_package, models[row.target], distance, row.tools != tools))
    return hits


def unfit(rows: Iterable[Measurement], problem: Problem) -> dict[str, str]:
    """Configurations whose newest row on this very model and row length is a failure; with what became of them."""
    newest: dict[str, Measurement] = {}
    for row in sorted(rows, key=lambda row: row.at):
        if (row.cols, row.layout, row.target) == (problem.cols, problem.layout, problem.target):
            newest[row.configuration] = row
    return {name: row.status for name, row in newest.items() if not row.ok}


def read_yours(database: Database, graph: str) -> list[Measurement]:
    try:
        return database.rows(graph)
    except FusegenError as error:
        warn(str(error))
        return []


@cache
def warn(said: str) -> None:
    """Once for each file and process: every plan asks."""
    log.warning("%s\n  the shipped measurements and the cost model's estimates serve instead", said)


def own_compiler(target: Target) -> str:
    """The compiler's name and version; empty where there is none."""
    try:
        return known_version(target.vendor)
    except MissingError:
        return ""


# ---------------------------------------------------------------- what comes with fusegen


@cache
def shipped(graph: str) -> tuple[Measurement, ...]:
    """The rows of a graph that come with the package."""
    return tuple(row for row in read_shipped(graph) if row.graph == graph)


def read_shipped(word: str = "") -> list[Measurement]:
    """The rows that come with the package, of the lines that hold `word`: to make rows of all the others took a
    quarter of the time to a kernel that is cached."""
    text = SHIPPED.read_text("utf-8") if SHIPPED.is_file() else ""
    rows = []
    for row in read_lines("".join(line if word in line else "\n" for line in text.splitlines(keepends=True))):
        if isinstance(row, Unsound):
            log.warning("%s: %s", SHIPPED, row)
        else:
            rows.append(row)
    return rows
