"""A WideWgmmaAttentionPlan in the words of CUDA and PTX: what templates/attention_wide_wgmma.cu.j2 prints.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.attention.wgmma import ChainedWgmmaSpeller
from fusegen.emitting.attention.wgmma_scores import times
from fusegen.emitting.hopper import wgmma
from fusegen.planner.attention.wgmma import LINE_ELEMENTS
from fusegen.planner.attention.wide_wgmma import WideWgmmaAttentionPlan
from fusegen.planner.tile import LINE_BYTES


class WideWgmmaAttentionSpeller(ChainedWgmmaSpeller):
    """The words of one plan; `context()` is what the template sees."""

    plan: WideWgmmaAttentionPlan
    writes_row = "inside && own == 0 && lane % 4 == 0"
    of_heads = "keys"

    def brought(self) -> dict[str, Any]:
        plan = self.plan
        queries = self.copies(plan.query_boxes, "query", "queries", "queries_full", "static_cast<int>(row0)")
        return {
            "copies": {"query": queries, "segment": self.segment_copies()},
            "named_pages": {"key": self.named_pages(plan.key_boxes, "key")},
        }

    def segment_copies(self) -> list[str]:
        """One tensor copy of 64 columns of a tile, or one for each page of it."""
        found = self.plan.key_boxes
        self.moved.add(("copy_box", found.axes))
        to, column = "keys_ring + stage * key_bytes + segment * key_segment", f"segment * {LINE_ELEMENTS}"
        others = "".join(f", static_cast<int>({index})" for index in found.others)
        if found.pages is None:
            return [f"copy_box({to}, {found.name}_map, arrived, {column}, key0{others});"]
        pages = self.numbers_of(found)
        if found.rows == found.box_rows:
            line = f"key0 % {found.name}_page_rows"
            return [f"copy_box({to}, {found.name}_map, arrived, {column}, {line}{others}, {pages});"]
        return [
            "#pragma unroll",
            "for (int page = 0; page < key_pages; ++page) {",
            f"  copy_box({to} + page * key_page, {found.name}_map, arrived, {column}, 0{others}, {pages}[page]);",
            "}",
        ]

    def multiplies(self) -> list[Mapping[str, Any]]:
        plan = self.plan
        keys, columns = plan.tile.keys, plan.own_columns
        scores = f"scores of 64 queries and {keys} keys: queries @ keys^T, 16 along K, added or put in their place"
        weights = f"sums of 64 queries and {columns} columns += weights @ values, 16 keys; weights come from registers"
        told = "the same by weights of the other warpgroup, in shared memory"
        return [
            wgmma("multiply_scores", scores, plan.atom, keys, ", 0, 0", registers=False),
            wgmma("multiply_weights", weights, plan.atom, columns, ", 1", registers=True, always_adds=True),
            wgmma("multiply_told", told, plan.atom, columns, ", 0, 1", registers=False, always_adds=True),
        ]

    def sizes(self) -> list[str]:
        plan, t = self.plan, self.plan.tile
        return [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}, stages = {t.stages};",
            *self.dealing(),
            "constexpr int warpgroup = 128;  // threads",
            "// 64 columns each: of a row of queries or keys, of one of values, and of a warpgroup's half of these",
            f"constexpr int key_segments = {plan.key_boxes.segments}, value_segments = {plan.value_segments};",
            "constexpr int own_segments = value_segments / 2, own_columns = own_segments * 64;",
            "// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them",
            f"constexpr int line_bytes = {LINE_BYTES};",
            "constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;",
            f"constexpr int query_bytes = {times(plan.query_boxes)}query_segment, "
            "key_bytes = key_segments * key_segment;",
            "// bytes from the queries, which come first, to the keys, what warpgroups tell each other, and barriers",
            "constexpr int keys_at = query_bytes;",
            f"constexpr int told_at = {plan.told_at}, barriers_at = {plan.barriers_at};",
            *self.weights_place(),
            *self.box_sizes(),
        ]

    def weights_place(self) -> list[str]:
        """Where the first consumer's weights are, and how far behind them the other's."""
        if self.plan.over_keys:
            return [
                "// to the first consumer's weights, in the place of columns that are no values, and on to the other's",
                "constexpr int weights_at = keys_at + value_segments * key_segment, next_weights = key_bytes;",
            ]
        return [
            "// to the first consumer's weights, and on to the other's",
            f"constexpr int weights_at = {self.plan.tiles_end}, next_weights = tile_rows * line_bytes;",
        ]

    def context(self) -> dict[str, Any]:
        made = super().context()
        steps = self.plan.depth_steps - 4 * (self.plan.key_boxes.segments - 1)  # of the last 64 columns
        return {**made, "boxes": True, "last_steps": steps}
