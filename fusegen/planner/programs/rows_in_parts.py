"""Rows that are reduced whole and taken apart behind that become rows of their parts.

    m = sum(x) of x [M, D];  y = x / m;  y[..., : D // 2], y[..., D // 2 :]
    l = x[..., : D // 2];  h = x[..., D // 2 :];  m = sum(l) + sum(h);  l / m, h / m

RoPE turns pairs, of which one half of a head has the first numbers and the other one the second, and behind a norm each
half needs the sums of both. No one kernel has rows of D and of D / 2. It has rows of D / 2, of which it reads two at a
time: a thread has both numbers of its pairs, and what it reads once is summed and turned.

Sums are made in another order; the largest and the least stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.nodes import size_number
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import Shape, size_of
from fusegen.language.trace import OPS
from fusegen.language.views import View, made

TOGETHER = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
MOST_PARTS = 4  # that a thread holds vectors of at the same time


@dataclass(frozen=True, slots=True)
class Part:
    """Where a part lies in a row: its view of one, and what numbers say of it."""

    view: View
    offset: int
    step: int
    length: int


@once_per_graph
def rows_in_parts(graph: Graph) -> Graph:
    """The graph whose reductions are of parts of rows; the graph as it is where it takes no rows apart that it reduces,
    or does more with them."""
    apart = (*graph.products, *graph.selections, *graph.scans, *graph.grouped, *graph.orders)
    rows = [n for n in graph.reductions if not n.over]
    if apart or not rows or len(rows) < len(graph.reductions) or not {n.op.name for n in rows} <= TOGETHER.keys():
        return graph
    (wide, *others) = {n.inputs[0].shape[-1] for n in rows}
    parts = parts_of_rows(graph, wide) if not others else ()
    if not parts:
        return graph
    made_of: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made_of[a] for a in node.inputs)
        made_of[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node in rows:
            made_of[node] = together(made_of[node], parts)
        if node.size == wide:  # a constant all the same, which no row is as long as
            number = size_number(node, graph.sizes)
            made_of[node] = Node(OPS["literal"], (), (), node.dtype, node.operator, literal=number)
    return with_nodes(graph, made_of)


def parts_of_rows(graph: Graph, wide: object) -> tuple[Part, ...]:
    """The parts that rows of so many columns are taken apart into, behind a reduction: all of a row, in parts of one
    length, one behind another or by turns. None where these are others."""
    behind: set[Node] = set()
    found: dict[tuple[int, int, int], Part] = {}
    for node in graph.nodes:
        if node.op.kind is Kind.REDUCE or any(a in behind for a in node.inputs):
            behind.add(node)
        if node.view is None or node not in behind or node.inputs[0].shape[-1:] != (wide,):
            continue
        if node.inputs[0].shape[-1:] == node.shape[-1:]:
            continue
        if (part := part_of(node, graph)) is None:
            return ()
        found.setdefault((part.offset, part.step, part.length), part)
    parts = tuple(found[key] for key in sorted(found))
    count, lengths = len(parts), {part.length for part in parts}
    if not 1 < count <= MOST_PARTS or len(lengths) != 1:
        return ()
    (length,) = lengths
    places = [(part.offset, part.step) for part in parts]
    whole = count * length == size_of(parts[0].view.base[-1][0], graph.sizes)
    behind_another = places == [(n * length, 1) for n in range(count)]
    return parts if whole and (behind_another or places == [(n, count) for n in range(count)]) else ()


def part_of(node: Node, graph: Graph) -> Part | None:
    """Of a view that shows a part of each row, where that is."""
    view, last = node.view, len(node.shape) - 1
    if view is None or len(node.shape) != len(node.inputs[0].shape):
        return None
    offset, step = view.offset[-1], view.steps[-1][last]
    if view != stretch(node.inputs[0].shape, view):
        return None
    numbers = (size_of(size, graph.sizes) for size in (offset, step, node.shape[-1]))
    return Part(view, *numbers)


def stretch(shape: Shape, like: View) -> View:
    """The view of rows of an array that takes of each what `like` does."""
    whole = View.identity(shape)
    last = len(shape) - 1
    columns = (*whole.columns[:last], (*(0,) * last, like.steps[-1][-1]))
    return made((*shape[:last], like.shape[-1]), whole.base, (*(0,) * last, like.offset[-1]), columns)


def together(node: Node, parts: tuple[Part, ...]) -> Node:
    """A reduction of rows by that of each part."""
    (source,) = node.inputs
    total: Node | None = None
    for part in parts:
        view = stretch(source.shape, part.view)
        shown = Node(OPS["view"], (source,), view.shape, source.dtype, node.operator, view=view)
        one = replace(node, inputs=(shown,))
        op = OPS[TOGETHER[node.op.name]]
        total = one if total is None else Node(op, (total, one), node.shape, node.dtype, node.operator)
    assert total is not None
    return total
