"""Reductions of groups along a row become part of the row's own kernel.

    y [M, N];   g = groups(y, K) [M, G, K];   s = max(g) [M, G, 1];    q = g / s [M, G, K]
    y [M, N];                                 s = group_max(y) [M, G];  q = y / spread(s) [M, N]

A chain that reduces whole rows and groups of them has rows of two lengths, which no one kernel passes over; and tiles
of products hold groups of a product's rows. But what has the shape [.., G, K] is a view of a row, and what has
[.., G, 1] has one value for each group of it. The two sides mean the same, element by element; what shows the values in
another shape becomes a view behind them.

Of chains that reduce groups alone nothing changes: there a group is a row, as short as it is.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import Size, size_of
from fusegen.language.trace import OPS
from fusegen.language.views import View

REDUCED = ("sum", "max", "min")


class Otherwise(Exception):
    """A value of groups that no row holds: it depends on the place within a group, or on a view of a row's results."""


@once_per_graph
def groups_in_rows(graph: Graph) -> Graph:
    """The graph whose reductions of groups are parts of rows; the graph as it is where it has none beside reductions of
    whole rows, or where a row does not hold them."""
    splits = {split_of(node) for node in graph.nodes} - {None}
    if len(splits) != 1:
        return graph
    ((whole, count, size),) = splits  # type: ignore[misc]
    rows = [n.inputs[0].shape[-1:] == (whole,) for n in graph.reductions if not n.over]
    grouped = [n.inputs[0].shape[-2:] == (count, size) for n in graph.reductions if not n.over]
    apart = (*graph.selections, *graph.scans, *graph.gathers, *(n for n in graph.reductions if n.over))
    held = groups_of_products(graph) if graph.products else any(rows)
    if not held or not any(grouped) or apart:
        return graph
    try:
        return Rows(graph, count, size).result()
    except (Otherwise, ValueError):
        return graph


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
    source, (count, size) = node.inputs[0].shape, node.shape[-2:]
    try:
        split = View.identity(source).split(len(source) - 1, (count, size))
    except ValueError:
        return None
    return (source[-1], count, size) if node.view == split else None


class Rows:
    """The nodes of the new graph while they are made: each value as it is, and those of groups as a row holds them."""

    def __init__(self, graph: Graph, count: Size, size: Size) -> None:
        self.graph = graph
        self.count = count
        self.size = size
        self.group = size_of(size, graph.sizes)
        self.split = {n for n in graph.nodes if (found := split_of(n)) and found[1:] == (count, size)}
        self.inside = self.find_inside()
        self.held: dict[Node, Node] = {}  # of what is inside: by rows [.., N], or by groups [.., G]
        self.made: dict[Node, Node] = {}

    def find_inside(self) -> set[Node]:
        """The views that show groups, and what is computed from them in the shape of groups."""
        found = set(self.split)
        for node in self.graph.nodes:
            of_groups = node.shape[-2:] in ((self.count, self.size), (self.count, 1))
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
            return self.made[node.inputs[0]]
        wide = node.shape[-1] == self.size
        leading = node.shape[:-2]
        if node.op.kind is Kind.REDUCE:
            (source,) = node.inputs
            if source not in self.inside or source.shape[-2:] != (self.count, self.size):
                raise Otherwise
            text = f"{{0}}.reshape(*{{0}}.shape[:-1], -1, {self.group}).{node.op.name}(-1{self.sum_type(node)})"
            op = OPS[f"group_{node.op.name}"]
            return replace(
                node, op=op, inputs=(self.held[source],), shape=(*leading, self.count), group=self.group, text=text
            )
        arguments = tuple(self.argument(a, wide) for a in node.inputs)
        return replace(node, inputs=arguments, shape=(*leading, self.count * self.size if wide else self.count))

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
        if wide and node.shape[-1] == 1:
            text = f"np.repeat({{0}}, {self.group}, axis=-1)"
            shape = (*node.shape[:-2], self.count * self.size)
            return Node(
                OPS["spread"], (held,), shape, node.dtype, node.operator, group=self.group, text=text
            )  # fmt: skip
        return held

    def operand(self, node: Node, wide: bool) -> Node:
        """What is not made of groups: an array in their shape, as rows."""
        if not wide or node.shape[-2:] != (self.count, self.size):
            raise Otherwise
        view = View.identity(node.shape).merged(len(node.shape) - 2, 2)
        return Node(OPS["view"], (self.made[node],), view.shape, node.dtype, node.operator, view=view)

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
        if node.shape[-1] == self.size:
            return View.identity(held).split(len(held) - 1, (self.count, self.size))
        return View.identity(held).sliced((..., None))

    def seen(self, held: Node, view: View, of: Node) -> Node:
        if view.is_identity:
            return held
        return Node(OPS["view"], (held,), view.shape, held.dtype, of.operator, view=view)
