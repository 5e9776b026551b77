"""A program of large products at a smaller width and K, with fewer groups, keys or rows, to be validated in its place.

A reference in float64 of 128256 logits, each of 4096 products, takes minutes for each of several launches. What a
kernel's text could have wrong shows at other sizes as well, if it is by the same rule, in the same configuration, and
what is left of the last tile is as much: sizes shrink to some whole tiles and that rest. The number of rows stays free.
Where it is a constant of a kernel, as of tokens whose slots are sorted, rows are as few as columns. Where a rule is for
wide rows alone, only K shrinks. Where keys are dealt to parts, they are to as many, and each has a tile or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from fusegen.errors import NoPlan, SpecError
from fusegen.language.graph import Graph
from fusegen.language.sizes import dims_in
from fusegen.language.types import Dim, size_of
from fusegen.planner import candidates
from fusegen.planner.launching import launched
from fusegen.planner.programs.joining import one_cluster_as, side_by_side
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.planner.smaller import TILE, WHOLE_TILES, alike_size, fewer, group_dims, shrunk, weights, written_as
from fusegen.planner.sorting.plan import SlotsPlan
from fusegen.planner.sorting.rule import with_fewer_slots

DEPTHS = (1, 2, 4)  # times the least K, until products are in the configuration that they have in the whole
# Elements of right factors. From MANY on programs are validated at smaller sizes where all products keep their
# configuration: 2^26 of 4 bits took 39 s to be judged in five launches on the host of an H200. From MOST on they are in
# any case: those of an MLP of 4096 x 14336 take some 10 s a launch
MANY_WEIGHTS = 2**24
MOST_WEIGHTS = 2**26
# Multiplications of a launch whose rows are constants, from which on it is validated at fewer rows: 2^31, of 16384
# tokens' logits, took 11 s to be judged in three launches
MOST_PRODUCTS = 2**30


def smaller(program: ProgramPlan, always: bool = False) -> ProgramPlan | None:
    """The same chain with smaller products, by the same kinds of kernels; None where products are not that
    large (`always`: however large they are), or their sizes do not shrink by themselves."""
    graph = program.graph
    width = set(dims_in(tuple(n.shape[-1] for n in graph.products)))
    depth = set(dims_in(tuple(n.inputs[0].shape[-1] for n in graph.products)))
    rows = constant_rows(program)
    many = weights(graph) > MANY_WEIGHTS or (bool(rows) and multiplications(graph) > MOST_PRODUCTS)
    if not many and not always:
        return None
    plans = [step.plan for step in program.steps]
    few = {dim.name: shrunk(graph.sizes[dim.name]) for dim in rows}
    for shrinking in (width | depth, depth - width):
        first: ProgramPlan | None = None
        for times in DEPTHS if shrinking else ():
            sizes = {dim.name: shrunk_by(graph.sizes[dim.name], times if dim in depth else 1) for dim in shrinking}
            sizes = {name: alike_size(least, graph.sizes[name], plans) for name, least in sizes.items()}
            found = with_few_groups(program, {**few, **sizes})
            if found is None or (first is not None and weights(found.graph) > MANY_WEIGHTS):
                continue
            if configured(found) == configured(program):
                return found
            first = first or found
        if first is not None and (always or rows or weights(graph) > MOST_WEIGHTS):
            return first
    return None


def constant_rows(program: ProgramPlan) -> set[Dim]:
    """The dims that count rows of products and nothing else of them, and of which a kernel is compiled for one number
    only."""
    products = program.graph.products
    rows = dims_in(tuple(size for n in products for size in n.inputs[0].shape[:-1]))
    others = dims_in(tuple(size for n in products for size in (n.shape[-1], *n.inputs[1].shape)))
    return {dim for dim in set(rows).difference(others) if dim.name in program.fixed}


def multiplications(graph: Graph) -> int:
    """Of all products."""
    return sum(math.prod(size_of(s, graph.sizes) for s in (*n.shape, n.inputs[0].shape[-1])) for n in graph.products)


def configured(program: ProgramPlan) -> list[str]:
    """How each step multiplies."""
    return [step.plan.configuration for step in program.steps if step.plan.graph.products]


def shrunk_by(size: int, times: int) -> int:
    """A K of so many times the tiles: few slices can't be dealt to as many groups of warps, or blocks, as many are."""
    return min(size, shrunk(size) + (times - 1) * WHOLE_TILES)


def with_few_groups(program: ProgramPlan, wanted: Mapping[str, int]) -> ProgramPlan | None:
    """The program at the `wanted` sizes and as few groups as leave its kernels their rules: rows of 8 experts are too
    short for the blocks of a launch that chooses among 64. None where no number of them does."""
    sizes = {dim.name: program.graph.sizes[dim.name] for dim in group_dims(program.graph)}
    times = 1
    while True:
        groups = {name: fewer(size, times) for name, size in sizes.items()}
        found = at_smaller(program, {**wanted, **groups})
        if found is not None or groups == sizes:
            return found
        times *= 2


def at_smaller(program: ProgramPlan, wanted: Mapping[str, int]) -> ProgramPlan | None:
    """The program at the `wanted` sizes, as far as they come out even, cut anew where that comes to the same kernels;
    None where these have no plans by the same rules."""
    graph, sizes = program.graph, dict(wanted)
    deals = [(own, node) for own in program.steps for node in own.graph.deals]
    dealt = next(((node.group, node.count) for _, node in deals), None)
    least = {
        own.sizes.get(str(size), size): node.group * node.count + WHOLE_TILES
        for own, node in deals for size in node.inputs[0].shape[-1:]
    }  # fmt: skip
    computed = [s for n in graph.products for s in (n.shape[-1], n.inputs[0].shape[-1]) if not isinstance(s, Dim)]
    for size in [*least, *computed]:  # as of pages, `P * L`, of which P is long
        whole = size_of(size, graph.sizes)
        extent = min(whole, least[size] + whole % TILE) if size in least else shrunk(whole)
        long = [dim.name for dim in dims_in(size) if dim.name in wanted and graph.sizes[dim.name] > TILE]
        if len(long) != 1:
            continue
        each = whole // graph.sizes[long[0]]
        if not extent % each and size_of(size, {**graph.sizes, long[0]: extent // each}) == extent:
            sizes[long[0]] = extent // each
    if all(graph.sizes[name] == size for name, size in sizes.items()):
        return None
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
    alike = one_cluster_as(side_by_side(replace(found, steps=tuple(steps))), program)
    if alike is None:
        return None
    found = alike
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
        steps.append(replace(step, graph=small, plan=plan, joined="", share=0))
    return replace(program, graph=graph, steps=tuple(steps))


def same_way(step: Step, large: Step) -> Step | None:
    """The step by the large one's rule, in its configuration where that is a candidate; None where the rule has none,
    as of rows that are too short for it. A sort keeps its warps and blocks, of which fewer slots ask for fewer."""
    if isinstance(large.plan, SlotsPlan):
        return replace(step, plan=with_fewer_slots(large.plan, step.plan.graph))
    found = candidates(step.graph, step.plan.target, step.plan.layout).plans
    alike = [plan for plan in found if plan.rule == large.plan.rule]
    same = [plan for plan in alike if plan.configuration == large.plan.configuration]
    own = [step.plan] * (step.plan.rule == large.plan.rule)
    return next((replace(step, plan=written_as(plan, large.plan)) for plan in (*same, *own, *alike)), None)


def same_order(step: Step, large: Step) -> Step | None:
    """The same of a program of one order of sums: where the configuration is no candidate, by the rule and in the large
    one's order, else in one that no number of rows decides."""
    order_of = import_module("fusegen.planner.orders").order_of
    found = candidates(step.graph, step.plan.target, step.plan.layout).plans
    alike = [plan for plan in found if plan.rule == large.plan.rule]
    alike.sort(key=lambda plan: (order_of(plan) != order_of(large.plan), repr(order_of(plan))))
    same = [plan for plan in alike if plan.configuration == large.plan.configuration]
    return next((replace(step, plan=written_as(plan, large.plan)) for plan in (*same, *alike)), None)
