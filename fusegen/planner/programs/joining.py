"""Neighbouring steps become one launch where that is expected to take less time.

Those that don't wait for one another go side by side. So q and k are turned in one launch, whose rows lie along other
numbers of heads. The step that takes the longest comes first: what is left of it at its end is done beside the others.

Those that do go one after another, by the blocks of one cluster, where they are short. Of the first of them, which
follow one another row by row, each of many clusters takes its own rows; they may be longer where they are a small part
of the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusegen.planner import candidates
from fusegen.planner.model import Cost, Plan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.programs import one_cluster, shares, step_candidates
from fusegen.planner.programs.model import Joined, ProgramPlan, Step, names_of, one_after_another
from fusegen.planner.programs.one_cluster import SHORT_US
from fusegen.planner.programs.side_by_side import MOST_STEPS, launch_cost, obstacle

MOST_PLANS = 4  # of each step, the cheapest first, that are looked at for one block size
FEWER_US = 0.7  # that a launch less is worth beside its time: the host's, and less than runs differ by,
FEWER_SHARE = 0.0075  # or this share of all launches' time: programs of 0.5 to 5 ms spread over 3 % and more
# Times what a launch less is worth: the longest step whose rows are shared out, which takes up to 1.6 times as long as
# in a launch of its own
LONGEST = 4

ByThreads = Mapping[int, Plan]  # a step's cheapest plan of each block size, for so few SMs


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
    return in_one_cluster(side_by_side(program))


# ---------------------------------------------------------------- side by side


def side_by_side(program: ProgramPlan) -> ProgramPlan:
    """The program with steps that don't wait for one another in one launch."""
    steps: list[Step] = []
    group: list[Step] = []
    for step in program.steps:
        own = replace(step, joined="", share=0)
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
    return tuple(replace(step, joined="beside" if place else "") for place, step in enumerate(made))


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


# ---------------------------------------------------------------- one after another


def in_one_cluster(program: ProgramPlan) -> ProgramPlan:
    """The program with neighbouring steps in one launch of a cluster wherever that is expected to take less time."""
    if one_cluster.cluster_of(program.target) == 1 or program.graph.batch_invariant:  # which has one order of sums
        return program
    launches = list(program.launches)
    early = program.target.early_us
    taking = [launch_cost([step.plan for step in steps], program.target).time_us for steps in launches]
    fewer = worth_of_fewer(sum(taking))
    many = one_cluster.clusters_of(program.target)
    short = [by_threads(program, steps) for steps in launches]
    wide = [by_threads(program, steps, many, max(SHORT_US, LONGEST * fewer)) for steps in launches]
    # of the first so many launches: the least time, and how they are launched
    best: list[tuple[float, tuple[Step, ...]]] = [(0.0, ())]
    for end in range(1, len(launches) + 1):
        time, steps = best[end - 1]
        found = time + taking[end - 1] + fewer - early, (*steps, *launches[end - 1])
        for start in range(end - 2, -1, -1):
            if not all(any(plans) for plans in zip(short[start:end], wide[start:end], strict=True)):
                break
            for one in ways(launches[start:end], short[start:end], wide[start:end]):
                time, steps = best[start]
                cost = turn_cost(one).time_us
                found = min(found, (time + cost + fewer - early, (*steps, *one)), key=lambda pair: pair[0])
        best.append(found)
    return replace(program, steps=best[-1][1])


def worth_of_fewer(time_us: float) -> float:
    """What a launch less is worth in a program of launches that take so long."""
    return max(FEWER_US, FEWER_SHARE * time_us)


def weighed_us(program: ProgramPlan) -> float:
    """A program's time, with what its launches are worth."""
    times = [plan.cost.time_us for plan in program.launched]
    return one_after_another(times, program.target.early_us) + len(times) * worth_of_fewer(sum(times))


def ways(
    launches: Sequence[Sequence[Step]], short: Sequence[ByThreads], wide: Sequence[ByThreads]
) -> Iterator[tuple[Step, ...]]:
    """These steps as one launch: by one cluster, whose plans are the `short` ones, and with the rows of the first ones
    shared out to many, whose plans are the `wide` ones."""
    for shared_out in range(shares.following(launches, wide) + 1):
        if (one := together(launches, (*wide[:shared_out], *short[shared_out:]), shared_out)) is not None:
            yield one


def turn_cost(steps: Sequence[Step]) -> Cost:
    """Of one launch in which these go one after another."""
    shared_out = sum(step.share > 0 for step in steps)
    return one_cluster.cost_in_turn([step.plan for step in steps], shared_out, steps[0].share)


def by_threads(program: ProgramPlan, steps: Sequence[Step], clusters: int = 1, most_us: float = SHORT_US) -> ByThreads:
    """Of a launch of one step that takes no longer than `most_us`, by so many clusters; nothing of any other. New rows
    of an operand have a launch of their own: what they leave as it is, the emulator takes for bytes that this launch
    has yet to write."""
    step = steps[0]
    long = step.plan.cost.time_us > most_us and not step.graph.orders  # a sort is one cluster's anyway
    if len(steps) > 1 or long or step.graph.scatters:
        return {}
    found: dict[int, tuple[float, Plan]] = {}
    for plan in on_few(program, step, clusters):
        if one_cluster.obstacle([plan]) or not streams(plan):
            continue
        if clusters > 1 and shares.rows_of_block(plan) is None:
            continue
        own = one_cluster.on(program.target, plan, step.plan.cost.floor_us)
        time = one_cluster.step_us(own, shares.rows_each([own]) if clusters > 1 else 0)
        if plan.threads not in found or time < found[plan.threads][0]:
            found[plan.threads] = time, own
    return {threads: plan for threads, (_, plan) in found.items()}


def on_few(program: ProgramPlan, step: Step, clusters: int = 1) -> tuple[Plan, ...]:
    """Candidates on the SMs of so many clusters, the cheapest first. A sort of slots is one cluster's on any GPU,
    and 16384 slots were to take 5.8 us in a router's launch, for 7.5, by few SMs that are said to do what all do."""
    few = program.target if step.graph.orders else one_cluster.narrowed(program.target, clusters)
    return candidates(step.graph, few, step.plan.layout).plans


def streams(plan: Plan) -> bool:
    """Has an SM enough on its way where few others ask for it? Of products those whose groups of warps share K have;
    others are many that ask, where most SMs of so many clusters have a tile."""
    if not isinstance(plan, GemmPlan) or plan.tile.slice_k > 1:
        return True
    return plan.target.shares > 1 and 2 * plan.planned_blocks >= plan.target.sms


def together(
    launches: Sequence[Sequence[Step]], plans: Sequence[ByThreads], shared_out: int = 0
) -> tuple[Step, ...] | None:
    """These steps as one launch, by the block size that takes the least time; None where they can't be one by any. Of
    so many as are `shared_out` the plans are those of many clusters."""
    found: tuple[float, tuple[Step, ...]] | None = None
    for threads in sorted(set(plans[0]).intersection(*plans[1:])):
        own = [each[threads] for each in plans]
        rows = shares.rows_each(own[:shared_out]) if shared_out else 0
        if one_cluster.obstacle(own) or shares.obstacle(own[:shared_out], rows):
            continue
        time = one_cluster.cost_in_turn(own, shared_out, rows).time_us
        if found is None or time < found[0]:
            steps = (
                replace(step, plan=plan, joined="behind" if place else "", share=rows if place < shared_out else 0)
                for place, ((step, *_), plan) in enumerate(zip(launches, own, strict=True))
            )
            found = time, tuple(steps)
    return found and found[1]


def one_cluster_as(program: ProgramPlan, large: ProgramPlan) -> ProgramPlan | None:
    """The program, of the same steps as `large` at other sizes, with those in one launch that are one there: in the
    same configurations where these are candidates, else by the same rules in blocks of one size; None where that can't
    be."""
    by_name = {step.name: step for step in program.steps}
    for steps in large.launches:
        if not any(step.joined == "behind" for step in steps):
            continue
        for place, step in enumerate(steps):
            own = by_name[step.name]
            clusters = one_cluster.clusters_of(program.target) if step.share else 1
            plans = (own.plan,) if own.graph.orders else on_few(program, replace(own, plan=step.plan), clusters)
            found = [one_cluster.on(program.target, plan, own.plan.cost.floor_us) for plan in plans]
            alike = [p for p in found if (p.rule, p.threads) == (step.plan.rule, step.plan.threads)]
            alike = [plan for plan in alike if not one_cluster.obstacle([plan])]
            if step.share:
                alike = [plan for plan in alike if not shares.obstacle([plan], step.share)]
            if not alike:
                return None
            same = (plan for plan in alike if plan.configuration == step.plan.configuration)
            joined: Joined = "behind" if place else ""
            by_name[step.name] = replace(own, plan=next(same, alike[0]), joined=joined, share=step.share)
        if one_cluster.obstacle([by_name[step.name].plan for step in steps]):
            return None
    return replace(program, steps=tuple(by_name[step.name] for step in program.steps))
