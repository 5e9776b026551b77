"""Tiles of products on Hopper's tensor cores: their shapes, and where what they bring lies in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fusegen.planner.products.parts import ProductTile
from fusegen.planner.tile import LINE_BYTES
from fusegen.targets.atoms import Atom

LINE_ELEMENTS = 64  # halves of a line of shared memory, the widest swizzle
CONSUMERS = 2  # groups that multiply slices
BUFFERS = 2  # that a warp stores by turns

GroupSchedule = Literal["pingpong", "cooperative"]


@dataclass(frozen=True, slots=True)
class WgmmaTile(ProductTile):
    """How the work is shared. A tile is `rows` x `cols`, those of its output group's products side by side; `stages`
    slices of 64 of what is summed are in shared memory at a time. The `cluster` blocks of one cluster have tiles one
    below the other, and each brings its part of the columns to all of them. `group` rows of tiles are taken column by
    column. Of `split_k` blocks of one cluster each sums a part of the K of one tile, and finishes a part of its
    columns. Cooperative groups may have fewer rows than the instructions' 128: the others' sums are of zeros, and are
    not stored. `across` instructions, one after another, multiply a slice's columns where their sums are promoted."""

    stages: int
    schedule: GroupSchedule
    cluster: int = 1
    group: int = 8
    split_k: int = 1
    across: int = 1
    atom: Atom = field(kw_only=True)

    @property
    def consumers(self) -> int:
        """Groups of warps that multiply."""
        return CONSUMERS

    @property
    def slices_a_stage(self) -> int:
        """Slices of 64 that are copied together."""
        return 1

    @property
    def k_parts(self) -> int:
        """Parts of consumers that share a tile's slices."""
        return 1

    @property
    def blocks(self) -> int:
        """Of a cluster as launched."""
        return self.cluster * self.split_k

    @property
    def pair(self) -> bool:
        """Do the blocks of a cluster multiply together, of which each brings a part of the right factor's columns to
        itself alone?"""
        return False

    @property
    def group_rows(self) -> int:
        """Rows whose sums one group of warps holds."""
        return self.rows if self.schedule == "pingpong" else max(self.atom.rows, self.rows // self.consumers)

    @property
    def held_rows(self) -> int:
        """Rows whose sums are held, and which slices of the left factor have room for."""
        return self.group_rows * (1 if self.schedule == "pingpong" else self.consumers)

    @property
    def parts(self) -> int:
        """Instructions that cover them."""
        return self.group_rows // self.atom.rows

    @property
    def part_rows(self) -> int:
        """Rows of a warp from one part's to the next one's."""
        return self.atom.rows

    @property
    def sums(self) -> int:
        """f32 values that one thread holds of each part."""
        return self.accumulators(self.cols) // self.parts

    @property
    def multiplied(self) -> int:
        """Columns of one instruction."""
        return self.cols // self.across

    @property
    def multiplied_sums(self) -> int:
        """f32 values that one thread holds of what one instruction sums."""
        return self.sums // self.across

    def accumulators(self, width: int) -> int:
        """f32 values that one thread holds of a product of so many columns."""
        return self.parts * width // self.atom.col_step * self.atom.accumulators

    @property
    def warps(self) -> int:
        """Of all groups that multiply."""
        return self.consumers * self.atom.warps

    @property
    def storing_warps(self) -> int:
        """That have a place for boxes to be stored."""
        return self.warps

    @property
    def box_rows(self) -> int:
        """Of a box that one warp stores."""
        return self.atom.warp_rows

    @property
    def box_bytes(self) -> int:
        """Of its place in shared memory."""
        return self.box_rows * LINE_BYTES

    @property
    def left_bytes(self) -> int:
        """Of one slice of the left factor."""
        return self.held_rows * LINE_BYTES

    @property
    def right_bytes(self) -> int:
        return self.cols * LINE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.left_bytes + self.right_bytes

    @property
    def right_at(self) -> int:
        """Where the right factors' slices begin in shared memory."""
        return self.stages * self.left_bytes

    @property
    def staging_at(self) -> int:
        """Where boxes wait to be stored."""
        return self.stages * self.stage_bytes

    @property
    def exchange_at(self) -> int:
        """Where the sums of all blocks that share a tile meet, of each one's columns: in place of the right factors'
        slices, which all blocks have multiplied by then."""
        return self.right_at

    @property
    def exchange_bytes(self) -> int:
        return 4 * self.held_rows * self.cols if self.split_k > 1 else 0

    @property
    def buffers(self) -> int:
        """Of a warp's boxes that wait to be stored: it fills them by turns."""
        return BUFFERS

    @property
    def barriers_at(self) -> int:
        return self.staging_at + self.storing_warps * self.buffers * self.box_bytes

    @property
    def barriers(self) -> int:
        """mbarriers: one for each full and each empty stage, two that tell whose turn it is (ping-pong), and where
        blocks share a tile one for each warp that adds up."""
        return 2 * self.stages + CONSUMERS + (self.warps if self.split_k > 1 else 0)

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 8 * self.barriers

    def statistics_bytes(self, count: int) -> int:
        """Of so many statistics of each row, from all blocks that share a tile: every thread has two rows of them."""
        return self.split_k * CONSUMERS * self.atom.threads * 8 * count if self.split_k > 1 else 0

    @property
    def releases(self) -> int:
        """Warps that are done with a slice before its place is free: of all blocks that write there."""
        return self.atom.warps * self.cluster * (1 if self.schedule == "pingpong" else self.consumers // self.k_parts)


def tiles_of_many(atom: Atom) -> tuple[WgmmaTile, ...]:
    """6 slices of 32 KiB, or 4 of 48, and what waits to be stored fill the 227 KiB of a block."""
    largest = WgmmaTile(128, 128, 6, "pingpong", atom=atom), WgmmaTile(128, 256, 4, "cooperative", atom=atom)
    return tuple(
        replace(tile, cluster=cluster, group=group) for tile in largest for cluster in (1, 2) for group in (8, 16)
    )


def promoted_tiles(atom: Atom) -> tuple[WgmmaTile, ...]:
    """The same where sums are promoted: a thread has registers for 128 sums and for 64 that come to them, of the upper
    and the lower 64 rows or of the left and the right half of the columns, one after another; or for twice 96. Each
    group adds while the other one multiplies."""
    largest = (
        WgmmaTile(256, 128, 4, "cooperative", atom=atom),
        WgmmaTile(128, 192, 4, "cooperative", atom=atom),
        WgmmaTile(128, 256, 4, "cooperative", across=2, atom=atom),
    )
    return tuple(
        replace(tile, cluster=cluster, group=group) for tile in largest for cluster in (1, 2) for group in (8, 16)
    )


def tiles_of_few(atom: Atom) -> tuple[WgmmaTile, ...]:
    """Where those would leave SMs without a tile: other widths, and tiles that several blocks sum together."""
    return (
        WgmmaTile(128, 192, 4, "cooperative", atom=atom),
        WgmmaTile(128, 160, 5, "cooperative", atom=atom),
        WgmmaTile(128, 128, 6, "cooperative", atom=atom),
        WgmmaTile(128, 64, 8, "cooperative", atom=atom),
        WgmmaTile(128, 128, 6, "cooperative", split_k=2, atom=atom),
        WgmmaTile(128, 128, 6, "cooperative", split_k=4, atom=atom),
        WgmmaTile(128, 64, 8, "cooperative", split_k=2, atom=atom),
        WgmmaTile(128, 64, 8, "cooperative", split_k=4, atom=atom),
    )
