"""What a warp moves where the elements of a row are not next to each other: whole sectors, of which it wants a part.

A matrix that is stored turned round has the elements of a row a line apart. A warp that takes neighbours of a row then
writes a sector of memory for each of them: the factor of 8192 x 8192 bf16 that w8a16_gemm dequantized and stored so
took about 945 us (H200: 1112 with its product, for which 165 are expected). By its 134 MB alone it was expected to take
86, by 2147 MB, which is a sector for each element, it is to take 896. Where threads of a warp take rows that lie next
to each other in that matrix, they fill its sectors together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.model import Access, Layout, RowDim, Tile
from fusegen.targets.base import Target

SECTOR_BYTES = 32  # what memory moves at least


def times_moved(
    graph: Graph, target: Target, layout: Layout, dims: Sequence[RowDim], accesses: Sequence[Access], tile: Tile
) -> Mapping[str, float]:
    """How many times its bytes each tensor takes in sectors that a warp touches: of those whose rows' elements are
    apart, by the strides that the layout knows."""
    known = dict(layout.strides)
    scattered = [access for access in accesses if access.apart and access.tensor in known and not access.gathered]
    return {a.tensor: sectors_share(graph, target, dims, a, known[a.tensor], tile) for a in scattered}


def sectors_share(
    graph: Graph, target: Target, dims: Sequence[RowDim], access: Access, strides: Sequence[int], tile: Tile
) -> float:
    """Bytes of all sectors that the first warp touches with a vector a thread, for each byte that it wants of them."""
    size, step = access.dtype.bytes, strides[-1]
    moving = [dim_step(graph, access, dim, strides) for dim in dims]
    extents = [math.prod(size_of(graph.shape[axis], graph.sizes) for axis in dim.axes) for dim in dims]
    width = max(1, access.vector)
    touched: set[int] = set()
    wanted = 0
    for lane in range(min(target.warp, tile.threads)):
        row, place = divmod(lane, tile.threads_per_row)
        at = 0
        for extent, stride in zip(reversed(extents), reversed(moving), strict=True):
            row, own = divmod(row, max(1, extent))
            at += own * stride
        if row:  # there are no so many rows
            break
        cols = range(place * width, min((place + 1) * width, graph.cols))
        touched.update((at + col * step) * size // SECTOR_BYTES for col in cols)
        wanted += len(cols) * size
    return max(1.0, len(touched) * SECTOR_BYTES / max(1, wanted))


def dim_step(graph: Graph, access: Access, dim: RowDim, strides: Sequence[int]) -> int:
    """Elements from one of the tensor's rows to the next along a dimension of rows; 0 where it does not move."""
    own = dim.axes[-1] - (len(graph.shape) - len(access.shape))
    moves = own >= 0 and access.shape[own] == graph.shape[dim.axes[-1]]
    return strides[own] if moves else 0


def turned_along(graph: Graph, layout: Layout, dims: Sequence[RowDim]) -> RowDim | None:
    """The dimension along which rows of the largest tensor that lies turned round are next to each other; None without
    such a tensor."""
    known = dict(layout.strides)
    tensors = [t for t in (*graph.outputs, *graph.inputs) if t.name in layout.apart and t.name in known]
    tensors.sort(key=lambda t: -t.dtype.bytes * math.prod(size_of(s, graph.sizes) for s in t.shape))
    for tensor in tensors:
        missing = len(graph.shape) - len(tensor.shape)
        for dim in dims:
            own = dim.axes[-1] - missing
            if own >= 0 and tensor.shape[own] == graph.shape[dim.axes[-1]] and abs(known[tensor.name][own]) == 1:
                return dim
    return None
