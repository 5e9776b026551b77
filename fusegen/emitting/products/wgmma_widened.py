"""How codes are widened for wgmma, in the words of CUDA: what templates/parts/products/wgmma_widen.j2 prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.products.mma_codes import CODES_A_LANE, WIDENINGS, ZERO_OF
from fusegen.emitting.products.wgmma_copies import CopySpeller
from fusegen.language.types import u4
from fusegen.planner.model import Access
from fusegen.planner.products.wgmma_codes import WIDENERS, CodedTile

WARP = 32
# Pieces of 16 bytes that a lane loads before it widens one: 5 % faster than two, at 64 to 1024 rows (H200)
AT_A_TIME = 4


def natural_order(pairs: tuple[tuple[int, int], ...]) -> str:
    """The four words of 8 numbers one behind the other, of words that hold these pairs of them."""
    place = {number: (word, half) for word, pair in enumerate(pairs) for half, number in enumerate(pair)}
    found = []
    for low in range(0, 8, 2):
        (word, half), (other, upper) = place[low], place[low + 1]
        if word == other:
            found.append(f"pairs[{word}]")
        else:
            selector = f"0x{'76' if upper else '54'}{'32' if half else '10'}"
            found.append(f"__byte_perm(pairs[{word}], pairs[{other}], {selector})")
    return ", ".join(found)


class WidenedSpeller(CopySpeller):
    """The words of one plan's codes."""

    def widened(self) -> Mapping[str, Any] | None:
        """How 16 bytes of codes at a time get to the lines that wgmma multiplies; None where no factor is codes."""
        plan, tile, coding = self.plan, self.tile, self.plan.coding
        if coding is None:
            return None
        assert isinstance(tile, CodedTile)
        widening = WIDENINGS[coding.code, plan.dtype]
        self.functions.update(widening.needs)
        lane_bytes = CODES_A_LANE * coding.code.bits // 8
        beside = tile.code_line // 16
        (output_group,) = plan.output_groups
        codings = [right.coding for right in output_group.rights if right.coding is not None]
        k_at = f"{self.step} * tile_k" if plan.steps > 1 or tile.split_k > 1 else "0"
        number = f"{k_at} / {coding.group}" if coding.group else "0"
        zeros = [self.zero_at(found.zeros, number) for found in codings if found.zeros]
        told = [*(["zeros"] if coding.code is u4 else []), *(["mask"] if widening.mask else [])]
        return {
            "warps": WIDENERS,
            "barriers_before": tile.barriers - 3 * tile.stages,
            "type": str(coding.code),
            "factor": str(plan.dtype),
            "widening": widening,
            "fused": self.spelling.functions.get(f"fused_{plan.dtype}", ()) if "fused" in widening.needs else (),
            "lane_words": f"unsigned words[{max(1, lane_bytes // 4)}]",
            "lane_bytes": lane_bytes,
            "zeros": coding.code is u4,
            "no_zero": ZERO_OF[plan.dtype] if coding.code is u4 else ("", ""),
            "zero": self.of_product(zeros) if zeros else "0u",
            "told": "".join(f", {name}" for name in told),
            "natural": natural_order(widening.pairs),
            "cols": tile.cols,
            "beside": beside,
            "pieces": tile.cols * beside,
            "at_a_time": AT_A_TIME,
            "granules": 16 // lane_bytes,
            "scale_passes": tile.cols // WARP,
            "scale_col": f"column % {plan.width}" if plan.products > 1 else "column",
            "ragged": self.inside_col(output_group),
            "scale_value": self.scale_value(coding.scales),
            "scale": self.of_product([self.scale_at(found.scales, number) for found in codings]),
        }

    def of_product(self, texts: list[str]) -> str:
        """Of the product that a column is one of."""
        if len(texts) == 1:
            return texts[0]
        first, second = texts
        return f"(column < {self.plan.width} ? {first} : {second})"

    def scale_at(self, scales: Access, number: str) -> str:
        """The bits of one, as a load of so many bytes brings them."""
        words = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}[scales.dtype.bytes]
        return f"reinterpret_cast<const {words}*>({self.pointers[scales.tensor]})[col * {scales.name}_ld + {number}]"

    def scale_value(self, scales: Access) -> str:
        value = self.to_value(scales.dtype, f"reinterpret_cast<const {self.ctype(scales.dtype)}&>(own_scales[i])")
        return f"static_cast<float>({value})" if scales.dtype.kind == "int" else value

    def zero_at(self, zeros: Access, number: str) -> str:
        row = f"{self.pointers[zeros.tensor]}[col * {zeros.name}_ld + ({number}) / 2]"
        return f"(static_cast<unsigned>({row}) >> ({number}) % 2 * 4 & 15u)"
