"""Launches of rows as the last of many, by numbers that need 64 bits; and the one that a GPU kernel's twin runs in the
checking emulator, beside what is checked on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fusegen.errors import KernelError, MissingError, NoPlan
from fusegen.language.reference import draws
from fusegen.runtime.arrays import ArrayView
from fusegen.validation import far
from fusegen.validation.compare import figures
from fusegen.validation.emulated import NAME as EMULATED
from fusegen.validation.emulated import REASON, twin
from fusegen.validation.grouped import behind
from fusegen.validation.inputs import NORMAL, Operands, free_dims
from fusegen.validation.judging import failing

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "last rows"


@dataclass(frozen=True, slots=True)
class LastLaunch:
    """A launch of rows as the last of many. `others`: they know their number, and are others there."""

    reason: str
    outputs: list[ArrayView]
    others: bool
    run: Callable[[], None]  # may be called in another thread


def last_launch(checks: Any, operands: Operands, alone: bool) -> LastLaunch | None:
    """The rows of `operands` as the last of as many as a launch takes; None where that can't be. `alone`: to be judged
    by themselves."""
    plan, graph = checks.plan, checks.graph
    dim = far.outer_dim(plan, free_dims(plan, plan.flat))
    able = dim and checks.strict and not checks.summed and not graph.scatters
    skip = far.left_out(plan, operands.sizes, dim) if dim and able else 0
    # rows that know their number are others there
    others = bool(checks.deep() and str(graph.shape[-2]) == dim) or draws(graph)
    if not skip or not checks.wants(NAME, NORMAL.name) or (others and alone):
        return None
    inputs, outputs, values = checks.placed(replace(operands, values=behind(graph, operands.values, skip)))
    views = {t.name: placed.view for t, placed in zip(checks.arrays, (*inputs, *outputs), strict=True)}
    try:
        run = far.last_launch(checks.kernel, views, values, operands.sizes, dim, skip)
    except (KernelError, NoPlan) as error:
        run = partial(raised, error)
    reason = f"the rows behind {skip} of {dim}: their numbers or their places need more than 32 bits"
    return LastLaunch(reason, list(views.values())[len(inputs) :], others, run)


def note_last(
    checks: Any, operands: Operands, launch: LastLaunch, problem: str, first: list[Array] | None
) -> None:  # fmt: skip
    """The case: bitwise the same as the `first` rows, or without these judged by themselves."""
    found = [] if problem else [view.numpy() for view in launch.outputs]
    if first is None:
        compared, doubt = checks.judge(operands, found) if found else ([], "")
        checks.note_figures(NAME, launch.reason, operands.text(checks.graph), figures(compared), problem or doubt)
    else:
        kept = found and not launch.others
        checks.same(NAME, launch.reason, operands, found if kept else [], first if kept else [], problem)


def emulating(checks: Any, most: int, quick: bool) -> Callable[[], None]:
    """A ragged launch of the kernel's twin in the checking emulator, and its rows as the last ones of many: with
    `quick` these alone, where they can be judged, and they are under way while the GPU's launches are judged. Returns
    what waits for that and notes the case; it raises MissingError where there is no twin."""
    try:
        other = type(checks)(twin(checks.kernel), checks.seed, frozenset({NORMAL.name}))
        operands = other.ragged_operands(most)
        launch = last_launch(other, operands, alone=True) if quick else None
    except MissingError as missing:
        return partial(raised, missing)
    pool = ThreadPoolExecutor(1)
    running = pool.submit(failing, launch.run) if launch else None
    pool.shutdown(wait=False)

    def note() -> None:
        if launch and running:
            note_last(other, operands, launch, running.result(), None)
        else:
            other.ragged(most)
        wrong = [case for case in other.found if not case.ok]
        first = (wrong or other.found)[0]
        checks.found.append(replace(first, name=EMULATED, reason=REASON))

    return note


def raised(error: Exception) -> None:
    raise error
