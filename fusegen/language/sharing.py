"""Common subexpressions: what is computed twice becomes one value."""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.ordering import with_nodes


def share_common(graph: Graph) -> Graph:
    """f(a) ... f(a)  ->  t = f(a); t ... t     for the same op on the same arguments.

    Exact: an op is a pure function of its arguments. A spec that writes F.mean(x) twice pays for it once.
    """
    seen: dict[tuple[object, ...], Node] = {}
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        if node.op.kind is Kind.INPUT:
            made[node] = node
            continue
        literal = (type(node.literal), repr(node.literal))  # repr tells 0.0 from -0.0 and matches NaN with NaN
        shown = (node.over, node.group, node.size, node.shape, node.dtype, node.view, node.parts)
        key = (node.op, inputs, literal, repr(node.missing), node.ordered, node.bare, node.limit, *shown)
        if key not in seen:
            seen[key] = node if inputs == node.inputs else replace(node, inputs=inputs)
        made[node] = seen[key]
    return with_nodes(graph, made)
