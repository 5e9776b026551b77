"""What a plan says of reductions and running sums over rows: tiles of columns, how their rows are shared out, passes
over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fusegen.language.scans import ScanWay
from fusegen.planner.block_count import BlockCount
from fusegen.planner.model import Plan
from fusegen.planner.parts import Load, Reduction, RowDim, Scan, Statement, Store
from fusegen.planner.tile import unusual

USUAL_TURN = 8


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """How threads share a tile of columns.

    `lanes` threads lie side by side along a row, each with a vector of `vector` elements; a block has `rows` rows at a
    time, the blocks of a `cluster` that many each, of rows that follow one another. In a turn a thread takes `turn`
    rows, `row_step` apart, whose loads are all issued before the first is used. In a pass with running sums these rows
    follow one another, and behind them come those of the threads of the next row.
    """

    threads: int
    lanes: int
    vector: int
    turn: int
    cluster: int = 1

    @property
    def cols(self) -> int:
        return self.lanes * self.vector

    @property
    def rows(self) -> int:
        return self.threads // self.lanes

    @property
    def row_step(self) -> int:
        return self.rows * self.cluster

    @property
    def rows_in_turn(self) -> int:
        """Of all threads of a cluster."""
        return self.row_step * self.turn

    def depth(self, rows: int) -> int:
        """Additions that a term passes at most: in its turn, over the turns, over a block's rows, over the blocks."""
        return self.turn + math.ceil(rows / self.rows_in_turn) + self.rows + self.cluster

    def rows_of_warp(self, warp: int) -> int:
        """Of the block's rows, those that one warp's threads have, through whose lanes running sums go."""
        return max(1, warp // self.lanes)

    def groups(self, warp: int) -> int:
        """Parts of the block's rows that running sums go through one after another: those of a warp are one."""
        return self.rows // self.rows_of_warp(warp)

    def running_depth(self, rows: int, warp: int) -> int:
        """Additions that a term of a running sum passes at most: of its thread's rows, through the lanes of its warp,
        one for each group of each turn, and two that bring these together; in a cluster one for each group of a turn,
        and one for each block of each turn."""
        lanes = math.ceil(math.log2(self.rows_of_warp(warp)))
        turns, groups = math.ceil(rows / self.rows_in_turn), self.groups(warp)
        parts = groups * turns if self.cluster == 1 else groups + 1 + self.cluster * turns
        return self.turn + lanes + parts + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Behind:
    """What is made of a column's results, once a column: operands that have one value a column, results of this pass
    and of earlier ones, and what is written of them."""

    loads: tuple[Load, ...] = ()
    takes: tuple[str, ...] = ()
    body: tuple[Statement, ...] = ()
    stores: tuple[Store, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnPass:
    """One pass over the rows of a tile of columns. `loads` are read for each row, `row_loads` have one value a row,
    `column_loads` one a column; `takes` are results of earlier passes. `keeps`: the results that later passes take.

    A pass with `scans` makes running sums of what its `body` makes, and reduces nothing; `running_body` is what is made
    of an element and of these, and the pass stores."""

    title: str
    loads: tuple[Load, ...] = ()
    row_loads: tuple[Load, ...] = ()
    column_loads: tuple[Load, ...] = ()
    takes: tuple[str, ...] = ()
    column_body: tuple[Statement, ...] = ()
    body: tuple[Statement, ...] = ()
    reductions: tuple[Reduction, ...] = ()  # `slot`: the place of its parts in shared memory
    scans: tuple[Scan, ...] = ()  # all of them from the first row on, or all from the last one
    running_body: tuple[Statement, ...] = ()
    stores: tuple[Store, ...] = ()
    behind: Behind = Behind()
    keeps: tuple[str, ...] = ()

    @property
    def reverse(self) -> bool:
        """Do its sums run from the last row on?"""
        return any(isinstance(scan.way, ScanWay) and scan.way.reverse for scan in self.scans)


@dataclass(frozen=True, kw_only=True)
class ColumnsPlan(Plan):
    """A kernel that reduces columns, or makes running sums of them. Of `row_dims`, `reduced` are reduced, or run along,
    by their place; the others stay."""

    tile: ColumnTile
    reduced: tuple[int, ...]
    counts: Mapping[str, str]  # the names of run-time sizes, by the extents that hold them
    once_loads: tuple[Load, ...]  # operands that are one value for the block
    passes: tuple[ColumnPass, ...]

    @property
    def writes_without_rows(self) -> bool:
        """The sum of no rows is 0."""
        return True

    @property
    def configuration(self) -> str:
        """`columns 512/32 8x4 cluster=16`: threads a block / side by side, rows a turn x elements a vector."""
        tile = self.tile
        shape = f"{tile.threads}/{tile.lanes} {tile.turn}x{tile.vector}"
        return f"{self.rule} {shape}{unusual({'cluster': (tile.cluster, 1)})}"

    @property
    def facts(self) -> Mapping[str, object]:
        return {"tile": asdict(self.tile)}

    @property
    def col_tiles(self) -> int:
        return -(-self.cols // self.tile.cols)

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def cluster(self) -> int:
        return self.tile.cluster

    @property
    def rows_per_block(self) -> int:
        return self.tile.rows_in_turn

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        return tuple(r for one in self.passes for r in one.reductions)

    @property
    def kept_dims(self) -> tuple[RowDim, ...]:
        return tuple(dim for place, dim in enumerate(self.row_dims) if place not in self.reduced)

    @property
    def reduced_dims(self) -> tuple[RowDim, ...]:
        return tuple(self.row_dims[place] for place in self.reduced)

    @property
    def shared_out(self) -> bool:
        """Does each block of a cluster bring the parts of its own columns together? Where a later pass takes the
        results, every block does so of the whole tile."""
        return not any(one.keeps for one in self.passes)

    @property
    def own_cols(self) -> int:
        """Columns of which a block brings the parts together."""
        return own_cols(self.tile, self.passes)

    @property
    def static_shared_bytes(self) -> int:
        return shared_bytes(self.tile, self.passes, self.target.warp)

    @property
    def order(self) -> tuple[object, ...]:
        """In which order a column's values are summed: by rows of a block, blocks and turns, wherever they lie; running
        sums by the rows of a warp besides."""
        warps = (self.tile.rows_of_warp(self.target.warp),) if any(one.scans for one in self.passes) else ()
        return (self.rule, self.tile.rows, self.tile.cluster, self.tile.turn, *warps)

    @property
    def block_count(self) -> BlockCount:
        return BlockCount(reduced=self.reduced, across=self.col_tiles, blocks=self.cluster)

    @property
    def max_rows(self) -> int:
        most = 2**62 if not self.kept_dims else self.max_blocks // (self.col_tiles * self.cluster)
        # with several dimensions a row's number has 32 bits
        return most if len(self.row_dims) == 1 else min(most, 2**32 - 2 * self.rows_per_block)


def own_cols(tile: ColumnTile, passes: tuple[ColumnPass, ...]) -> int:
    return tile.cols if any(one.keeps for one in passes) else tile.cols // tile.cluster


def shared_bytes(tile: ColumnTile, passes: tuple[ColumnPass, ...], warp: int) -> int:
    """Of the parts of a block's rows, one reduction at a time; of a cluster's parts; of what later passes take; and of
    the parts of running sums, of groups and of a cluster's blocks, in turns of both halves."""
    reductions = sum(len(one.reductions) for one in passes)
    parts = tile.rows * tile.cols if reductions else 0
    sums = reductions * tile.cluster * own_cols(tile, passes)
    groups = tile.groups(warp) if tile.groups(warp) > 1 else 0
    blocks = tile.cluster if tile.cluster > 1 else 0
    running = 2 * (groups + blocks) * tile.cols * sum(len(one.scans) for one in passes)
    return 4 * (parts + sums + running + sum(len(one.keeps) for one in passes) * tile.cols)
