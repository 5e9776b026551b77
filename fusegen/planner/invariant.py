"""Plans by which a row's bits are the same however many rows there are: `compile(chain, batch_invariant=True)`.

A compiled kernel gives a row the same bits among any others. But compiled at other sizes of its rows a chain may get
another plan, which sums in another order: few rows split a sum between blocks that many rows don't. So of all orders
one is chosen for every number of rows, by the cost model, and nothing that the sizes of rows say has a part in that:
the order whose cheapest plan takes at worst the least times as long as the cheapest of all, over 1 to 65536 rows. At
the sizes at hand the cheapest plan of that order is taken; where it has none for so few rows, one for more.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from fusegen.errors import NoPlan
from fusegen.language.graph import Graph
from fusegen.language.sizes import dims_in
from fusegen.planner import alike, candidates
from fusegen.planner.attention.parts import ScoresPlan
from fusegen.planner.model import Candidates, Layout, Plan, Refusal, RowPlan
from fusegen.planner.products.parts import ProductPlan
from fusegen.targets.base import Target

ROWS = (1, 16, 128, 1024, 8192, 65536)  # at which orders are compared


def order_of(plan: Plan) -> Hashable:
    """What a row's bits depend on beside the formula: plans of one order give the same, as far as it is known. Of
    others it is the plan itself."""
    if isinstance(plan, RowPlan):
        return plan.rule, plan.keeps, plan.uniform_results, plan.order
    if isinstance(plan, ScoresPlan):
        return plan.rule, plan.tile.keys, plan.tile.warps, plan.parts
    if isinstance(plan, ProductPlan) and not plan.graph.reductions:
        summed, atom = plan.summed, plan.atom
        return plan.rule, atom.kind, atom.k, replace(summed, k=summed.k if summed.split_k > 1 else 0)
    return plan.configuration


def batch_invariant(graph: Graph, target: Target) -> Candidates:
    """The candidates of the one order that is chosen for every number of rows. Raises NoPlan for a chain that sums over
    its rows, or that no one kernel holds."""
    if any(node.over for node in graph.reductions):
        raise NoPlan(
            f"{graph.name} sums over rows, so that its results depend on how many there are\n"
            "  batch_invariant is for chains whose rows are each for itself"
        )
    here = candidates(graph, target)
    try:
        here.need()
    except NoPlan as error:
        raise NoPlan(f"{error}\n  batch_invariant is for chains that one kernel holds") from None
    worst: dict[Hashable, float] = {}
    least: dict[Hashable, float] = {}  # a kernel for more rows takes fewer as well, and no longer
    for rows in reversed(ROWS):
        own: dict[Hashable, float] = {}
        for plan in candidates(with_rows(graph, rows), target).need():
            own.setdefault(order_of(plan), plan.cost.time_us)  # the cheapest come first
        least |= own
        best = min(least.values())
        both = least.keys() if rows == ROWS[-1] else least.keys() & worst.keys()
        worst = {order: max(worst.get(order, 0.0), least[order] / best) for order in both}
    order = min(worst, key=lambda order: (worst[order], repr(order)))
    found = like(here, order)
    for rows in ROWS:
        if not found.plans and rows >= graph.rows:
            more = like(candidates(with_rows(graph, rows), target), order)
            found = replace(found, plans=tuple(replace(p, graph=p.graph.at(**graph.sizes)) for p in more.plans))
    return found


def alike_in_order(plan: Plan, layout: Layout) -> Candidates:
    """The candidates for operands that lie otherwise, and that compute the same bits as `plan`, products included."""
    found = alike(plan, layout)
    return found if isinstance(plan, RowPlan) else like(found, order_of(plan))


def like(found: Candidates, order: Hashable) -> Candidates:
    """Those of the candidates that sum in that order."""
    plans = tuple(plan for plan in found.plans if order_of(plan) == order)
    if plans or not found.plans:
        return replace(found, plans=plans)
    reason = "for arrays that lie so no candidate sums in the order that every number of rows is summed in"
    return replace(found, plans=(), refusals=(Refusal("batch_invariant", reason), *found.refusals))


def with_rows(graph: Graph, rows: int) -> Graph:
    """The graph at so many rows: of what a call chooses the first size, where the others are 1."""
    fixed = {dim.name for dim in dims_in(tuple(graph.fixed))}
    first, *others = [name for name in graph.sizes if name not in fixed] or [""]
    return graph.at(**dict.fromkeys(others, 1), **({first: rows} if first else {}))
