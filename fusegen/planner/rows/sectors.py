"""What a warp moves where the elements of a row are not next to each other: whole sectors, of which it wants a part.

A matrix that is stored turned round has the elements of a row a line apart. A warp that takes neighbours of a row then
writes a sector of memory for each of them: the factor of 8192 x 8192 bf16 that w8a16_gemm dequantized and stored so
took about 945 us (H200: 1112 with its product, for which 165 are expected). By its 134 MB alone it was expected to take
86, by 2147 MB, which is a sector for each element, it is to take 896. Where threads of a warp take rows that lie next
to each other in that matrix, they fill its sectors together.

Longer runs go through shared memory (`by_tiles`): a block has a tile of rows and columns there, whose columns are lines
of that matrix. All threads of the block move it by these lines, and each takes or leaves its own elements of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.model import Access, Layout, Load, RowDim, RowPass, Store, Tile
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.targets.base import Target

SECTOR_BYTES = 32  # what memory moves at least


def times_moved(
    graph: Graph,
    target: Target,
    layout: Layout,
    dims: Sequence[RowDim],
    accesses: Sequence[Access],
    tile: Tile,
    turned: bool = False,
) -> Mapping[str, float]:
    """How many times its bytes each tensor takes in sectors that a warp touches: of those whose rows' elements are
    apart, by the strides that the layout knows. `turned`: those that lie so go through tiles."""
    known = dict(layout.strides)
    scattered = [access for access in accesses if access.apart and access.tensor in known and not access.gathered]
    return {
        a.tensor: lines_share(a, tile)
        if turned and goes_by_tiles(graph, layout, dims, a)
        else sectors_share(graph, target, dims, a, known[a.tensor], tile)
        for a in scattered
    }


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


def lines_share(access: Access, tile: Tile) -> float:
    """Bytes of all sectors that a column of a block's tile begins with, for each byte of it."""
    size = tile.rows_per_block * access.dtype.bytes
    return -(-size // SECTOR_BYTES) * SECTOR_BYTES / size


def goes_by_tiles(graph: Graph, layout: Layout, dims: Sequence[RowDim], access: Access) -> bool:
    """Are the tensor's rows next to each other, such that a block's rows of each column are a run of it?"""
    known = dict(layout.strides)
    if not (access.apart and access.by_column and access.tensor in known) or access.gathered or access.interleaved:
        return False
    return len(dims) == 1 and access.walked == (0,) and abs(dim_step(graph, access, dims[0], known[access.tensor])) == 1


def tile_bytes(access: Access, tile: Tile) -> int:
    """Of shared memory, for a block's rows and columns of a tensor. From a column to the next there is one element more
    than rows: threads with columns a vector apart then have other banks, and so have those with neighbouring rows."""
    size = tile.cols * (tile.rows_per_block + 1) * access.dtype.bytes
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


def by_tiles(
    graph: Graph, layout: Layout, dims: Sequence[RowDim], passes: Sequence[RowPass], tile: Tile
) -> tuple[tuple[RowPass, ...], int]:
    """The passes, with tiles for what lies turned round, and the bytes of shared memory that these take."""
    places: dict[str, int] = {}
    shared = 0
    every = [load.access for row_pass in passes for load in row_pass.loads]
    every += [store.access for row_pass in passes for store in row_pass.stores]
    for access in every:
        if access.tensor not in places and goes_by_tiles(graph, layout, dims, access):
            places[access.tensor] = shared
            shared += tile_bytes(access, tile)

    def load(way: Load) -> Load:
        at = places.get(way.access.tensor)
        return way if at is None else replace(way, transport="turned", offset_bytes=at)

    def store(way: Store) -> Store:
        at = places.get(way.access.tensor)
        return way if at is None else replace(way, transport="turned", offset_bytes=at)

    found = (replace(p, loads=tuple(map(load, p.loads)), stores=tuple(map(store, p.stores))) for p in passes)
    return tuple(found), shared
