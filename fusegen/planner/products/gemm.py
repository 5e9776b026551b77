"""What a plan says of a product of matrices: its tiles, what happens before them, what comes of them.

A chain around products is one kernel: elements of the left operand are computed on their way to the tensor cores (the
*prologue*), the products are summed in f32 registers, and the rest of the chain takes the sums from there (the
*epilogue*). Products that are used together share one tile, and are an *output group*; those with columns of their own
are further groups of one grid.

    rows M    the last of `row_dims`, a run-time argument; every other row dimension counts products of their own
    cols N    of one product, a constant
      K         what is summed over, a constant

Operands, the prologue, and output groups of contractions are those of planner/products/parts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fusegen.language.types import DType
from fusegen.planner.block_count import BlockCount
from fusegen.planner.model import Statement, Summed
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.products.asked_ahead import Asked, asked_ahead
from fusegen.planner.products.halved import halved
from fusegen.planner.products.parts import Operand, ProductPlan, ProductTile
from fusegen.planner.tile import unusual
from fusegen.targets.atoms import Atom
from fusegen.targets.compute_unit import unit_of


@dataclass(frozen=True, slots=True)
class GemmTile(ProductTile):
    """How a block shares the work.

    A block computes `rows` x `cols` of every product of its output group. Its threads are `slice_k` groups, each of
    which takes `warps_down` x `warps_across` warps' worth of the tile and every so many-th slice of K, `k` long; with
    several groups (slice-K) or a `cluster` of blocks (split-K), their sums are added up in a fixed order. `stages`
    slices are in shared memory at a time, in a ring of each group. `group` rows of tiles are taken column by column.
    Where it is `persistent`, chunks of slices are copied among the products, and no more blocks than the GPU has room
    for go over all tiles: the next tile's first slices are on their way while one's last slices are multiplied and its
    sums are stored. `by_shared`: sums go through shared memory even where threads hold neighbours of a row.
    """

    k: int
    stages: int
    warps_down: int
    warps_across: int
    slice_k: int = 1
    cluster: int = 1
    group: int = 8
    bands: int = 1
    persistent: bool = False
    by_shared: bool = False

    @property
    def band_rows(self) -> int:
        return self.rows // self.bands

    @property
    def split_k(self) -> int:
        """Sums of one element, which are added up: slice-K groups of all blocks of a cluster."""
        return self.slice_k * self.cluster

    @property
    def warps(self) -> int:
        """Of a slice-K group."""
        return self.warps_down * self.warps_across

    @property
    def warp_rows(self) -> int:
        return self.rows // self.warps_down

    @property
    def warp_cols(self) -> int:
        return self.cols // self.warps_across

    def accumulators(self, atom: Atom) -> int:
        """f32 values that one thread holds of a product."""
        return self.warp_rows * self.warp_cols // atom.threads


ROW_LANES = 8  # lanes that reduce a row of a tile whose sums lie in shared memory
LEAST_RUN_COLS = 4  # columns: 8 lanes then store whole sectors of 32 bytes and more
SUMS_PADDING_FLOATS = 4  # floats behind a row of sums: what a warp writes at once then lies in different banks


SWIZZLE_ROWS = {"plain": 8, "turned": 16, "by sixteens": 32, "by pairs": 16}
CODES_STEP = 32  # of K, whose codes of a column four lanes widen: 8 each, two instructions' worth


def chunk_of(dtype: DType) -> int:
    """Elements of a factor that move together: 16 bytes."""
    return VECTOR_BYTES // dtype.bytes


@dataclass(frozen=True, kw_only=True)
class GemmPlan(ProductPlan):
    """Products of matrices on tensor cores, with what comes before and after them."""

    tile: GemmTile
    launch_body: tuple[Statement, ...] = ()  # once a thread

    @property
    def summed(self) -> Summed:
        return Summed(self.tile.split_k, self.tile.k, scaled=self.scaled_k, promote=self.promote)

    @property
    def configuration(self) -> str:
        """`gemm 128x128x64 2x2 3`: rule, tile, warps down x across, stages; then each choice that is not the usual."""
        t = self.tile
        choices = {"slice_k": (t.slice_k, 1), "cluster": (t.cluster, 1), "group": (t.group, 8), "bands": (t.bands, 1)}
        shape = f"{t.rows}x{t.cols}x{t.k} {t.warps_down}x{t.warps_across} {t.stages}"
        words = " persistent" * t.persistent + " by-shared" * t.by_shared
        return f"{self.rule} {shape}{unusual(choices)}{words}"

    @property
    def slice_k_threads(self) -> int:
        """Threads of a slice-K group."""
        return self.tile.warps * self.target.warp

    @property
    def threads(self) -> int:
        return self.slice_k_threads * self.tile.slice_k

    @property
    def cluster(self) -> int:
        return self.tile.cluster

    @property
    def in_any_block(self) -> bool:
        return not (self.tile.persistent or self.segments or self.inner_segments or self.dies > 1)

    @cached_property
    def asked_ahead(self) -> Asked | None:
        """What the L2 cache is asked for before the wait. Not where a block has other tiles than its own, or a part."""
        if self.tile.persistent or self.tile.cluster > 1:
            return None
        return asked_ahead(self, self.tile.k, self.tile.group if self.tiles_across > 1 else 1)

    @property
    def reads_ahead(self) -> bool:
        return super().reads_ahead or self.asked_ahead is not None

    @property
    def waits_inside(self) -> bool:
        return self.reads_ahead

    @property
    def slices_at_first(self) -> int:
        """Not where the right factors are codes, or come through registers, or are found by ends of groups, nor beside
        rows that an index names; persistent blocks copy chunk by chunk."""
        if self.coding or self.segments or self.inner_segments or self.tile.persistent or self.left[0].rows_at:
            return 0
        if not all(r.copied for g in self.output_groups for r in g.rights):
            return 0
        return min(self.tile.stages - 1, self.steps)

    @property
    def before_wait(self) -> str:
        if self.asked_ahead is None:
            return self.rights_ahead
        names = ", ".join(dict.fromkeys(r.access.tensor for r in self.output_groups[0].rights))
        run, blocks = self.asked_ahead.run, self.asked_ahead.blocks
        return f"asking the L2 cache for {run} of each column of {names} for the first {blocks} blocks"

    @property
    def steps(self) -> int:
        """Slices of what is summed that one slice-K group takes."""
        return -(-self.k // (self.tile.k * self.tile.split_k))

    @property
    def chunk(self) -> int:
        """Elements of a factor that move together."""
        return chunk_of(self.dtype)

    @property
    def even(self) -> bool:
        """Are all slices whole?"""
        return self.k % (self.tile.k * self.tile.split_k) == 0 and not self.inner_segments

    @property
    def few_steps(self) -> bool:
        """May there be fewer slices than the ring has places for at first?"""
        return self.inner_segments is not None or self.steps < self.tile.stages - 1

    @property
    def several_steps(self) -> bool:
        """May there be more than one?"""
        return self.inner_segments is not None or self.steps > 1

    @property
    def many_steps(self) -> bool:
        """May there be more than two?"""
        return self.inner_segments is not None or self.steps > 2

    @property
    def copies(self) -> bool:
        """Does any factor get into shared memory by asynchronous copies? Beside codes those that don't are copied by
        the same steps."""
        return self.coding is not None or any(f.copied for f in self.factors)

    @property
    def step_k(self) -> int:
        """How deep the fragments are that are loaded together: as the atom, or where they are widened two of it."""
        return CODES_STEP if self.coding else self.atom.k

    @property
    def slice_steps(self) -> int:
        return self.tile.k // self.step_k

    @property
    def scaled_k(self) -> int:
        """How often in a slice of K sums are scaled: the group of the codes, or the whole slice."""
        return min(self.coding.group or self.tile.k, self.tile.k) if self.coding else 0

    @property
    def prepares(self) -> bool:
        """Does a thread make something of what it brings, or has it to store it itself?"""
        return self.prologue is not None or any(not f.copied for f in self.factors if not self.coding)

    @property
    def prepare_step(self) -> int:
        """The step of a slice before which the next one is prepared: what came by copies a step before it is waited
        for, between products; what comes through registers gets until then."""
        if self.prologue is not None and all(f.copied for f in self.factors):
            return max(1, self.slice_steps - 2)
        return self.slice_steps - 1

    @property
    def fetches_ahead(self) -> bool:
        """Does a thread ask for a slice as soon as it has stored the one before, in whose registers it comes? Then the
        loads have as long as a slice takes to be multiplied. What comes beside copies is asked for behind these."""
        return not self.copies

    def turned(self, factor: Operand) -> int:
        """Columns, or rows of a left factor, that a thread brings of a factor that lies across K, whose tile lies along
        it: of so many neighbours in K that what it stores of each column is 16 bytes. 0: it is not brought so."""
        across = factor.tile_along and not factor.along and not factor.copied and not factor.rows_at
        if self.atom.kind == "mma" or not across or (self.prologue is not None and factor.mn == "rows"):
            return 0
        extent = self.tile.rows if factor.mn == "rows" else self.tile.cols
        return extent * self.tile.k // self.slice_k_threads // self.chunk

    def in_parts(self, factor: Operand) -> bool:
        """May some elements of a vector that a thread loads be there and others not, or does it load them one by one?
        Then each load is a branch, and what is loaded in part is waited for at once."""
        if factor.width == 1 or factor.step:
            return True
        if factor.along:
            return not self.even and (self.inner_segments is not None or self.k % self.chunk > 0)
        return factor.mn == "rows" or any(group.cols % self.chunk for group in self.output_groups)

    @property
    def whole_ends(self) -> tuple[str, ...]:
        """Which of rows, cols and k end no sooner than a slice that is brought by loads without tests of their own, by
        one test of them all: where slices are brought through registers while others are multiplied. Not where rows
        alone are tested, of which whole vectors are there or not: simulated, those loops take no longer for it."""
        whole = self.inner_segments or self.k >= self.tile.k
        whole = whole and any(g.cols >= self.tile.cols for g in self.output_groups)
        if not whole or not self.fetches_ahead or self.coding:
            return ()
        cols = ("cols",) * any(g.cols % self.tile.cols for g in self.output_groups)
        others = (*cols, *(() if self.even else ("k",)))
        if not others and not any(self.in_parts(f) for f in self.factors):
            return ()
        return ("rows",) * any(f.mn == "rows" and not f.rows_at for f in self.factors) + others

    @property
    def turns(self) -> bool:
        """Is any factor brought so?"""
        return any(self.turned(f) for f in self.factors)

    @property
    def swizzle(self) -> Literal["plain", "turned", "by sixteens", "by pairs"]:
        """How chunks of a tile's rows change places, so that those that lanes read or write at once lie in different
        banks: of 8 neighbours, or of every other row too, where threads bring columns. CDNA 4 reads for 16 lanes of an
        MFMA at once, from 64 banks: of rows of 64 bytes by the row's place among 32 or, of smaller MFMA, as columns; of
        longer rows by its place among 16."""
        unit, chunks = unit_of(self.target) if self.atom.kind == "mfma" else None, self.tile.k // self.chunk
        if unit is not None and unit.lds_read_bytes > unit.lds_bytes and chunks >= 4:
            return "by pairs" if chunks >= 8 else "by sixteens" if self.atom.rows == 32 else "turned"
        return "turned" if self.turns else "plain"

    @property
    def swizzle_rows(self) -> int:
        """Rows of a tile after which chunks change places as before."""
        return SWIZZLE_ROWS[self.swizzle]

    @property
    def dies(self) -> int:
        """Dies that blocks are dealt out to. One has all L2 cache, streams share no factor, and of grouped products the
        last blocks may have no tile, of which one die would have them all."""
        dealt = self.tile.group > 1 and self.tiles_across > 1 and not self.segments and not self.tile.persistent
        return self.target.dies if dealt else 1

    @property
    def pending_copies(self) -> int:
        """Slices that may be on their way when one is waited for. Where copies are `persistent`, those of the slice at
        hand are not committed then."""
        return self.tile.stages - (3 if self.tile.persistent else 2)

    @property
    def fragments(self) -> int:
        """Of one step, that a warp loads where the tile is `persistent`, one before each product: as `fragments_of`."""
        return fragments_of(self.tile, self.atom, self.products)

    @property
    def chunks_a_thread(self) -> int:
        """That a thread brings of a slice."""
        return chunks_of(self.tile, self.dtype, self.products, self.slice_k_threads)

    @property
    def chunks_a_step(self) -> int:
        """That it copies there, behind the products that fragments are loaded before."""
        return -(-self.chunks_a_thread // self.slice_steps)

    @property
    def factors(self) -> tuple[Operand, ...]:
        """Of one output group: those of the left operand, then the right ones."""
        return (*self.left, *self.output_groups[0].rights)

    @property
    def halves(self) -> tuple[bool, bool]:
        """Are the left factor and the right ones multiplied as their halves? Then their codes are changed as a thread
        stores them, and sums are multiplied where they leave its registers."""
        right = self.output_groups[0].rights[0].access.dtype
        return halved(self.dtype, self.atom.factors), halved(right, self.atom.right_factors)

    @property
    def scales_slices(self) -> bool:
        """Are sums of a slice made apart, and then scaled by its block's scales and added? AMD's instructions add to
        sums where these are; what mma.sync gives is scaled as it comes."""
        return self.block_scales is not None and self.atom.kind != "mma"

    @property
    def run(self) -> int:
        """As `run_of`."""
        return run_of(
            self.tile,
            self.atom,
            all(right.along for output_group in self.output_groups for right in output_group.rights),
        )

    @property
    def sums_stride(self) -> int:
        """Floats from one row of sums to the next in shared memory."""
        return self.tile.cols + SUMS_PADDING_FLOATS

    def tiles(self, *extents: int) -> int:
        """Of the whole launch, of products of those sizes."""
        return self.block_count.tiles(*extents)

    @property
    def block_count(self) -> BlockCount:
        """One for each tile; of persistent blocks as few as need no more rounds than all that the GPU holds."""
        groups = self.segments.count if self.segments else 0
        count = BlockCount(rows=self.tile.rows, across=self.tiles_across, blocks=self.tile.cluster, groups=groups)
        if not self.tile.persistent:
            return count
        return replace(count, blocks=1, at_once=self.target.sms * self.cost.blocks_per_sm, even=True)

    @property
    def max_rows(self) -> int:
        """Tiles are counted in 32 bits; of products with one row each, every one takes a row of tiles."""
        down = self.max_blocks // (self.tiles_across * self.tile.cluster)
        if self.segments:
            down = max(0, down - self.segments.count - 1)
        return down * (1 if self.row_dims[1:] else self.tile.rows)


def tile_elements(tile: GemmTile, products: int, share: float = 1.0) -> int:
    """Elements of one stage: the left operand's slice and one of each product's right one, whose elements take `share`
    of the room of one of the left."""
    return int((tile.rows + tile.cols * products * share) * tile.k)


def fragments_of(tile: GemmTile, atom: Atom, products: int) -> int:
    """Of one step of a warp: the left operand's are of 16 rows."""
    return tile.warp_rows // 16 + products * tile.warp_cols // atom.cols


def chunks_of(tile: GemmTile, dtype: DType, products: int, slice_k_threads: int) -> int:
    """That each of the threads of a slice-K group brings of a slice."""
    return tile_elements(tile, products) // chunk_of(dtype) // slice_k_threads


def run_of(tile: GemmTile, atom: Atom, along: bool) -> int:
    """Neighbouring columns that one thread sums, for the epilogue to take them from its registers; 0 where the sums go
    through shared memory to get there.

    A lane has two of the 16 columns of mma.sync's sums. Which columns these are is up to the copies: where the right
    factors lie along K (`along`), a column is a row of the tile in shared memory, and rows lie in any order.
    Fewer than LEAST_RUN_COLS columns are too few to be stored at once, and sums of several slice-K groups must meet.
    """
    if atom.kind != "mma" or not along or tile.split_k > 1 or tile.by_shared:
        return 0
    run = tile.warp_cols // atom.fragment.lane_cols
    return run if run >= LEAST_RUN_COLS else 0


def shared_bytes(tile: GemmTile, dtype: DType, products: int, statistics: int, run: int = 0, share: float = 1.0) -> int:
    """Dynamic shared memory of a block: the rings, and afterwards the sums in their place, where there is no `run`."""
    ring = dtype.bytes * tile_elements(tile, products, share) * tile.stages * tile.slice_k
    return max(ring, 4 * (statistics * tile.rows if run else tile.slice_k * sums_floats(tile, products, statistics)))


def sums_floats(tile: GemmTile, products: int, statistics: int) -> int:
    """Floats of one slice-K group's sums of a band, and of its statistics, in shared memory."""
    return products * tile.band_rows * (tile.cols + SUMS_PADDING_FLOATS) + statistics * tile.rows
