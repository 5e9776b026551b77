"""Heads of one row each that share keys become the rows of one product.

    [..., R, 1, D] @ [..., 1, D, T]  ->  [..., R, D] @ [..., D, T]

A decode step is mostly written so: queries [B, G, R, 1, D] of one token, keys [B, G, 1, T, D] that R heads share. A
kernel's tile is of rows of one head, so that each head would read all keys again, in a tile of one row. Where the axis
of rows is written as 1, heads are rows as well: the graph is made of views of its operands without that axis, and its
outputs are views with it. Exact: each element is made of what it was made of before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, behind, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import Shape
from fusegen.language.trace import OPS
from fusegen.language.types import i32
from fusegen.language.views import View, made

WITHOUT_ROWS = (Kind.MAP, Kind.REDUCE, Kind.PRODUCT)  # what is one thing, whatever axes are before the row


@once_per_graph
def heads_as_rows(graph: Graph) -> Graph:
    """The graph whose rows are heads; the same graph where it has no such products, or does more than that with them.

    Every product has to be of one row a head, as axes are written, and of right factors that all heads share."""
    factors = [p.factors for p in graph.products]
    if not factors or graph.updates or graph.selection or not all(shares(left, right) for left, right in factors):
        return graph
    if len(factors) == 1 and len(factors[0][1].shape) == 2:
        return graph  # rows of one head each meet one matrix: the rules take them as its rows
    rights = behind(right for _, right in factors)
    made_of: dict[Node, Node] = {}
    last = views_of_results(graph)
    for node in graph.nodes:
        if node in rights:
            if node.shape and (node.op.kind is Kind.PRODUCT or is_elsewhere(graph, node, rights)):
                return graph
            made_of[node] = node
        elif node in last:
            (source,) = node.inputs
            made_of[node] = replace(node, inputs=(with_rows(made_of[source], source),))
        elif (found := without_rows(node, made_of)) is None:
            return graph
        else:
            made_of[node] = found
    if any(t.node in rights for t in graph.outputs):
        return graph
    outputs = {t.node: with_rows(made_of[t.node], t.node) for t in graph.outputs}
    changed = with_nodes(graph, made_of)
    whole = tuple(replace(t, node=outputs[t.node]) for t in graph.outputs)
    return replace(changed, outputs=whole, origin=graph.written)


def shares(left: Node, right: Node) -> bool:
    """Is it one row of each of several heads, which share the right factor?"""
    heads, rows = left.shape[-3:-1] if len(left.shape) > 2 else (1, 1)
    return heads != 1 and rows == 1 and right.shape[-3:-2] in ((), (1,))


def views_of_results(graph: Graph) -> set[Node]:
    """Views of what is computed that nothing is computed from: they stay as they are."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        computed = node.op.kind is Kind.VIEW and any(n.op.kind is Kind.PRODUCT for n in behind(node.inputs))
        if computed and found.issuperset(graph.users.get(node, ())):
            found.add(node)
    return found


def is_elsewhere(graph: Graph, node: Node, rights: Iterable[Node]) -> bool:
    """Is a value that right factors are made of used in another place, where it has an axis of rows?"""
    return any(
        user not in rights and not (user.op.kind is Kind.PRODUCT and node in user.factors[1:])
        for user in graph.users.get(node, ())
    )


def without_rows(node: Node, made_of: dict[Node, Node]) -> Node | None:
    """The value without its axis of rows; None of what is not the same without one."""
    if node.op.name == "row_index":
        return Node(OPS["literal"], (), (), i32, node.operator, literal=0)
    if len(node.shape) < 2:
        leaf = node.op.kind in (Kind.INPUT, Kind.LEAF)
        return node if leaf else replace(node, inputs=tuple(made_of[a] for a in node.inputs))
    if node.shape[-2] != 1:
        return None
    if node.op.kind in (Kind.INPUT, Kind.VIEW):
        if any(a.op.kind is not Kind.INPUT for a in node.inputs):
            return None
        return shown(node, without(View.identity(node.shape)), node)
    if node.op.kind not in WITHOUT_ROWS or node.over:
        return None
    shape = (*node.shape[:-2], node.shape[-1])
    if node.op.kind is not Kind.PRODUCT:
        return replace(node, inputs=tuple(made_of[a] for a in node.inputs), shape=shape)
    if node.any_ends or node.scales:
        return None
    left, right = node.factors
    return replace(node, inputs=(made_of[left], matrix(right, len(shape))), shape=shape)


def matrix(right: Node, rank: int) -> Node:
    """A right factor without the axis of heads, which share it."""
    if len(right.shape) < 3:
        return right
    if right.op.kind is Kind.TRANSPOSE:  # which stays the last step: the rules look for it
        inner = matrix(right.inputs[0], rank)
        return replace(right, inputs=(inner,), shape=(*right.shape[:-3], *right.shape[-2:]))
    return shown(right, without(View.identity(right.shape), -3), right)


def with_rows(value: Node, wanted: Node) -> Node:
    """A result with its axis of rows."""
    if value.shape == wanted.shape:
        return value
    inner = View.identity(value.shape)
    at = len(value.shape) - 1
    columns = (*inner.columns[:at], (0,) * len(inner.base), *inner.columns[at:])
    return shown(value, made(wanted.shape, inner.base, inner.offset, columns), wanted)


def without(view: View, axis: int = -2) -> View:
    """Without an axis of size 1, counted from behind."""
    at = len(view.shape) + axis
    shape: Shape = (*view.shape[:at], *view.shape[at + 1 :])
    return made(shape, view.base, view.offset, (*view.columns[:at], *view.columns[at + 1 :]))


def shown(node: Node, view: View, beside: Node) -> Node:
    return Node(OPS["view"], (node,), view.shape, node.dtype, beside.operator, view=view)
