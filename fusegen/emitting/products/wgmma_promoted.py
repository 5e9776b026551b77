"""How a kernel by wgmma adds up sums of slices, in the words of CUDA: each begun at 0, and scaled where blocks are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.products.wgmma_copies import CopySpeller
from fusegen.planner.pieces import stride_name


class PromotedSpeller(CopySpeller):
    """The words of one plan's loop over slices, where sums are promoted."""

    def promoted(self) -> Mapping[str, Any] | None:
        """When sums in registers of their own begin, and when they are added to the tile's, scaled or not."""
        slices, steps = self.plan.promoted_slices, self.plan.steps
        if not slices:
            return None
        if slices == 1:
            return {"slices": "each slice", "adds": "k != 0", "ends": "", **self.scaled_blocks()}
        return {
            "slices": f"each {slices} slices",
            "adds": f"(step % {slices} | k) != 0",
            **self.scaled_blocks(),
            "ends": f"step % {slices} == {slices - 1} || step == {steps - 1}",
        }

    def scaled_blocks(self) -> Mapping[str, Any]:
        """The scales of a slice: of a thread's rows, by those of each product's columns."""
        blocks, tile = self.plan.block_scales, self.tile
        if blocks is None:
            return {"scales": [], "by": ""}
        step = self.step
        rows = blocks.rows
        along = f"{step}" if rows.ld_axis is None else f"{step} * {rows.name}_ld"
        row = f"row0 + i * {tile.atom.rows} + {tile.atom.fragment.row_text(('r8', 2))}"
        each = f" * {stride_name(rows, self.dims, len(self.dims) - 1)}" if rows.strided else ""
        cols = [
            f"{self.pointers[c.tensor]}[{self.own_scales(c)}at.col0 / scaled_cols * {c.name}_ld + {step}]"
            for c in blocks.cols
        ]
        products = self.plan.products
        product = f"[j / {tile.sums // products}]" if products > 1 else "[0]"
        return {
            "scales": cols,
            "row": row,
            "slot": "[slot]" if self.plan.scales_ahead > 1 else "",  # of those slices' scales
            "of_row": f"{self.pointers[rows.tensor]}[row{each} + {along}]",
            "by": f" * scale{product}[i][j / 2 % 2]",
            "products": products,
        }
