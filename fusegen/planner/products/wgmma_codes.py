"""Products of codes on Hopper's tensor cores: weights of 4 and 8 bits, widened in shared memory on their way to wgmma.

wgmma takes right factors from shared memory alone. So tensor copies bring codes there, and three warps of the
producer's group, which otherwise wait, write them as f16 or bf16 where wgmma looks for them, a slice each by turns. For
few rows mma.sync does less (`gemm`): it widens codes in registers, once for each row of tiles. Here a code is widened
once for 128 or 256 rows.

What is multiplied is a code, less its zero, exactly. The sums of a slice, or of two of one group, begin at 0 in
registers of their own, and are scaled in f32 where they are added to the tile's, as those of 8-bit floats are. The
scales of a slice's columns lie in shared memory.

What three warps widen limits large products: 1024 x 8192 x 8192 in 4 bits takes 248 us, where x @ w.T of bf16 takes 173
and mma.sync 784 (H200, medians of 20, L2 cold). Beside more rows programs of two kernels take less, of which the first
writes the weights as bf16.
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
from fusegen.planner.products.wgmma import CONSUMERS, LINE_ELEMENTS, WgmmaPlan, WgmmaTile
from fusegen.planner.products.wgmma_rule import LEAST_COLS, LEAST_STAGES, MOST_ROWS, WgmmaDraft, check
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

WIDENED: tuple[DType, ...] = (i8, i4, u4, f8e4m3, f4e2m1)
"""Codes that f16 and bf16 hold exactly."""
WIDENERS = 3  # warps
COPY_ALIGNMENT = 128  # of a box in shared memory that is not swizzled (PTX ISA, "Tensor copies")
FEWEST_ROWS = 17  # up to 16 mma.sync has one fragment of rows, and is bound by the codes' bytes


@dataclass(frozen=True, slots=True)
class CodedTile(WgmmaTile):
    """A tile beside whose ring codes of `code_bits` wait to be widened, and the scales of their columns."""

    code_bits: int = field(kw_only=True)

    @property
    def code_line(self) -> int:
        """Bytes of a column's codes of a slice."""
        return LINE_ELEMENTS * self.code_bits // 8

    @property
    def code_bytes(self) -> int:
        """Of a slice's codes."""
        return self.cols * self.code_line

    @property
    def codes_at(self) -> int:
        return -(-(self.barriers_at + 8 * self.barriers) // COPY_ALIGNMENT) * COPY_ALIGNMENT

    @property
    def scales_at(self) -> int:
        return self.codes_at + self.stages * self.code_bytes

    @property
    def barriers(self) -> int:
        """One more for each stage, that tells when its codes are widened."""
        return 3 * self.stages + CONSUMERS + (self.warps if self.split_k > 1 else 0)

    @property
    def buffers(self) -> int:
        """One, so that a tile of 256 x 128 has room for a fourth slice."""
        return 1

    @property
    def shared_bytes(self) -> int:
        return self.scales_at + 4 * self.stages * self.cols


def is_large(rows: int, cols: int) -> bool:
    """Is it a tile for many rows, whatever fills the GPU?"""
    return rows * cols >= MOST_ROWS * 192


def wgmma_codes(graph: Graph, target: Target, layout: Layout) -> Iterator[WgmmaPlan]:
    """Every tile, cooperative."""
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
        raise NoMatch(f"no tile for {draft.extents[-1]} rows; up to {FEWEST_ROWS - 1} codes are widened in registers")
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
        """A thread has registers for 128 sums and for those of 64 rows that come to them, or for twice 96."""
        for rows, cols, stages, split_k in (
            (2 * MOST_ROWS, 128, 4, 1), (MOST_ROWS, 192, 4, 1), (MOST_ROWS, 128, 6, 1), (MOST_ROWS, 64, 8, 1),
            (MOST_ROWS, 128, 6, 2), (MOST_ROWS, 128, 6, 4), (MOST_ROWS, 64, 8, 2), (MOST_ROWS, 64, 8, 4),
        ):  # fmt: skip
            large = is_large(rows, cols)
            for group in (8, 16) if large else (8,):
                yield CodedTile(
                    rows if large else self.even_rows, cols, stages, "cooperative", group=group, split_k=split_k,
                    atom=self.atom, code_bits=self.code_bits,
                )  # fmt: skip

    def suits(self, tile: WgmmaTile) -> bool:
        if self.rows < FEWEST_ROWS:
            return False
        width = tile.cols // self.together
        whole = need_whole_groups(self.groups, self.hoisted)  # columns that a tile has to have
        if whole and (width != whole or tile.split_k > 1):
            return False
        if tile.cols % self.together or width // tile.split_k % LEAST_COLS:
            return False
        return is_large(tile.rows, tile.cols) or self.few(tile)

    def fitted(self, tile: WgmmaTile) -> WgmmaTile | None:
        while self.shared_bytes(tile) > self.target.shared_bytes and tile.stages > LEAST_STAGES:
            tile = replace(tile, stages=tile.stages - 1)
        exchanged = tile.exchange_bytes <= tile.stages * tile.right_bytes
        return tile if exchanged and self.shared_bytes(tile) <= self.target.shared_bytes else None

    def is_coded(self, access: Access) -> bool:
        return any(p.right.operand is not None and p.right.operand.name == access.tensor for p in self.parts.products)

    def map(self, pointer: Param, tile: WgmmaTile) -> Param:
        """Codes lie one behind the other in shared memory, and are widened into swizzled lines."""
        found = super().map(pointer, tile)
        return replace(found, swizzle=0) if self.is_coded(self.access[pointer.tensor]) else found

    def box(self, access: Access, tile: WgmmaTile) -> tuple[int, int]:
        if not self.is_coded(access):
            return super().box(access, tile)
        assert isinstance(tile, CodedTile)
        return tile.cols // self.together, tile.code_line // access.dtype.bytes

    def regime(self, tile: WgmmaTile) -> str:
        coding = next(iter(self.rights.values())).coding
        assert coding is not None
        return f"{super().regime(tile)}; {coding.text}"
