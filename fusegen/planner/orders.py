"""In which order a plan's kernel sums: plans of one order give a row the same bits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from fusegen.language.graph import Graph, Kind
from fusegen.language.types import f32
from fusegen.planner import alike
from fusegen.planner.attention.parts import ScoresPlan
from fusegen.planner.model import Candidates, Layout, Plan, Refusal, RowPlan
from fusegen.planner.products.parts import ProductPlan

SUMMING = (Kind.REDUCE, Kind.SCAN, Kind.GROUP, Kind.PART, Kind.DEAL, Kind.PRODUCT, Kind.SELECT)


def order_of(plan: Plan) -> Hashable:
    """What a row's bits depend on beside the formula: plans of one order give the same, as far as it is known. Of
    others it is the plan itself. Whole numbers have the same sums in any order."""
    if plan.graph.orders:  # slots have one order
        return ()
    if isinstance(plan, RowPlan):
        return () if whole_numbers(plan.graph) else (plan.rule, plan.keeps, plan.uniform_results, plan.order)
    if isinstance(plan, ScoresPlan):
        return plan.rule, plan.tile.keys, plan.tile.warps, plan.parts
    if isinstance(plan, ProductPlan) and not plan.graph.reductions:
        summed, atom = plan.summed, plan.atom
        return plan.rule, atom.kind, atom.k, replace(summed, k=summed.k if summed.split_k > 1 else 0)
    return plan.configuration


def whole_numbers(graph: Graph) -> bool:
    """Is all that is summed, and all that is computed, of whole numbers?"""
    return any(n.op.kind in SUMMING for n in graph.nodes) and all(n.dtype is not f32 for n in graph.nodes)


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


def in_order_of(plan: Plan, found: Candidates) -> Candidates:
    """Those of the candidates that sum as a plan does, which may be one that is for more rows."""
    own = like(found, order_of(plan))
    return own if own.plans else replace(found, plans=(plan,))
