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

A kernel of very many small blocks does not say that the next one may begin. The GPU takes what blocks say one after
another: 65536 blocks of 128 threads that write 8192 x 8192 codes of 8 bits as bf16 took 54.6 us, and 82.5 where each
lets the next kernel begin; 32768 of 256 took 55.6 and 55.1 (H200, medians of 15, L2 cold).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fusegen.planner.launching import launched
from fusegen.planner.model import Dependent, Plan
from fusegen.planner.programs.model import ProgramPlan, Step, names_of
from fusegen.planner.traffic import Cost
from fusegen.targets.base import Target

IDLE_SHARE = 0.5  # of a launch's time, that its bytes may take
SIGNAL_US = 1.26e-3  # for each block that lets the next kernel begin: 82.5 us of 65536


def dependent(program: ProgramPlan) -> ProgramPlan:
    """The program launched so, where its target can and it has several launches."""
    if not program.target.dependent_launches or len(program.launches) < 2:
        return program
    last, launched_plans = len(program.launches) - 1, program.launched
    written: set[str] = set()
    found: list[Step] = []
    for place, steps in enumerate(program.launches):
        idle = place > 0 and leaves_memory(launched_plans[place - 1].cost, program.target)
        for step in steps:
            triggers = place < last and in_time(step.plan)
            how = Dependent(place > 0, triggers, unwritten(step, written) if place else frozenset(), idle)
            found.append(replace(step, plan=launched(step.plan, how)))
            written |= in_memory(names_of(step.writes), program.graph.updates)  # behind it, too, where each is a launch
    return replace(program, steps=tuple(found))


def in_time(plan: Plan) -> bool:
    """Have all blocks said that the next kernel may begin before the last one ends?"""
    return SIGNAL_US * plan.planned_blocks < plan.cost.time_us


def leaves_memory(cost: Cost, target: Target) -> bool:
    """Does a launch move so little that memory has most of its time for others?"""
    return cost.traffic.ideal / (target.dram_gbs * 1e3) < IDLE_SHARE * cost.time_us


def unwritten(step: Step, written: set[str]) -> frozenset[str]:
    """The step's own names of what it reads and no kernel before it has written."""
    return frozenset(b.tensor for b in step.reads if b.base not in written)


def in_memory(names: Iterable[str], updates: Mapping[str, str]) -> set[str]:
    """These tensors, and the operands whose memory some of them are in."""
    found = set(names)
    return found | {updates[name] for name in found if name in updates}
