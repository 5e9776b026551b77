"""`compile` and `tune` on more than this process: on several of this machine, or over a Ray cluster."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fusegen.cli import builds, programs
from fusegen.cli.showing import complain, pass_over, progress
from fusegen.errors import FusegenError, RequestError
from fusegen.language.spec import Chain
from fusegen.targets import Target

if TYPE_CHECKING:
    from fusegen.language.graph import Graph
    from fusegen.spreading import Crew
    from fusegen.tuning import Effort, Report

log = logging.getLogger("fusegen.spreading")

Pair = tuple[Chain, Target]


@contextmanager
def crew_of(
    ray: str | None, jobs: int | None, measured: Sequence[Target] = (), gpus: Sequence[str] = ()
) -> Iterator[Crew]:
    """Those who do the work, as long as it takes: `ray`, a cluster's address, or `jobs` processes here. `measured`: the
    targets whose GPUs the cluster has to have; `gpus`: those that measure here."""
    from fusegen.spreading import Cluster, Processes

    if ray is None:
        with Processes(jobs or 1, gpus) as processes:
            yield processes
        return
    cluster = Cluster(ray, measured)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(Overheard()))
        with progress(1) as bar:
            bar.step(f"asking for the Ray cluster at {ray}")
            stack.enter_context(cluster)
        yield cluster


class Overheard(io.TextIOBase):
    """What Ray prints while others' results are not yet there, such as twenty lines of each worker that died: none of
    it is a result, which may be JSON. `fusegen --verbose` shows it."""

    def write(self, text: str) -> int:
        if text.strip():
            log.info("Ray says: %s", text.strip())
        return len(text)


def ask_crew(ray: str | None, jobs: int | None) -> bool:
    """Whether the work is to be spread at all. Raises RequestError where both ways are asked for."""
    if ray is not None and jobs is not None:
        raise RequestError("--ray and --jobs exclude each other: Ray has as many jobs at once as its nodes' processors")
    return ray is not None or jobs is not None


def compile_all(pairs: Sequence[Pair], validate: bool, ray: str | None, jobs: int | None) -> list[builds.Outcome]:
    """What becomes of each pair, in their order; those that nobody could compile are said and passed over. Raises the
    only one's error, and MissingError without a compiler here or anywhere."""
    if not ask_crew(ray, jobs):
        outcomes = []
        with progress(len(pairs)) as bar:
            for chain, target in pairs:
                bar.step(f"{chain.name} for {target}")
                outcomes.append(builds.compile_one(chain, target, validate))
        return outcomes
    from fusegen.spreading import Job, spread

    made: dict[int, builds.Outcome] = {}
    errors: list[FusegenError] = []
    names = [f"{chain.name} at {chain.graph.sizes_text()} for {target}" for chain, target in pairs]
    work = [Job(name, builds.compile_one, (*pair, validate)) for name, pair in zip(names, pairs, strict=True)]
    places = {job: place for place, job in enumerate(work)}
    with crew_of(ray, jobs) as crew, progress(len(pairs)) as bar:
        for done, (job, answer) in enumerate(spread(work, crew), 1):
            if answer.error is None:
                made[places[job]] = answer.value
            else:
                errors.append(answer.error)
            bar.reach(done, len(pairs), job.name)
    if not made:
        raise errors[0]
    pass_over(*errors)
    return [made[place] for place in sorted(made)]


def tune_all(
    chains: Sequence[Chain], targets: Sequence[Target], ray: str | None, jobs: int | None, gpus: Sequence[str],
    effort: Effort, deadline_s: float, retry: bool, save: bool,
) -> tuple[list[Report], list[FusegenError]]:  # fmt: skip
    """The reports of those kernels that could be tuned, in the order asked for, and of the others why not, which is
    said. The only one's error is raised."""
    from fusegen.database import Database
    from fusegen.tuning.farm import Farm
    from fusegen.tuning.report import Report

    reports: dict[int, Report] = {}
    errors: dict[int, FusegenError] = {}
    with crew_of(ray, jobs, targets, gpus) as crew:
        wanted = planned(chains, targets)
        farm = Farm(crew, Database() if save else None, effort, deadline_s, retry)
        with progress(2 + len(wanted)) as bar:
            bar.step("what is to be compiled is planned")
            for number, found in farm.tune(wanted, bar.reach):
                if isinstance(found, Report):
                    reports[number] = found
                else:
                    errors[number] = found
    if len(wanted) == 1 and errors:
        raise errors[0]
    for number, error in sorted(errors.items()):
        graph, target = wanted[number]
        complain(f"{graph.name} at {graph.sizes_text()} for {target} is not tuned: {error}\n")
    return [reports[number] for number in sorted(reports)], [errors[number] for number in sorted(errors)]


def planned(chains: Sequence[Chain], targets: Sequence[Target]) -> list[tuple[Graph, Target]]:
    """Every kernel of every chain, for each target."""
    found = []
    with progress(len(chains) * len(targets)) as bar:
        for target in targets:
            for chain in chains:
                bar.step(f"{chain.name} for {target} is planned")
                found += [(graph, target) for graph in programs.kernel_graphs(chain, target)]
    return found
