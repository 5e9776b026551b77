"""A program of large products at a smaller width and K, with fewer groups or fewer keys, to be validated in its place.

A reference in float64 of 128256 logits, each of 4096 products, takes minutes for each of several launches. What a
kernel's text could have wrong shows at other sizes as well, if it is by the same rule, in the same configuration, and
what is left of the last tile is as much: sizes shrink to some whole tiles and that rest. The number of rows stays free.
Where a rule is for wide rows alone, only K shrinks. Where keys are dealt to parts, they are to as many, and each has a
tile or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from fusegen.errors import NoPlan, SpecError
from fusegen.language.sizes import dims_in
from fusegen.language.types import Dim, size_of
from fusegen.planner import candidates
from fusegen.planner.launching import launched
from fusegen.planner.programs.joining import joined
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.planner.smaller import TILE, WHOLE_TILES, fewer, group_dims, shrunk, weights

MOST_WEIGHTS = 2**26  # elements of right factors: those of an MLP of 4096 x 14336 take some 10 s to be judged


def smaller(program: ProgramPlan, always: bool = False) -> ProgramPlan | None:
    """The same chain with smaller products, by the same kinds of kernels; None where products are not that
    large (`always`: however large they are), or their sizes do not shrink by themselves."""
    graph = program.graph
    if weights(graph) <= MOST_WEIGHTS and not always:
        return None
    width = set(dims_in(tuple(n.shape[-1] for n in graph.products)))
    depth = set(dims_in(tuple(n.inputs[0].shape[-1] for n in graph.products)))
    for shrinking in (width | depth, depth - width):
        if shrinking and (found := at_smaller(program, {dim.name for dim in shrinking})) is not None:
            return found
    return None


def at_smaller(program: ProgramPlan, dims: set[str]) -> ProgramPlan | None:
    """The program at smaller sizes of these dims, cut anew where that comes to the same kernels; None where these have
    no plans by the same rules."""
    graph = program.graph
    sizes = {name: shrunk(graph.sizes[name]) for name in dims}
    sizes |= {dim.name: fewer(graph.sizes[dim.name]) for dim in group_dims(graph)}
    deals = [(own, node) for own in program.steps for node in own.graph.deals]
    dealt = next(((node.group, node.count) for _, node in deals), None)
    for own, node in deals:
        keys = {dim.name for size in node.inputs[0].shape[-1:] for dim in dims_in((own.sizes.get(str(size), size),))}
        for name in keys & dims:
            least = node.group * node.count + WHOLE_TILES
            sizes[name] = min(graph.sizes[name], least + graph.sizes[name] % TILE)
    search = import_module("fusegen.planner.programs.search")
    found: ProgramPlan | None = None
    try:
        if not graph.batch_invariant:  # whose cut is no matter of sizes
            found = search.cheapest(graph.at(**sizes), program.target, dealt=dealt)
    except (NoPlan, SpecError):
        return None
    if found is None or [step.name for step in found.steps] != [step.name for step in program.steps]:
        again = None if deals and not graph.batch_invariant else as_cut(program, sizes)
        if again is None:
            return None
        found = again
    way = same_order if graph.batch_invariant else same_way
    steps = [step for pair in zip(found.steps, program.steps, strict=True) if (step := way(*pair)) is not None]
    if len(steps) < len(found.steps):
        return None
    found = joined(replace(found, steps=tuple(steps)))
    how = {step.name: step.plan.dependent for step in program.steps}
    return replace(found, steps=tuple(replace(step, plan=launched(step.plan, how[step.name])) for step in found.steps))


def as_cut(program: ProgramPlan, sizes: Mapping[str, int]) -> ProgramPlan | None:
    """The program's own kernels at other sizes of the chain, each by the plan that is cheapest there; None where there
    is none."""
    graph = program.graph.at(**sizes)
    steps = []
    for step in program.steps:
        own = {name: size_of(step.sizes.get(name, Dim(name)), graph.sizes) for name in step.graph.sizes}
        try:
            small = step.graph.at(**own)
            plan = candidates(small, program.target, step.plan.layout).need()[0]
        except (NoPlan, SpecError):
            return None
        steps.append(replace(step, graph=small, plan=plan, joined=False))
    return replace(program, graph=graph, steps=tuple(steps))


def same_way(step: Step, large: Step) -> Step | None:
    """The step by the large one's rule, in its configuration where that is a candidate; None where the rule has none,
    as of rows that are too short for it."""
    found = candidates(step.graph, step.plan.target, step.plan.layout).plans
    alike = [plan for plan in found if plan.rule == large.plan.rule]
    same = [plan for plan in alike if plan.configuration == large.plan.configuration]
    own = [step.plan] * (step.plan.rule == large.plan.rule)
    return next((replace(step, plan=plan) for plan in (*same, *own, *alike)), None)


def same_order(step: Step, large: Step) -> Step | None:
    """The same of a program of one order of sums: where the configuration is no candidate, by the rule and in the large
    one's order, else in one that no number of rows decides."""
    order_of = import_module("fusegen.planner.orders").order_of
    found = candidates(step.graph, step.plan.target, step.plan.layout).plans
    alike = [plan for plan in found if plan.rule == large.plan.rule]
    alike.sort(key=lambda plan: (order_of(plan) != order_of(large.plan), repr(order_of(plan))))
    same = [plan for plan in alike if plan.configuration == large.plan.configuration]
    return next((replace(step, plan=plan) for plan in (*same, *alike)), None)
