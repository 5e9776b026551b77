"""A chain with products in a kernel's terms: its prologue, and its spans of products with their epilogues.

`fusegen.language.products.split` says what a chain is made of; this says in which thread's hands each part is,
statement by statement, or raises NoMatch for what tiles of products can't hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fusegen.language.graph import Extent, Graph, Kind, Node, Tensor
from fusegen.language.naming import value_names
from fusegen.language.products import Factor as Side
from fusegen.language.products import Split, is_computed
from fusegen.language.types import Size, f32, size_of
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Access, Load, Reduction, Store
from fusegen.planner.pieces import statements
from fusegen.planner.products.gemm import Factor, Product, Prologue, Span


@dataclass(frozen=True, slots=True)
class Group:
    """Products that are used together, of one width, and the outputs that are made of them."""

    products: tuple[Node, ...]
    width: Size
    outputs: tuple[Tensor, ...]


def groups(graph: Graph, parts: Split) -> tuple[Group, ...]:
    """Products whose results meet in an output, in the order they were written."""
    joined: list[set[Node]] = [{p.node} for p in parts.products]
    reached = {t: set(graph.ancestors(t.node)) for t in graph.outputs}
    for nodes in reached.values():
        meeting = [g for g in joined if g & nodes]
        if len(meeting) > 1:
            joined = [g for g in joined if not g & nodes] + [set().union(*meeting)]
    order = [p.node for p in parts.products]
    joined.sort(key=lambda g: min(map(order.index, g)))
    found = []
    for members in joined:
        products = tuple(n for n in order if n in members)
        widths = {n.shape[-1] for n in products}
        if len(widths) > 1:
            first, other = products[0], next(n for n in products if n.shape[-1] != products[0].shape[-1])
            raise NoMatch(f"the products at {first.where} and {other.where} are used together and differ in width")
        outputs = tuple(t for t in graph.outputs if reached[t] & members)
        found.append(Group(products, products[0].shape[-1], outputs))
    alone = tuple(t for t in graph.outputs if not any(t in g.outputs for g in found))
    for tensor in alone:  # what needs no product goes with one as wide
        place = next((i for i, g in enumerate(found) if tensor.shape[-1] in (g.width, 1)), None)
        if place is None:
            raise NoMatch(f"{tensor.name} needs no product and is as wide as none")
        found[place] = replace(found[place], outputs=(*found[place].outputs, tensor))
    if len({len(g.products) for g in found}) > 1:
        counts = list(dict.fromkeys(len(g.products) for g in found))
        raise NoMatch(
            f"the outputs need {counts[0]} and {counts[1]} products each; one kernel's tiles sum equally many"
        )
    return tuple(found)


def load(graph: Graph, access: Access, tensor: Tensor) -> Load:
    return Load(access, value_names(graph)[tensor.node])


def within(graph: Graph, *roots: Node, without: Iterable[Node] = ()) -> set[Node]:
    """What `roots` need, back to products and reductions and `without`."""
    stop = set(without)
    found = set(roots)
    for node in reversed(graph.nodes):
        if node in found and node.op.kind not in (Kind.PRODUCT, Kind.REDUCE, Kind.INPUT) and node not in stop:
            found.update(node.inputs)
    return found


def need_plain_rights(parts: Split) -> None:
    """Raises NoMatch for a right factor that is computed."""
    for product in parts.products:
        if product.right.operand is None:
            raise NoMatch(
                f"the right factor of the product at {product.node.where} is computed element by element, which "
                "kernels do to left factors only\n  compute it beforehand; in place of x @ (w * s), with one s a "
                "column, write (x @ w) * s"
            )


def prologue_of(
    graph: Graph, parts: Split, left: Side, factors: tuple[Factor, ...], accesses: Mapping[str, Access]
) -> Prologue | None:
    """What is computed of the left operand's elements; None where they go as they are."""
    if left.operand is not None and not parts.statistics:
        return None
    for statistic in parts.statistics:
        if statistic.node.op.name != "sum" or statistic.node.dtype is not f32:
            raise NoMatch(
                f"{statistic.node.op.name} of {statistic.node.dtype} at {statistic.node.where}: gemm takes sums of f32 "
                "along the rows that it multiplies, and nothing else of them"
            )
    names = value_names(graph)
    tiles = {f.access.tensor for f in factors}
    roots = [left.node, *(s.node.inputs[0] for s in parts.statistics)]
    needed = within(graph, *roots)
    if first := next((n for n in graph.nodes if n in needed and n.op.kind is Kind.REDUCE), None):
        raise NoMatch(
            f"the left factor needs {first.op.name} at {first.where} of its own row before it is multiplied; gemm "
            "reads the row once\n  only a scale of the whole row can wait until the products are summed, and only one "
            "that is surely finite, as F.rsqrt(F.mean(x * x) + 1e-6) is"
        )
    if any(n.op.name in ("row_index", "col_index") for n in needed):
        raise NoMatch("the left factor is computed from a position; gemm computes it from operands alone")
    inputs = [t for t in graph.inputs if t.node in needed and t.shape]
    listed = [n for n in graph.nodes if n in needed and is_computed(n)]
    by_row = [n for n in listed if graph.extents[n] is not Extent.ELEMENT]
    by_element = [n for n in listed if graph.extents[n] is Extent.ELEMENT]
    # an operand is held as one of three: what a thread brings of a slice, of a vector along it, or of its rows
    elements = [t for t in inputs if graph.extents[t.node] is Extent.ELEMENT]
    values = [t for t in inputs if graph.extents[t.node] is not Extent.ELEMENT]
    return Prologue(
        loads=tuple(load(graph, accesses[t.name], t) for t in elements if t.name in tiles),
        vectors=tuple(load(graph, accesses[t.name], t) for t in elements if t.name not in tiles),
        row_loads=tuple(load(graph, accesses[t.name], t) for t in values),
        row_body=statements(graph, by_row),
        body=statements(graph, by_element),
        value=names[left.node],
        changes=left.operand is None,
        statistics=tuple(
            Reduction("sum", names[s.node.inputs[0]], (names[s.node],)) for s in parts.statistics
        ),
    )  # fmt: skip


def span_of(
    graph: Graph, group: Group, rights: Mapping[Node, Factor], accesses: Mapping[str, Access], first_tile: int,
    tile_cols: int, vector: int,
) -> Span:  # fmt: skip
    """The products of one group, and the statements that make its outputs of them."""
    names = value_names(graph)
    cols = size_of(group.width, graph.sizes)
    needed = within(graph, *(t.node for t in group.outputs))
    inputs = [t for t in graph.inputs if t.node in needed and t.shape]
    listed = [n for n in graph.nodes if n in needed and is_computed(n)]
    extents = graph.extents
    by_row = [n for n in listed if extents[n] is not Extent.ELEMENT]
    stores = [(Store(accesses[t.name], names[t.node]), extents[t.node]) for t in group.outputs]
    return Span(
        products=tuple(Product(names[n], rights[n]) for n in group.products),
        cols=cols,
        first_tile=first_tile,
        tiles=-(-cols // tile_cols),
        vector=vector,
        loads=tuple(load(graph, accesses[t.name], t) for t in inputs if extents[t.node] is Extent.ELEMENT),
        row_loads=tuple(load(graph, accesses[t.name], t) for t in inputs if extents[t.node] is not Extent.ELEMENT),
        row_body=statements(graph, by_row),
        row_stores=tuple(store for store, extent in stores if extent is not Extent.ELEMENT),
        body=statements(graph, [n for n in listed if extents[n] is Extent.ELEMENT]),
        stores=tuple(store for store, extent in stores if extent is Extent.ELEMENT),
    )
