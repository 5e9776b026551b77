"""tune(chain): measure the planner's candidates on this machine's GPU, and remember the winner.

    report = fusegen.tune(bias_gelu_residual_ln)
    report.winner.us, report.untuned.us, report.regret

    search    which candidates are tried, and which wins
    report    what was found
    bench     a process in which candidates run, ended when one hangs
    child     that process
    wire      how a candidate gets there

What is found goes to the user's database, where `fusegen.compile` looks it up.
"""

from __future__ import annotations

from fusegen.database import Database
from fusegen.errors import MissingError, RequestError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.pipeline import choose_target
from fusegen.runtime import finding
from fusegen.targets import Target
from fusegen.tuning.bench import DEADLINE_S, Bench, Unfit
from fusegen.tuning.report import WANTED_REGRET, Report, Trial
from fusegen.tuning.search import BUDGET_S, Effort, Tuner, Watch, unwatched

__all__ = [
    "BUDGET_S", "DEADLINE_S", "WANTED_REGRET", "Bench", "Effort", "Report", "Trial", "Tuner", "Unfit", "Watch",
    "measurable", "tune",
]  # fmt: skip


def tune(
    chain: Chain | Graph,
    target: str | Target | None = None,
    *,
    on: str = "gpu",
    budget_s: float = BUDGET_S,
    deadline_s: float = DEADLINE_S,
    retry: bool = False,
    keep: bool = True,
    watch: Watch = unwatched,
) -> Report:
    """Measure `chain`'s candidates at its sizes, and keep what was found in the user's database (unless not `keep`).

    `on` names a GPU by number ("gpu:1"). `budget_s` is for the first timings of all candidates; `deadline_s` how long
    one may take before it counts as hung; `retry` tries again what hung or crashed before. Raises MissingError without
    a GPU of the target's model, NoPlan, and RequestError for a budget that is none.
    """
    effort = Effort(budget_s)
    chosen = measurable(choose_target(target), on)
    with Bench(chosen, on, deadline_s=deadline_s) as bench:
        return Tuner(bench, Database() if keep else None, effort, retry).tune(chain, watch)


def measurable(target: Target, on: str = "gpu") -> Target:
    """`target`, when the GPU that runs its kernels here is the model that it stands for: other times would be another
    model's. Raises MissingError."""
    if not on.startswith("gpu"):
        raise RequestError(f"on={on!r} can't be measured on; tuning takes a GPU: gpu, or gpu:1 by number")
    gpus = [gpu for gpu in finding.matching(target) if on in ("gpu", f"gpu:{gpu.ordinal}")]
    if not gpus:
        number = f" with number {on[4:]}" if ":" in on else ""
        here = finding.present()
        found = "; ".join(map(str, here.gpus)) or here.missing[target.vendor]
        raise MissingError(
            f"tuning measures on a GPU, and none{number} here runs {target.name} ({target.arch})\n  found: {found}\n"
            "  measure where there is one; `fusegen db export` there and `fusegen db import` here bring the results"
        )
    own = finding.target_of(gpus[0])
    if own is not None and own.name != target.name and target.model != target.arch:
        raise MissingError(
            f"tuning for {target.name} takes that GPU, and here is {gpus[0]}\n  tune for {own.name} instead"
        )
    return target
