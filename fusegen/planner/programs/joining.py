"""Neighbouring steps that don't wait for one another become one launch where that is expected to take less time.

So q and k are turned in one launch, whose rows lie along other numbers of heads. The step that takes the longest comes
first: what is left of it at its end is done beside the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusegen.planner.model import Plan
from fusegen.planner.programs import step_candidates
from fusegen.planner.programs.model import ProgramPlan, Step, names_of
from fusegen.planner.programs.side_by_side import MOST_STEPS, launch_cost, obstacle

MOST_PLANS = 4  # of each step, the cheapest first, that are looked at for one block size


def independent(steps: Sequence[Step], updates: dict[str, str]) -> bool:
    """Does none of them write what another one reads or writes? An output that is an operand with new rows is in that
    operand's memory. Parts of one output may be written side by side, as they never lie in the same bytes."""

    def memory(names: set[str]) -> set[str]:
        return {updates.get(name, name) for name in names}

    for one, other in itertools.permutations(steps, 2):
        if memory(names_of(one.writes)) & memory(names_of(other.reads)):
            return False
        if names_of(one.writes) & names_of(other.writes) & set(updates):
            return False
    return True


def joined(program: ProgramPlan) -> ProgramPlan:
    """The program with neighbouring steps in one launch wherever that is expected to take less time."""
    steps: list[Step] = []
    group: list[Step] = []
    for step in program.steps:
        own = replace(step, joined=False)
        together = together_of(program, [*group, own]) if group and len(group) < MOST_STEPS else None
        if together is not None:
            group = list(together)
            continue
        steps += group
        group = [own]
    return replace(program, steps=(*steps, *group))


def together_of(program: ProgramPlan, group: Sequence[Step]) -> tuple[Step, ...] | None:
    """The steps as one launch, each with the plan that it has there; None where that is no gain, or can't be."""
    if not independent(group, dict(program.graph.updates)):
        return None
    apart = [group[:-1], group[-1:]]
    alone = sum(launch_cost([step.plan for step in steps], program.target).time_us for steps in apart)
    best: tuple[float, tuple[Plan, ...]] | None = None
    for plans in combinations(program, group):
        time = launch_cost(plans, program.target).time_us
        if time < alone and (best is None or time < best[0]):
            best = time, plans
    if best is None:
        return None
    made = [replace(step, plan=plan) for step, plan in zip(group, best[1], strict=True)]
    made.sort(key=lambda step: -step.plan.cost.time_us)
    return tuple(replace(step, joined=place > 0) for place, step in enumerate(made))


def combinations(program: ProgramPlan, group: Sequence[Step]) -> Iterator[tuple[Plan, ...]]:
    """Plans of these steps that can be one launch: those that they have, else the cheapest few of each block size."""
    own = tuple(step.plan for step in group)
    if not obstacle(own):
        yield own
        return
    if any(obstacle([plan]) for plan in own):
        return
    found = []
    for step in group:
        plans: dict[int, list[Plan]] = {}
        for plan in step_candidates(program, step).plans:
            if not obstacle([plan]) and len(plans.setdefault(plan.threads, [])) < MOST_PLANS:
                plans[plan.threads].append(plan)
        found.append(plans)
    for threads in sorted(set(found[0]).intersection(*found[1:])):
        yield from (plans for plans in itertools.product(*(each[threads] for each in found)) if not obstacle(plans))
