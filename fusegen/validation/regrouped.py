"""Values regrouped so that what a reduction takes together lies along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegen.language.graph import Node
from fusegen.validation.bounded import Bounded

Array = np.ndarray[Any, np.dtype[Any]]
REST = {"part_max": -np.inf, "part_min": np.inf}  # what changes nothing; else 0


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
