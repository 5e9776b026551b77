"""Values regrouped so that what a reduction takes together lies along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegen.language.graph import Node
from fusegen.validation.bounded import Bounded

Array = np.ndarray[Any, np.dtype[Any]]
REST = {"part_max": -np.inf, "part_min": np.inf, "group_max": -np.inf, "group_min": np.inf}  # changes nothing; else 0


def rows_of_parts(node: Node, arg: Bounded) -> Bounded:
    """[count, N, turns] of a value whose every `count`-th row is of one part; parts of fewer rows are filled up."""
    cols = arg.value.shape[-1]
    rows = arg.value.size // max(1, cols)
    turns = max(1, -(-rows // node.count))

    def moved(array: Array, rest: float) -> Array:
        padded = np.full((turns * node.count, cols), rest, array.dtype)
        padded[:rows] = np.broadcast_to(array, arg.value.shape).reshape(rows, cols)
        return np.moveaxis(padded.reshape(turns, node.count, cols), 0, -1)

    return Bounded(moved(arg.value, REST.get(node.op.name, 0.0)), moved(np.asarray(arg.error), 0.0))


def columns_of_groups(node: Node, arg: Bounded) -> Bounded:
    """[.., G, group] of a value [.., N] in groups of neighbours; the last one is filled up where it has fewer."""
    *leading, cols = arg.value.shape
    count = -(-cols // node.group)

    def moved(array: Array, rest: float) -> Array:
        whole = np.broadcast_to(array, arg.value.shape)
        if count * node.group != cols:
            padding = np.full((*leading, count * node.group - cols), rest, whole.dtype)
            whole = np.concatenate([whole, padding], axis=-1)
        return whole.reshape(*leading, count, node.group)

    rest = REST.get(node.op.name, 0.0) if arg.value.dtype.kind == "f" else 0
    return Bounded(moved(arg.value, rest), moved(np.asarray(arg.error), 0.0))


def spread_out(node: Node, arg: Bounded, cols: int) -> Bounded:
    """Each group's value at all of its places."""
    error = np.broadcast_to(arg.error, arg.value.shape)
    parts = (np.repeat(part, node.group, axis=-1)[..., :cols] for part in (arg.value, error))
    return Bounded(*parts)
