"""Graph -> Graph rewrites, each with its equation. Meaning and names stay."""

from __future__ import annotations

from dataclasses import replace

from fusegen.graph import Graph, Kind, Node


def simplify(graph: Graph) -> Graph:
    """The graph that rules plan: every pass, in order."""
    return share_common(graph)


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
        key = (node.op, inputs, literal, node.size, node.shape, node.dtype)
        if key not in seen:
            seen[key] = node if inputs == node.inputs else replace(node, inputs=inputs)
        made[node] = seen[key]
    names: dict[Node, str] = {}
    for node, name in graph.names.items():
        if node in made:
            names.setdefault(made[node], name)
    return replace(
        graph,
        outputs=tuple(replace(t, node=made[t.node]) for t in graph.outputs),
        names=names,
    )
