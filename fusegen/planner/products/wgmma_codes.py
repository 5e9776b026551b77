"""Products of codes on Hopper's tensor cores: weights of 4 and 8 bits, widened in registers on their way to wgmma.

wgmma takes its left factor from registers. So the weights are the left factor here, and what is summed is the result
turned round: a warp has 16 columns of a tile, and rows are the instructions' columns, as few as there are. A lane finds
its two columns' codes in shared memory, where tensor copies bring them, and widens those that are its part of a
fragment, one slice while the slice before is multiplied. Once a tile is summed, its sums turn back by way of shared
memory, and all that comes behind them is as of other tiles. A code is widened for each 128 rows again.

What is multiplied is a code, less its zero, exactly. The sums of a slice, or of two of one group, begin at 0 in
registers of their own, and are scaled in f32 where they are added to the tile's.

What measurements on an H200 decided, of x @ w.T with 8192 x 8192 weights of 4 bits (medians of 20, L2 cold):

- Three warps that wrote widened codes to shared memory, as wgmma takes right factors, took 49, 51, 91 and 250 us of 64,
  128, 256 and 1024 rows; these kernels take 28, 37, 59 and 208, and torch's bf16 product 46, 46, 53 and 171.
- Lines of codes of 128 bytes, four slices, took 24.5 us of 32 rows, and of 64 bytes 25.7: fewer barriers and places to
  compute. By single slices it was 27.0, and 23.6 without any copy: instructions limit it, and not memory.
- Four consumers that have stages by turns took 22.8 of 32 rows in place of 24.5 by two; for more rows registers lack.
- Loads of scales that were converted at once, and so waited for, had taken 3 of 28 us.
- Turns at multiplying, as promoted sums take them, took 2 to 3 us more of 32 to 128 rows; codes that were loaded a
  slice earlier 0.3 to 2 more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from fusegen.language.graph import Graph, Node
from fusegen.language.types import DType, bf16, f4e2m1, f8e4m3, f16, i4, i8, u4
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Access, Layout, Param
from fusegen.planner.products.factors import no_unit
from fusegen.planner.products.output_groups import groups, need_whole_groups, taken_apart
from fusegen.planner.products.parts import Coding, Operand
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.products.wgmma_rule import LEAST_COLS, LEAST_STAGES, WgmmaDraft, check
from fusegen.planner.products.wgmma_tiles import CONSUMERS, LINE_ELEMENTS, WgmmaTile
from fusegen.planner.tile import LINE_BYTES
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

WIDENED: tuple[DType, ...] = (i8, i4, u4, f8e4m3, f4e2m1)
"""Codes that f16 and bf16 hold exactly."""
FEWEST_ROWS = 17  # up to 16 mma.sync has one fragment of rows, and took 20.9 us where these took 21.2
PADDING = 4  # floats behind a row of sums that turn round: the lanes of a warp write to 32 banks
BOX_ALIGNMENT = 1024  # of swizzled boxes in shared memory
LINE_BITS = 16  # of codes: so many slices of one bit have lines of 128 bytes
COLS = 64  # of each consumer
MOST_CONSUMERS = 4
MOST_STAGES = 8
FEW_ROWS = 32  # whose sums four consumers have registers for


@dataclass(frozen=True, slots=True)
class CodedTile(WgmmaTile):
    """A tile whose right factor's slices are codes. Each consumer has 64 of its columns. A stage of the ring is
    several slices, so that lines of codes are long; of `k_parts` parts of the consumers each has its stages by turns.
    """

    code_bits: int = field(kw_only=True)
    slices_a_stage: int = field(kw_only=True)
    k_parts: int = 1

    @property
    def code_line(self) -> int:
        """Bytes of a column's codes of a slice."""
        return LINE_ELEMENTS * self.code_bits // 8

    @property
    def consumers(self) -> int:
        return self.cols // COLS * self.k_parts

    @property
    def storing_warps(self) -> int:
        """Those that have rows."""
        return self.rows // self.box_rows

    @property
    def left_bytes(self) -> int:
        """Of its own rows alone, which the instructions' columns are."""
        return self.slices_a_stage * self.rows * LINE_BYTES

    @property
    def line_bytes(self) -> int:
        """Of a column's codes of a stage."""
        return self.slices_a_stage * self.code_line

    @property
    def right_bytes(self) -> int:
        return self.cols * self.line_bytes

    @property
    def turned_sums(self) -> int:
        """f32 values that one thread sums."""
        return self.rows // 2

    @property
    def turned_cols(self) -> int:
        """Floats from one row of sums to the next, where they turn round."""
        return self.cols + PADDING

    @property
    def behind_ring(self) -> int:
        return self.right_at + self.stages * self.right_bytes

    @property
    def turned_at(self) -> int:
        """Where sums turn round: behind the ring, or in its place, where no other tile's slices come."""
        return self.behind_ring if self.split_k == 1 else 0

    @property
    def turned_bytes(self) -> int:
        return -(-4 * self.rows * self.turned_cols // BOX_ALIGNMENT) * BOX_ALIGNMENT

    @property
    def exchange_bytes(self) -> int:
        """Blocks that share a tile read each other's sums where these turn round."""
        return 0

    @property
    def staging_at(self) -> int:
        return max(self.behind_ring, self.turned_at + self.turned_bytes)

    @property
    def buffers(self) -> int:
        """One, so that a tile of 128 rows has room for a third stage."""
        return 1

    @property
    def barriers(self) -> int:
        """As of factors that are not widened in shared memory, and none for sums of other blocks."""
        return 2 * self.stages + CONSUMERS

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 8 * self.barriers


def wgmma_codes(graph: Graph, target: Target, layout: Layout) -> Iterator[WgmmaPlan]:
    """Every tile."""
    if not target.wgmma:
        raise NotFor(f"{target.arch} has no wgmma; sm_90a has")
    hoisted, parts = taken_apart(graph)
    first = parts.products[0]
    if not any(p.right.scaled for p in parts.products):
        raise NotFor("no right factor is codes")
    if not target.atoms_of("warpgroup", first.left.dtype, first.right.dtype):
        raise NoMatch(no_unit(target, "wgmma", first.left.dtype, first.right.dtype))
    found = groups(hoisted, parts)
    check(hoisted, parts, found, "wgmma", codes=True)
    draft = CodedDraft.of(graph, hoisted, parts, found, target, layout, "cooperative")
    draft.need_codes()
    plans = [plan for tile in draft.tiles() for plan in draft.plans(tile)]
    if not plans:
        raise NoMatch(f"no tile for {draft.extents[-1]} rows; of up to {FEWEST_ROWS - 1} mma.sync widens codes")
    yield from plans


@dataclass(frozen=True)
class CodedDraft(WgmmaDraft):
    """What all tiles share."""

    brings_operands: ClassVar[bool] = False  # behind a tile's slices: nothing there would be widened

    def promote(self, atom: Atom) -> int:
        """Sums of each slice are scaled by themselves."""
        return LINE_ELEMENTS

    def need_codes(self) -> None:
        """Raises NoMatch for codes that are not widened, and for what else has no place beside them."""
        product, rights = self.parts.products[0], self.rights.values()
        where = f"the product at {product.node.where}"
        coding = next(iter(rights)).coding
        kinds = {(r.coding.code, r.coding.group, r.coding.scales.dtype) if r.coding else None for r in rights}
        if coding is None or len(kinds) > 1:
            raise NoMatch("products of one kernel have right factors that are coded alike, or none of codes")
        if self.dtype not in (f16, bf16) or coding.code not in WIDENED:
            taken = ", ".join(map(str, WIDENED))
            raise NoMatch(
                f"{where}: codes of {coding.code} beside {self.dtype}; wgmma takes {taken} beside f16 or bf16"
            )
        if coding.zeros and (coding.code, coding.zero) != (u4, u4):
            raise NoMatch(f"{where}: zeros of {coding.zero} beside codes of {coding.code}; u4 beside u4 is widened")
        if self.k % LINE_ELEMENTS or coding.group % LINE_ELEMENTS or (coding.group and self.k % coding.group):
            what = f"K={self.k} in groups of {coding.group}" if coding.group else f"K={self.k}"
            raise NoMatch(f"{where}: {what}; slices of {LINE_ELEMENTS} of K are scaled, and these are no multiples")
        left = self.parts.lefts[0]
        if self.matrix is not None or left.operand is None or not self.operand(left.operand, "rows").along:
            raise NoMatch(f"{where}: beside codes the left factor is one matrix, with K along its lines")
        if len(self.groups) > 1 or len(self.dims) > 1 or self.segments:
            raise NoMatch(f"{where}: codes are widened for one output group of one product of rows")

    @cached_property
    def rights(self) -> Mapping[Node, Operand]:
        return {p.node: self.coded(p.node) for p in self.parts.products}

    def coded(self, node: Node) -> Operand:
        right = next(p.right for p in self.parts.products if p.node is node)
        scaled, found = right.scaled, self.operand(right.operand, "cols")
        if scaled is None:
            return found
        zeros = self.access[scaled.zeros.name] if scaled.zeros else None
        return replace(
            found,
            along=True,
            coding=Coding(scaled.code, scaled.group, self.access[scaled.scales.name], zeros, scaled.zero),
        )

    @property
    def code_bits(self) -> int:
        coding = next(iter(self.rights.values())).coding
        assert coding is not None
        return coding.code.bits

    def tiles(self) -> Iterator[CodedTile]:
        for cols, k_parts, split_k in (
            (2 * COLS, 1, 1), (2 * COLS, 1, 2), (2 * COLS, 1, 4), (2 * COLS, 2, 1), (2 * COLS, 2, 2), (2 * COLS, 2, 4),
            (COLS, 2, 1), (COLS, 2, 2),
        ):  # fmt: skip
            if cols // COLS * k_parts == MOST_CONSUMERS and self.even_rows > FEW_ROWS:
                continue
            for group in (8, 16) if split_k == 1 else (8,):
                yield CodedTile(
                    self.even_rows, cols, MOST_STAGES, "cooperative", group=group, split_k=split_k, k_parts=k_parts,
                    atom=self.atom, code_bits=self.code_bits, slices_a_stage=LINE_BITS // self.code_bits,
                )  # fmt: skip

    def suits(self, tile: WgmmaTile) -> bool:
        assert isinstance(tile, CodedTile)
        width = tile.cols // self.together
        whole = need_whole_groups(self.groups, self.hoisted)  # columns that a tile has to have
        if whole and (width != whole or tile.split_k > 1):
            return False
        if self.rows < FEWEST_ROWS or width // tile.split_k % LEAST_COLS or tile.cols // COLS % self.together:
            return False
        stages = -(-self.k // (LINE_ELEMENTS * tile.slices_a_stage * tile.split_k))
        if tile.k_parts > 1 and (stages < 2 * tile.k_parts or (tile.split_k == 1 and stages % tile.k_parts)):
            return False
        return tile.split_k == 1 or self.few(tile)

    def fitted(self, tile: WgmmaTile) -> WgmmaTile | None:
        """With lines of codes of 64 bytes where longer ones leave room for too few stages."""
        assert isinstance(tile, CodedTile)
        least = max(LEAST_STAGES, tile.k_parts)
        for slices in (tile.slices_a_stage, tile.slices_a_stage // 2):
            found = replace(tile, slices_a_stage=slices)
            while self.shared_bytes(found) > self.target.shared_bytes and found.stages > least:
                found = replace(found, stages=found.stages - 1)
            if slices % 2 == 0 and self.shared_bytes(found) <= self.target.shared_bytes:
                return found
        return None

    def is_coded(self, access: Access) -> bool:
        return any(p.right.operand is not None and p.right.operand.name == access.tensor for p in self.parts.products)

    def map(self, pointer: Param, tile: WgmmaTile) -> Param:
        """Lines of codes are swizzled, so that lanes find those of 8 columns in different banks."""
        found = super().map(pointer, tile)
        assert isinstance(tile, CodedTile)
        return replace(found, swizzle=tile.line_bytes) if self.is_coded(self.access[pointer.tensor]) else found

    def box(self, access: Access, tile: WgmmaTile) -> tuple[int, int]:
        if not self.is_coded(access):
            return super().box(access, tile)
        assert isinstance(tile, CodedTile)
        return tile.cols // self.together, tile.line_bytes // access.dtype.bytes

    def regime(self, tile: WgmmaTile) -> str:
        coding = next(iter(self.rights.values())).coding
        assert coding is not None
        assert isinstance(tile, CodedTile)
        turns = f" that have {tile.slices_a_stage} slices by turns" if tile.k_parts > 1 else ""
        each = f"{tile.rows}x{tile.cols // self.together}" + (f" of {self.together} products" * (self.together > 1))
        who = f"{tile.consumers} consumer warpgroups{turns} sum tiles of {each} transposed, the weights as left factor"
        ahead = f"a producer {tile.stages * tile.slices_a_stage} slices of {self.line} ahead"
        blocks = (
            f"split-K by a cluster of {tile.split_k} blocks"
            if tile.split_k > 1
            else f"persistent blocks, {tile.group} rows of tiles at a time"
        )
        return f"{who}, {ahead}; {blocks}; {coding.text}"
