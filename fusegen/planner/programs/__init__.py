"""Programs: chains that several kernels hold, one after another, with tensors between them.

`kernels_of(graph, target)` are a chain's. `program_instead(found)` says whether it is cut: where no rule plans one
kernel for it, or where several are expected to take much less time. What is cut where is `search`'s to find; `cutting`
makes the graphs of the pieces.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

from fusegen.errors import NoPlan
from fusegen.language.axes import over_rows
from fusegen.language.graph import Graph, plain
from fusegen.language.sharing import share_common
from fusegen.language.types import size_of
from fusegen.planner import candidates
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.attention.recognition import is_attention
from fusegen.planner.launching import as_launched
from fusegen.planner.model import Candidates, Plan
from fusegen.planner.programs.axes_as_rows import ways_over_axes
from fusegen.planner.programs.factors_apart import copies_tensors, factors_apart
from fusegen.planner.programs.grouping import groups_of_products
from fusegen.planner.programs.heads_as_rows import heads_as_rows
from fusegen.planner.programs.long_rows import by_groups
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.planner.programs.rows_as_columns import rows_as_columns
from fusegen.planner.programs.steps import whole
from fusegen.targets.base import Target

# Of one kernel's estimate: several are taken only below it. Estimates of two kinds of kernels may be 15 % off each, in
# opposite directions, and a program needs a workspace.
WORTH_CUTTING = 0.67
# The same of reductions over rows, whose two kernels are of the kinds that one would be: column_sum f32 1048576 x 1024
# took 1003.5 us by clusters of 16 blocks, and its first kernel alone 931 (H200).
WORTH_PARTING = 0.97
# The same of attention whose keys are dealt to parts, whose first kernel is of the one kernel's kind
WORTH_DEALING = 0.95
# The same of codes that wgmma's own kernel widens, where estimates of both were within 6 % of what they took: w4a16
# beside 2048 rows of 8192 x 8192 took 404 us by one kernel, and 358 by two (H200)
WORTH_UNPACKING = 0.97
# The same of a product whose K is dealt to parts: estimates of both are of one kind, and parts take a workspace. Of
# 64 x 1024 numbers, K 16384, 20.5 us were expected of two and 22.4 of one, and they took 17.7 and 29.5; of 256 x 1024
# 27.9 and 30.5, and they took 26.1 and 31.8; of 16 x 4096 42.4 and 40.8, and they took 42 and 39.9 (H200,
# benchmarks/deep_products.py)
WORTH_DEEPENING = 0.93
# The same of long rows that are reduced by groups, by kernels of the same kind
WORTH_GROUPING = 0.8
# The same of two products without a softmax between them, whose scores products apart store: as of any chain, but that
# estimates of both are of products, and a kernel of few rows leaves most of a GPU idle
WORTH_APART = 0.95
FEW_STATES = 12  # to look at where one kernel is at hand: a search in full takes longer than compiling
LONG_STATES = 60  # beside wasteful attention: two cuts are found by then, with a mask between them
WASTED = 3.5  # times its floor


def is_wasteful(plan: Plan) -> bool:
    """Is it attention of long rows of which few queries share keys? Blocks are many then, each reads all keys, and
    products apart may take less. Or does it widen keys or values of 8 bits again for each of several tiles of rows?
    Widened once, they are what faster kernels multiply as they lie."""
    if isinstance(plan, AttentionPlan) and plan.widens:
        return size_of(plan.graph.shape[-2], plan.graph.sizes) > plan.tile.rows
    return plan.rule.startswith("attention_wide") and plan.cost.time_us > WASTED * plan.cost.floor_us


def worth_cutting(plan: Plan) -> float:
    """Several kernels are taken below this share of what the one kernel takes."""
    return WORTH_APART if isinstance(plan, AttentionPlan) and not plan.softmaxed else WORTH_CUTTING


def kernels_of(graph: Graph, target: Target) -> tuple[Candidates, ProgramPlan | None]:
    """The candidates for one kernel, and the program to take in their place, if there is one. Raises NoPlan where
    neither can be planned."""
    if graph.batch_invariant:
        found: tuple[Candidates, ProgramPlan | None]
        found = import_module("fusegen.planner.invariant").in_one_order(graph, target)
        return found
    one = candidates(graph, target)
    return one, program_instead(one)


def step_candidates(program: ProgramPlan, step: Step) -> Candidates:
    """A step's candidates, for arrays that lie as the program has them lie, launched as the program launches it; in a
    program of one order of sums, those that sum as the step does."""
    found = candidates(step.graph, program.target, step.plan.layout)
    if program.graph.batch_invariant:
        found = import_module("fusegen.planner.orders").in_order_of(step.plan, found)
    return as_launched(found, step.plan.dependent)


def program_instead(found: Candidates) -> ProgramPlan | None:
    """The program to take in place of one kernel; None where one kernel is right. `found` are the one kernel's
    candidates. Raises NoPlan where neither can be planned."""
    graph, target = found.graph.written, found.target
    if heads_as_rows(graph) is not graph:
        with suppress(NoPlan):  # then heads have tiles of their own
            rows = cheapest(graph, target)
            if not found.plans or rows.time_us < found.plans[0].cost.time_us:
                return rows
    if (long := by_groups(graph, target)) is not graph and (grouped := in_groups(found, long)) is not None:
        return grouped
    if (columns := rows_as_columns(graph)) is not graph and (made := as_columns(found, columns)) is not None:
        return made
    if found.plans:
        least = found.plans[0].cost
        if over_rows(graph):
            return by_parts(found, WORTH_PARTING * least.time_us)
        computed = any(not plain(factor) for product in graph.products for factor in product.inputs)
        if is_attention(graph):  # whose scores no cut leaves out of memory
            dealt = by_parts(found, WORTH_DEALING * least.time_us)
            if not is_wasteful(found.plans[0]):
                return dealt
            try:
                return cheapest(graph, target, WORTH_CUTTING * (dealt.time_us if dealt else least.time_us), LONG_STATES)
            except NoPlan:
                return dealt
        if copies_tensors(target) and not graph.viewed and factors_apart(whole(graph)) is not None:
            with suppress(NoPlan):
                return cheapest(graph, target, least.time_us, FEW_STATES)
        if graph.products and fills_part(found.plans[0]):
            deep: ProgramPlan | None = searching().deepened(graph, target, found.plans[0])
            if deep is not None:
                return deep
        if found.plans[0].rule.startswith("weights"):  # as well, but rows of a block each may be too few for a GPU
            computed = fills_part(found.plans[0])
        worth = worth_cutting(found.plans[0])
        if not (computed or groups_of_products(graph)) or least.floor_us > worth * least.time_us:
            return None
    limits = (worth_cutting(found.plans[0]) * found.plans[0].cost.time_us, FEW_STATES) if found.plans else ()
    try:
        return cheapest(graph, target, *limits)
    except NoPlan as cut:
        if found.plans:
            return None
        raise alone(found, cut) from None


def in_groups(found: Candidates, long: Graph) -> ProgramPlan | None:
    """The program of a chain's few long rows, which `long` reduces by groups; None where another plan takes less."""
    graph, target, least_us = found.graph.written, found.target, math.inf
    with suppress(NoPlan):
        least_us = found.plans[0].cost.time_us if found.plans else cheapest(graph, target).time_us
    with suppress(NoPlan):
        return replace(cheapest(long, target, WORTH_GROUPING * least_us), graph=graph)
    return None


def as_columns(found: Candidates, columns: Graph) -> ProgramPlan | None:
    """The program of a chain whose reduced rows of products are columns in `columns`; None where another plan takes
    less."""
    graph, target, least_us = found.graph.written, found.target, math.inf
    with suppress(NoPlan):
        least_us = found.plans[0].cost.time_us if found.plans else cheapest(graph, target).time_us
    with suppress(NoPlan):
        return replace(cheapest(columns, target, least_us), graph=graph)
    return None


def cheapest(graph: Graph, target: Target, *limits: float) -> ProgramPlan:
    """The result of a search, which stays with the graph: `plan` and `compile` of one chain search once."""
    known: dict[tuple[object, ...], ProgramPlan | NoPlan] = graph.__dict__.setdefault("cheapest programs", {})
    key = (target, *limits)
    if key not in known:
        try:
            known[key] = searched(graph, target, *limits)
        except NoPlan as error:
            known[key] = error
    program = known[key]
    if isinstance(program, NoPlan):
        raise program.with_traceback(None)
    return program


def searched(graph: Graph, target: Target, below_us: float = math.inf, *limits: float) -> ProgramPlan:
    """The result of a search; of a chain that reduces several axes together, where rows of all of them would leave some
    of a GPU idle or take several kernels, the best of one for each way to take them."""
    best: ProgramPlan | None = None
    refused: NoPlan | None = None
    for way in ways_over_axes(graph):
        try:
            found = searching().cheapest(way, target, below_us, *limits)
        except NoPlan as error:
            refused = refused or error
            continue
        best, below_us = found if way is graph else replace(found, graph=share_common(graph)), found.time_us
        if len(found.steps) == 1 and not fills_part(found.steps[0].plan):
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def searching() -> Any:
    """The module of searches, which plans by this one."""
    return import_module("fusegen.planner.programs.search")


def fills_part(plan: Plan) -> bool:
    """Has a launch at the graph's sizes fewer blocks than the GPU has places?"""
    return plan.planned_blocks < plan.target.sms * plan.cost.blocks_per_sm


def by_parts(found: Candidates, below_us: float) -> ProgramPlan | None:
    """Reductions over rows, or attention to many keys, by two kernels, where that is expected to take less than
    `below_us`."""
    return searching().in_two(found.graph.written, found.target, below_us)  # type: ignore[no-any-return]


def alone(found: Candidates, cut: NoPlan) -> NoPlan:
    """Neither one kernel nor several: the reason of the first, and of the second where it is another one."""
    try:
        found.need()
    except NoPlan as error:
        lines = str(error).splitlines()
        more = [line for line in str(cut).splitlines()[1:] if line.strip() not in str(error)]
        return NoPlan("\n".join([*lines, "  and no cut into several kernels helps", *more]) if more else str(error))
    return cut
