"""How threads share the rows of a kernel, what they keep of them and where, and the shared memory that this takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fusegen.language.scans import ScanWay, Sorted
from fusegen.planner.parts import Access, RowPass

Staging = Literal[
    "none",
    "registers",
    "shared",
    "persistent",  # in shared memory and registers, by persistent blocks that prefetch the next row
    "stream",
]
Keeps = Literal["values", "inputs", "nothing"]  # from one pass to the next: what was computed, what was read, nothing


@dataclass(frozen=True, slots=True)
class Tile:
    """How threads share the work.

    A row belongs to `threads_per_row` threads, each of which takes `per_thread` vectors of `vector` elements,
    `threads_per_row` vectors apart. `rows_per_block` rows are in flight in a block. `col_tiles` blocks share a row
    (only without reductions), or `cluster` blocks, which reach into each other's shared memory. Of what is kept in
    shared memory, a thread's first `kept` vectors have room there; the others are read again, or held in registers as
    they were read by a "persistent" plan. The last `remainder` values of a row belong to no vector: its first threads
    take one each.
    """

    threads: int
    threads_per_row: int
    rows_per_block: int
    vector: int
    per_thread: int
    col_tiles: int = 1
    cluster: int = 1
    kept: int = 0
    remainder: int = 0

    @property
    def cols(self) -> int:
        """Columns (elements, in a flat plan) that one block covers in a row."""
        return self.threads_per_row * self.per_thread * self.vector

    @property
    def blocks_per_row(self) -> int:
        return self.col_tiles * self.cluster

    def blocks(self, rows: int) -> int:
        """For so many rows; elements, in a flat plan."""
        return -(-rows // self.rows_per_block) * self.blocks_per_row

    @property
    def row_threads(self) -> int:
        """Threads of one block that share a row."""
        return self.threads_per_row // self.cluster

    def warps_per_row(self, warp: int) -> int:
        """Warps of a block that share a row; 1 when a warp holds one row or several."""
        return max(1, self.row_threads // warp)

    def parts_per_row(self, warp: int) -> int:
        """Partial results of one reduction in a block: of its warps, and of the cluster's blocks."""
        return self.warps_per_row(warp) + (self.cluster if self.cluster > 1 else 0)

    @property
    def kept_cols(self) -> int:
        """Columns of a row that have room in one block's shared memory."""
        return self.row_threads * self.kept * self.vector

    @property
    def again(self) -> float:
        """The share of a row that has none."""
        return 1 - self.kept / self.per_thread


# Of a line of shared memory, the widest swizzle, and where a bulk copy should begin there: from 16, 32 or 64 bytes
# behind such a place on, the LayerNorm chain at 4096 x 4096 took 38 us in place of 31, and at 4096 x 1024 18 to 23 in
# place of 12.
LINE_BYTES = 128


def begins_anywhere(access: Access, tile: Tile, cols: int) -> bool:
    """May a block's rows begin within a line?"""
    return tile.rows_per_block * cols * access.dtype.bytes % LINE_BYTES != 0


def in_shared_memory(staging: Staging) -> bool:
    """Is what later passes need again in shared memory, or most of it?"""
    return staging in ("shared", "persistent")


def packed(staging: Staging, keeps: Keeps) -> bool:
    """Do registers hold what was read as it was read, and not as f32?"""
    return staging == "registers" and keeps == "inputs"


def prefetched(passes: Iterable[RowPass]) -> tuple[Access, ...]:
    """The vectors that bulk copies bring to shared memory while the first pass runs."""
    loads = (load for row_pass in passes for load in row_pass.loads if load.when == "prefetched")
    return tuple({load.access.tensor: load.access for load in loads}.values())


SORTED_BYTES = 8  # of a place in shared memory: an element's bits in order, and its column


def partial_bytes(tile: Tile, warp: int, slots: int, persistent: bool) -> int:
    """Of the shared array that carries partial results across warps; a block that takes rows in turn has two."""
    return 4 * slots * tile.parts_per_row(warp) * (2 if persistent else 1)


def scanned_bytes(passes: Iterable[RowPass], tile: Tile, warp: int) -> int:
    """Of the shared arrays in which running sums come from warp to warp, one for each vector of a thread."""
    warps = tile.row_threads // warp
    running = sum(isinstance(scan.way, ScanWay) for row_pass in passes for scan in row_pass.scans)
    parts = 4 * tile.per_thread * warps * running if warps > 1 else 0
    return parts + tile.rows_per_block * sum(SORTED_BYTES * places for *_, places in sorts(passes))


def sorts(passes: Iterable[RowPass]) -> frozenset[tuple[str, bool, int]]:
    """What is sorted, which way, in how many places: values and columns by one sort."""
    scans = (scan for row_pass in passes for scan in row_pass.scans)
    return frozenset((s.value, s.way.descending, s.places) for s in scans if isinstance(s.way, Sorted))


def prefetched_bytes(passes: Iterable[RowPass], cols: int) -> int:
    """Of shared memory, for the vectors that bulk copies bring there: each begins at a line."""
    size = 0
    for access in prefetched(passes):
        size = -(-size // LINE_BYTES) * LINE_BYTES + cols * access.dtype.bytes
    return size


def unusual(choices: Mapping[str, tuple[object, object]]) -> str:
    """` name=value` for each choice that is not the usual one, of (what is chosen, the usual one) by name."""
    return "".join(f" {name}={chosen}" for name, (chosen, usual) in choices.items() if chosen != usual)
