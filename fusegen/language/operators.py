"""The operators of a chain: what its author wrote, each as the nodes it expands to."""

from __future__ import annotations

from fusegen.language.graph import Extent, Graph, Kind, Node


def operators(graph: Graph) -> list[list[Node]]:
    """The user's operators in order, each as its nodes; steps that only make literals or indices are none."""
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.op.kind is not Kind.INPUT:
            groups.setdefault(node.operator.index, []).append(node)
    return [
        nodes
        for _, nodes in sorted(groups.items())
        if any(n.op.kind is not Kind.LEAF and graph.extents[n] is not Extent.LAUNCH for n in nodes)
    ]
