"""A short last axis, along which an array's elements lie far apart, becomes as many parts that are taken by turns.

    y = x as [B, C, H, W, 2] of [B, 2 * C, H, W];  y as [B, C, H, 2 * W]         # rows of 2, which lie H * W apart
    low, high = x as [2, B, C, H, W];  stack([low, high], -1) as [B, C, H, 2 * W]

So a pixel shuffle is: of rows of 2 a thread has one, and reads two bytes at a time; of rows of W it reads vectors of
each part and writes them interleaved. Exact: every element is where it was.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.trace import OPS
from fusegen.language.views import View

MOST_TURNS = 4  # vectors that a thread holds of each operand
ELEMENTWISE = (Kind.INPUT, Kind.LEAF, Kind.MAP, Kind.VIEW, Kind.JOIN)


@once_per_graph
def by_turns(graph: Graph) -> Graph:
    """The graph whose short last axes are parts by turns; the graph as it is where it has none, or does more than to
    compute element by element."""
    if any(n.op.kind not in ELEMENTWISE for n in graph.nodes):
        return graph
    made_of: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made_of[a] for a in node.inputs)
        made_of[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if takes_turns(node) and all(merges_last(user) for user in graph.users[node]):
            made_of[node] = stacked(made_of[node])
    return graph if all(made_of[n] is n for n in graph.nodes) else with_nodes(graph, made_of)


def takes_turns(node: Node) -> bool:
    """Does a view show, along its last axis, few elements that lie apart, and along the one before neighbours?"""
    if node.view is None or len(node.shape) < 2:
        return False
    count = node.shape[-1]
    row = node.view.steps[-1]
    return isinstance(count, int) and 1 < count <= MOST_TURNS and row[-1] == 0 and row[-2] == 1


def merges_last(user: Node) -> bool:
    """Does a view take the last axis and the one before as one?"""
    return user.view is not None and len(user.view.base[-1]) > 1


def stacked(node: Node) -> Node:
    """What a view shows, as its parts along the last axis."""
    assert node.view is not None
    count = node.shape[-1]
    assert isinstance(count, int)
    places = tuple(View.identity(node.shape).sliced((..., n)) for n in range(count))
    parts = []
    for n in range(count):
        view = node.view.sliced((..., n))
        parts.append(Node(OPS["view"], node.inputs, view.shape, node.dtype, node.operator, view=view))
    text = f"np.stack([{', '.join(f'{{{n}}}' for n in range(count))}], axis=-1)"
    return Node(OPS["join"], tuple(parts), node.shape, node.dtype, node.operator, parts=places, text=text)
