"""Attention on Hopper: tensor copies bring queries, keys and values, wgmma multiplies, and registers hold the rest.

A block has 64 queries for each of its consumer warpgroups; a producer brings tiles of keys and values. The products of
the next tile's scores are issued before those of this tile's weights and values, so that exponentials are computed
while the tensor cores multiply (Shah et al. 2024, FlashAttention-3). Consumers take turns at issuing (ping-pong), and
there are as many blocks as tiles: the hardware hands the next one to the first SM that is free.

What measurements on an H100 decided (docs/measurements.md, "Attention on Hopper"):

- Three consumers hide the exponentials of heads of up to 80 numbers, which bound them: 556 TFLOP/s against 494 with two
  for heads of 64, 557 against 517 for heads of 80.
- Persistent blocks gained nothing without a mask, and lost up to a fifth with a causal one, where blocks differ.
- A quarter of the exponentials by a polynomial on the FMA units lost 10 % for heads of 64, which issue slots bound.
- With a causal mask, the longest rows of several heads first gained 7 % over head by head (`heads_together`).
- Turns gained up to 2 %, and tiles of 96 keys lost 4 % against 128.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.language.types import bf16, f16
from fusegen.planner.attention.parts import AttentionPlan, AttentionTile, Pages, ScoresPlan
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Access, Param, RowDim
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.tile import LINE_BYTES

LINE_ELEMENTS = 64  # halves of a line of shared memory
GROUP_ROWS = 64  # queries of a warpgroup
BOX_ROWS = 16  # of what a warp stores at once
WARPGROUP = 128  # threads
# of a consumer's and of the producer's thread, by how many consumers there are: together as many as the block starts
# with. A single consumer keeps what the compiler gives it
CONSUMER_REGISTERS = {1: 255, 2: 232, 3: 160, 4: 112}
PRODUCER_REGISTERS = {1: 0, 2: 40, 3: 32, 4: 32}
USUAL_REGISTERS = 28  # beside sums, scores and weights: addresses, row values, loop counters
MOST_TOGETHER = 16  # heads whose blocks are mixed: 4, 8 and 16 took the same time
MOST_AXES = 5  # of a tensor copy (PTX ISA, cp.async.bulk.tensor)
STAGES = 2
SWIZZLED_LINES = 8  # of shared memory, in which the swizzle of a box repeats
# consumers and keys of a tile, by the most numbers of a query and of a value that they are for
TILES: Mapping[int, tuple[tuple[int, int], ...]] = {
    80: ((3, 128), (3, 96), (3, 64), (2, 128), (1, 128)),
    128: ((2, 128), (2, 160), (2, 64), (1, 128)),
    192: ((2, 112), (2, 96), (2, 64), (1, 64)),
    256: ((2, 64), (1, 64)),
}


@dataclass(frozen=True, slots=True)
class Boxes:
    """A matrix that tensor copies move: `rows` lines of it in shared memory, in boxes of `box_rows` lines of 128 bytes,
    `segments` of them side by side. `others`: indices of the dimensions that it moves along beside its lines, the
    innermost first, as a copy's coordinates have them. Of one that lies in `pages` a box is of one page, whose number
    is the outermost coordinate: of a page that is not there, the copy makes zeros."""

    access: Access
    rows: int
    box_rows: int
    segments: int
    others: tuple[str, ...]
    pages: Pages | None = None

    @property
    def axes(self) -> int:
        """Of a copy's coordinates."""
        return 2 + len(self.others) + (self.pages is not None)

    @property
    def name(self) -> str:
        return self.access.name

    @property
    def bytes(self) -> int:
        return self.segments * self.rows * LINE_BYTES


@dataclass(frozen=True, kw_only=True)
class WgmmaScoresPlan(ScoresPlan):
    """Tiles of scores by wgmma. `scale`: a logit is so many times what the bodies make of a score."""

    scale: float
    query_boxes: Boxes
    key_boxes: Boxes
    stored: Mapping[str, Boxes]  # results that tensor copies store, by their tensors' names

    @property
    def consumers(self) -> int:
        return self.tile.warps // 4

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def shared_alignment(self) -> int:
        return 1024  # eight lines, in which swizzles repeat

    @property
    def configuration(self) -> str:
        """`attention_wgmma 128x128 2`: rule, rows x keys, stages."""
        return f"{self.rule} {self.tile.rows}x{self.tile.keys} {self.tile.stages}"

    @property
    def consumer_registers(self) -> int:
        """That a consumer's thread takes; 0: those that it has."""
        return CONSUMER_REGISTERS[self.consumers] if self.consumers > 1 else 0

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS[self.consumers]

    @property
    def depth_steps(self) -> int:
        """Instructions along a query."""
        return -(-self.query.columns // self.atom.k)

    @property
    def scores_each(self) -> int:
        """That a thread holds of a tile."""
        return self.tile.keys // 2

    @property
    @abstractmethod
    def columns_of_key(self) -> int:
        """That are read for each key."""

    @property
    def most_together(self) -> int:
        return MOST_TOGETHER

    @property
    def heads_together(self) -> int:
        """Heads whose blocks are mixed, the longest rows of all of them first, where a mask makes rows unequal: as many
        as have room for what is read of their keys in half of the L2 cache. 1: a head's blocks follow one another.

        causal, 64 heads of 128, S = 4096 on an H100: 439 us so, 470 head by head."""
        if len(self.row_dims) < 2 or self.ends.direction != "up" or self.ends.end is None:
            return 1
        each = self.keys * self.columns_of_key * self.dtype.bytes
        room = self.target.l2_bytes // 2 // max(1, each)
        return min(self.most_together, 1 << max(0, room.bit_length() - 1))


@dataclass(frozen=True, kw_only=True)
class ChainedWgmmaPlan(WgmmaScoresPlan, AttentionPlan):
    """Attention whose products are both by wgmma."""

    late: float = 0.0  # powers of 2 by which a row's logits may be above its pivot, which stays then; 0: it never does
    tangent: str = ""  # a tanh of each score, by a polynomial alone where all scores of a warp's tile are small

    @property
    def two_chains(self) -> bool:
        """Are a row's largest logit and its sum of exponentials found of even and of odd columns apart, so that half as
        many operations wait for one another?

        64 heads of 128, S = 4096, causal: 453 us so, 475 in one chain; all keys of 32 heads 409 and 421. It loses where
        each score has more of its own to do: 684 and 677 us with a bias, 543 and 536 with a soft cap (H200)."""
        return not self.tangent and not self.tested.loads

    @property
    @abstractmethod
    def sums_each(self) -> int:
        """Sums of the result that a thread holds."""


@dataclass(frozen=True, kw_only=True)
class WgmmaAttentionPlan(ChainedWgmmaPlan):
    """Attention by wgmma, whose warpgroups have rows of their own."""

    value_boxes: Boxes

    @property
    def takes_turns(self) -> bool:
        return self.consumers > 1

    @property
    def columns_of_key(self) -> int:
        return self.key.columns + self.value.columns

    @property
    def sums_each(self) -> int:
        return self.value.padded // 2

    @property
    def staging_at(self) -> int:
        """Where what is stored is put, in bytes: in the place of the queries, which nobody needs then, if that is as
        large."""
        needed = max((b.bytes for b in self.stored.values()), default=0)
        return 0 if needed <= self.query_boxes.bytes else ring_bytes(self.tile, *self.matrices)

    @property
    def barriers_at(self) -> int:
        needed = max((b.bytes for b in self.stored.values()), default=0)
        return max(ring_bytes(self.tile, *self.matrices), self.staging_at + needed)

    @property
    def matrices(self) -> tuple[Boxes, Boxes, Boxes]:
        return self.query_boxes, self.key_boxes, self.value_boxes


def tiles(depth: int, width: int) -> Iterator[AttentionTile]:
    """Those for queries of `depth` numbers and values of `width`."""
    largest = next(most for most in TILES if max(depth, width) <= most)
    for consumers, keys in TILES[largest]:
        yield AttentionTile(consumers * GROUP_ROWS, keys, 4 * consumers, STAGES, held=False)


def registers_of(tile: AttentionTile, width: int, ahead: Iterable[Access]) -> int:
    """Registers of a consumer's thread: sums, scores, weights by pairs, and what is read ahead of operands that have an
    element for each score."""
    scores = tile.keys // 2
    return USUAL_REGISTERS + width // 2 + scores + scores // 2 + sum(scores * a.dtype.bytes // 4 for a in ahead)


def by_pairs(access: Access, keys: int, unaligned: bool) -> Access:
    """The same, two neighbouring elements at a time where the layout allows that."""
    if unaligned or keys % 2 or not access.by_column or access.output:
        return access
    return replace(access, mode="vector", vector=2, vector_bytes=2 * access.dtype.bytes)


def ring_bytes(tile: AttentionTile, query: Boxes, key: Boxes, value: Boxes) -> int:
    """Of the queries, and of all stages of keys and values."""
    return query.bytes + tile.stages * (key.bytes + value.bytes)


def barrier_bytes(tile: AttentionTile) -> int:
    """One mbarrier for the queries, and a full and an empty one for each stage of keys and of values."""
    return 8 * (1 + 4 * tile.stages)


def boxes(
    access: Access, dims: tuple[RowDim, ...], rows: int, columns: int, box_rows: int = 0, pages: Pages | None = None
) -> Boxes:
    others = tuple(dims[i].index for i in reversed(access.strided) if i != len(dims) - 1)
    if pages is not None:
        box_rows = min(rows, pages.rows)
    return Boxes(access, rows, box_rows or rows, -(-columns // LINE_ELEMENTS), others, pages)


def axes_of(access: Access, dims: tuple[RowDim, ...]) -> tuple[tuple[int, ...], ...]:
    """Of its tensor, as a tensor map has them, outermost first: other dimensions, lines, columns."""
    moving = dict(zip(access.strided, access.axes, strict=True))
    lines = (access.ld_axis,) if access.ld_axis is not None else moving[len(dims) - 1]
    page = ((-len(access.shape),),) if access.gathered else ()
    return (*page, *(own for dim, own in moving.items() if dim != len(dims) - 1), lines, (-1,))


def unmovable(access: Access, dims: tuple[RowDim, ...]) -> str:
    """Why tensor copies can't move a matrix; empty where they can."""
    if access.mode != "vector" or access.vector_bytes < VECTOR_BYTES:
        return f"{access.tensor} has an address or a stride that is no multiple of {VECTOR_BYTES} bytes"
    if len(axes_of(access, dims)) > MOST_AXES:
        return f"{access.tensor} moves along {len(axes_of(access, dims))} axes, and a tensor copy along {MOST_AXES}"
    return ""


def need_one_way(moved: Sequence[str], kept: frozenset[str]) -> None:
    """Raises NoMatch where a tensor of which tensor copies move a matrix is read in another way too."""
    for tensor in moved:
        if tensor in kept or moved.count(tensor) > 1:
            raise NoMatch(f"{tensor} is used in two ways; a kernel with tensor copies moves each tensor in one")


def unboxed(rows: int, keys: int) -> str:
    """Why boxes of whole pages of so many rows can't make a tile of so many keys; empty where they can."""
    if rows % SWIZZLED_LINES == 0 and (keys % rows == 0 or rows % keys == 0):
        return ""
    return f"pages of {rows} keys don't make up tiles of {keys}, in boxes of eights"


def is_stored(access: Access, dims: tuple[RowDim, ...]) -> bool:
    """Do tensor copies store it, by pairs of halves?"""
    return access.by_column and access.dtype in (f16, bf16) and not unmovable(access, dims)


def mapped(
    params: Iterator[Param], found: tuple[Boxes, ...], dims: tuple[RowDim, ...], kept: frozenset[str]
) -> Iterator[Param]:
    """Those parameters, with maps in place of the pointers and strides of what tensor copies move. `kept`: tensors that
    are read or written by their pointers as well."""
    names = {b.name for b in found}
    for param in params:
        maps = [b for b in found if b.access.tensor == param.tensor] if param.kind == "pointer" else []
        for each in maps:
            axes = axes_of(each.access, dims)
            box = (*[1] * (len(axes) - 2), each.box_rows, LINE_ELEMENTS)
            yield replace(param, kind="map", name=f"{each.name}_map", box_axes=axes, box=box, swizzle=LINE_BYTES)
        if param.kind == "stride" and param.name.startswith(tuple(f"{name}_stride" for name in names)):
            continue
        if param.kind == "stride" and param.name in {f"{name}_ld" for name in names}:
            continue
        if param.kind == "size" and any(b.pages and b.access.tensor == param.tensor for b in found):
            continue  # a map knows how many pages there are
        if not maps or param.tensor in kept:
            yield param
