"""Rows of a product that are reduced together become columns of its transpose.

    out[s, t] = sum over h of f(q[s, h] @ k[t])     each H rows of a product [S * H, T] are reduced
    out[s, t] = sum over h of f(k[t] @ q[s, h])     each H columns of a product [T, S * H]

So do indexers of sparse attention: scores of 32 or 64 heads, of which a weighted sum is kept for each token and key. A
tile's rows lie in different warps, and its columns in one thread and its neighbours: reduced there, the product never
goes to memory, which has H times as many numbers as the result. The graph is made of the transposed product; elements
are what they were, and a group is reduced in another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.sizes import Shape, broadcast, size_of
from fusegen.language.trace import OPS
from fusegen.language.views import View

MOST_TOGETHER = 64  # rows: columns of which a tile of the transpose has several groups
TOGETHER = 8  # rows come in multiples: columns of which a thread has a pair
REDUCES = ("sum", "max", "min")  # what tiles make of their columns


@once_per_graph
def rows_as_columns(graph: Graph) -> Graph:
    """The graph whose reduced rows of products are columns; the same graph where it has none, or more is made of such
    a product than elementwise steps before it is reduced."""
    if graph.batch_invariant or graph.updates:
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node.over == (-2,) and node.op.name in REDUCES:
            made[node] = turned(graph, node, made) or made[node]
    if all(made[n] is n for n in graph.nodes):
        return graph
    return replace(with_nodes(graph, made), origin=graph.written)


def turned(graph: Graph, node: Node, made: dict[Node, Node]) -> Node | None:
    """The reduction, of columns of the transposed product; None where it is no such reduction."""
    (values,) = node.inputs
    if len(values.shape) < 3:
        return None
    together = size_of(values.shape[-2], graph.sizes)
    if together > MOST_TOGETHER or together % TOGETHER:
        return None
    found: dict[Node, Node] = {}
    products = 0
    for step in steps_to(values):
        product = product_of(step, values.shape)
        if product is not None:
            columns = columns_of(step, product, made)
            products += 1
        elif step.op.kind is Kind.MAP and step.shape:
            inputs = [found[a] for a in step.inputs]
            columns = replace(step, inputs=tuple(inputs), shape=reduce(broadcast, [a.shape for a in inputs]))
        else:
            columns = beside(made[step], values.shape)
        if columns is None:
            return None
        found[step] = columns
    if products != 1:
        return None
    *others, rows, each, cols = values.shape
    whole = found[values]
    if whole.shape != (*others, cols, rows * each):
        return None
    groups = shown(whole, View.identity(whole.shape).split(len(others) + 1, (rows, each)))
    reduced = replace(node, inputs=(groups,), over=(), shape=(*others, cols, rows, 1))
    axes = range(len(values.shape))
    return shown(reduced, View.identity(reduced.shape).transposed((*axes[:-3], axes[-2], axes[-1], axes[-3])))


def steps_to(values: Node) -> Iterable[Node]:
    """The elementwise steps that make these values, what they are made of first, down to products and other nodes."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in found:
            return
        if node.op.kind is Kind.MAP and node.shape and product_of(node, values.shape) is None:
            for argument in node.inputs:
                visit(argument)
        found[node] = None

    visit(values)
    return found


def product_of(node: Node, shape: Shape) -> Node | None:
    """The product that has this shape, or whose rows are seen as its S and H; None of any other value."""
    if node.shape != shape:
        return None
    if node.op.kind is Kind.VIEW:
        (source,) = node.inputs
        if source.op.kind is not Kind.PRODUCT or len(source.shape) != len(shape) - 1:
            return None
        whole = View.identity(source.shape).split(len(shape) - 3, (shape[-3], shape[-2]))
        return source if node.view == whole and is_plain(source) else None
    return node if node.op.kind is Kind.PRODUCT and is_plain(node) else None


def is_plain(product: Node) -> bool:
    """Is it of two factors, and of nothing else?"""
    return product.op.name == "matmul" and len(product.inputs) == 2


def columns_of(node: Node, product: Node, made: dict[Node, Node]) -> Node | None:
    """The transposed product [..., T, S * H]; None where the right factor has axes of its own beside K and T."""
    rows, (left, right) = len(node.shape) - 3, (made[a] for a in product.inputs)
    if product is node:  # S and H are axes of the left factor
        if len(left.shape) != rows + 3:
            return None
        left = shown(left, View.identity(left.shape).merged(rows, 2))
        if len(right.shape) == rows + 3 and right.shape[rows] == 1:
            right = shown(right, View.identity(right.shape).sliced((*[slice(None)] * rows, 0)))
    if len(right.shape) != rows + 2 or len(left.shape) != rows + 2:
        return None
    *others, merged, _ = left.shape
    cols = right.shape[-1]
    if tuple(others) != right.shape[:-2]:
        return None
    return replace(product, inputs=(transposed(right), transposed(left)), shape=(*others, cols, merged))


def transposed(node: Node) -> Node:
    if node.op.kind is Kind.TRANSPOSE:
        return node.inputs[0]
    if node.op.kind is Kind.VIEW:
        return shown(node, View.identity(node.shape).transposed(swapped(len(node.shape))))
    return replace(
        node, op=OPS["transpose"], inputs=(node,), shape=(*node.shape[:-2], node.shape[-1], node.shape[-2]), view=None
    )


def beside(node: Node, shape: Shape) -> Node | None:
    """What has one value for each S and H, or for each T, as it stands beside the transpose [..., T, S * H]; None of
    other values."""
    if not node.shape:
        return node
    if node.op.kind is Kind.LEAF:
        return None
    view = View.identity(node.shape)
    if missing := len(shape) - len(node.shape):
        view = view.sliced((None,) * missing)
    *others, rows, each, cols = view.shape
    if (rows, each) == (1, 1):
        return shown(node, view.sliced((Ellipsis, 0, slice(None), slice(None))).transposed(swapped(len(others) + 2)))
    if cols != 1 or (rows, each) != shape[-3:-1]:
        return None
    return shown(node, view.merged(len(others), 2).transposed(swapped(len(others) + 2)))


def swapped(rank: int) -> tuple[int, ...]:
    """The order of axes of which the last two change places."""
    return (*range(rank - 2), rank - 1, rank - 2)


def shown(node: Node, view: View) -> Node:
    if view.is_identity and view.shape == node.shape:
        return node
    return Node(OPS["view"], (node,), view.shape, node.dtype, node.operator, view=view)
