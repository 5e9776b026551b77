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
from dataclasses import replace

from fusegen.planner.model import LINE_BYTES, Access, Load, Stage, Store, Tile
from fusegen.planner.pieces import VECTOR_BYTES


def begins_anywhere(access: Access, tile: Tile, cols: int) -> bool:
    """May a block's rows begin within a line?"""
    return tile.rows_per_block * cols * access.dtype.bytes % LINE_BYTES != 0


def place_bytes(access: Access, tile: Tile, cols: int) -> int:
    """Room for a block's rows, wherever they begin."""
    size = tile.rows_per_block * cols * access.dtype.bytes
    block = LINE_BYTES - access.dtype.bytes if tile.rows_per_block == 1 or begins_anywhere(access, tile, cols) else 0
    return -(-(size + block) // LINE_BYTES) * LINE_BYTES


def brought(stages: Iterable[Stage]) -> dict[str, Access]:
    """The tensors whose rows are brought, in the order in which they are first read."""
    return {load.access.tensor: load.access for load in bulk_loads(stages)}


def bulk_loads(stages: Iterable[Stage]) -> list[Load]:
    return [load for stage in stages for load in stage.loads if load.access.mode == "bulk"]


def with_places(stages: Sequence[Stage], tile: Tile, cols: int) -> tuple[tuple[Stage, ...], int]:
    """The walks with the places of what they read and write, and the bytes of shared memory that all of it takes.

    What is written once no walk reads what was brought takes that one's place: between two walks all threads of a row
    have met. A walk that may take any columns, and writes blocks of 16 bytes, goes by those and needs no place.
    """
    starts: dict[str, int] = {}
    end = 0
    for name, access in brought(stages).items():
        starts[name] = end
        end += place_bytes(access, tile, cols)
    found = []
    again = 0  # from where on what was brought has been given up
    for number, stage in enumerate(stages):
        loads = tuple(
            replace(load, offset_bytes=starts[load.access.tensor]) if load.access.mode == "bulk" else load
            for load in stage.loads
        )
        if by_blocks(stage):
            name = next(store.access.name for store in stage.stores if store.access.mode == "bulk")
            found.append(replace(stage, loads=loads, blocks_of=name))
            continue
        stores: list[Store] = []
        for store in stage.stores:
            if store.access.mode != "bulk":
                stores.append(store)
                continue
            size = place_bytes(store.access, tile, cols)
            if bulk_loads(stages[number:]):
                at, end = end, end + size
            else:
                at, again = again, again + size
            stores.append(replace(store, staged=True, offset_bytes=at))
        found.append(replace(stage, loads=loads, stores=tuple(stores)))
    return tuple(found), max(end, again)


def by_blocks(stage: Stage) -> bool:
    """May the walk's threads take any columns, and does a vector of each of its results fill 16 bytes?"""
    bound = stage.reductions or stage.keeps or stage.takes
    stores = [store.access for store in stage.stores if store.access.mode == "bulk"]
    fills = all(access.vector * access.dtype.bytes == VECTOR_BYTES for access in stores)
    return bool(stores) and not bound and fills
