"""How results of a kernel by wgmma get to memory, in the words of CUDA and PTX: by boxes, rows, pairs, or quads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.dialect import all_of
from fusegen.emitting.products.wgmma_codes import CodesSpeller
from fusegen.language.types import DType, bf16, f16
from fusegen.planner.model import Access, Store
from fusegen.planner.parts import BOXED
from fusegen.planner.products.parts import OutputGroup
from fusegen.planner.products.wgmma_tiles import LINE_ELEMENTS

PAIRS: Mapping[DType, str] = {
    f16: "__floats2half2_rn({0}, {1})",
    bf16: "__floats2bfloat162_rn({0}, {1})",
}
PAIR_TYPES: Mapping[DType, str] = {f16: "__half2", bf16: "__nv_bfloat162"}


class StoreSpeller(CodesSpeller):
    """What becomes of an epilogue's results."""

    def swizzled(self) -> Mapping[str, str | int]:
        """A line of a box that is stored, and where a swizzle by such lines puts its 16 bytes: bits 7 and up of an
        address flip bits 4 and up (CUDA driver API, CUtensorMapSwizzle)."""
        lines = LINE_ELEMENTS // self.plan.box_cols  # of a box in 128 bytes
        r = f"r / {lines} % {8 // lines}" if lines > 1 else "r % 8"
        return {"bytes": self.line_of(self.plan.box_cols * 2), "swizzled_by": r, "swizzle": r.replace("r", "lane")}

    def boxes(self, output_group: OutputGroup) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for place, store in enumerate(output_group.boxes):
            access = store.access
            number = self.box_number(place, len(output_group.boxes))
            coordinates = [f"{self.col0} + chunk * {self.plan.box_cols}", f"row0 + i * {self.tile.part_rows}"]
            if self.plan.moves_with_batch(access):
                coordinates.append("at.batch")
            if store.transport in BOXED and not (store.transport == "rows" and self.plan.lanes_store):
                self.moved.add(("store_box", len(coordinates)))
            buffer = "buffer" if number else "staging"
            found.append(
                {
                    "name": access.name,
                    "words": "kept[chunk]" if self.plan.deferred_store else f"{access.name}_words",
                    "pair": PAIRS[access.dtype].format(f"{access.name}_pair[0]", f"{access.name}_pair[1]"),
                    "pair_type": PAIR_TYPES[access.dtype],
                    "buffer": f"staging + {number}" if number else "staging",
                    "place": buffer,
                    "at": ", ".join(coordinates),
                    "rows": self.rows_of_box(access, buffer, output_group) if store.transport == "rows" else None,
                }
            )
        return found

    def rows_of_box(self, access: Access, place: str, output_group: OutputGroup) -> Mapping[str, Any]:
        """How lanes store a box that lies at `place`, whose last rows may be none of the tile's."""
        across, box = self.plan.box_cols // 8, self.swizzled()
        self.functions.add("load")
        row0 = f"row0 + i * {self.tile.part_rows}"
        piece = f"r * {box['bytes']} + (((piece % {across}) ^ {box['swizzled_by']}) << 4)"
        kind = self.ctype(access.dtype)
        at = f"reinterpret_cast<const {kind}*>(shared + ({place} - left) + {piece})"
        whole = all_of("inside" * bool(self.inside), f"{row0} + {self.tile.box_rows} <= at.segment_end")
        return {
            "pieces": self.tile.box_rows * across,
            "across": across,
            "row0": row0,
            "whole": "" if self.plan.lanes_store else whole,
            "guard": all_of("inside" * bool(self.inside), self.inside_row, self.inside_col(output_group)),
            "call": f"{self.moving('store', access)}<8>({self.at(access, 'col')}, load<8>({at}));",
        }

    def kept(self, box: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same box at the place of the tile that it was kept of."""
        return {**box, "at": box["at"].replace("at.", "kept_at.").replace(f" + i * {self.tile.part_rows}", "")}

    def box_number(self, place: int, outputs: int) -> str:
        """Which buffer a box waits in, in bytes: they take turns, by the box's number among all of the warp's."""
        chunks, buffers = self.plan.chunks, self.tile.buffers
        if buffers == 1:
            return ""
        terms = []
        if self.tile.parts > 1 and chunks * outputs % buffers:
            terms.append("i")
        if chunks > 1 and outputs % buffers:
            terms.append("chunk")
        if place % buffers:
            terms.append("1")
        text = " + ".join(terms)
        if text in ("", "1"):
            return self.size("box_bytes") if text else ""
        return f"{f'({text})' if len(terms) > 1 else text} % {buffers} * {self.size('box_bytes')}"

    def direct(self, output_group: OutputGroup) -> list[Mapping[str, str]]:
        """Results that a thread stores by pairs."""
        pairs = [store.access for store in output_group.stores if store.transport == "plain"]
        return [{"type": self.pair(a), "name": f"{a.name}_vec", "call": self.store(a, 2)} for a in pairs]

    def paired(self, store: Store) -> bool:
        """Does one instruction make codes of two numbers?"""
        return not store.fits and store.masked is None and f"pairs_{store.access.dtype}" in self.spelling.functions

    def quads(self, output_group: OutputGroup) -> list[Mapping[str, Any]]:
        """Results of 8 bits: what becomes of a pair, and how a lane stores the 8 neighbours that it then has."""
        found: list[Mapping[str, Any]] = []
        for store in output_group.stores:
            if store.transport != "quads":
                continue
            access, paired = store.access, self.paired(store)
            name = access.name
            if paired:
                self.functions.add(f"pair_of_{access.dtype}")
                pair = f"pair_of_{access.dtype}({name}_pair[0], {name}_pair[1])"
            else:
                pair = f"reinterpret_cast<const unsigned short&>({name}_vec)"
            found.append(
                {
                    "declared": f"float {name}_pair[2];" if paired else f"{self.pair(access)} {name}_vec;",
                    "words": f"{name}_words",
                    "pair": pair,
                    "type": self.vec(access.dtype, 8),
                    "call": f"{self.moving('store', access)}<8>({self.at(access, 'col')}, {name}_eight);",
                    "name": f"{name}_eight",
                }
            )
        return found
