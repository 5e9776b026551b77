"""plan(graph, target): the cheapest candidate over all rules, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module

from fusegen.language.axes import over_rows
from fusegen.language.graph import Graph
from fusegen.language.one_kernel import obstacle
from fusegen.language.sharing import share_common
from fusegen.planner.launching import as_launched
from fusegen.planner.matching import NoMatch, NotFor, need_no_draw, need_whole_rows
from fusegen.planner.model import Candidates, Layout, Plan, Refusal, RowPlan
from fusegen.planner.pieces import vector_widths
from fusegen.planner.rewrites import simplify
from fusegen.planner.rows.elementwise import elementwise
from fusegen.planner.rows.in_place import promising_nothing
from fusegen.planner.rows.rowwise import in_order_of, rowwise
from fusegen.planner.selections.large_k import large_k
from fusegen.planner.selections.small_k import small_k
from fusegen.planner.selections.topk import topk
from fusegen.targets.base import Target

Rule = Callable[[Graph, Target, Layout], Iterator[Plan]]


def for_products(name: str, module: str) -> Rule:
    """A rule that is imported with the first product: it and what it needs are half of the planner."""

    def rule(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
        if not graph.products:
            raise NotFor("the chain multiplies no matrices")
        need_no_draw(graph)
        found: Rule = getattr(import_module(f"fusegen.planner.products.{module}"), name)
        return found(graph, target, layout)

    return rule


def for_attention(name: str, module: str) -> Rule:
    """The rule of that name, imported with the first product of a product."""

    def rule(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
        if len(graph.products) != 2:
            raise NotFor("attention is for two products with a softmax between them")
        found: Rule = getattr(import_module(f"fusegen.planner.attention.{module}"), name)
        return found(graph, target, layout)

    return rule


def for_weights(name: str, module: str) -> Rule:
    """The rule of that name, imported with the first product whose rows are softmaxed."""

    def rule(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
        if (
            len(graph.products) != 1
            or graph.products[0].inner_ends
            or graph.selection
            or not any(n.op.name == "max" for n in graph.reductions)
        ):
            raise NotFor("written weights are the softmax of a product's rows")
        found: Rule = getattr(import_module(f"fusegen.planner.attention.{module}"), name)
        return found(graph, target, layout)

    return rule


def for_columns(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Imported with the first reduction over rows."""
    if not over_rows(graph):
        raise NotFor("the chain reduces over no axis of rows; columns is for sums of columns, as F.sum(x, over=M)")
    found: Rule = import_module("fusegen.planner.columns.rule").columns
    return found(graph, target, layout)


def for_slots(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Imported with the first slots that are sorted by their groups."""
    if not graph.orders:
        raise NotFor("the chain sorts no slots by their groups, as F.sort_by_group does")
    found: Rule = import_module("fusegen.planner.sorting.rule").slot_sort
    return found(graph, target, layout)


def for_parts(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Imported with the first reduction over rows by parts."""
    if not graph.parts:
        raise NotFor("the chain reduces no parts of its rows")
    found: Rule = import_module("fusegen.planner.rows.parts_rule").row_parts
    return found(graph, target, layout)


RULES: Mapping[str, Rule] = {
    "elementwise": elementwise, "rowwise": rowwise, "topk": topk, "topk_small_k": small_k, "topk_large_k": large_k,
    "columns": for_columns, "row_parts": for_parts, "slot_sort": for_slots,
    "attention": for_attention("attention", "rule"),
    "attention_wgmma": for_attention("attention_wgmma", "wgmma_rule"),
    "attention_wide": for_attention("attention_wide", "wide_rule"),
    "attention_wide_wgmma": for_attention("attention_wide_wgmma", "wide_wgmma_rule"),
    "gemm": for_products("gemm", "mma_rule"), "wgmma": for_products("wgmma", "wgmma_rule"),
    "wgmma_codes": for_products("wgmma_codes", "wgmma_codes"),
    "tcgen05": for_products("tcgen05", "tcgen05_rule"),
    "weights": for_weights("weights", "weights_rule"),
    "weights_wgmma": for_weights("weights_wgmma", "weights_wgmma"),
}  # fmt: skip
CONTIGUOUS = Layout()


def candidates(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> Candidates:
    """Every legal plan, cheapest first, and every refusal. Ties go to the earlier candidate, so order is stable.

    Of plans of one configuration, which read the same things at other times, the cheapest stays."""
    if graph.viewed:
        viewed = "the chain has views, joins or computed sizes; a kernel takes what `programs.lowering` makes of it"
        return Candidates(graph, target, (), (Refusal("views", viewed, False),))
    if obstacle(graph) and (several := obstacle(share_common(graph))):  # what is written twice is one value
        return Candidates(graph, target, (), (Refusal("one kernel", str(several)),))
    scattered = layout.apart | layout.woven
    if graph.products:  # whose tiles store what they reduce their columns to one by one, wherever it lies
        scattered -= {tensor.name for tensor in graph.outputs if tensor.node in graph.grouped}
    if scattered and (graph.products or graph.selection or over_rows(graph)):
        does = "choose columns" if graph.selection else "reduce over rows"
        said = (
            f"{' and '.join(sorted(scattered))}: the elements of a row are not next to each other, and kernels that "
            f"{'multiply matrices' if graph.products else does} read rows whole; copy it to memory first"
        )
        return Candidates(graph, target, (), (Refusal("rows apart", said, False),))
    if layout.interleaved and not vector_widths(graph, layout):
        return Candidates(graph, target, (), (Refusal("interleaved", "no vector holds whole runs of all", False),))
    graph = simplify(graph)
    plans: list[Plan] = []
    refusals: list[Refusal] = []
    try:
        need_whole_rows(graph)
    except NoMatch as reason:
        return Candidates(graph, target, (), (Refusal("random numbers", str(reason), False),))
    for name, rule in RULES.items():
        try:
            plans.extend(rule(graph, target, layout))
        except NoMatch as reason:
            refusals.append(Refusal(name, str(reason), isinstance(reason, NotFor)))
    if layout.interleaved:
        plans = [p for p in plans if isinstance(p, RowPlan) and moves_together(p)]
    plans.sort(key=lambda p: p.cost.time_us)
    ranked: dict[str, Plan] = {}
    for found in in_place(plans, layout):
        ranked.setdefault(found.configuration, found)
    if plans and not ranked:
        refusals.append(Refusal("in place", "no plan has read what it would overwrite"))
    return Candidates(graph, target, tuple(ranked.values()), tuple(refusals))


def moves_together(plan: RowPlan) -> bool:
    """Do interleaved tensors move in whole vectors between memory and registers, and all of those that lie in one at
    the same time?"""
    loads = [(place, load) for place, row_pass in enumerate(plan.passes) for load in row_pass.loads]
    if plan.in_shared or plan.bulk or plan.prefetched or plan.in_turn or plan.tail == "element" or plan.tile.remainder:
        return False
    if any(row_pass.blocks_of or row_pass.scans or row_pass.groups for row_pass in plan.passes):
        return False
    if any(load.until and load.access.interleaved for _, load in loads):
        return False
    times: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for place, load in loads:
        if load.access.interleaved:
            times.setdefault((load.access.stem, load.access.interleaved.place), []).append((place, load.when))
    stems = {stem for stem, _ in times}
    return all(len({tuple(found) for (own, _), found in times.items() if own == stem}) == 1 for stem in stems)


def in_place(plans: Iterable[Plan], layout: Layout) -> list[Plan]:
    """The plans that may write over the operands that the layout names, with parameters that say so."""
    pairs = layout.in_place
    if not pairs:
        return list(plans)
    return [replace(p, params=promising_nothing(p.params, pairs)) for p in plans if pairs <= p.in_place]


def plan(graph: Graph, target: Target, layout: Layout = CONTIGUOUS) -> Plan:
    """The cheapest legal plan for `graph` on `target`. Raises NoPlan with the nearest rule's reason."""
    return candidates(graph, target, layout).need()[0]


def alike(plan: Plan, layout: Layout) -> Candidates:
    """The plans for operands that lie otherwise than `plan` expects, and that compute the same bits: they sum in the
    same order. First those that compute again what `plan` does, which a compiler may fuse otherwise; then the cheapest.

    How matrix products are summed is their instructions' own matter: of those, all candidates, as of chains that sum
    nothing. A selection that no other plan makes in that order is made in another. They are launched as it is."""
    return as_launched(of_same_bits(plan, layout), plan.dependent)


def of_same_bits(plan: Plan, layout: Layout) -> Candidates:
    found = candidates(plan.graph, plan.target, layout)
    if not plan.order:
        return found
    if not isinstance(plan, RowPlan):
        return replace(found, plans=tuple(other for other in found.plans if other.order == plan.order))
    like = [other for other in found.plans if isinstance(other, RowPlan) and computes_alike(other, plan)]
    if plan.selection:
        return replace(found, plans=tuple(like)) if like else found
    if not like and plan.in_turn is None:
        made = in_place(in_order_of(plan, layout), layout)
        like = [other for other in made if isinstance(other, RowPlan) and computes_alike(other, plan)]
    if layout.in_place and not like:
        reason = "no plan that sums in the same order has read what it would overwrite"
        return replace(found, plans=(), refusals=(*found.refusals, Refusal("in place", reason)))
    like.sort(key=lambda other: other.keeps != plan.keeps)
    return replace(found, plans=tuple(replace(other, uniform_results=plan.uniform_results) for other in like))


def computes_alike(other: RowPlan, plan: RowPlan) -> bool:
    """Whose threads share one rounding may also do so where they need not."""
    return other.order == plan.order and other.uniform_results <= plan.uniform_results
