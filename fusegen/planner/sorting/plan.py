"""What a plan says of a counting sort: a block, or a cluster of them, that counts each group's slots and places them.

A warp has slots that follow one another, a lane's width at a time. In the first pass it counts the slots of each group
among its own; the counts of the warps before it, and of the groups before, say where its slots of a group begin. In the
second pass a slot's place is there, behind those of its group that came before in its warp. So all that is added are
whole numbers, and slots of one group keep their order. The blocks of a cluster have slots that follow one another as
well, and read one another's counts in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fusegen.planner.block_count import BlockCount
from fusegen.planner.model import Access, Plan
from fusegen.planner.tile import unusual

COUNT_BYTES = 4  # of one count


@dataclass(frozen=True, slots=True)
class SlotTile:
    """How blocks of `warps` warps, `cluster` of them, share the slots: a warp has `turns` of them a lane, in rounds of
    `batch` whose groups are all read before the first is looked at."""

    warps: int
    turns: int
    batch: int
    cluster: int = 1

    @property
    def rounds(self) -> int:
        return self.turns // self.batch


@dataclass(frozen=True, kw_only=True)
class SlotsPlan(Plan):
    """A kernel that sorts `slots` slots by `groups` groups, and writes where groups end, the slots' order, and their
    places, or some of these."""

    tile: SlotTile
    slots: int
    groups: int
    ids: Access
    ends: tuple[Access, ...]  # each the outputs that have it
    order_to: tuple[Access, ...]
    places: tuple[Access, ...]

    @property
    def configuration(self) -> str:
        """`slot_sort 1024 4x8 cluster=2`: threads of a block, rounds x slots of a lane in each, blocks."""
        more = unusual({"cluster": (self.cluster, 1)})
        return f"{self.rule} {self.threads} {self.tile.rounds}x{self.tile.batch}{more}"

    @property
    def facts(self) -> Mapping[str, object]:
        return {"tile": asdict(self.tile), "slots": self.slots, "groups": self.groups}

    @property
    def places_slots(self) -> bool:
        """Are slots placed, and not counted alone?"""
        return bool(self.order_to or self.places)

    @property
    def one_vote(self) -> bool:
        """Does a lane have one slot, so that both passes ask once which lanes have slots of its group?"""
        return self.places_slots and self.tile.turns == 1

    @property
    def group_bits(self) -> int:
        """Of a group's number; those of no group, and lanes without a slot, have numbers behind all others."""
        return (self.groups + 1).bit_length()

    @property
    def ragged(self) -> bool:
        """Have some lanes no slot in some turn?"""
        return self.slots != self.threads * self.tile.turns * self.cluster

    @property
    def threads(self) -> int:
        return self.tile.warps * self.target.warp

    @property
    def cluster(self) -> int:
        return self.tile.cluster

    @property
    def in_any_block(self) -> bool:
        return True

    @property
    def rows_per_block(self) -> int:
        return 1

    @property
    def static_shared_bytes(self) -> int:
        return 0

    @property
    def block_count(self) -> BlockCount:
        return BlockCount(blocks=self.cluster)

    @property
    def max_rows(self) -> int:
        return 1


def shared_bytes(warps: int, groups: int, cluster: int = 1) -> int:
    """Each warp's counts of each group and of slots of none, and where each group begins; in a cluster the block's
    counts as well, and those of the blocks before it."""
    return COUNT_BYTES * (warps + (3 if cluster > 1 else 1)) * (groups + 1)
