"""The struct Picker: what a block keeps of its choice in shared memory, by each way of choosing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fusegen.language.types import DType, f32, i32
from fusegen.planner.held_rows import Dense, Hold
from fusegen.planner.model import Selection, Tile
from fusegen.planner.selections import density
from fusegen.planner.selections.choosing import COMPARED, merged_room, most_ranked
from fusegen.planner.structs import Count, Member, Struct, member

KEY_TYPES: Mapping[DType, str] = {f32: "float", i32: "int"}


def picker(selection: Selection, tile: Tile, warp: int) -> Struct:
    """As the kernel declares it."""
    if selection.hold:
        return of_hold(selection.hold, tile, selection.k, warp)
    if selection.dense:
        return of_dense(selection.dense, tile)
    if selection.by == "team":
        return Struct("Picker", tuple(of_team(selection, tile)))
    return Struct("Picker", tuple(of_threshold(selection, tile, warp)))


def of_team(selection: Selection, tile: Tile) -> Iterator[Member]:
    rows = tile.rows_per_block
    if not selection.in_turn:
        yield member(KEY_TYPES[selection.dtype], keys=(rows, tile.per_thread * tile.threads_per_row * tile.vector))
        yield member("Entry", candidates=(rows, most_ranked(selection.k) + COMPARED))
    yield member("Entry", picks=(rows, selection.k))


def of_threshold(selection: Selection, tile: Tile, warp: int) -> Iterator[Member]:
    warps, bins = Count("warps", tile.threads // warp), Count("bins", selection.bins)
    room = Count("room", selection.entries // int(warps))
    cluster = tile.cluster
    yield member("int", notes=(warps, selection.notes))
    yield member("Entry", entries=(2, warps * room))
    if cluster > 1:
        merged = merged_room(selection.limit, int(warps), cluster)
        yield member("Entry", "of the whole cluster, in its first block", merged=(2, merged))
        yield member("Entry", floors=(cluster,))
    yield member("unsigned", bins_above=(bins + 1,))
    yield member("unsigned", totals=(warps,))
    yield member("unsigned", "orders that each warp said", reached=(warps,), highest=(warps,))
    if cluster > 1:
        yield member("unsigned", reached_far=(cluster,), highest_far=(cluster,))
        yield member("unsigned", incoming=())
    yield member("unsigned", "order among the candidates", least=(), most=())
    yield member("unsigned", found=(), above=(), here=())


def of_hold(hold: Hold, tile: Tile, k: int, warp: int) -> Struct:
    warps, row_warps = Count("warps", tile.threads // warp), Count("row_warps", hold.warps)
    room, bins = Count("room", hold.room), Count("bins", hold.bins)
    members = (
        member("float", keys=(tile.per_thread * tile.vector, tile.threads)),
        member("Entry", "what each block of the row found, in the first one", entries=(tile.cluster, room)),
        member("Entry", binned=(hold.limit,)),
        member("Entry", picks=(k,)),
        member("unsigned", "orders that each warp said", reached=(row_warps,), most=(row_warps,)),
        member("float", "of exponentials below its most", sums=(row_warps,)),
        member("unsigned", bins_above=(bins + 1,)),
        member("unsigned", totals=(warps,)),
        member("unsigned", "candidates of each block, and", counts=(2, tile.cluster)),
        member("unsigned", "of this one", found=(2,)),
        member("unsigned", "its order", bar=()),
    )
    return Struct("Picker", members, aligned=False)


def of_dense(dense: Dense, tile: Tile) -> Struct:
    warps, bins = Count("warps", dense.warps), Count("bins", dense.bins)
    limit, compared = Count("limit", dense.limit), Count("compared", density.COMPARED)
    found = "keys, and columns as they are; later on room to sort in, and what is chosen"
    members = (
        member("Entry", binned=(limit + compared,)),
        member("float", found, found=(2, limit)),
        member("unsigned", bins_above=(bins + tile.threads + 2,)),
        member("unsigned", totals=(warps,)),
        member("unsigned", counts=(2, warps)),
        member("unsigned", "orders that each warp said", reached=(warps,), most=(warps,)),
        member("float", "of exponentials below its most", sums=(warps,)),
    )
    return Struct("Picker", members)
