"""Values regrouped so that what a reduction takes together lies along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusegen.language.graph import Node
from fusegen.validation.bounded import Bounded

Array = np.ndarray[Any, np.dtype[Any]]
# what changes nothing; else 0
REST = dict.fromkeys(("part_max", "group_max", "deal_max"), -np.inf) | dict.fromkeys(("part_min", "group_min"), np.inf)


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


def columns_dealt(node: Node, arg: Bounded) -> Bounded:
    """[P, .., turns * group] of a value [.., N] whose tiles of `group` columns are dealt to P parts; parts of fewer
    columns are filled up."""
    *leading, cols = arg.value.shape
    turns = -(-cols // (node.group * node.count))

    def moved(array: Array, rest: float) -> Array:
        padded = np.full((*leading, turns * node.count * node.group), rest, array.dtype)
        padded[..., :cols] = np.broadcast_to(array, arg.value.shape)
        tiles = np.moveaxis(padded.reshape(*leading, turns, node.count, node.group), -2, 0)
        return tiles.reshape(node.count, *leading, turns * node.group)

    return Bounded(moved(arg.value, REST.get(node.op.name, 0.0)), moved(np.asarray(arg.error), 0.0))


def rows_dealt(node: Node, arg: Bounded) -> Bounded:
    """[P, .., turns * group, N] of a right factor, whose rows are dealt as the left one's columns are."""

    def turned(bound: Bounded) -> Bounded:
        error = np.broadcast_to(bound.error, bound.value.shape)
        return Bounded(np.swapaxes(bound.value, -1, -2), np.swapaxes(error, -1, -2))

    return turned(columns_dealt(node, turned(arg)))


def dealt_back(node: Node, arg: Bounded, cols: int) -> Bounded:
    """[.., N] of one value for each part, [P, .., 1]: each part's at the columns that it is dealt."""
    part = np.arange(cols) // node.group % node.count
    error = np.broadcast_to(arg.error, arg.value.shape)
    return Bounded(*(np.moveaxis(each[..., 0], 0, -1)[..., part] for each in (arg.value, error)))


def spread_out(node: Node, arg: Bounded, cols: int) -> Bounded:
    """Each group's value at all of its places."""
    error = np.broadcast_to(arg.error, arg.value.shape)
    parts = (np.repeat(part, node.group, axis=-1)[..., :cols] for part in (arg.value, error))
    return Bounded(*parts)
