"""A chain at every row length where its plan changes its ways: around its vectors, warps and tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusegen.errors import RequestError
from fusegen.language.spec import Chain
from fusegen.language.types import Dim
from fusegen.planner.model import Plan, RowPlan
from fusegen.runtime import Kernel
from fusegen.validation.checks import validate
from fusegen.validation.report import Report

Build = Callable[[Chain], Kernel]
Progress = Callable[[int, int, Report], None]  # which length, of how many, and its report


def interesting_lengths(plan: Plan) -> tuple[int, ...]:
    """Row lengths around the edges of `plan`'s vectors, warps and tile, and its own."""
    edges = {plan.target.warp, plan.graph.cols}
    if isinstance(plan, RowPlan):
        edges |= {plan.tile.vector, plan.target.warp * plan.tile.vector, plan.tile.cols}
    picks = plan.graph.picks  # a row has all the columns that are chosen of it
    least = max(1, picks)
    own = {least, plan.graph.cols, *((picks + 1,) if picks else ())}
    lengths = own | {edge + step for edge in edges for step in (-1, 0, 1)}
    return tuple(sorted(n for n in lengths if n >= least))


def at_lengths(chain: Chain, plan: Plan, lengths: Sequence[int] | None = None) -> dict[int, Chain]:
    """The chain at the row lengths around the edges of `plan`, or at `lengths`.

    Raises RequestError for a chain whose row length is a number in its signature and can't change.
    """
    last = chain.graph.shape[-1]
    if not isinstance(last, Dim):
        raise RequestError(f"{chain.name}: its row length is always {last}; make it a Dim to vary it")
    wanted = interesting_lengths(plan) if lengths is None else lengths
    return {length: chain.at(**{last.name: length}) for length in wanted}


def validate_chain(
    chain: Chain,
    build: Build,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    quick: bool = True,
    progress: Progress | None = None,
) -> dict[int, Report]:
    """Build `chain` at each row length and validate it: a report for each.

    `build` compiles one chain, as in `lambda c: fusegen.compile(c, target="cuda:h200", on="emulator", validate=False)`;
    `lengths` are those around the edges of the plan at the chain's own length, unless given. `progress` is called after
    each. Raises RequestError as `at_lengths` does.
    """
    wanted = at_lengths(chain, build(chain).plan, lengths)
    reports: dict[int, Report] = {}
    for done, (length, other) in enumerate(wanted.items(), 1):
        reports[length] = validate(build(other), seed=seed, quick=quick)
        if progress is not None:
            progress(done, len(wanted), reports[length])
    return reports
