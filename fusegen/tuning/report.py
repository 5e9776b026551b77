"""What tuning found: every candidate tried, the cost model's own choice, the winner, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fusegen.database import Database, Measurement, Problem, Tools
from fusegen.database.rows import MOST_TEXT, Status
from fusegen.language.graph import Graph
from fusegen.measuring.timing import Timing
from fusegen.planner.model import Plan

WANTED_REGRET = 0.10  # the cost model's own choice should take at most so much longer than the winner


@dataclass
class Trial:
    """One candidate under way: its `times` in µs grow, its `status` may turn bad."""

    plan: Plan
    rank: int  # by the estimate
    status: Status = "ok"
    reason: str = ""
    times: tuple[float, ...] = ()
    validated: bool = False
    known: Measurement | None = None  # the earlier row that it was not tried again for

    @property
    def configuration(self) -> str:
        return self.plan.configuration

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.times)

    @property
    def us(self) -> float:
        """The median; 0 where nothing was timed."""
        return median(self.times) if self.times else 0.0

    def fail(self, status: Status, reason: str) -> None:
        self.status, self.reason, self.validated = status, " ".join(reason.split())[:MOST_TEXT], False

    def facts(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration,
            "regime": self.plan.regime,
            "rank": self.rank,
            "status": self.status,
            "reason": self.reason,
            "predicted_us": self.plan.cost.time_us,
            "time_us": self.us or None,
            "repeats": len(self.times),
            "validated": self.validated,
        }


@dataclass(frozen=True)
class Report:
    """One chain, tuned. `copy_rate` in bytes per µs; `untuned` is what would be taken without measurements."""

    graph: Graph
    problem: Problem
    tools: Tools
    gpu: str
    copy_rate: float
    trials: tuple[Trial, ...]
    untuned: Trial | None
    winner: Trial | None
    skipped: str  # which candidates were not tried, and why; empty where all were
    seconds: float
    at: str

    @property
    def regret(self) -> float | None:
        """How much longer the untuned choice takes than the winner; None where either has no time."""
        if self.winner is None or self.untuned is None or not self.untuned.ok:
            return None
        return self.untuned.us / self.winner.us - 1

    @property
    def bytes(self) -> int:
        """What a launch must move at least."""
        return self.trials[0].plan.cost.traffic.ideal

    def share(self, trial: Trial) -> float:
        """Of the copy rate."""
        return self.bytes / trial.us / self.copy_rate

    def rows(self) -> list[Measurement]:
        """What the database keeps of it."""
        return [trial.known or self.row(trial) for trial in self.trials if trial.times or trial.reason]

    def keep(self, database: Database, known: Mapping[str, Measurement]) -> None:
        """Keep it as all that the database knows of the problem, but for what is `known` of candidates that were not
        tried."""
        tried = {trial.configuration for trial in self.trials}
        old = [row for name, row in known.items() if name not in tried]
        database.replace(self.problem, self.tools, [*self.rows(), *old])

    def row(self, trial: Trial) -> Measurement:
        ok = trial.ok
        return Measurement(
            graph=self.problem.graph, cols=self.problem.cols, rows=self.problem.rows, layout=self.problem.layout,
            target=self.problem.target, arch=self.problem.arch, configuration=trial.configuration,
            compiler=self.tools.compiler, fusegen=self.tools.fusegen,
            chain=f"{self.graph.name}  {self.graph.signature}"[:MOST_TEXT], sizes=self.graph.sizes_text(),
            gpu=self.gpu, status=trial.status, reason=trial.reason,
            time_us=rounded(trial.us) if ok else 0.0, predicted_us=rounded(trial.plan.cost.time_us),
            spread=rounded(Timing(trial.times).spread) if ok else 0.0,
            share=rounded(self.share(trial)) if ok else 0.0, repeats=len(trial.times) if ok else 0,
            copy_gbs=rounded(self.copy_rate / 1e3) if ok else 0.0, validated=trial.validated, at=self.at,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "chain": self.graph.name,
            "signature": self.graph.signature,
            "sizes": dict(self.graph.sizes),
            "target": self.problem.target,
            "gpu": self.gpu,
            "compiler": self.tools.compiler,
            "copy_gbs": self.copy_rate / 1e3,
            "untuned": self.untuned.facts() if self.untuned else None,
            "winner": {**self.winner.facts(), "share": self.share(self.winner)} if self.winner else None,
            "regret": self.regret,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "trials": [trial.facts() for trial in self.trials],
        }


def rounded(value: float) -> float:
    """To five digits: more are noise, and make rows hard to read and compare."""
    return float(f"{value:.5g}")
