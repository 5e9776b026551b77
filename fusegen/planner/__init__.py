"""plan(graph, target): the cheapest candidate over all rules, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

from fusegen.graph import Graph
from fusegen.planner.model import Candidates, Layout, Plan, Refusal
from fusegen.planner.passes import simplify
from fusegen.planner.rules import NoMatch, NotFor
from fusegen.planner.rules.dense import dense
from fusegen.planner.rules.elementwise import elementwise
from fusegen.planner.rules.held import held
from fusegen.planner.rules.rowwise import rowwise
from fusegen.planner.rules.topk import topk
from fusegen.targets.base import Target

Rule = Callable[[Graph, Target, Layout], Iterator[Plan]]


def for_products(name: str) -> Rule:
    """A rule that is imported with the first product: it and what it needs are half of the planner."""

    def rule(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
        if not graph.products:
            raise NotFor("the chain multiplies no matrices")
        found: Rule = getattr(import_module(f"fusegen.planner.rules.{name}"), name)
        return found(graph, target, layout)

    return rule


RULES: Mapping[str, Rule] = {
    "elementwise": elementwise, "rowwise": rowwise, "topk": topk, "held": held, "dense": dense,
    "gemm": for_products("gemm"), "wgmma": for_products("wgmma"),
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
            refusals.append(Refusal(name, str(reason), isinstance(reason, NotFor)))
    ranked = tuple(sorted(plans, key=lambda p: p.cost.time_us))
    return Candidates(graph, target, ranked, tuple(refusals))


def plan(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> Plan:
    """The cheapest legal plan for `graph` on `target`. Raises NoPlan with the nearest rule's reason."""
    return candidates(graph, target, layout).need()[0]
