"""Where rows that come and go by bulk copies have their places in a block's shared memory.

A bulk copy moves aligned blocks of 16 bytes, and is slow where these lie otherwise in lines of shared memory than in
those of global memory, of 128 bytes each. So a row lies as far behind a line as it does there. With places at any 16
bytes LayerNorm of 524288 x 129 f16 took 80.4 us and takes 73.1, add and rmsnorm of 262144 x 127 bf16 78.9 and 70.9,
LayerNorm 8192 x 24577 220.6 and 208.0; twelve kernels took 2 to 10 % longer and one, a padded softmax of 577, as long
(H200, cold L2, medians of 21, one version after the other in one job). A thread reads and writes single elements there,
which may lie anywhere. Where a block has several rows they follow one another, in memory and there, and come and go as
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from fusegen.planner.model import Access, Load, RowPass, Store, Tile
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.tile import LINE_BYTES, begins_anywhere


def place_bytes(access: Access, tile: Tile, cols: int) -> int:
    """Room for a block's rows, wherever they begin."""
    size = tile.rows_per_block * cols * access.dtype.bytes
    block = LINE_BYTES - access.dtype.bytes if tile.rows_per_block == 1 or begins_anywhere(access, tile, cols) else 0
    return -(-(size + block) // LINE_BYTES) * LINE_BYTES


def brought(passes: Iterable[RowPass]) -> dict[str, Access]:
    """The tensors whose rows are brought, in the order in which they are first read."""
    return {load.access.tensor: load.access for load in bulk_loads(passes)}


def bulk_loads(passes: Iterable[RowPass]) -> list[Load]:
    return [load for row_pass in passes for load in row_pass.loads if load.access.mode == "bulk"]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of shared memory, from `at` to `end`. A pass behind `last`, the last one that uses them, may have them."""

    at: int
    end: int
    last: float

    def overlaps(self, other: Place) -> bool:
        return self.at < other.end and other.at < self.end


def with_places(passes: Sequence[RowPass], tile: Tile, cols: int, warp: int) -> tuple[tuple[RowPass, ...], int]:
    """The passes with the places of what they read and write, and the bytes of shared memory that all of it takes.

    A result may lie where a tensor was brought that no pass reads any more, its own pass included; a barrier stands
    between the last one that does and its own. No two results share a byte: copies may be on their way out of a place
    until the kernel ends. The last pass's are placed first, which have the most to choose from.

    A pass that may take any columns, and writes blocks of 16 bytes, goes by those and needs no place.
    """
    places: dict[str, Place] = {}
    for name, access in brought(passes).items():
        at = max((place.end for place in places.values()), default=0)
        last = max(number for number, row_pass in enumerate(passes) if name in brought((row_pass,)))
        places[name] = Place(at, at + place_bytes(access, tile, cols), last)
    for number, row_pass in reversed(list(enumerate(passes))):
        for store in () if by_blocks(row_pass) else bulk_stores(row_pass):
            taken = [place for place in places.values() if place.last >= number]
            places[store.access.tensor] = lowest(place_bytes(store.access, tile, cols), taken)

    def placed(store: Store) -> Store:
        at = places.get(store.access.tensor) if store.access.mode == "bulk" else None
        return replace(store, staged=True, offset_bytes=at.at) if at else store

    found: list[RowPass] = []
    for number, row_pass in enumerate(passes):
        loads = tuple(
            replace(load, offset_bytes=places[load.access.tensor].at) if load.access.mode == "bulk" else load
            for load in row_pass.loads
        )
        stores = tuple(map(placed, row_pass.stores))
        blocks_of = bulk_stores(row_pass)[0].access.name if by_blocks(row_pass) else row_pass.blocks_of
        own = [places[store.access.tensor] for store in stores if store.staged]
        before = [place for place in places.values() if place.last < number and any(map(place.overlaps, own))]
        met = all(met_since(found[int(place.last) :], tile, warp) for place in before)
        found.append(replace(row_pass, loads=loads, stores=stores, blocks_of=blocks_of, behind_barrier=not met))
    return tuple(found), max((place.end for place in places.values()), default=0)


def lowest(size: int, taken: Iterable[Place]) -> Place:
    """The first place of so many bytes beside those taken, for good."""
    found = Place(0, size, inf)
    for place in sorted(taken, key=lambda place: place.at):
        if found.overlaps(place):
            found = Place(place.end, place.end + size, inf)
    return found


def met_since(passes: Sequence[RowPass], tile: Tile, warp: int) -> bool:
    """Have all threads of a block met behind the first pass's reads, when the last one is done? For a reduction across
    warps, for a row that is complete before it leaves, or before a later pass; a warp's reductions are no barrier."""
    across_warps = tile.threads_per_row > warp
    ends = any(
        (row_pass.reductions and across_warps) or any(store.staged for store in row_pass.stores) for row_pass in passes
    )
    return ends or any(row_pass.behind_barrier for row_pass in passes[1:])


def bulk_stores(row_pass: RowPass) -> list[Store]:
    return [store for store in row_pass.stores if store.access.mode == "bulk"]


def by_blocks(row_pass: RowPass) -> bool:
    """May the pass's threads take any columns, and does a vector of each of its results fill 16 bytes?"""
    bound = row_pass.reductions or row_pass.keeps or row_pass.takes
    stores = [store.access for store in bulk_stores(row_pass)]
    fills = all(access.vector * access.dtype.bytes == VECTOR_BYTES for access in stores)
    return bool(stores) and not bound and fills
