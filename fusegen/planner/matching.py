"""One file a template: each rule yields every candidate plan it knows for a graph, or raises NoMatch with its reason.

A rule never ranks; `fusegen.planner.candidates` does, by what each plan costs. Where no rule can plan a graph, the
reason to show is the one of the first rule that is for such graphs: rules of one kind stand in the order of how much
they take.
"""

from __future__ import annotations

from fusegen.language.axes import over_rows
from fusegen.language.graph import Graph, Node
from fusegen.language.reference import PLACES
from fusegen.language.types import DType, f32, shape_text

MOST_COLS = 2**31 - 2**20  # a thread counts columns in 32 bits, up to a tile beyond the row


def need_countable(cols: int) -> None:
    """Raises NoMatch for a row whose columns 32 bits can't count."""
    if cols > MOST_COLS:
        raise NoMatch(f"a row of {cols} elements; kernels count a row's columns in 32 bits, up to {MOST_COLS}")


def need_no_product(graph: Graph, rule: str) -> None:
    """Raises NotFor for a chain that multiplies matrices: it has rows of several lengths, and sums beside its pass."""
    if graph.products:
        first = graph.products[0]
        raise NotFor(f"{first.operator} at {first.where} multiplies matrices; {rule} has no products")


def need_no_columns(graph: Graph, rule: str) -> None:
    """Raises NotFor for a chain that reduces over rows, or sorts slots by their groups."""
    if graph.orders:
        first = graph.orders[0]
        raise NotFor(f"{first.operator} at {first.where} sorts slots by their groups; {rule} takes each row by itself")
    if graph.parts:
        part = graph.parts[0]
        said = f"{part.operator} at {part.where} reduces over every so-many-th row"
        raise NotFor(f"{said}; {rule} takes each row by itself")
    if found := over_rows(graph):
        does = "reduces" if found[0] in graph.reductions else "runs"
        raise NotFor(f"{found[0].operator} at {found[0].where} {does} over rows; {rule} takes each row by itself")


def need_no_selection(graph: Graph) -> None:
    """Raises NotFor for a chain that chooses columns: its results have another row length than its pass."""
    if node := graph.selection:
        raise NotFor(
            f"{node.operator} at {node.where} chooses columns (k={node.shape[-1]}); this rule keeps whole rows"
        )


def need_selection(graph: Graph, rule: str, keys: tuple[DType, ...] = (f32,)) -> Node:
    """The node that chooses columns. Raises NotFor for a chain without one or with products, NoMatch where it orders by
    other keys."""
    node = graph.selection
    need_no_product(graph, rule)
    if node is None:
        raise NotFor(f"the chain keeps every column; {rule} is for chains that choose some, as F.topk does")
    if node.inputs[0].dtype not in keys:
        raise NoMatch(
            f"{node.operator} at {node.where} orders by {node.inputs[0].dtype} values; {rule} orders by {keys[0]}"
        )
    return node


def drawn(graph: Graph) -> tuple[Node, ...]:
    """The indices of elements and rows that random numbers are drawn for."""
    return tuple(node for node in graph.nodes if node.op.name in PLACES)


def need_no_draw(graph: Graph) -> None:
    """Raises NoMatch for random numbers, in a kernel that doesn't know which element of its rows it has."""
    for node in drawn(graph):
        raise NoMatch(
            f"{node.operator} at {node.where} draws random numbers, and the chain multiplies matrices; kernels of "
            "products draw none, but those of attention for its scores\n  draw in a second chain, of the result"
        )


def need_whole_rows(graph: Graph) -> None:
    """Raises NoMatch for random numbers whose element indices a kernel of whole rows can't tell."""
    for node in () if graph.products else drawn(graph):
        if node.shape[:-1] != graph.shape[:-1]:
            raise NoMatch(
                f"{node.operator} at {node.where} draws for {shape_text(node.shape)}, and the rows of the chain are "
                f"{shape_text(graph.shape[:-1])}; draw for a value that has them all"
            )


class NoMatch(Exception):
    """This rule can't plan the graph; the text says why, in the user's words."""


class NotFor(NoMatch):
    """This rule is for graphs of another kind, or for other targets; its user need not know where another one is."""
