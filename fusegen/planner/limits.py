"""Columns that a row does not need: what a mask such as `col <= row` rules out is not read.

    where(col <= r, f(x), c)      needs x only up to column r, whatever f is

as long as every use of x goes through such a mask, and r is known before the row is passed over. The masked value is
then computed from zeros and thrown away, so a NaN or an infinity beyond the limit can't be seen either way. A causal
softmax reads about half of its scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fusegen.language.graph import Extent, Graph, Kind, Node, once_per_graph
from fusegen.language.types import size_of


@dataclass(frozen=True, slots=True)
class Limit:
    """Columns up to `bound` (its own column too, when `inclusive`) are needed, the others are not."""

    bound: Node
    inclusive: bool

    @property
    def sign(self) -> Literal["<", "<="]:
        return "<=" if self.inclusive else "<"


@once_per_graph
def limits(graph: Graph) -> Mapping[Node, Limit]:
    """The limit of each operand that has one; none where tiles of products take their columns as they come."""
    if graph.products:
        return {}
    uses = limits_of_uses(graph)
    inputs = {t.node for t in graph.inputs}
    return {node: limit for node, limit in uses.items() if node in inputs and limit is not None}


def limits_of_uses(graph: Graph) -> Mapping[Node, Limit | None]:
    """For each element value the one limit that its every use passes through; None where some use has none.

    Users come after what they use, so one pass from the end knows them; chains may be too long for recursion.
    """
    outputs = {t.node for t in graph.outputs}
    masks = limits_of_masks(graph)
    table: dict[Node, Limit | None] = {}
    for node in reversed(graph.nodes):
        if graph.extents[node] is not Extent.ELEMENT or node.op.kind is Kind.REDUCE:
            continue
        seen = {limit_of_use(node, user, masks, table) for user in graph.users[node]}
        table[node] = seen.pop() if len(seen) == 1 and node not in outputs else None
    return table


def limit_of_use(
    node: Node, user: Node, masks: Mapping[Node, Limit], table: Mapping[Node, Limit | None]
) -> Limit | None:
    if user.op.kind is Kind.SCAN:
        return None
    if user.op.name == "where" and user.inputs[1] is node and node not in (user.inputs[0], user.inputs[2]):
        limit = masks.get(user.inputs[0])
        if limit is not None:
            return limit
    return table.get(user)


@once_per_graph
def limits_of_masks(graph: Graph) -> Mapping[Node, Limit]:
    """Of each mask that has one: `col <= r`, `col < r`, the same mirrored, or one of them and anything else."""
    mirrored = {"ge": "le", "gt": "lt"}
    known = known_first(graph)
    table: dict[Node, Limit] = {}
    for mask in graph.nodes:
        name, pair = mask.op.name, mask.inputs
        if name == "logical_and":
            limit = table.get(pair[0]) or table.get(pair[1])
            if limit:
                table[mask] = limit
            continue
        if name in mirrored:
            name, pair = mirrored[name], pair[::-1]
        if name in ("le", "lt") and pair[0].op.name == "col_index" and pair[1] in known:
            table[mask] = Limit(pair[1], name == "le")
    return table


def known_first(graph: Graph) -> set[Node]:
    """The values that are the same along a row, and made without reducing it."""
    known: set[Node] = set()
    for node in graph.nodes:
        along_row = graph.extents[node] in (Extent.GROUP, Extent.ELEMENT) or node.op.kind is Kind.REDUCE
        if not along_row and all(a in known for a in node.inputs):
            known.add(node)
    return known


def common_limit(graph: Graph) -> Limit | None:
    """The limit that every limited mask of the chain has; None where there are none, or several."""
    masks = limits_of_masks(graph)
    found = {masks[n.inputs[0]] for n in graph.nodes if n.op.name == "where" and n.inputs[0] in masks}
    return found.pop() if len(found) == 1 else None


def masked_values(graph: Graph, limit: Limit) -> Mapping[Node, Node]:
    """What makes a value beyond the limit the same all along the row: the value itself, or the other side of a `where`
    that counts there. Values that still vary by column are not in it."""
    masks = limits_of_masks(graph)
    table: dict[Node, Node] = {}
    for node in graph.nodes:
        if graph.extents[node] not in (Extent.GROUP, Extent.ELEMENT):
            table[node] = node
        elif node.op.name == "where" and masks.get(node.inputs[0]) == limit:
            if node.inputs[2] in table:
                table[node] = table[node.inputs[2]]
        elif node.op.kind is Kind.MAP and all(a in table for a in node.inputs):
            table[node] = node
    return table


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
