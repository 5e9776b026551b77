"""Masks that name what is hidden, as torch's masked_fill does, become masks that name what is kept.

    where(c, -inf, x)  ->  where(not c, x, -inf)     and so of any other number, such as -1e9

Exact. `not` goes inside of `and`, `or` and comparisons of whole numbers, so that what is known of `col <= row` is known
of a hidden `col > row` as well: which keys a row needs, and where it needs no test.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import Graph, Node
from fusegen.language.ordering import along_row, with_nodes
from fusegen.language.trace import OPS
from fusegen.language.types import f32

OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
BY_PARTS = {"logical_and": "logical_or", "logical_or": "logical_and"}


def kept_instead(graph: Graph) -> Graph:
    """The graph, where no condition hides; the same graph where none did."""
    made: dict[Node, Node] = {}
    opposites: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        hides = node.op.name == "where" and inputs[1].literal is not None and inputs[2].literal is None
        if hides and along_row(node):
            same = replace(node, inputs=(opposite(inputs[0], opposites), inputs[2], inputs[1]))
        made[node] = same
    return graph if all(made[n] is n for n in graph.nodes) else with_nodes(graph, made)


def opposite(test: Node, known: dict[Node, Node]) -> Node:
    """Where `test` does not hold. Of f32 a comparison with NaN does not hold, and neither does its opposite."""
    if test not in known:
        name, of = test.op.name, test.inputs
        if name == "logical_not":
            known[test] = of[0]
        elif name in BY_PARTS:
            known[test] = replace(test, op=OPS[BY_PARTS[name]], inputs=tuple(opposite(a, known) for a in of))
        elif name in OPPOSITE and all(a.dtype is not f32 for a in of):
            known[test] = replace(test, op=OPS[OPPOSITE[name]])
        else:
            known[test] = replace(test, op=OPS["logical_not"], inputs=(test,))
    return known[test]
