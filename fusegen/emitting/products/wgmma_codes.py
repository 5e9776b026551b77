"""How codes are widened for wgmma, and sums turn round, in the words of CUDA: what
templates/parts/products/wgmma_codes.j2 prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.hopper import wgmma
from fusegen.emitting.products.mma_codes import WIDENINGS, WORDS, ZERO_OF
from fusegen.emitting.products.wgmma_promoted import PromotedSpeller
from fusegen.language.types import u4
from fusegen.planner.model import Access
from fusegen.planner.products.wgmma_codes import CodedTile

LINE = 128  # bytes that a swizzle goes by
SELECTORS = {  # of the bytes that are a lane's two codes, or that both are in: PRMT's
    "bytes": "lane % 4 * 0x2222 + 0x1100",
    "neighbours": "lane % 4 * 0x2222 + 0x1010",
    "nibbles": "lane % 4 + 0x4440",
}


class CodesSpeller(PromotedSpeller):
    """The words of one plan whose sums turn round."""

    def turned(self) -> Mapping[str, Any] | None:
        """None where the right factor is multiplied as it lies."""
        plan, tile, coding = self.plan, self.tile, self.plan.coding
        if not isinstance(tile, CodedTile):
            return None
        assert coding is not None
        widening = WIDENINGS[coding.code, plan.dtype]
        self.functions.update(widening.needs)
        (output_group,) = plan.output_groups
        codings = [right.coding for right in output_group.rights if right.coding is not None]
        of_slice = f"{self.step} * {tile.slices_a_stage} + i"
        of_number = f"({of_slice}) / {coding.group // plan.line}" if coding.group else "0"
        words = WORDS[coding.scales.dtype.bytes]
        bits = f"reinterpret_cast<const {self.ctype(coding.scales.dtype)}&>(next_scales[r8])"
        value = self.to_value(coding.scales.dtype, bits)
        scales = [f"reinterpret_cast<const {words}*>({self.line_of_column(c.scales)})" for c in codings]
        zeros = [self.line_of_column(c.zeros) for c in codings if c.zeros]
        ragged = output_group.cols % plan.width
        col = f"at.col0 + {self.own_column(plan.products > 1)}"
        told = [*(["zeros[r8]"] if coding.code is u4 else []), *(["mask"] if widening.mask else [])]
        per_piece = 128 // coding.code.bits // tile.atom.k  # instructions that 16 bytes of codes are for
        lines, together = LINE // tile.line_bytes, plan.slices_together
        each = plan.finished // 8  # of one product
        return {
            "type": str(coding.code),
            "factor": str(plan.dtype),
            "widening": widening,
            "fused": self.spelling.functions.get(f"fused_{plan.dtype}", ()) if "fused" in widening.needs else (),
            "zeros": coding.code is u4,
            "no_zero": ZERO_OF[plan.dtype] if coding.code is u4 else ("", ""),
            "zeros_of": self.own_product(zeros) if zeros else "",
            "told": "".join(f", {name}" for name in told),
            "parameters": "".join(f", unsigned {name.removesuffix('[r8]')}" for name in told),
            "selector": SELECTORS[widening.source],
            "scale_words": words,
            "scales_of": self.own_product(scales),
            "scale": f"static_cast<float>({value})" if coding.scales.dtype.kind == "int" else value,
            "number": of_number,
            "within": f"{of_slice} < {plan.slices}" if plan.padded else "",
            "col": f"min({col}, {output_group.cols} - 1)" if ragged else col,
            "column": self.own_column(False),
            "line": tile.line_bytes,
            "pieces": tile.code_line // 16,
            "swizzle": f"lane / {4 * lines} % {tile.line_bytes // 16}",
            "each": f"piece * {per_piece} + k" if per_piece > 1 else "piece",
            "per_piece": per_piece,
            # the words that a half of an instruction's codes are in
            "code": "__byte_perm(words[k * 2 + half], 0u, selector) * 0x1001u"
            if widening.source == "nibbles"
            else "__byte_perm(words[half * 2], words[half * 2 + 1], selector)",
            "sums": tile.turned_sums,
            "together": together,
            "depth": tile.slices_a_stage,
            "slice": f"({tile.rows * LINE} / 16)",
            "shares": tile.k_parts,
            "columns": self.column_groups,
            "first": "first" if tile.k_parts > 1 else "0",
            "rows": f"own * {tile.atom.rows} + warp * {tile.box_rows} + lane / 4",
            "threads": tile.consumers * tile.atom.threads,
            "finished": plan.products * plan.finished // 2,
            "place": f"n8 / {each} * {plan.width} + n8 % {each} * 8" if plan.products > 1 else "n8 * 8",
            "multiply": wgmma(
                "multiply_add",
                f"sums of {tile.atom.rows} x {tile.rows} elements: the product of two matrices, {tile.atom.k} along K, "
                "added to what they were or put in its place",
                tile.atom,
                tile.rows,
                ", 0",
                registers=True,
            ),
        }

    def line_of_column(self, access: Access) -> str:
        """Where a column's scales or zeros begin."""
        return f"{self.pointers[access.tensor]} + static_cast<long long>(col) * {access.name}_ld"

    def left_copy(self) -> Mapping[str, Any]:
        """Of each slice of a stage a box."""
        found, tile = super().left_copy(), self.tile
        if not isinstance(tile, CodedTile):
            return found
        k, *others = found["at"].split(", ")
        call = found["call"].replace("left + stage", f"left + i * {tile.rows * LINE} + stage")
        return {
            **found,
            "boxes": tile.slices_a_stage,
            "call": call,
            "at": ", ".join([f"{k} + i * {self.plan.line}", *others]),
        }

    @property
    def column_groups(self) -> int:
        """Consumers that have columns of their own."""
        return self.tile.consumers // self.tile.k_parts

    def own_column(self, of_product: bool) -> str:
        """The column of a tile that a lane's row r8 of a fragment is; of one product, those of its own alone."""
        groups = self.column_groups // 2 if of_product else self.column_groups
        own = "own" if groups == self.tile.consumers else f"own % {groups}"
        start = f"{own} * {self.tile.atom.rows} + " if groups > 1 else ""
        return f"{start}warp * {self.tile.box_rows} + lane / 4 + r8 * 8"

    def own_product(self, texts: list[str]) -> str:
        """Of two products half of the consumers have one."""
        groups = self.column_groups
        own = "own" if groups == self.tile.consumers else f"own % {groups}"
        return texts[0] if len(texts) == 1 else f"({own} < {groups // 2} ? {texts[0]} : {texts[1]})"
