"""A WgmmaWeightsPlan in the words of CUDA and PTX: what templates/weights_wgmma.cu.j2 prints.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fusegen.emitting.attention.weights import WrittenWords
from fusegen.emitting.attention.wgmma_scores import WgmmaScoresSpeller, times
from fusegen.emitting.dialect import asks, float_text
from fusegen.emitting.hopper import box_functions, wgmma
from fusegen.planner.attention.weights_wgmma import WgmmaWeightsPlan
from fusegen.planner.attention.wgmma import BOX_ROWS, LINE_ELEMENTS, Boxes
from fusegen.planner.model import Store
from fusegen.planner.tile import LINE_BYTES


class WgmmaWeightsSpeller(WgmmaScoresSpeller, WrittenWords):
    """The words of one plan; `context()` is what the template sees."""

    plan: WgmmaWeightsPlan
    of_heads = "keys"

    @property
    def factor(self) -> str:
        scale = self.plan.scale * (1.0 if self.plan.base_2 else math.log2(math.e))
        return float_text(scale) if scale != 1 else ""

    # ---- boxes

    def store_boxes(self, found: Boxes, column: str, row: str, staged: str, segments: int) -> list[str]:
        """Stores of boxes of 64 columns each, from `column` on; `staged`: their places in shared memory."""
        self.moved.add(("store_box_evict_first", 2 + len(found.others)))
        others = "".join(f", static_cast<int>({index})" for index in found.others)
        return [
            f"store_box_evict_first({found.name}_map, {staged}{f' + {s} * box_rows * line_bytes' if s else ''}, "
            f"{column}{f' + {s * LINE_ELEMENTS}' if s else ''}, {row}{others});"
            for s in range(segments)
        ]

    @property
    def zero_heads(self) -> list[str]:
        """Loops over the columns of which no scores are made."""
        heads = ["for (int col = last_key; col < keys; col += line_elements)"]
        if self.plan.ends.first is not None:
            heads.insert(0, "for (int col = 0; col < first_key; col += line_elements)")
        return heads

    def zero_boxes(self) -> list[tuple[str, list[str]]]:
        """Those, and what stores zeros there."""
        if not self.plan.zeroes:
            return []
        row = "static_cast<int>(row0) + zero_rows"
        stores = [line for b in self.plan.stored.values() for line in self.store_boxes(b, "col", row, "zeros", 1)]
        return [(head, stores) for head in self.zero_heads]

    # ---- elements

    def boxed(self, store: Store) -> bool:
        return store.access.tensor in self.plan.stored

    def written(self) -> Mapping[str, Any]:
        plan, results = self.plan, self.plan.results
        given = f"{self.scores}[i]"

        def write(store: Store) -> str:
            if self.boxed(store):
                return f"{store.access.name}_pair[j] = {store.value};"
            return f"{store.access.name}_vec.at[j] = {self.stored(store)};"

        tested = self.written_lines(plan.tested, results.body, given, write)
        free = self.written_lines(plan.free, results.free_body, given, write) if plan.tests else tested
        col = "key0 + (n + pair / 2) * 8 + lane % 4 * 2"
        inside = "warp_row + lane / 4 + pair % 2 * 8 < rows_here"
        declares: list[str] = []
        stores: list[str] = []
        tested_stores: list[str] = []
        boxes: list[Mapping[str, Any]] = []
        offset = 0
        for store in results.stores:
            name = store.access.name
            if self.boxed(store):
                found = plan.stored[store.access.tensor]
                declares.append(f"float {name}_pair[2];")
                line = f"{name}_words[pair] = {self.rounded(store.access)};"
                stores.append(line)
                tested_stores.append(line)
                row = "static_cast<int>(row0) + warp_row"
                boxes.append(
                    {
                        "words": f"{name}_words",
                        "staging": f"{name}_staging",
                        "to": f"{name}_to",
                        "offset": f" + {offset}" if offset else "",
                        "stores": self.store_boxes(found, "key0", row, f"{name}_staging", found.segments),
                    }
                )
                offset += found.bytes
                continue
            declares.append(f"{self.vec(store.access.dtype, 2)} {name}_vec;")
            to = f"{name}_rows[pair % 2] + {col}"
            if store.access.mode == "vector" and plan.keys % 2 == 0:
                self.functions.add("store")
                stores.append(f"if ({inside}) store<2>({to}, {name}_vec);")
                tested_stores.append(f"if ({inside} && {col} < keys) store<2>({to}, {name}_vec);")
            else:
                each = "for (int j = 0; j < 2; ++j) "
                stores += ["#pragma unroll", f"{each}if ({inside}) ({to})[j] = {name}_vec.at[j];"]
                tested_stores += [
                    "#pragma unroll", f"{each}if ({inside} && {col} + j < keys) ({to})[j] = {name}_vec.at[j];",
                ]  # fmt: skip
        return {
            "declares": declares,
            "tested": tested,
            "free": free,
            "stores": stores,
            "tested_stores": tested_stores if plan.ragged else stores,
            "boxes": boxes,
        }

    def apart_rows(self) -> list[tuple[str, str]]:
        """Of results that no tensor copy stores: where the thread's two rows begin."""
        return [
            (
                f"{self.ctype(s.access.dtype)}* {s.access.name}_rows[2];",
                f"{s.access.name}_rows[r] = {self.at(s.access)};",
            )
            for s in self.plan.results.stores
            if not self.boxed(s)
        ]

    def fills(self) -> list[str]:
        """What writes a row's columns of which no scores are made, of results that no tensor copy stores."""
        apart = [s for s in self.plan.results.stores if not self.boxed(s)] if self.masks else []
        return [line for store in apart for line in self.fill(store, "lane % 4", 4)]

    def odd_boxes(self) -> list[Mapping[str, Any]]:
        """What writes over the zeros of rows that hold something else there, 16 rows of a warp at a time."""
        found: list[Mapping[str, Any]] = []
        for store in self.plan.results.stores if self.plan.zeroes else ():
            if not self.boxed(store):
                continue
            name, masked = store.access.name, self.masked(store)
            boxes = self.plan.stored[store.access.tensor]
            row = "static_cast<int>(row0) + warp_row"
            kind = self.rounded(store.access).partition("(")[0]
            found.append(
                {
                    "odd": f"!({masked}[0] == 0.0f && {masked}[1] == 0.0f)",
                    "words": f"{name}_words",
                    "rounded": f"{kind}({masked}[r], {masked}[r])",
                    "staging": f"{name}_staging",
                    "loops": [
                        (head, self.store_boxes(boxes, "col", row, f"{name}_staging", 1)) for head in self.zero_heads
                    ],
                }
            )
        return found

    # ---- all of it

    def sizes(self) -> list[str]:
        plan, t = self.plan, self.plan.tile
        lines = [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}, stages = {t.stages};",
            "constexpr int warpgroup = 128;  // threads",
            "// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them",
            f"constexpr int line_bytes = {LINE_BYTES};",
            "constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;",
            f"constexpr int query_bytes = {times(plan.query_boxes)}query_segment, "
            f"key_bytes = {times(plan.key_boxes)}key_segment;",
        ]
        if plan.stored:
            lines.append(f"constexpr int box_rows = {BOX_ROWS};  // of what a warp stores at once, 64 columns each")
        if plan.zeroes:
            lines.append(f"constexpr int line_elements = {LINE_ELEMENTS}, zero_bytes = box_rows * line_bytes;")
        lines.append("// bytes from the queries, which come first, to what lies behind them")
        places = ["keys_at = query_bytes"]
        places += ["staging_at = keys_at + stages * key_bytes"] if plan.stored else []
        places += [f"zeros_at = {plan.zeros_at}"] if plan.zeroes else []
        return [*lines, f"constexpr int {', '.join(places)};", f"constexpr int barriers_at = {plan.barriers_at};"]

    def context(self) -> dict[str, Any]:
        plan, atom = self.plan, self.plan.atom
        self.functions.update(("larger", "power_of_2"))
        self.constants.add("INFINITY")
        tested = self.element_lines(plan.tested, f"{self.scores}[i]")
        free = self.element_lines(plan.free, f"{self.scores}[i]") if plan.tests else tested
        if not plan.free.body:
            free = []  # a score is its logit
        written = self.written()
        settled = self.settled_rows(f" * {float_text(plan.scale)}" if plan.scale != 1 else "")
        masked, fills = self.masked_lines(self.exponential_of("-INFINITY", "r")), self.fills()
        odd_boxes = self.odd_boxes()
        launch_body, ends, key_range = self.statements(plan.launch_body), self.ends(), self.key_range()
        row_setup, row_arrays, ahead = self.row_setup(), self.row_arrays(), self.ahead()
        apart = self.apart_rows()
        lines = {"tested": tested, "free": free, "written": written["tested"], "written_free": written["free"]}
        asks_col = {name: asks(found, self.col_name) for name, found in lines.items()}
        copies = {
            "query": self.copies(plan.query_boxes, "query", "queries", "queries_full", "static_cast<int>(row0)"),
            "key": self.copies(
                plan.key_boxes, "key", "keys_ring + stage * key_bytes", "keys_full + 8 * stage", "key0"
            ),
        }  # fmt: skip
        zero_boxes = self.zero_boxes()
        what = (
            f"scores of 64 queries and {plan.tile.keys} keys: queries @ keys^T, 16 along K, added or put in their place"
        )
        shuffle = self.spelling.shuffle_xor
        vectors = any(not self.boxed(s) for s in plan.results.stores)
        return {
            **self.frame(plan),
            "includes": self.headers_of({a.dtype for a in plan.accesses} | {plan.dtype}),
            "uses": {"vec": vectors or bool(ahead), "functions": self.functions},
            "index": "int",
            "row_reduces": [],
            "sizes": self.sizes(),
            "launch_body": launch_body,
            "place": self.place(),
            "ends": ends,
            "key_range": key_range,
            "met": len(self.named_ends(plan.ends)) if plan.meets else 0,
            "copies": copies,
            "zero_boxes": zero_boxes,
            "box_functions": box_functions(self.moved),
            "boxes": bool(written["boxes"]),
            "multiplies": [wgmma("multiply_scores", what, atom, plan.tile.keys, ", 0, 0", registers=False)],
            "pairs": [
                {"name": f"rounded_{kind}", "body": self.spelling.functions[kind]} for kind in sorted(self.pairs)
            ],
            "fences_words": False,
            "ahead": ahead,
            "pair_col": atom.fragment.col_text(("n", 2)),
            "head_lines": self.head_lines(),
            "row_setup": row_setup,
            "setup_asks_row": asks(row_setup, "row", "m"),
            "row_arrays": [
                *self.factor_arrays(),
                *row_arrays,
                *self.masked_arrays(2),
                *(declared for declared, _ in apart),
            ],
            "apart_rows": apart,
            "slot": self.slot,
            "slot_row": self.slot_row,
            "scores": self.scores,
            "col_name": self.col_name,
            "col": atom.fragment.col_text(("i", 1)),
            "is_free": self.is_free(),
            "tested": tested,
            "tested_value": plan.tested.value,
            "free": free,
            "free_value": plan.free.value,
            "written": written,
            "settled": settled,
            "asks_place": asks((*settled, *(text for _, text in apart)), "row"),
            "masked": masked,
            "fills": fills,
            "odd_boxes": odd_boxes,
            "asks_col": asks_col,
            "asks_key": {"carry": plan.tests or asks_col["tested"] or asks_col["free"]},
            "total": bool(plan.results.total),
            **self.factors(self.factor),
            "power": self.exponential_of(f"{self.scores}[i]", self.slot),
            "partner": shuffle,
            "peak_partner": shuffle.format("peak", "step"),
            "summed_partner": shuffle.format("summed[r]", "step"),
        }
