"""Values that are only taken elsewhere, each element with its own error: views, joins, rows and columns at an index."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fusegen.language.graph import ROWS_AT, Node
from fusegen.language.lookup import pages_at, rows_at, take_at
from fusegen.language.segments import ends_of_groups, order_of_slots, places_of_slots
from fusegen.language.types import f4e2m1, size_of
from fusegen.language.views import positions_in
from fusegen.validation.bounded import Bounded, exact


def viewed(node: Node, arg: Bounded, sizes: Mapping[str, int]) -> Bounded:
    """Some elements, each with its own error."""
    assert node.view is not None
    whole = tuple(size_of(size, sizes) for size in node.inputs[0].shape)
    at = positions_in(node.view, sizes)
    return Bounded(*(np.broadcast_to(part, whole).reshape(-1)[at] for part in (arg.value, arg.error)))


def joined(node: Node, args: Sequence[Bounded], sizes: Mapping[str, int]) -> Bounded:
    """Values side by side, each element with its own error."""
    shape = tuple(size_of(size, sizes) for size in node.shape)
    value = np.empty(math.prod(shape), np.result_type(*(a.value.dtype for a in args)))
    error = np.empty(math.prod(shape))
    for part, arg in zip(node.parts, args, strict=True):
        at = positions_in(part, sizes)
        value[at], error[at] = arg.value, arg.error
    return Bounded(value.reshape(shape), error.reshape(shape))


def looked_up(node: Node, source: Bounded, index: Bounded) -> Bounded:
    """Rows or columns at an index, each element with its own error; unknown where the index may be another one."""
    error = np.broadcast_to(source.error, source.value.shape)
    if node.op.name in ROWS_AT:
        at = rows_at if node.op.name == "gather" else pages_at
        found = Bounded(at(source.value, index.value), at(error, index.value))
        unsure = (
            at(np.ones(source.value.shape), np.where(np.broadcast_to(index.error, index.value.shape) > 0, 0, -1)) > 0
        )
    else:
        found = Bounded(
            take_at(source.value, index.value, node.missing).astype(source.value.dtype),
            take_at(error, index.value, 0.0),
        )
        unsure = np.broadcast_to(index.error > 0, found.value.shape)
    return Bounded(found.value, np.where(unsure, np.inf, found.error)) if np.any(index.error > 0) else found


def ordered_slots(node: Node, args: Sequence[Bounded], sizes: Mapping[str, int]) -> Bounded:
    """Where groups of slots end, their order, or their places: unknown where the group of one is."""
    ids = args[0].value
    if node.op.name == "group_ends":
        value = ends_of_groups(ids, size_of(node.shape[-1], sizes))
    else:
        value = (order_of_slots if node.op.name == "slot_order" else places_of_slots)(ids, args[1].value)
    return exact(value) if args[0].exact else Bounded(value, np.full(value.shape, np.inf))


def unpacked(node: Node, arg: Bounded) -> Bounded:
    """Numbers of 4 bits, two from each byte, the low nibble first."""
    codes = np.stack([arg.value & 15, arg.value >> 4], -1).reshape(*arg.value.shape[:-1], -1)
    if node.op.name == "unpack_f4e2m1":
        return exact(codes.astype(np.uint8).view(f4e2m1.numpy).astype(np.float64))
    return exact((codes ^ 8) - 8 if node.op.name == "unpack_i4" else codes)
