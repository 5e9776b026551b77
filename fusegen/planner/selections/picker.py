"""The struct Picker: what a block keeps of its choice in shared memory, by each way of choosing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fusegen.language.types import DType, f32, i32
from fusegen.planner.model import Selection, Tile
from fusegen.planner.selections import large_k_cost
from fusegen.planner.selections.choosing import COMPARED_CANDIDATES, merged_room
from fusegen.planner.structs import Count, Member, Struct, member
from fusegen.planner.ways import InWarp, LargeK, OneByOne, Packed, SmallK, Streaming

BINS = "of each bin its candidates, then those above it"
ROW_GAP_WORDS = 4  # behind a row, for each of its lanes
SAID = "by warp: the order that enough keys reach, and the largest"
KEY_TYPES: Mapping[DType, str] = {f32: "float", i32: "int"}


def picker(selection: Selection, tile: Tile, warp: int, adds_up: bool = False) -> Struct:
    """As the kernel declares it. `adds_up`: the exponentials of the keys, for a softmax, where warps hold the row."""
    way = selection.way
    if isinstance(way, SmallK):
        return of_small_k(way, tile, selection.k, warp, adds_up)
    if isinstance(way, LargeK):
        return of_large_k(way, tile, adds_up)
    if isinstance(way, Streaming):
        return Struct("Picker", tuple(of_streaming(way, tile, warp)))
    if isinstance(way, Packed):
        return Struct("Picker", tuple(of_words(way, tile)))
    return Struct("Picker", tuple(of_warp(selection, way, tile)))


def of_words(way: Packed, tile: Tile) -> Iterator[Member]:
    """Nothing where registers hold all; the rows' pairs of keys, whose groups are found by place, or the keys that
    words have no room for. The lanes of a row write 16 bytes each, and rows lie so far apart that those of a warp have
    banks of their own."""
    if way.group > 1:
        words = (tile.per_thread * tile.vector // 2 + ROW_GAP_WORDS) * tile.threads_per_row
        yield member("unsigned", "of keys, each row's from its end on", pairs=(tile.rows_per_block, words))
    if way.clipped:
        words = (tile.per_thread * tile.vector + ROW_GAP_WORDS) * tile.threads_per_row
        yield member("float", "of each row, by column", keys=(tile.rows_per_block, words))


def of_warp(selection: Selection, way: OneByOne | InWarp, tile: Tile) -> Iterator[Member]:
    rows = tile.rows_per_block
    if isinstance(way, InWarp):
        yield member(KEY_TYPES[selection.dtype], "of each thread", keys=(tile.per_thread * tile.vector, tile.threads))
        yield member("Entry", candidates=(rows, way.most_ranked + COMPARED_CANDIDATES))
    if limit := selection.limit:
        vectors = (rows, tile.per_thread * tile.threads_per_row)
        yield member(
            "float", "the largest of each vector", tops=vectors, **({"seconds": vectors} if limit.by > 1 else {})
        )
        yield member("Entry", "the order of each group's score, and its place", scores=(rows, limit.groups))
        yield member("int", "is it one of the best?", in_best=(rows, limit.groups))
    yield member("Entry", "what is chosen, the best first", picks=(rows, selection.k))


def of_streaming(way: Streaming, tile: Tile, warp: int) -> Iterator[Member]:
    warps, bins = Count("warps", tile.threads // warp), Count("bins", way.bins)
    room = Count("room", way.entries // int(warps))
    cluster = tile.cluster
    yield member("int", "the words of largest keys, then columns of vectors", notes=(warps, way.notes))
    yield member("Entry", "candidates by warp, in one half; the other one is free", entries=(2, warps * room))
    if cluster > 1:
        merged = merged_room(way.limit, int(warps), cluster)
        yield member("Entry", "of the whole cluster, in its first block", merged=(2, merged))
        yield member("Entry", "of each block", cutoffs=(cluster,))
    yield member("unsigned", BINS, bins_above=(bins + 1,))
    yield member("unsigned", "candidates by warp", totals=(warps,))
    yield member("unsigned", SAID, reached=(warps,), highest=(warps,))
    if cluster > 1:
        yield member("unsigned", "the same by block", reached_far=(cluster,), highest_far=(cluster,))
        yield member("unsigned", "candidates of the cluster", incoming=())
    yield member("unsigned", "orders among the candidates", least=(), most=())
    yield member(
        "unsigned", "the bin that a cut goes on with, candidates above it and in it", found=(), above=(), here=()
    )


def of_small_k(small_k: SmallK, tile: Tile, k: int, warp: int, adds_up: bool) -> Struct:
    warps = Count("warps", tile.threads // warp)
    row_warps = Count("row_warps" if tile.cluster > 1 else "warps", small_k.warps)
    room, bins = Count("room", small_k.room), Count("bins", small_k.bins)
    blocks = (tile.cluster,) if tile.cluster > 1 else ()
    by_block = " of each block, in the first one" if blocks else ""
    members = (
        member("float", keys=(tile.per_thread * tile.vector, tile.threads)),
        member("Entry", f"candidates{by_block}", entries=(*blocks, room)),
        member("Entry", "candidates by bins", binned=(small_k.limit,)),
        member("Entry", "what is chosen, the best first", picks=(k,)),
        member("unsigned", SAID, reached=(row_warps,), most=(row_warps,)),
        *([member("float", "of exponentials below it", sums=(row_warps,))] if adds_up else []),
        member("unsigned", BINS, bins_above=(bins + 1,)),
        member("unsigned", "candidates by warp", totals=(warps,)),
        member("unsigned", "candidates of each block" if blocks else "candidates", counts=(2, *blocks)),
        member("unsigned", "candidates of this block" if blocks else "the same, while they are counted", found=(2,)),
        member("unsigned", "its order", bar=()),
    )
    return Struct("Picker", members, aligned=False)


def of_large_k(large_k: LargeK, tile: Tile, adds_up: bool) -> Struct:
    warps, bins = Count("warps", large_k.warps), Count("bins", large_k.bins)
    limit, compared = Count("limit", large_k.limit), Count("compared", large_k_cost.COMPARED_CANDIDATES)
    members = (
        member("Entry", "candidates by bins", binned=(limit + compared,)),
        member("float", "keys and columns of candidates; then what is chosen", found=(2, limit)),
        member("unsigned", BINS, bins_above=(bins + tile.threads + 2,)),
        member("unsigned", "candidates by warp", totals=(warps,)),
        member("unsigned", "keys that reach a cutoff, by warp", counts=(2, *((warps,) if large_k.warps > 1 else ()))),
        member("unsigned", SAID, reached=(warps,), most=(warps,)),
        *([member("float", "of exponentials below it", sums=(warps,))] if adds_up else []),
    )
    return Struct("Picker", members)
