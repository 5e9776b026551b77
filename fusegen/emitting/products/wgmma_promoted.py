"""How a kernel by wgmma adds up sums of slices, in the words of CUDA: each begun at 0, and scaled where blocks are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.products.wgmma_copies import CopySpeller
from fusegen.language.block_products import BLOCK
from fusegen.planner.pieces import stride_name
from fusegen.planner.products import slice_scales


class PromotedSpeller(CopySpeller):
    """The words of one plan's loop over slices, where sums are promoted."""

    def promoted(self) -> Mapping[str, Any] | None:
        """When sums in registers of their own begin, and when they are added to the tile's, scaled or not."""
        slices, steps, tile = self.plan.promoted_slices, self.plan.steps, self.tile
        several = tile.across > 1
        parts = {
            "right_part": " + part * (part_cols * line_bytes / 16)" * several,
            "sum": f"{f'part * {tile.multiplied_sums} + ' * several}j",
            "last": f"part == {tile.across - 1} && " * several,
        }
        if not slices:
            return None
        if slices == 1:
            return {"slices": "each slice", "adds": "k != 0", "ends": "", **parts, **self.scaled_blocks()}
        return {
            "slices": f"each {slices} slices",
            "adds": f"(step % {slices} | k) != 0",
            **parts,
            **self.scaled_blocks(),
            "ends": f"step % {slices} == {slices - 1} || step == {steps - 1}",
        }

    def scaled_blocks(self) -> Mapping[str, Any]:
        """The scales of a slice, which two warps of the producer copy to shared memory: of a tile's rows, and of the
        blocks of each product's columns."""
        blocks, tile, plan = self.plan.block_scales, self.tile, self.plan
        if blocks is None:
            return {"scales": [], "by": ""}
        step, threads = self.step, slice_scales.WARPS * plan.target.warp
        rows = blocks.rows
        along = f"{step}" if rows.ld_axis is None else f"{step} * {rows.name}_ld"
        each = f" * {stride_name(rows, self.dims, len(self.dims) - 1)}" if rows.strided else ""
        cols = [
            f"{self.pointers[c.tensor]} + {self.own_scales(c)}{block} * {c.name}_ld + {step}"
            for c in blocks.cols
            for block in self.blocks_across()
        ]
        own_blocks = len(cols) // tile.across  # of an instruction
        inside = f"j / {tile.sums // len(cols)}"
        block = f"[{inside}]" if len(cols) > 1 else "[0]"
        if tile.across > 1:
            block = "[part]" if own_blocks == 1 else f"[part * {own_blocks} + {inside}]" if own_blocks else "[0]"
        slot = "stage" if plan.scale_slots == tile.stages else f"stage % {plan.scale_slots}"
        half = str(tile.group_rows) if tile.parts == 1 else "(tile_rows / 2)"
        own = f"own * {half} + " if tile.schedule == "cooperative" else ""
        part = f"i * {tile.atom.rows} + " if tile.parts > 1 else ""
        return {
            "scales": cols,
            "threads": threads,
            "rounds": tile.held_rows // threads,
            "row": f"at.row0 + i * {threads} + thread",
            "slot": f"{slot} * slice_scales",
            "from_row": f"{self.pointers[rows.tensor]} + (row < rows ? row{each} + {along} : 0)",
            "own_row": f"{own}warp * 16 + {part}{tile.atom.fragment.row_text(('r8', 2))}",
            "columns": "tile_rows" if tile.held_rows == tile.rows else tile.held_rows,  # where their scales are
            "by": f" * scale{block}[i][j / 2 % 2]",
            "trails": plan.scale_slots != tile.stages and {"first": tile.stages - plan.scale_slots},
        }

    def blocks_across(self) -> list[str]:
        """The numbers of the blocks that a tile's columns are of: of one, or of those of each half of a block."""
        cols, width = self.plan.output_groups[0].cols, self.plan.width
        count = slice_scales.blocks_across(width)
        if count == 1:
            return ["at.col0 / scaled_cols"]
        ahead = {0: "", BLOCK // 2: f" + {BLOCK // 2}", BLOCK: " + scaled_cols"}
        found = [f"(at.col0{ahead[at]}) / scaled_cols" for at in range(0, width, width // count)]
        return [f"min({block}, {cols // BLOCK - 1})" for block in found] if cols % width else found
