"""Latent attention on Hopper: two warpgroups share 64 rows, and a tile of keys holds its values.

    o [.., H, 512] = softmax(q @ kv.mT) @ kv[..., :512], with q and kv of 576 numbers each

The sums of 64 rows of 512 columns are more than a warpgroup's registers hold, so each of two has those of half of the
columns. Tiles of 64 keys alternate: a warpgroup makes the scores and weights of every other one, multiplies these by
its half of the values from registers, and leaves them in shared memory for the other warpgroup, which multiplies them
by the other half. While one computes exponentials, the other multiplies (FlashMLA, DeepSeek 2025, is built so).

- Halves of a tile's keys for each warpgroup would make scores by instructions of 32 columns, for which shared memory
  gives queries and keys in 24 cycles where the tensor cores take 16.
- Queries and two tiles fill shared memory. Weights lie where the last columns of their own tile's keys were, if these
  are no values: once the scores are there, nobody needs them. Else they lie behind the tiles.
- Each 64 columns of a tile have a barrier of their own that tells when they are there, and each half of the values one
  that tells when its place is free: a tile's first columns are multiplied while its last ones are on their way.
- The other's weights are multiplied before the next scores, so that their tile is let go early: 64 sequences of 8192
  keys took 251 us so, and 299 with the scores first, whose products hide the exponentials but wait for memory (H200).
- A row's largest logit and sum in two chains: 249.4 us for 251.1, side by side.
- Not to rescale sums where no row's largest logit grew, a test for each tile, gained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.planner.attention.parts import AttentionTile
from fusegen.planner.attention.wgmma import CONSUMER_REGISTERS, GROUP_ROWS, LINE_ELEMENTS, Boxes, ChainedWgmmaPlan
from fusegen.planner.model import Access
from fusegen.planner.tile import LINE_BYTES

CONSUMERS = 2
# of as many keys as a line of 128 bytes has weights: those that the other warpgroup reads are such lines
TILE = AttentionTile(rows=GROUP_ROWS, keys=LINE_ELEMENTS, warps=4 * CONSUMERS, stages=2, held=False)
MOST_REGISTERS = CONSUMER_REGISTERS[CONSUMERS]
USUAL_REGISTERS = 40  # beside sums, scores and weights: addresses, row values, loop counters
TOLD = 3  # values of each row that warpgroups tell each other


@dataclass(frozen=True, kw_only=True)
class WideWgmmaAttentionPlan(ChainedWgmmaPlan):
    """Attention whose values are the first columns of the keys, and whose rows two warpgroups share."""

    @property
    def columns_of_key(self) -> int:
        return self.key.columns

    @property
    def own_columns(self) -> int:
        """Of the values, that one warpgroup multiplies."""
        return self.value.columns // CONSUMERS

    @property
    def sums_each(self) -> int:
        return self.own_columns // 2

    @property
    def value_segments(self) -> int:
        """64 columns each, of a row of values."""
        return self.value.columns // LINE_ELEMENTS

    @property
    def over_keys(self) -> bool:
        """Do weights lie in the place of their tile's last columns?"""
        return self.key_boxes.segments > self.value_segments

    @property
    def weights_bytes(self) -> int:
        """Of one tile's weights: a line of 128 bytes for each row."""
        return self.tile.rows * LINE_BYTES

    @property
    def tiles_end(self) -> int:
        return self.query_boxes.bytes + self.tile.stages * self.key_boxes.bytes

    @property
    def told_at(self) -> int:
        """Bytes to what warpgroups tell each other of rows."""
        return self.tiles_end + (0 if self.over_keys else CONSUMERS * self.weights_bytes)

    @property
    def barriers_at(self) -> int:
        return self.told_at + 4 * TOLD * CONSUMERS * self.tile.rows


def barrier_bytes(tile: AttentionTile, key: Boxes) -> int:
    """One mbarrier for the queries; for each stage one for each 64 columns of keys and one for each half of values."""
    return 8 * (1 + tile.stages * (key.segments + CONSUMERS))


def registers_of(tile: AttentionTile, width: int, ahead: list[Access]) -> int:
    """Registers of a consumer's thread: its half of the sums, scores, weights by pairs, and what is read ahead."""
    scores = tile.keys // 2
    each = width // (2 * CONSUMERS)
    return USUAL_REGISTERS + each + scores + scores // 2 + sum(scores * a.dtype.bytes // 4 for a in ahead)
