"""A WideAttentionPlan in the words of one dialect: what templates/attention_wide.cu.j2 prints, in its order.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.attention.spelling import AttentionSpeller
from fusegen.planner.attention.parts import CHUNK
from fusegen.planner.attention.wide import WideAttentionPlan


class WideAttentionSpeller(AttentionSpeller):
    """The words of one plan in one dialect; `context()` is what the template sees."""

    plan: WideAttentionPlan
    keys_at_once = "warp_keys"

    @property
    def columns_at_once(self) -> int:
        return self.plan.columns_at_once

    @property
    def place_of_sums(self) -> str:
        return "m * sums_stride + col" + " - first_col" * (self.plan.column_passes > 1)

    def values(self) -> Mapping[str, Any]:
        """Values that come with the keys are brought by nobody."""
        return {"name": self.plan.value.name, "m": self.plan.key} if self.plan.shared else super().values()

    def sizes(self) -> list[str]:
        plan, t = self.plan, self.plan.tile
        query, key, value = plan.query.name, plan.key.name, plan.value.name
        place = (
            f"constexpr int {value}_at = 0, {value}_pitch = {key}_pitch, stage_elements = {plan.stage_elements};"
            f"  // values are columns of keys; and to the next stage"
            if plan.shared
            else f"constexpr int {value}_at = {plan.value_at}, {value}_pitch = {plan.value_pitch}, "
            f"stage_elements = {plan.stage_elements};  // of a tile's values, and to the next stage"
        )
        pitches = [f"{key}_pitch = {plan.key.pitch}", f"weights_pitch = {plan.weights_pitch}"]
        if not t.held:
            pitches.insert(0, f"{query}_pitch = {plan.query.pitch}")
        return [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}, threads = {plan.threads};",
            "// warps that share 16 queries, and what each of them has: keys of a tile, and columns of the values",
            f"constexpr int beside = {plan.beside}, warp_keys = {plan.warp_keys}, warp_columns = {plan.warp_columns};",
            *self.dealing(),
            *self.chunks(),
            "// elements from one line in shared memory to the next, an odd number of 16 bytes: what is read at once",
            "// of 8 lines lies in different banks",
            f"constexpr int {', '.join(pitches)};",
            place,
            *(["constexpr int stage_bytes = 2 * stage_elements;"] if plan.atom.kind == "mma" else []),
            *([] if t.held else [f"constexpr int {query}_at = {plan.query_at};"]),
            f"constexpr int weights_at = {plan.weights_at}, told_at = {plan.told_at};  // halves, and bytes",
            *self.sums_sizes(),
            *self.page_sizes(),
        ]

    def sums_sizes(self) -> list[str]:
        if self.plan.column_passes == 1:
            return [f"constexpr int sums_stride = {self.plan.sums_stride};  // floats of a row of sums"]
        return [
            "// columns of sums in shared memory at a time, and floats of a row of them",
            f"constexpr int columns_at_once = {self.plan.columns_at_once}, sums_stride = {self.plan.sums_stride};",
        ]

    def chunks(self) -> list[str]:
        """The names of how many 16 bytes lines have, where they are many."""
        plan = self.plan
        brought = [*([] if plan.tile.held else [plan.query]), plan.key, *([] if plan.shared else [plan.value])]
        named = [f"{self.chunks_of(m)} = {m.padded // CHUNK}" for m in brought if not self.chunks_of(m).isdigit()]
        return [f"constexpr int {', '.join(named)};  // 16 bytes each, of a line"] if named else []

    def context(self) -> dict[str, Any]:
        plan = self.plan
        made = super().context()
        self.functions.discard("rounded")
        query, key, value = made["query"], made["key"], made["value"]
        if plan.tile.held:  # its fragments are loaded from where it lies
            query = {**query, "declares": [], "rows": self.query_rows()}
            self.functions.add("load_chunk")
            if plan.query.width > 1:
                self.functions.add("load")
        return {
            **made,
            "query": query,
            "brought": [key] if plan.shared else [key, value],
            "copies": made["copies"] and not plan.tile.held,
            "across": plan.warp_keys // plan.atom.cols,
            "tile_steps": plan.tile.keys // self.deep,
            "deep": self.deep,
            "down": "(i / 4 * 16 + i % 4)" if self.deep > 16 else "i",
            "width_steps": plan.warp_columns // 16,
            "whose_keys": "the warp's keys of the tile",
        }

    @property
    def deep(self) -> int:
        """Keys of a tile that one instruction multiplies by the values: of MFMA that takes halves of a lane at once, as
        many as it is deep."""
        return 32 if self.plan.atom.kind == "mfma" and self.plan.atom.instructions == 1 else 16

    def query_rows(self) -> str:
        """Where a lane's row of queries begins: one that there is."""
        row = "row0 + (own_row < rows_here ? own_row : rows_here - 1)"
        return self.at(self.plan.query.access, row=f"({row})")
