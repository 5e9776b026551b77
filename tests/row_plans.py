"""The planner's answers for chains of rows, typed as what they are: plans of row kernels."""

from __future__ import annotations

from fusegen.language.graph import Graph
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.model import Layout, RowPlan
from fusegen.targets import Target


def row_plans(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> list[RowPlan]:
    """Every candidate, cheapest first. The chain has no matrix product."""
    found = candidates(graph, target, layout).need()
    rows = [made for made in found if isinstance(made, RowPlan)]
    assert len(rows) == len(found), f"{graph.name} has other plans than those of rows"
    return rows


def row_plan(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> RowPlan:
    """The cheapest candidate."""
    return row_plans(graph, target, layout)[0]
