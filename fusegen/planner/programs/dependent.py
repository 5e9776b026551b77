"""Programmatic dependent launch: kernels of a program that begin while those before them run.

What a launch costs beside its work, a kernel that begins early has behind it when the one before it ends: its blocks
have their places, and what no kernel before it writes, such as weights, is on its way. From then on two rules keep
results what they were:

    wait      whatever a kernel before it reads or writes is touched behind the wait alone, which ends when all kernels
              before it have: each of them waits in its turn, so that the end of one is the end of all
    first     the program's first kernel begins when the stream is done, so that no call overtakes the one before

What may be read early is a matter of the program: a tensor that no kernel before writes. Whether a kernel has a use for
it is its own plan's (`Plan.before_wait`). Operands that kernels write are read with no promise that nobody else does
(`__restrict__`): else a compiler may move a load before the wait. The emulator's checking build holds each launch to
the first rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fusegen.planner.launching import launched
from fusegen.planner.model import Dependent
from fusegen.planner.programs.model import ProgramPlan, Step


def dependent(program: ProgramPlan) -> ProgramPlan:
    """The program launched so, where its target can and it has several launches."""
    if not program.target.dependent_launches or len(program.launches) < 2:
        return program
    last = len(program.launches) - 1
    written: set[str] = set()
    found: list[Step] = []
    for place, steps in enumerate(program.launches):
        for step in steps:
            how = Dependent(place > 0, place < last, unwritten(step, written) if place else frozenset())
            found.append(replace(step, plan=launched(step.plan, how)))
        written |= in_memory(program.written(place), program.graph.updates)
    return replace(program, steps=tuple(found))


def unwritten(step: Step, written: set[str]) -> frozenset[str]:
    """The step's own names of what it reads and no kernel before it has written."""
    return frozenset(b.tensor for b in step.reads if b.base not in written)


def in_memory(names: Iterable[str], updates: Mapping[str, str]) -> set[str]:
    """These tensors, and the operands whose memory some of them are in."""
    found = set(names)
    return found | {updates[name] for name in found if name in updates}
