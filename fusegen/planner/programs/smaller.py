"""A program of large products at a smaller width and K, to be validated in its place.

A reference in float64 of 128256 logits, each of 4096 products, takes minutes for each of several launches. What a
kernel's text could have wrong shows at other sizes as well, if it is by the same rule, in the same configuration, and
what is left of the last tile is as much: sizes shrink to some whole tiles and that rest. The number of rows stays free.
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
from fusegen.planner.programs.joining import joined
from fusegen.planner.programs.model import ProgramPlan, Step

MOST_WEIGHTS = 2**26  # elements of right factors: those of an MLP of 4096 x 14336 take some 10 s to be judged
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
    inner = dims_in(tuple(size for n in graph.products for size in (n.shape[-1], n.inputs[0].shape[-1])))
    sizes = {d.name: min(graph.sizes[d.name], WHOLE_TILES + graph.sizes[d.name] % TILE) for d in inner}
    search = import_module("fusegen.planner.programs.search")
    try:
        found: ProgramPlan = search.cheapest(graph.at(**sizes), program.target)
    except (NoPlan, SpecError):
        return None
    if [step.plan.rule for step in found.steps] != [step.plan.rule for step in program.steps]:
        return None
    pairs = zip(found.steps, program.steps, strict=True)
    found = joined(replace(found, steps=tuple(same_way(own, large) for own, large in pairs)))
    how = {step.name: step.plan.dependent for step in program.steps}
    return replace(found, steps=tuple(replace(step, plan=launched(step.plan, how[step.name])) for step in found.steps))


def same_way(step: Step, large: Step) -> Step:
    """The step by the configuration that the large one has, where that is a candidate."""
    others = candidates(step.graph, step.plan.target, step.plan.layout).plans
    plan = next((p for p in others if p.configuration == large.plan.configuration), step.plan)
    return replace(step, plan=plan)
