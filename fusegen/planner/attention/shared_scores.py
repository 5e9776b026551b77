"""Scores that several heads share are made by each of them: a block has the rows of one head.

q [B, 1, S, D] @ k [B, 1, T, D]^T  ->  scores [B, H, S, T], where weights or values have H heads
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from fusegen.language.graph import Graph, Kind, Node, behind, broadcast
from fusegen.language.ordering import with_nodes
from fusegen.language.types import Shape


def of_all_rows(graph: Graph) -> Graph:
    """The graph whose scores have the chain's rows, where several heads share them: each makes its own."""
    first, second = graph.products
    shape = (*graph.shape[:-1], first.shape[-1])
    if first.shape == shape or second.shape[:-1] != shape[:-1] or not grows(first.shape, shape):
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node is first:
            made[node] = replace(made[node], shape=shape)
        elif node.op.kind is Kind.MAP and first in behind([node]):
            made[node] = replace(made[node], shape=reduce(broadcast, (a.shape for a in made[node].inputs)))
    return with_nodes(graph, made)


def grows(shape: Shape, into: Shape) -> bool:
    try:
        return broadcast(shape, into) == into
    except ValueError:
        return False
