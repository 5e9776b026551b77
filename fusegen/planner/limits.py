"""Columns that a row does not need: what a mask such as `col <= row` rules out is not read.

    where(col <= r, f(x), c)      needs x only up to column r, whatever f is

as long as every use of x goes through such a mask, and r is known before the row is walked. The masked value is then
computed from zeros and thrown away, so a NaN or an infinity beyond the limit can't be seen either way. A causal
softmax reads about half of its scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fusegen.graph import Extent, Graph, Kind, Node
from fusegen.types import size_of


@dataclass(frozen=True, slots=True)
class Limit:
    """Columns up to `bound` (its own column too, when `inclusive`) are needed, the others are not."""

    bound: Node
    inclusive: bool

    @property
    def sign(self) -> str:
        return "<=" if self.inclusive else "<"


def limits(graph: Graph) -> Mapping[Node, Limit]:
    """The limit of each operand that has one."""
    found: dict[Node, Limit] = {}
    outputs = {t.node for t in graph.outputs}
    for tensor in graph.inputs:
        node = tensor.node
        if node in graph.users and graph.extents[node] is Extent.ELEMENT:
            limit = limit_of_uses(graph, node, outputs)
            if limit is not None:
                found[node] = limit
    return found


def limit_of_uses(graph: Graph, node: Node, outputs: set[Node]) -> Limit | None:
    """The one limit that every use of a value passes through; None where some use has none."""
    if node in outputs:
        return None
    seen: set[Limit] = set()
    for user in graph.users[node]:
        limit = None
        if user.op.name == "where" and user.inputs[1] is node and node not in (user.inputs[0], user.inputs[2]):
            limit = limit_of_mask(graph, user.inputs[0])
        if limit is None:
            limit = limit_of_uses(graph, user, outputs) if user.op.kind is Kind.MAP else None
        if limit is None:
            return None
        seen.add(limit)
    return seen.pop() if len(seen) == 1 else None


def limit_of_mask(graph: Graph, mask: Node) -> Limit | None:
    """`col <= r`, `col < r`, the same turned around, or one of them and anything else."""
    if mask.op.name == "logical_and":
        return limit_of_mask(graph, mask.inputs[0]) or limit_of_mask(graph, mask.inputs[1])
    turned = {"ge": "le", "gt": "lt"}
    name, pair = mask.op.name, mask.inputs
    if name in turned:
        name, pair = turned[name], pair[::-1]
    if name not in ("le", "lt") or pair[0].op.name != "col_index" or not known_first(graph, pair[1]):
        return None
    return Limit(pair[1], name == "le")


def known_first(graph: Graph, node: Node) -> bool:
    """Is the value the same along a row, and made without reducing it?"""
    if graph.extents[node] is Extent.ELEMENT or node.op.kind is Kind.REDUCE:
        return False
    return all(known_first(graph, a) for a in node.inputs)


def share_read(graph: Graph, limit: Limit, vector: int) -> float:
    """The share of a tensor's elements that is read in vectors of `vector`, at the graph's sizes; 1 where the bound is
    not the row's index, with or without a literal added."""
    offset = row_offset(limit.bound)
    if offset is None or graph.rows * graph.cols == 0:
        return 1.0
    rows = size_of(graph.shape[-2], graph.sizes)
    last = np.arange(rows) + offset - (0 if limit.inclusive else 1)
    columns = np.clip((last // vector + 1) * vector, 0, graph.cols)
    return float(columns.mean()) / graph.cols


def row_offset(node: Node) -> int | None:
    """k of `row + k`; None for anything else."""
    if node.op.name == "row_index":
        return 0
    if node.op.name in ("add", "sub") and node.inputs[0].op.name == "row_index":
        literal = node.inputs[1].literal
        if isinstance(literal, int):
            return literal if node.op.name == "add" else -literal
    return None
