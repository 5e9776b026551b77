"""Attention of long rows: keys or values of more numbers than a warp's registers have room for sums of.

    o [.., S, 512] = softmax(q @ kv.mT) @ kv[..., :512], with q and kv of 576 numbers each

Several warps, `beside` each other, share 16 rows of queries. Of a tile's scores each makes those of some keys; their
largest logits meet in shared memory, and so do the weights, which all of them then multiply: each with some columns of
the values, as many as its registers hold sums of. Where the values are the first columns of the keys, as those of
multi-head latent attention are, a tile is brought once, for both products.

Keys and values of 8 bits go this way too, however short: few queries read them, and of blocks of two warps an SM has
many, whose loads are on their way while others widen and multiply. What each key has one of, as its scale, is loaded
with its codes, and meets them where they are widened (`codes`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.language.types import DType
from fusegen.planner.attention.cost import ROW_VALUE_REGISTERS, USUAL_REGISTERS
from fusegen.planner.attention.parts import (
    CHUNK,
    SUMS_PADDING_FLOATS,
    AttentionPlan,
    AttentionTile,
    Matrix,
)
from fusegen.targets.atoms import Atom

GROUP_ROWS = 16  # of queries, whose scores and sums one warp has or several share
COLUMNS_AT_ONCE = 128  # of sums that are in shared memory at a time, behind the last tile
# rows, keys, warps, stages: with copies past the registers
TILES = (
    (64, 64, 16, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2), (16, 64, 4, 2), (16, 32, 2, 2),
)  # fmt: skip
# and by way of registers
WAVES = ((64, 64, 16, 1), (64, 32, 8, 1), (32, 64, 8, 1), (32, 32, 4, 1), (16, 64, 4, 1), (16, 32, 2, 1))
# the same, of numbers of 8 bits: a second stage gains nothing
CODED = ((16, 32, 2, 1), (16, 64, 4, 1), (32, 32, 4, 1))


@dataclass(frozen=True, kw_only=True)
class WideAttentionPlan(AttentionPlan):
    """Attention whose rows several warps share. `shared`: the values are the first columns of the keys' rows."""

    shared: bool

    @property
    def beside(self) -> int:
        """Warps that share rows."""
        return beside(self.tile)

    @property
    def warp_keys(self) -> int:
        """Of a tile, whose scores one warp makes."""
        return self.tile.keys // self.beside

    @property
    def warp_columns(self) -> int:
        """Of the values, that one warp multiplies."""
        return self.value.padded // self.beside

    @property
    def stage_elements(self) -> int:
        return stage_elements(self.key, self.value, self.shared)

    @property
    def value_at(self) -> int:
        """Elements from a stage's start to its values."""
        return 0 if self.shared else self.key.elements

    @property
    def value_pitch(self) -> int:
        return self.key.pitch if self.shared else self.value.pitch

    @property
    def query_at(self) -> int:
        return self.stage_elements * self.tile.stages

    @property
    def weights_at(self) -> int:
        """Elements from the start of shared memory to the tile's weights."""
        return self.query_at + (0 if self.tile.held else self.query.elements)

    @property
    def weights_pitch(self) -> int:
        return weights_pitch(self.tile)

    @property
    def columns_at_once(self) -> int:
        return min(COLUMNS_AT_ONCE, self.value.padded)

    @property
    def column_passes(self) -> int:
        """In which sums go through shared memory."""
        return -(-self.value.columns // self.columns_at_once)

    @property
    def sums_stride(self) -> int:
        return self.columns_at_once + SUMS_PADDING_FLOATS

    @property
    def told_at(self) -> int:
        """Bytes to what warps that share rows tell each other: behind all that is there at the same time."""
        return told_at(self.tile, self.dtype, self.query, self.key, self.value, self.shared)


def beside(tile: AttentionTile) -> int:
    """Warps that share rows."""
    return tile.warps * GROUP_ROWS // tile.rows


def weights_pitch(tile: AttentionTile) -> int:
    """Elements from one row of weights to the next, an odd number of 16 bytes."""
    return (tile.keys // CHUNK | 1) * CHUNK


def stage_elements(key: Matrix, value: Matrix, shared: bool) -> int:
    return key.elements + (0 if shared else value.elements)


def told_at(tile: AttentionTile, dtype: DType, query: Matrix, key: Matrix, value: Matrix, shared: bool) -> int:
    """Bytes of the ring, the queries and the weights, or of the sums that take their place."""
    looped = stage_elements(key, value, shared) * tile.stages + (0 if tile.held else query.elements)
    looped += tile.rows * weights_pitch(tile)
    behind = 4 * tile.rows * (min(COLUMNS_AT_ONCE, value.padded) + SUMS_PADDING_FLOATS + 2)
    return max(looped * dtype.bytes, behind)


def shared_bytes(tile: AttentionTile, dtype: DType, query: Matrix, key: Matrix, value: Matrix, shared: bool) -> int:
    """Dynamic shared memory: all that, and of each row a float for each of the warps that share it."""
    return told_at(tile, dtype, query, key, value, shared) + 4 * tile.rows * beside(tile)


def registers_of(
    tile: AttentionTile, atom: Atom, query: Matrix, key: Matrix, value: Matrix, shared: bool, row_values: int
) -> int:
    """Registers of one thread, as of other attention: each warp has its keys' scores and its columns' sums."""
    lanes = atom.fragment.lanes
    sums = GROUP_ROWS * value.padded // (beside(tile) * lanes)
    scores = GROUP_ROWS * tile.keys // (beside(tile) * lanes)
    held = GROUP_ROWS * query.padded // (2 * lanes) if tile.held else 8
    brought = (key,) if shared else (key, value)
    threads = tile.warps * lanes
    fetched = sum(m.held(threads) for m in brought if not m.copied and tile.ahead)
    return USUAL_REGISTERS + sums + scores + held + fetched + row_values * ROW_VALUE_REGISTERS
