"""What a plan says of a product on Hopper's tensor cores: wgmma, fed by tensor copies.

A block is warp-specialized: three groups of four warps. One is the producer, which copies slices of the factors into a
ring in shared memory, a box at a time; two are consumers, which multiply them and make something of the sums. They
share a tile, an upper and a lower half of its rows (`cooperative`), or each has tiles of its own (`pingpong`): while
one multiplies, the other one makes something of its tile's sums. Blocks are persistent: as many as the GPU has room for
go over all tiles. Where tiles are few, the blocks of a cluster share one: each sums a part of K (split-K), sends the
others what it has of their columns, and makes something of its own ones. Products that are used together share tiles;
those with columns of their own are *output groups*, side by side in one row of tiles. Cooperative groups alternate, a
slice each, where the left factor is computed: while one multiplies, the other one prepares its fragments, of the next
tile too; and where rows are normalised, what is made of a tile's sums waits in registers until the next tile's products
run. Operands as large as the result come through the ring behind a tile's slices, where the schedule is cooperative.
Where an index names the left factor's rows, the producer's threads copy them, 16 bytes each, beside the tensor copies.

    rows M    the last of `row_dims`, a run-time argument; another one before it counts products of their own
    cols N    of the products of one output group, a constant
      K         what is summed over, a constant

f32 is rounded to tf32 by the tensor copies, to nearest (CUDA driver API, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32).

Where groups of K are summed, each tile has slices of its own group's part, from the part's beginning on. The last one
may bring rows that lie behind the group: consumers put zeros in their place before they multiply, in both factors,
since 0 times NaN is NaN.

8-bit floats are summed in 14 bits. So their sums are *promoted*: those of a slice, or of some, begin at 0 in registers
of their own, and are added to the tile's in f32, while the other group multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusegen.planner.block_count import BlockCount
from fusegen.planner.model import Access, Summed
from fusegen.planner.products.in_step import tiles_in_step
from fusegen.planner.products.parts import (
    InnerSegments,
    Operand,
    ProductPlan,
    ProductWork,
    Prologue,
    Segments,
)
from fusegen.planner.products.product_cost import tiles_down
from fusegen.planner.products.slice_scales import scale_slots
from fusegen.planner.products.wgmma_tiles import CONSUMERS, LINE_ELEMENTS, WgmmaTile
from fusegen.planner.tile import LINE_BYTES, unusual

PRODUCERS = 1  # groups that bring slices
SEGMENT_LINES = 64  # of rows or columns of a slice, however they lie
SEGMENT_BYTES = SEGMENT_LINES * LINE_BYTES
LAUNCH_REGISTERS = 168  # of a thread as launched: 3 groups of as many threads share 65536,
# of which those that bring slices give back what they need not, and those that multiply take it: 40 + 2 x 232 are three
# times 168. By how many things producers keep beside where slices go, rows that an index names and groups: with fewer,
# SwiGLU of 128 x 256 spilled 16 bytes of groups, and 104 where rows are named too, 20 with 72, and in clusters with 88.
SHARED_REGISTERS = ((40, 232), (56, 224), (88, 208), (104, 200))
FEW_PRODUCER_REGISTERS, FEW_CONSUMER_REGISTERS = 24, 112  # where five groups are launched with 96 each
SLICES_AHEAD = 2  # slices whose pairs are on their way
PIECE_BYTES = 16  # that a thread copies of a row at once
MOST_K = 2**31 - 1  # of what groups are summed over, which kernels count in 32 bits
PLACE_BYTES = 32  # of a tile's place in shared memory: up to seven numbers
MOST_KEPT_REGISTERS = 80  # registers beside 128 sums and two prepared slices; with 88 a kernel spilled


def box_cols(cols: int) -> int:
    """Columns of the boxes that so many are stored by: lines of 128, 64 or 32 bytes."""
    return next(box for box in (LINE_ELEMENTS, LINE_ELEMENTS // 2, LINE_ELEMENTS // 4) if cols % box == 0)


def vector_bytes(prologue: Prologue | None) -> int:
    """Of a slice of all vectors that the left factor is computed from."""
    return LINE_ELEMENTS * sum(found.access.dtype.bytes for found in prologue.vectors) if prologue else 0


@dataclass(frozen=True, kw_only=True)
class WgmmaWork(ProductWork):
    """Products on Hopper's tensor cores: what their time depends on."""

    tile: WgmmaTile
    stepped: int | None = None  # `tiles_in_step` of a longer launch, whose text is judged by this plan's

    @property
    def line(self) -> int:
        """Elements of the factors in a line of shared memory, and in a slice of what is summed."""
        return LINE_BYTES // self.dtype.bytes

    @property
    def gathers(self) -> bool:
        """Do the producer's threads find rows of the left factor by an index, in place of tensor copies?"""
        return self.left[0].rows_at is not None

    @property
    def promoted_slices(self) -> int:
        """Whose sums begin at 0 and are added in f32; 0: none are."""
        return self.promote // self.line

    @property
    def slices_together(self) -> int:
        """Slices that are scaled together: two of one group of codes."""
        return 2 if self.coding and self.coding.group % (2 * self.line) == 0 else 1

    @property
    def lanes_store(self) -> bool:
        """Do lanes alone store boxes of groups' rows? Promoted sums leave no registers for tensor copies as well."""
        return bool(self.segments and self.promote)

    @property
    def scale_slots(self) -> int:
        """Slices whose scales by blocks are in shared memory at a time; 0: there are none."""
        return scale_slots(self.tile.rows, self.tile.stages) if self.block_scales else 0

    @property
    def slices(self) -> int:
        """Of what is summed, the last one filled up with zeros."""
        return -(-self.k // self.line)

    @property
    def steps(self) -> int:
        """Slices that one block brings. Those beyond K are zeros, and change no sum of products."""
        return self.steps_of(self.k)

    def steps_of(self, k: int) -> int:
        """The same of another K."""
        together = self.tile.slices_a_stage
        return -(-k // (self.line * self.tile.split_k * together)) * together

    @property
    def most_steps(self) -> int:
        """The same, at most: a group of K may have all of it."""
        return self.steps if self.inner_segments is None else -(-MOST_K // self.line)

    @property
    def width(self) -> int:
        """Columns of each product in a tile."""
        return self.tile.cols // self.products

    @property
    def finished(self) -> int:
        """Of these, the columns that one block makes something of."""
        return self.width // self.tile.split_k

    @property
    def tiles_in_step(self) -> int:
        """After how many of its tiles a block waits for all others; 0: none does. In long launches of groups they do,
        as far as measured: of 16 bits that tensor copies bring, without clusters, and on Hopper."""
        if self.stepped is not None:
            return self.stepped
        if not self.target.wgmma or not self.segments or self.gathers or self.promote or self.coding:
            return 0
        tiles = tiles_down(self.graph, self.band) * self.tiles_across // self.target.sms
        return tiles_in_step(tiles * self.steps * self.tile.cols) if self.tile.blocks == 1 else 0

    @property
    def band(self) -> int:
        """Rows of all tiles of a cluster."""
        return self.tile.rows * self.tile.cluster

    @property
    def batched(self) -> bool:
        return len(self.row_dims) > 1

    def tiles(self, *extents: int) -> int:
        """Of the whole launch; those of a cluster count as one."""
        return self.block_count.tiles(*extents)

    @property
    def block_count(self) -> BlockCount:
        """As few as need no more rounds than all that the GPU has room for: each then takes as many tiles; of grouped
        products, whose tiles the device counts, all of them. Those that share a tile have no other one."""
        groups = self.segments.count if self.segments else 0
        count = BlockCount(rows=self.band, across=self.tiles_across, groups=groups)
        if self.tile.split_k > 1:
            return replace(count, blocks=self.tile.split_k)
        cluster = self.tile.cluster
        return replace(count, blocks=cluster, at_once=self.target.sms // cluster, even=not groups)


@dataclass(frozen=True, kw_only=True)
class WgmmaPlan(WgmmaWork, ProductPlan):
    """Products on Hopper's tensor cores, to which what a prologue computes goes from registers."""

    @property
    def summed(self) -> Summed:
        split_k = self.tile.split_k
        if self.coding:
            scaled = self.slices_together * self.line
            parts = self.tile.k_parts
            part_k = self.tile.slices_a_stage * self.line if parts > 1 else 0
            k = self.steps * self.line if split_k > 1 else 0
            return Summed(split_k, k, scaled=scaled, parts=parts, part_k=part_k)
        return Summed(split_k, self.steps * self.line if split_k > 1 else 0, promote=self.promote)

    @property
    def configuration(self) -> str:
        """`wgmma pingpong 128x128 6`: rule, schedule, tile, stages; then each choice that is not the usual one."""
        t = self.tile
        choices = {"cluster": (t.cluster, 1), "group": (t.group, 8), "split_k": (t.split_k, 1)}
        choices |= {"slices": (t.slices_a_stage, 1), "k_parts": (t.k_parts, 1)}
        return f"{self.rule} {t.schedule} {t.rows}x{t.cols} {t.stages}{unusual(choices)}"

    @property
    def threads(self) -> int:
        return (PRODUCERS + self.tile.consumers) * self.tile.atom.threads

    @property
    def cluster(self) -> int:
        return self.tile.blocks

    @property
    def waits_inside(self) -> bool:
        return self.waits

    @property
    def slices_at_first(self) -> int:
        """Not where ends of groups say which they are: these may be the kernel's before. Nor where all threads of the
        producer copy, whose slices come one behind the other."""
        if self.segments or self.inner_segments or self.gathers:
            return 0
        return min(self.tile.stages, self.steps // self.tile.slices_a_stage)

    @property
    def before_wait(self) -> str:
        return f"its barriers{' and ' * self.reads_ahead}{self.rights_ahead}" if self.waits else ""

    @property
    def shared_registers(self) -> tuple[int, int]:
        """Of a thread that brings slices, and of one that multiplies."""
        if self.tile.consumers > CONSUMERS:
            return FEW_PRODUCER_REGISTERS, FEW_CONSUMER_REGISTERS
        all_three = self.gathers and self.keeps_groups and self.tile.cluster > 1 and not self.is_pingpong
        return SHARED_REGISTERS[self.gathers + (self.keeps_groups or self.block_scales is not None) + all_three]

    @property
    def producer_registers(self) -> int:
        """Of a thread that brings slices."""
        return self.shared_registers[0]

    @property
    def consumer_registers(self) -> int:
        """Of a thread that multiplies them."""
        return self.shared_registers[1]

    @property
    def piece_lanes(self) -> int:
        """Neighbouring threads of the producer that copy one line of a row."""
        return LINE_BYTES // PIECE_BYTES

    @property
    def piece_rows(self) -> int:
        """Rows of which the producer's threads copy a line together."""
        return PRODUCERS * self.tile.atom.threads // self.piece_lanes

    @property
    def row_passes(self) -> int:
        """Rows of which a thread copies a part."""
        return self.left_rows // self.piece_rows

    @property
    def is_pingpong(self) -> bool:
        """Ping-pong: do the groups multiply by turns, a tile or a slice at a time? Where a narrow tile's slices are
        prepared, that takes longer than their products, and turns took 0.5 to 5 % more."""
        prepared = self.prologue is not None and self.tile.cols == self.tile.atom.cols
        return self.tile.schedule == "pingpong" or prepared

    @property
    def ahead(self) -> bool:
        """Is a tile's first slice prepared behind the last products of the one before? Not where it takes long, which
        a bias, an activation or a gain of f32 do: 3 to 4 % more, on an H200."""
        found = self.prologue
        return self.tile.split_k == 1 and found is not None and (found.scale is not None or not found.changes)

    @property
    def deferred_store(self) -> bool:
        """Is what is made of a tile kept in registers, and stored while products of the next one run? Where rows are
        normalised, there is one output, and vectors leave it the registers: all else was seen to spill."""
        found = self.prologue
        if found is None or found.scale is None or not found.reductions or self.several or self.tile.split_k > 1:
            return False
        if self.segments:  # whose boxes no tensor copy stores
            return False
        (output_group,) = self.output_groups
        alone = len(output_group.boxes) == len(output_group.stores) == 1 and not any(
            load.when == "ahead" for load in output_group.loads
        )
        kept = self.contractions[0].accumulators // 2  # by pairs of halves
        return alone and kept + self.vector_registers <= MOST_KEPT_REGISTERS

    @property
    def vector_registers(self) -> int:
        """That hold what one thread needs of a slice of all vectors: a quarter of it."""
        return vector_bytes(self.prologue) // 4 // 4

    @property
    def pairs_ahead(self) -> int:
        """Slices whose pairs of the vectors along K a lane asks for at a time: a load takes longer than the
        products of a narrow tile's slice. Not than those of a wide one, where two at a time took 0.4 to 0.7 % more."""
        return (
            SLICES_AHEAD
            if self.prologue and self.prologue.vectors and self.tile.cols < self.tile.atom.cols and self.steps > 1
            else 1
        )

    @property
    def vectors_at(self) -> int:
        """Where slices of the vectors that the left factor is computed from lie in shared memory."""
        return self.tile.shared_bytes

    @property
    def statistics_at(self) -> int:
        """Where the statistics of all blocks that share a tile meet."""
        return self.vectors_at + self.tile.stages * vector_bytes(self.prologue)

    @property
    def unrolled_slices(self) -> bool:
        """Are slices of all tiles in the same places of the ring, so that a loop goes over these, and addresses are
        constants?"""
        return not (self.inner_segments or self.brought) and self.steps % self.tile.stages == 0

    @property
    def fences_both(self) -> bool:
        """Are sums of a slice and sums of a tile, which are more of them, kept from being reordered?"""
        return self.promoted_slices > 0 and self.tile.across > 1 and self.unrolled_slices and not self.block_scales

    @property
    def place_bytes(self) -> int:
        """Of the place of a tile of grouped products, which the producer leaves in shared memory for the consumers; 0:
        each works it out. Where all of them looked for the group of each tile, in up to 16 groups a lane, that took
        longer than what the ring holds: of 512 groups and a K of 1024, tiles of 128 x 128 took twice as long (H200).
        Where slices are prepared, a tile's first one may be before its place is asked for."""
        return PLACE_BYTES if self.groups_a_lane and self.prologue is None else 0

    @property
    def keeps_groups(self) -> bool:
        """Does the producer keep what it knows of groups from tile to tile? A lane's groups have a lane each then."""
        return self.place_bytes > 0 and self.groups_a_lane <= self.target.warp

    @property
    def places_at(self) -> int:
        """Where the places of tiles lie in shared memory: behind all else."""
        return self.shared_bytes - self.tile.stages * self.place_bytes

    @property
    def counts_slices(self) -> bool:
        """Does the kernel ask how many slices every tile has, as consumers pass by those of the other one's tile? Of
        groups of K the device counts those of each tile."""
        return self.inner_segments is None

    @property
    def warp_finds(self) -> bool:
        """Do the lanes of a warp find a tile's group together?"""
        return self.inner_segments is not None or self.groups_a_lane > 0

    @property
    def clearing_threads(self) -> int:
        """Of the consumers that multiply one slice, which put zeros behind a group together."""
        return self.tile.atom.threads * (1 if self.tile.schedule == "pingpong" else self.tile.consumers)

    @property
    def line_steps(self) -> int:
        """Instructions along a slice."""
        return self.line // self.tile.atom.k

    @property
    def padded(self) -> bool:
        """Does a slice reach beyond K?"""
        return self.steps * self.tile.split_k * self.line != self.k

    @property
    def rights(self) -> tuple[Operand, ...]:
        """Of all output groups."""
        return tuple(right for output_group in self.output_groups for right in output_group.rights)

    @property
    def reduced_cols(self) -> int:
        """Columns of a group that tiles reduce; 0: they reduce none."""
        return max(node.group for node in self.hoisted.nodes) if self.hoisted.grouped else 0

    @property
    def chunks_are_groups(self) -> bool:
        """Has a tile several groups of columns that it reduces, each a chunk?"""
        return 0 < self.reduced_cols < self.finished

    @property
    def box_cols(self) -> int:
        """Of a chunk: of a box that is stored, or of a group that is reduced."""
        return self.reduced_cols if self.chunks_are_groups else box_cols(self.finished)

    @property
    def left_rows(self) -> int:
        """Rows of the left factor that a slice brings: where lines lie along them, whole lines."""
        return self.tile.rows if self.left[0].along else self.tile.held_rows

    @property
    def chunks(self) -> int:
        """What a thread takes of a tile's columns one after another: boxes that a warp stores side by side."""
        return self.finished // self.box_cols

    @property
    def uneven_boxes(self) -> bool:
        """Does a warp store an odd number of boxes of a tile, and then those of another one? The buffers take turns."""
        counts = {self.tile.parts * self.chunks * len(output_group.boxes) for output_group in self.output_groups}
        return self.tile.split_k == 1 and not self.lanes_store and any(count % self.tile.buffers for count in counts)

    @property
    def brought(self) -> int:
        """Places of the ring that boxes of operands take behind a tile's slices, two side by side in each."""
        return sum(len(output_group.brought) for output_group in self.output_groups) * -(-self.chunks // 2)

    def moves_with_batch(self, access: Access) -> bool:
        """Has each of the batches elements of its own?"""
        return self.batched and 0 in access.strided

    @property
    def max_rows(self) -> int:
        """Rows and tiles are counted in 32 bits; of products with one row each, every one takes a row of tiles."""
        most = (2**31 - 1) // (self.tiles_across * self.tile.split_k)
        most = max(0, most - self.segments.count - 1) if self.segments else most
        return most if self.batched else min(most * self.band, 2**31 - 2**12)


def regime(
    tile: WgmmaTile, products: int, line: int, segments: Segments | InnerSegments | None, gathers: bool
) -> str:  # fmt: skip
    each = f"{tile.rows}x{tile.cols // products}" + (f" of {products} products" if products > 1 else "")
    pingpong = tile.schedule == "pingpong"
    who = (
        f"ping-pong: two consumer warpgroups, each with tiles of {each}"
        if pingpong
        else f"cooperative: two consumer warpgroups share tiles of {each}"
    )
    producer = f"a producer {tile.stages} slices of {line} ahead" + ", which finds rows by their index" * gathers
    cluster = f", the right factor multicast in clusters of {tile.cluster}" if tile.cluster > 1 else ""
    if tile.split_k > 1:
        return f"{who}, {producer}; split-K by a cluster of {tile.split_k} blocks"
    grouped = f"; {segments.text}" if segments else ""
    return f"{who}, {producer}{cluster}; persistent blocks, {tile.group} rows of tiles at a time{grouped}"
