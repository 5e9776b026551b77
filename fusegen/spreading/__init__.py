"""spread(jobs, crew): jobs on processes of this machine, or over a Ray cluster, and each answer as it comes.

with Processes(4) as crew:                 # or Cluster("10.0.0.1:6379")
    for job, answer in spread(jobs, crew):
        ...                                    # answer.value, or answer.error

jobs       what a job is, how it is done, and whether the fusegen that does it is this one
processes  a crew of processes of this machine
cluster    a crew that is a Ray cluster
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from fusegen.spreading.cluster import Cluster
from fusegen.spreading.jobs import Answer, Crew, Faulty, Job
from fusegen.spreading.processes import Processes

__all__ = ["Answer", "Cluster", "Crew", "Faulty", "Job", "Processes", "spread"]

LOOK_S = 5.0  # how often a crew that answers nothing is asked whether anybody is left to answer


def spread(jobs: list[Job], crew: Crew) -> Iterator[tuple[Job, Answer]]:
    """Each job's answer as it comes, in any order. `jobs` may be added to meanwhile; what is taken leaves it.

    A job whose worker dies is done again by another, up to `RETRIES` times; each job is answered once. Ending the
    iteration early, as an interrupt does, calls off what is not yet done. Raises MissingError where the crew has
    nobody left who could do what waits, or has another fusegen than this one.
    """
    waiting: dict[Future[Any], Job] = {}
    try:
        while jobs or waiting:
            while jobs:
                job = jobs.pop(0)
                waiting[crew.submit(job)] = job
            done, _ = wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), crew.answer(future)
            if not done:
                crew.look(waiting.values())
    finally:
        for future in waiting:
            crew.call_off(future)
