"""Reductions of groups along a row become part of the row's own kernel.

    y [M, N];   g = groups(y, K) [M, G, K];   s = max(g) [M, G, 1];    q = g / s [M, G, K]
    y [M, N];                                 s = group_max(y) [M, G];  q = y / spread(s) [M, N]

A chain that reduces whole rows and groups of them has rows of two lengths, which no one kernel passes over; and tiles
of products hold groups of a product's rows. But what has the shape [.., G, K] is a view of a row, and what has
[.., G, 1] has one value for each group of it. The two sides mean the same, element by element; what shows the values in
another shape becomes a view behind them.

Of chains that reduce groups alone nothing changes: there a group is a row, as short as it is.

What is normalized together may have channels, each with a scale and a shift of its own, as GroupNorm's groups do:

    r = x as [B, G, C * S];  m = sum(r) [B, G, 1];  y = (x as [B, G, C, S] - m[.., None]) * gamma [G, C, 1]
                                                    y = (r - m) * spread(gamma [G, C])    # of rows, which are read once

There operands have one value for each group of a row, and groups are as long as they are: nothing is reduced by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import Shape, Size, size_of
from fusegen.language.trace import OPS
from fusegen.language.views import View, product

REDUCED = ("sum", "max", "min")


class Otherwise(Exception):
    """A value of groups that no row holds: it depends on the place within a group, or on a view of a row's results."""


@once_per_graph
def groups_in_rows(graph: Graph) -> Graph:
    """The graph whose reductions of groups are parts of rows; the graph as it is where it has none beside reductions of
    whole rows, or where a row does not hold them."""
    splits = {split_of(node) for node in graph.nodes} - {None}
    if len(splits) != 1:
        return channels_in_rows(graph)
    ((whole, count, size),) = splits  # type: ignore[misc]
    rows = [n.inputs[0].shape[-1:] == (whole,) for n in graph.reductions if not n.over]
    grouped = [n.inputs[0].shape[-2:] == (count, size) for n in graph.reductions if not n.over]
    apart = (*graph.selections, *graph.scans, *graph.gathers, *(n for n in graph.reductions if n.over))
    held = groups_of_products(graph) if graph.products else any(rows)
    if not held or not any(grouped) or apart:
        return channels_in_rows(graph)
    of_rows = (n for n in graph.nodes if (of := split_of(n)) and of[1:] == (count, size))
    split = {n: View.identity(n.inputs[0].shape) for n in of_rows}
    try:
        return Rows(graph, split, (count, size)).result()
    except (Otherwise, ValueError):
        return graph


def channels_in_rows(graph: Graph) -> Graph:
    """The graph whose values by channels are parts of the rows that are reduced; the graph as it is where it reduces
    none, or has no view of the same array with more axes."""
    apart = (*graph.products, *graph.selections, *graph.scans, *graph.gathers, *graph.scatters)
    rows = [n.inputs[0] for n in graph.reductions]
    if not rows or apart or any(n.over for n in graph.reductions) or len({r.shape for r in rows}) != 1:
        return graph
    whole = [n for n in graph.nodes if n.view is not None and n.shape == rows[0].shape]
    split: dict[Node, View] = {}
    for node in graph.nodes:
        same = (w for w in whole if w.inputs == node.inputs and splits_last(w, node))
        if (row := next(same, None)) is not None and row.view is not None:
            split[node] = row.view
    tails = {node.shape[len(rows[0].shape) - 1 :] for node in split}
    if len(tails) != 1:
        return graph
    try:
        return Rows(graph, split, *tails).result()
    except (Otherwise, ValueError):
        return graph


def splits_last(whole: Node, node: Node) -> bool:
    """Does a view show the same as `whole`, with the last axis in several?"""
    lead = len(whole.shape) - 1
    if node.view is None or len(node.shape) < lead + 2:
        return False
    try:
        return node.view.merged(lead, len(node.shape) - lead) == whole.view
    except ValueError:
        return False


def groups_of_products(graph: Graph) -> bool:
    """Are there groups, and all of them of products' rows, which tiles of products hold?"""
    behind, found = set(graph.products), [node for node in graph.nodes if split_of(node)]
    for node in graph.nodes:
        if any(a in behind for a in node.inputs):
            behind.add(node)
    return bool(found) and behind.issuperset(found)


def split_of(node: Node) -> tuple[Size, Size, Size] | None:
    """Of a view that takes its argument's last axis as groups: the axis, how many groups there are, and their size."""
    if node.view is None or len(node.shape) < 2 or len(node.inputs[0].shape) != len(node.shape) - 1:
        return None
    if node.shape[-1] == 1:  # an axis that is added
        return None
    source, (count, size) = node.inputs[0].shape, node.shape[-2:]
    try:
        split = View.identity(source).split(len(source) - 1, (count, size))
    except ValueError:
        return None
    return (source[-1], count, size) if node.view == split else None


class Rows:
    """The nodes of the new graph while they are made: each value as it is, and those of groups as a row holds them.
    `split`: the views that show groups, each with the view of its argument that shows rows. `tail`: the last axes of
    groups, of which the first counts them."""

    def __init__(self, graph: Graph, split: Mapping[Node, View], tail: Shape) -> None:
        self.graph = graph
        self.tail = tail
        self.narrow: Shape = (tail[0], *(1,) * (len(tail) - 1))
        self.count = tail[0]
        self.size = product(tail[1:])
        self.length = product(tail)
        self.group = size_of(self.size, graph.sizes)
        self.split = split
        self.inside = self.find_inside()
        self.held: dict[Node, Node] = {}  # of what is inside: by rows [.., N], or by groups [.., G]
        self.made: dict[Node, Node] = {}

    def find_inside(self) -> set[Node]:
        """The views that show groups, and what is computed from them in the shape of groups."""
        found = set(self.split)
        for node in self.graph.nodes:
            of_groups = node.shape[-len(self.tail) :] in (self.tail, self.narrow)
            computed = node.op.kind is Kind.MAP or (node.op.kind is Kind.REDUCE and not node.over)
            if of_groups and computed and any(a in found for a in node.inputs):
                found.add(node)
        return found

    def result(self) -> Graph:
        for node in self.graph.nodes:
            if node in self.inside:
                self.held[node] = self.in_row(node)
            else:
                self.made[node] = self.plain(node)
        for tensor in self.graph.outputs:
            if tensor.node in self.inside:
                self.made[tensor.node] = self.shown(tensor.node)
        named = {node: held for node, held in self.held.items() if node not in self.split}
        return with_nodes(self.graph, {**named, **self.made})

    # ---------------------------------------------------------------- as rows hold it

    def in_row(self, node: Node) -> Node:
        if node in self.split:
            return self.seen(self.made[node.inputs[0]], self.split[node], node)
        wide = node.shape[-len(self.tail) :] == self.tail
        leading = node.shape[: -len(self.tail)]
        if node.op.kind is Kind.REDUCE:
            (source,) = node.inputs
            if source not in self.inside or source.shape[-2:] != self.tail:
                raise Otherwise
            text = f"{{0}}.reshape(*{{0}}.shape[:-1], -1, {self.group}).{node.op.name}(-1{self.sum_type(node)})"
            op = OPS[f"group_{node.op.name}"]
            return replace(
                node, op=op, inputs=(self.held[source],), shape=(*leading, self.count), group=self.group, text=text
            )
        arguments = tuple(self.argument(a, wide) for a in node.inputs)
        return replace(node, inputs=arguments, shape=(*leading, self.length if wide else self.count))

    def sum_type(self, node: Node) -> str:
        """Sums of i32 stay i32, as numpy's own would not."""
        return ", dtype=np.int32" if node.op.name == "sum" and node.dtype.kind == "int" else ""

    def argument(self, node: Node, wide: bool) -> Node:
        """One of a step's arguments as the step has it in a row."""
        if not node.shape:
            return self.made[node]
        if node not in self.inside:
            return self.operand(node, wide)
        held = self.held[node]
        return self.spread(held, node, self.size) if wide and node.shape[-len(self.tail) :] == self.narrow else held

    def spread(self, held: Node, of: Node, size: Size) -> Node:
        """The value of each group of so many neighbours at all of its places."""
        group = size_of(size, self.graph.sizes)
        text = f"np.repeat({{0}}, {group}, axis=-1)"
        shape = (*held.shape[:-1], self.length)
        return Node(OPS["spread"], (held,), shape, held.dtype, of.operator, group=group, text=text)

    def operand(self, node: Node, wide: bool) -> Node:
        """What is not made of groups: an array in their shape, as rows; one value a row; or one a group, as that of a
        channel is, at all places of it."""
        own = node.shape[-len(self.tail) :]
        whole = View.identity(node.shape)
        if own == (1,) * len(self.tail):
            return self.seen(self.made[node], whole.sliced((..., *(0,) * (len(own) - 1))), node)
        if not wide or own not in (self.tail, self.narrow) or (own == self.narrow and self.graph.products):
            raise Otherwise
        if own == self.tail:
            return self.seen(self.made[node], whole.merged(len(node.shape) - len(own), len(own)), node)
        few = whole.sliced((..., *(0,) * (len(own) - 1)))
        return self.spread(self.seen(self.made[node], few, node), node, self.size)

    # ---------------------------------------------------------------- as it is

    def plain(self, node: Node) -> Node:
        if node.view is not None and node.inputs[0] in self.inside:
            source = node.inputs[0]
            return self.seen(self.held[source], node.view.of(self.unheld(source)), node)
        if any(a in self.inside for a in node.inputs):
            arguments = tuple(self.shown(a) if a in self.inside else self.made[a] for a in node.inputs)
        else:
            arguments = tuple(self.made[a] for a in node.inputs)
        return node if arguments == node.inputs else replace(node, inputs=arguments)

    def shown(self, node: Node) -> Node:
        """A value of groups in its own shape."""
        return self.seen(self.held[node], self.unheld(node), node)

    def unheld(self, node: Node) -> View:
        """The view that shows what a row holds in the shape of groups."""
        held = self.held[node].shape
        if node.shape[-len(self.tail) :] == self.tail:
            return View.identity(held).split(len(held) - 1, self.tail)
        return View.identity(held).sliced((..., *(None,) * (len(self.tail) - 1)))

    def seen(self, held: Node, view: View, of: Node) -> Node:
        if view.is_identity:
            return held
        return Node(OPS["view"], (held,), view.shape, held.dtype, of.operator, view=view)
