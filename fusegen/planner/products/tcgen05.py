"""What a plan says of a product on Blackwell's tensor cores: tcgen05, whose sums are in tensor memory.

A block is warp-specialized: of a first group of four warps one thread is the producer, which copies slices of the
factors into a ring in shared memory, as wgmma's does, and one thread multiplies: it asks for the products of a slice
once that is there, and a commit behind them gives the slice's place back. Sums lie in tensor memory, 128 lanes of 512
columns, with room for two tiles of 256 columns. Two more groups of four warps take the tiles by turns: each waits for
its tile's products, brings their sums to registers, gives the columns back, and makes something of the sums while the
next tile is multiplied. Blocks are persistent.

Two blocks of a cluster may be a *pair* (`cluster` = 2, `.cta_group::2`) with a tile of 256 rows. Each has 128 of them
in its shared memory, and their sums in its tensor memory, and half of the right factor's columns: the instructions,
which one thread of the first block asks for, read both blocks' shared memory. So a block brings and reads half as much
of the right factor as one by itself. All copies of a slice are counted by the first block's mbarrier, and a commit
tells both blocks. Of products that are used together each block brings half of each one's columns, so that halves of
their sums take turns in tensor memory.

What becomes of sums in registers is wgmma's: `tcgen05.ld.16x256b` brings 16 rows to a warp as wgmma leaves them. A warp
reaches 32 lanes of tensor memory, so that it takes two such parts of a tile's 128 rows, one after the other.

    rows M, cols N, K    those of `wgmma`

PTX ISA 9, "TensorCore 5th Generation Family Instructions"; CUTLASS (cute/arch/mma_sm100_desc.hpp) and DeepGEMM
(impls/sm100_bf16_gemm.cuh) for the fields of descriptors and for who waits for whom. No kernel has run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.planner.model import Summed
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.products.wgmma_tiles import WgmmaTile
from fusegen.planner.tile import LINE_BYTES, unusual
from fusegen.targets.atoms import Atom

TENSOR_COLUMNS = 512  # of 32 bits, in each lane
LEAST_COLUMNS = 32  # that can be allocated, and any power of 2 beyond
ACCUMULATORS = 2  # tiles whose sums are in tensor memory: one is multiplied, of the other one something is made
LOADED_ROWS = 16  # that one load brings to a warp
PAIR = 2  # blocks of a cluster that multiply together


@dataclass(frozen=True, slots=True)
class Tcgen05Tile(WgmmaTile):
    """As wgmma's by turns (`pingpong`): `rows` x `cols`, those of its output group's products side by side."""

    @property
    def pair(self) -> bool:
        return self.cluster == PAIR

    @property
    def right_bytes(self) -> int:
        """Of one slice of the right factors: each block of a pair has half of the columns."""
        return self.cols // self.cluster * LINE_BYTES

    @property
    def parts(self) -> int:
        """Of a warp's rows, that are in registers one after the other."""
        return self.atom.warp_rows // LOADED_ROWS

    @property
    def part_rows(self) -> int:
        return LOADED_ROWS

    def accumulators(self, width: int) -> int:
        """Sums of a product of so many columns that one thread brings to registers, of all parts."""
        return width // self.atom.col_step * self.atom.accumulators

    @property
    def box_rows(self) -> int:
        return LOADED_ROWS

    @property
    def columns(self) -> int:
        """Of tensor memory, to be allocated."""
        return max(LEAST_COLUMNS, 1 << (ACCUMULATORS * self.cols - 1).bit_length())

    @property
    def barriers(self) -> int:
        """mbarriers: one for each full and each empty stage, and for each accumulator two, which tell when it is summed
        and when it has been taken."""
        return 2 * self.stages + 2 * ACCUMULATORS

    @property
    def shared_bytes(self) -> int:
        """With 8 bytes for the address of tensor memory."""
        return self.barriers_at + 8 * self.barriers + 8

    @property
    def releases(self) -> int:
        """Arrivals before a slice's place is free: of the commit behind its products."""
        return 1

    @property
    def takers(self) -> int:
        """Warps that take a tile's sums, of all blocks that it is shared by."""
        return self.atom.warps * self.cluster


@dataclass(frozen=True, kw_only=True)
class Tcgen05Plan(WgmmaPlan):
    """Products on Blackwell's tensor cores."""

    tile: Tcgen05Tile

    @property
    def summed(self) -> Summed:
        return Summed(1, 0, promote=self.promote)

    @property
    def counts_slices(self) -> bool:
        return self.steps > 1

    @property
    def lanes_store(self) -> bool:
        """Of several products besides: with tensor copies too gate and up spilled 12 bytes (NVRTC 13.5)."""
        return bool(self.segments and self.products > 1)

    @property
    def configuration(self) -> str:
        """`tcgen05 128x256 4`: rule, a block's tile, stages; then each choice that is not the usual one."""
        t = self.tile
        return f"{self.rule} {t.rows}x{t.cols} {t.stages}{unusual({'cluster': (t.cluster, 1), 'group': (t.group, 8)})}"

    @property
    def groups_a_lane(self) -> int:
        return 0  # each thread that looks for a tile's group goes over all of them

    @property
    def before_wait(self) -> str:
        what = "its barriers and tensor memory"
        return f"{what}{' and ' * self.reads_ahead}{self.rights_ahead}" if self.waits else ""

    @property
    def instruction_fields(self) -> tuple[tuple[str, str], ...]:
        """The instruction descriptor but for how factors lie: terms of it, and what each says. PTX ISA, "Instruction
        descriptor", table 42; CUTLASS, cute/arch/mma_sm100_desc.hpp, InstrDescriptor."""
        atom = self.tile.atom
        kinds = [atom.factors, atom.right_factors]
        sums, (left, right) = SUM_FORMATS[atom.sum_type.name], [FACTOR_FORMATS[kind.name] for kind in kinds]
        named = "tf32" if atom.word == "tf32" else " and ".join(dict.fromkeys(map(str, kinds)))
        return (
            (f"{sums}u << 4", f"sums of {atom.sum_type}"),
            (f"{left}u << 7 | {right}u << 10", f"factors of {named}"),
            (f"{self.tile.cols}u / 8 << 17", "columns"),
            (f"{atom.rows * self.tile.cluster}u / 16 << 24", "rows"),
        )


SUM_FORMATS = {"f32": 1, "i32": 2}
FACTOR_FORMATS = {"f16": 0, "bf16": 1, "f32": 2, "u8": 0, "i8": 1, "f8e4m3": 0, "f8e5m2": 1}  # f32 as tf32


def tiles_of_many(atom: Atom) -> tuple[Tcgen05Tile, ...]:
    """4 slices of 48 KiB, or 6 of 32, and what waits to be stored fill the 227 KiB of a block; two tiles of 256 columns
    fill tensor memory. Pairs have tiles of 256 x 256, of which a block brings 32 KiB a slice."""
    alone = tuple(
        Tcgen05Tile(128, cols, stages, "pingpong", group=group, atom=atom)
        for cols, stages in ((256, 4), (128, 6))
        for group in (8, 16)
    )
    return (*alone, *(Tcgen05Tile(128, 256, 6, "pingpong", PAIR, group, atom=atom) for group in (8, 4)))


def tiles_of_few(atom: Atom) -> tuple[Tcgen05Tile, ...]:
    """Where those would leave SMs without a tile."""
    return tuple(Tcgen05Tile(128, cols, stages, "pingpong", atom=atom) for cols, stages in ((192, 4), (64, 8), (32, 8)))
