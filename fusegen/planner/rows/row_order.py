"""In which order rows follow one another: such that what several rows share is still in the L2 cache.

A bias [H, S, N] of scores [B, H, S, N] is read for each of B sequences. Read as the shape has them, a whole sequence
lies between a row of the bias and its next use; with B last, the rows that share it follow one another. On an H200 a
softmax of 8 x 16 x 1024 x 1024 bf16 scores with such a bias took 143.6 us so and 190.9 in the shape's order (cold L2,
medians of 15); the bias then comes from memory 8 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fusegen.language.graph import Graph, Tensor
from fusegen.language.types import size_of
from fusegen.planner.model import Decision, RowDim
from fusegen.planner.pieces import arrays, bytes_of, moves_along
from fusegen.targets.base import Target

HELD_SHARE = 0.5  # of the L2 cache, what it is counted on to hold, as for rows that are read twice
# Bytes of the narrowest row from which rows may lie apart: neighbouring threads still find whole sectors of 32 bytes.
LEAST_ROW_BYTES = 128


def ordered(graph: Graph, target: Target, dims: tuple[RowDim, ...]) -> tuple[RowDim, ...]:
    """`dims`, or with one of them last where that saves bytes: the last one's rows follow one another."""
    if len(dims) < 2 or graph.cols * min(t.dtype.bytes for t in iterated(graph)) < LEAST_ROW_BYTES:
        return dims
    moved = [(*(d for d in dims if d is not dim), dim) for dim in dims]
    return min([dims, *moved], key=lambda order: missed(graph, target, order))


def order_decisions(graph: Graph, target: Target, dims: Sequence[RowDim]) -> Iterator[Decision]:
    """What the order of `dims` saves against the shape's; nothing where it is the shape's."""
    natural = sorted(dims, key=lambda dim: dim.axes)
    if list(dims) == natural:
        return
    for tensor in iterated(graph):
        before, after = (again(graph, target, order, tensor) for order in (natural, dims))
        if after < before:
            names = ", ".join(str(graph.shape[axis]) for axis in dims[-1].axes)
            verdict = f"rows that share it, along {names}, follow one another: it is not read from memory again"
            yield Decision(tensor.name, verdict, before - after)


def missed(graph: Graph, target: Target, dims: Sequence[RowDim]) -> int:
    """Bytes that come from memory again when rows are taken in the order of `dims`, the last one fastest."""
    return sum(again(graph, target, dims, tensor) for tensor in iterated(graph))


def again(graph: Graph, target: Target, dims: Sequence[RowDim], tensor: Tensor) -> int:
    """Of one tensor: for each dimension along which it does not move, whether all that is read and written between two
    uses leaves it in the L2 cache."""
    row_bytes = sum(graph.cols * other.dtype.bytes for other in iterated(graph))
    between, times, moving = row_bytes, 1, False
    for dim in reversed(dims):
        size = math.prod(size_of(graph.shape[axis], graph.sizes) for axis in dim.axes)
        if any(moves_along(graph, tensor, axis) for axis in dim.axes):
            moving = True
        elif moving and between > HELD_SHARE * target.l2_bytes:
            times *= size
        between *= size
    return bytes_of(graph, tensor) * (times - 1)


def iterated(graph: Graph) -> tuple[Tensor, ...]:
    """The tensors that have the row's columns."""
    return tuple(t for t in arrays(graph) if t.shape[-1] == graph.shape[-1])
