"""plan(graph, target): the cheapest candidate over all rules, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fusegen.graph import Graph
from fusegen.planner.model import Candidates, Layout, Plan, Refusal
from fusegen.planner.passes import simplify
from fusegen.planner.rules import NoMatch
from fusegen.planner.rules.dense import dense
from fusegen.planner.rules.elementwise import elementwise
from fusegen.planner.rules.gemm import gemm
from fusegen.planner.rules.held import held
from fusegen.planner.rules.rowwise import rowwise
from fusegen.planner.rules.topk import topk
from fusegen.planner.rules.wgmma import wgmma
from fusegen.targets.base import Target

Rule = Callable[[Graph, Target, Layout], Iterator[Plan]]
RULES: Mapping[str, Rule] = {
    "elementwise": elementwise, "rowwise": rowwise, "topk": topk, "held": held, "dense": dense,
    "gemm": gemm, "wgmma": wgmma,
}  # fmt: skip
CONTIGUOUS = Layout()


def candidates(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> Candidates:
    """Every legal plan, cheapest first, and every refusal. Ties go to the earlier candidate, so order is stable."""
    graph = simplify(graph)
    plans: list[Plan] = []
    refusals: list[Refusal] = []
    for name, rule in RULES.items():
        try:
            plans.extend(rule(graph, target, layout))
        except NoMatch as reason:
            refusals.append(Refusal(name, str(reason)))
    ranked = tuple(sorted(plans, key=lambda p: p.cost.time_us))
    return Candidates(graph, target, ranked, tuple(refusals))


def plan(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> Plan:
    """The cheapest legal plan for `graph` on `target`. Raises NoPlan with every rule's reason."""
    return candidates(graph, target, layout).need()[0]
