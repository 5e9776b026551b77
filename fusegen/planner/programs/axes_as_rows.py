"""Reductions over several of the last axes are of rows, where these lie together in memory.

    x [B, C, H, W];  s = sum over (C, H) of sum(x) [B, 1, 1, 1];           y = (x - s) * g [C, 1, 1]
    r = x as [B, C * H * W];                    s = sum(r) [B, 1];         y = (r - s) * spread(g [C])

A kernel reduces the last axis, or axes of rows, not both: each such reduction would be two, and what comes of it would
read its operands again. As rows of all these axes a chain is one kernel, and a row is read once. What an operand has
the same along the last of the axes, as a scale of each channel, is one value for neighbours in a row.

Sums are made in another order. The axes' sizes are constants of the kernel, and each operand has to lie so that they
are one axis of it: a graph with `axes_apart` reduces them one after the other instead, whatever their sizes and
strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.nodes import size_number
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import Shape, Size, dims_in, size_of
from fusegen.language.trace import OPS
from fusegen.language.types import f32
from fusegen.language.views import View, product
from fusegen.planner.programs.grouping import Otherwise, Rows

LEAST_COLUMNS = 1024  # of rows that hold some of the axes alone, as more blocks may have them: a pass of a warp or more


@dataclass(frozen=True, slots=True)
class Span:
    """A reduction over axes that are the last `count` of `source`, and maybe over others before them."""

    of_rows: Node  # the reduction of the last axis, which the one over the others takes
    source: Node
    count: int


@once_per_graph
def axes_as_rows(graph: Graph) -> Graph:
    """The graph whose reductions over the last axes are of rows; the graph as it is where it has none, or has some over
    different axes, or a value that no such row holds."""
    spans = {node: span for node, span in spans_of(graph).items() if -min(node.over) == span.count}
    tails = {span.source.shape[-span.count :] for span in spans.values()}
    if len(tails) != 1:
        return graph
    try:
        return AxesInRows(graph, spans, *tails).result()
    except (Otherwise, ValueError):
        return graph


@once_per_graph
def ways_over_axes(graph: Graph) -> tuple[Graph, ...]:
    """The same chain with rows of as many of the last axes as there are, with rows of as few as make LEAST_COLUMNS,
    which are more, and with rows of the last axis alone: what is left of the axes is reduced over such rows."""
    if not spans_of(graph):
        return (graph,)
    ways = (rows_first(graph), rows_first(graph, LEAST_COLUMNS))
    found = {tuple(node.over for node in way.reductions): way for way in ways}
    return (*found.values(), replace(graph, axes_apart=True))


def rows_first(graph: Graph, columns: float = math.inf) -> Graph:
    """The graph whose reductions over axes are over the last ones first, until they make so many columns."""
    made: dict[Node, Node] = {}
    spans = spans_of(graph)
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if (span := spans.get(node)) is None:
            continue
        sizes = [size_of(size, graph.sizes) for size in span.source.shape]
        enough = (n for n in range(1, span.count) if math.prod(sizes[-n:]) >= columns)
        count = next(enough, span.count)
        rows, rest = (tuple(a for a in node.over if (a >= -count) is inside) for inside in (True, False))
        if rows and rest:
            shape = tuple(1 if axis in rows else size for axis, size in enumerate(inputs[0].shape, -len(sizes)))
            of_rows = replace(node, inputs=inputs, shape=shape, over=rows)
            made[node] = replace(node, inputs=(of_rows,), over=rest)
    return graph if all(made[n] is n for n in graph.nodes) else with_nodes(graph, made)


@once_per_graph
def spans_of(graph: Graph) -> Mapping[Node, Span]:
    """The reductions over several of the last axes, but not over all axes: one is left for the number of rows, which
    calls choose."""
    outputs = {t.node for t in graph.outputs}
    found: dict[Node, Span] = {}
    for node in () if graph.axes_apart else graph.reductions:
        (inner,) = node.inputs
        alone = graph.users[inner] == (node,) and inner not in outputs
        if not node.over or inner.over or inner.op is not node.op or not alone:
            continue
        (source,) = inner.inputs
        if (count := trailing(source.shape, node.over)) > 1:
            found[node] = Span(inner, source, count)
    return found


def trailing(shape: Shape, over: tuple[int, ...]) -> int:
    """How many of the last axes are reduced, the last one among them; those of one element between them count as
    well."""
    count, last = 1, 1
    for axis in range(-2, -len(shape), -1):
        if axis in over:
            last = count + 1
        elif shape[axis] != 1:
            break
        count += 1
    return last


def counted(node: Node) -> Size | None:
    """Of a size, and of a product of several, which is how many values axes have together; None of any other value."""
    if node.size is not None:
        return node.size
    if node.op.name != "mul" or node.shape or node.dtype is not f32:
        return None
    one, other = map(counted, node.inputs)
    return None if one is None or other is None else one * other


class AxesInRows(Rows):
    """The nodes of the new graph while they are made. What is inside has the shape of the axes, and is held as a row
    [.., N], or is one value for all of them, [.., 1]."""

    def __init__(self, graph: Graph, spans: Mapping[Node, Span], tail: Shape) -> None:
        self.spans = spans
        self.skipped = {span.of_rows for span in spans.values()}
        self.ones: Shape = (1,) * len(tail)
        super().__init__(graph, {}, tail)

    def own(self, node: Node) -> Shape:
        """What a value has along the axes."""
        return (*self.ones, *node.shape)[-len(self.tail) :]

    def find_inside(self) -> set[Node]:
        found = {n for n in self.graph.nodes if n.op.kind is Kind.MAP and n.shape and self.own(n) == self.tail}
        for node in self.graph.nodes:
            one = node.op.kind is Kind.MAP and self.own(node) == self.ones and any(a in found for a in node.inputs)
            if one or node in self.spans:
                found.add(node)
        return found

    def plain(self, node: Node) -> Node:
        if node in self.skipped:
            return node
        if (size := counted(node)) is None or (size != self.length and node.size is None):
            return super().plain(node)
        if size == self.length:  # the row's own length
            return Node(OPS["size"], (), (), node.dtype, node.operator, size=size)
        if not set(dims_in(size)) & set(dims_in(self.tail)):
            return node
        number = size_number(node, self.graph.sizes)  # as any other size of these axes is a constant
        return Node(OPS["literal"], (), (), node.dtype, node.operator, literal=number)

    def in_row(self, node: Node) -> Node:
        if (span := self.spans.get(node)) is not None:
            source = self.argument(span.source, wide=True)
            return replace(node, inputs=(source,), shape=(*source.shape[:-1], 1), over=())
        wide = self.own(node) == self.tail
        arguments = tuple(self.argument(a, wide) for a in node.inputs)
        return replace(node, inputs=arguments, shape=(*node.shape[: -len(self.tail)], self.length if wide else 1))

    def argument(self, node: Node, wide: bool) -> Node:
        if not node.shape:
            return self.made[node]
        return self.held[node] if node in self.inside else self.operand(node, wide)

    def operand(self, node: Node, wide: bool) -> Node:
        """What is not made of rows: an array of all the axes, as rows; one value for all of them; or one for what
        neighbours are the same."""
        own, rank = self.own(node), len(self.tail)
        view = View.identity(node.shape)
        view = view.sliced((*(None,) * (rank - len(node.shape)), ...))
        lead = len(view.shape) - rank
        if own == self.ones:
            return self.seen(self.made[node], view.sliced((..., *(0,) * (rank - 1))), node)
        if wide and own == self.tail:
            return self.seen(self.made[node], view.merged(lead, rank), node)
        for count in range(1, rank) if wide else ():
            if own == (*self.tail[:count], *self.ones[count:]):
                few = view.sliced((..., *(0,) * (rank - count))).merged(lead, count)
                return self.spread(self.seen(self.made[node], few, node), node, product(self.tail[count:]))
        raise Otherwise

    def unheld(self, node: Node) -> View:
        held = View.identity(self.held[node].shape)
        if self.own(node) == self.tail:
            return held.split(len(held.shape) - 1, self.tail)
        return held.sliced((..., *(None,) * (len(self.tail) - 1)))
