"""A program of large products at a smaller width and K, or with fewer keys, to be validated in its place.

A reference in float64 of 128256 logits, each of 4096 products, takes minutes for each of several launches. What a
kernel's text could have wrong shows at other sizes as well, if it is by the same rule, in the same configuration, and
what is left of the last tile is as much: sizes shrink to some whole tiles and that rest. The number of rows stays free.
Where a rule is for wide rows alone, only K shrinks. Where keys are dealt to parts, they are to as many, and each has a
tile or more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

from fusegen.errors import NoPlan, SpecError
from fusegen.language.graph import Graph
from fusegen.language.sizes import dims_in
from fusegen.language.types import size_of
from fusegen.planner import candidates
from fusegen.planner.launching import launched
from fusegen.planner.model import Candidates, Plan
from fusegen.planner.programs.joining import joined
from fusegen.planner.programs.model import ProgramPlan, Step

MOST_WEIGHTS = 2**26  # elements of right factors: those of an MLP of 4096 x 14336 take some 10 s to be judged
MOST_GROUPED_WEIGHTS = 2**24  # of 16 groups of 1024 x 1024
GROUPS = 8  # whose ends a block reads at a time
TILE = 256  # of columns, or of K: all that tiles divide
WHOLE_TILES = 2 * TILE


def weights(graph: Graph) -> int:
    """Elements of all right factors."""
    return sum(math.prod(size_of(s, graph.sizes) for s in n.inputs[1].shape) for n in graph.products)


def smaller(program: ProgramPlan) -> ProgramPlan | None:
    """The same chain with smaller products, cut anew and by the same kinds of kernels; None where products are not that
    large, or their sizes do not shrink by themselves."""
    graph = program.graph
    if weights(graph) <= MOST_WEIGHTS:
        return None
    width = set(dims_in(tuple(n.shape[-1] for n in graph.products)))
    depth = set(dims_in(tuple(n.inputs[0].shape[-1] for n in graph.products)))
    for shrinking in (width | depth, depth - width):
        if shrinking and (found := shrunk(program, {dim.name for dim in shrinking})) is not None:
            return found
    return None


def fewer_groups(plan: Plan) -> Candidates | None:
    """The candidates of a chain of grouped products at fewer groups, a smaller width and K, those of the plan's own
    configuration first; None where they are not that large, or there are none by the same rule. A launch has a tile for
    each group, and reads as many weights as all of them have."""
    graph = plan.graph.written
    grouped = [n for n in graph.products if n.ends]
    if not grouped or weights(graph) <= MOST_GROUPED_WEIGHTS:
        return None
    inner = dims_in((*(n.shape[-1] for n in grouped), *(n.inputs[0].shape[-1] for n in grouped)))
    sizes = {dim.name: min(graph.sizes[dim.name], WHOLE_TILES + graph.sizes[dim.name] % TILE) for dim in inner}
    for dim in dims_in(tuple(n.inputs[1].shape[0] for n in grouped)):
        sizes[dim.name] = min(graph.sizes[dim.name], GROUPS + graph.sizes[dim.name] % GROUPS)
    try:
        found = candidates(graph.at(**sizes), plan.target, plan.layout)
    except (NoPlan, SpecError):
        return None
    alike = [other for other in found.plans if other.rule == plan.rule]
    alike.sort(key=lambda other: other.configuration != plan.configuration)
    return replace(found, plans=tuple(alike)) if alike else None


def shrunk(program: ProgramPlan, dims: set[str]) -> ProgramPlan | None:
    """The program at smaller sizes of these dims; None where it is cut otherwise, or by other rules."""
    graph = program.graph
    sizes = {name: min(graph.sizes[name], WHOLE_TILES + graph.sizes[name] % TILE) for name in dims}
    deals = [(own, node) for own in program.steps for node in own.graph.deals]
    dealt = next(((node.group, node.count) for _, node in deals), None)
    for own, node in deals:
        keys = {dim.name for size in node.inputs[0].shape[-1:] for dim in dims_in((own.sizes.get(str(size), size),))}
        for name in keys & dims:
            least = node.group * node.count + WHOLE_TILES
            sizes[name] = min(graph.sizes[name], least + graph.sizes[name] % TILE)
    search = import_module("fusegen.planner.programs.search")
    try:
        found: ProgramPlan = search.cheapest(graph.at(**sizes), program.target, dealt=dealt)
    except (NoPlan, SpecError):
        return None
    if [step.name for step in found.steps] != [step.name for step in program.steps]:
        return None
    steps = [step for pair in zip(found.steps, program.steps, strict=True) if (step := same_way(*pair)) is not None]
    if len(steps) < len(found.steps):
        return None
    found = joined(replace(found, steps=tuple(steps)))
    how = {step.name: step.plan.dependent for step in program.steps}
    return replace(found, steps=tuple(replace(step, plan=launched(step.plan, how[step.name])) for step in found.steps))


def same_way(step: Step, large: Step) -> Step | None:
    """The step by the large one's rule, in its configuration where that is a candidate; None where the rule has none,
    as of rows that are too short for it."""
    found = candidates(step.graph, step.plan.target, step.plan.layout).plans
    alike = [plan for plan in found if plan.rule == large.plan.rule]
    same = [plan for plan in alike if plan.configuration == large.plan.configuration]
    own = [step.plan] * (step.plan.rule == large.plan.rule)
    return next((replace(step, plan=plan) for plan in (*same, *own, *alike)), None)
