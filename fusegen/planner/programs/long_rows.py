"""Reductions of a few long rows go by groups of their columns first.

    r [M, 1] = sum(f(x))  of x [M, N]
    r_of_groups [M, G, 1] = sum(f(x))  of x [M, G, N / G];  r = sum(r_of_groups)

A row belongs to one block, or on Hopper to a cluster of 16: while it sums one row of 2^26 gradients, nine tenths of a
GPU are idle. Groups are rows of their own to as many blocks, and a second kernel reduces what they leave. Sums are made
in another order, and always in the same one. Where no number of groups comes out even, as of 7000003 gradients, the
rest of the row is reduced by itself:

    r = sum(r_of_groups) + sum(f(x)[..., G * group :])
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import evenly
from fusegen.language.trace import OPS
from fusegen.language.types import Size
from fusegen.language.views import View
from fusegen.targets.base import Target

LEAST_COLUMNS = 1 << 17  # of a row: shorter ones take a block less time than a second launch
GROUP = 1 << 14  # columns, at most: rows that long are held by a block's registers, and read at a copy's rate
LEAST_GROUP = 1 << 10
WHOLE = 64  # columns: a group begins at a whole number of vectors, and of sectors
BOTH = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}  # of two parts of a row
PLAIN = (Kind.INPUT, Kind.LEAF, Kind.MAP, Kind.REDUCE, Kind.VIEW)


def by_groups(graph: Graph, target: Target) -> Graph:
    """The graph whose long rows are reduced by groups; the same graph where rows are enough for a GPU, or do more."""
    if graph.cols < LEAST_COLUMNS or 2 * graph.rows > target.sms or graph.batch_invariant:
        return graph
    return grouped_rows(graph)


@once_per_graph
def grouped_rows(graph: Graph) -> Graph:
    wide = graph.shape[-1]
    if any(n.op.kind not in PLAIN or n.over for n in graph.nodes):
        return graph
    even = next((g for g in range(GROUP, LEAST_GROUP - 1, -WHOLE) if graph.cols % g == 0), 0)
    group = even or GROUP
    count: Size = evenly(wide, group) if even else graph.cols // group
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node.op.kind is not Kind.REDUCE or node.inputs[0].shape[-1] != wide:
            continue
        leading, whole = node.shape[:-1], View.identity(inputs[0].shape)
        inside = whole if even else whole.sliced((Ellipsis, slice(0, group * (graph.cols // group))))
        groups = shown(inputs[0], inside.split(len(leading), (count, group)))
        parts = replace(node, inputs=(groups,), shape=(*leading, count, 1))
        parts_of_row = shown(parts, View.identity(parts.shape).sliced((Ellipsis, 0)))
        made[node] = replace(node, inputs=(parts_of_row,))
        if not even:
            rest = shown(inputs[0], whole.sliced((Ellipsis, slice(group * (graph.cols // group), graph.cols))))
            made[node] = replace(node, op=OPS[BOTH[node.op.name]], inputs=(made[node], replace(node, inputs=(rest,))))
    if all(made[n] is n for n in graph.nodes):
        return graph
    return replace(with_nodes(graph, made), origin=graph.written)


def shown(node: Node, view: View) -> Node:
    return Node(OPS["view"], (node,), view.shape, node.dtype, node.operator, view=view)
