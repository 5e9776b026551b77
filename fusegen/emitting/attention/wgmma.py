"""A WgmmaAttentionPlan in the words of CUDA and PTX: what templates/attention_wgmma.cu.j2 prints.

Nothing is decided here. Whatever could be wrong is a field of the plan; this turns fields into C++.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusegen.emitting.attention.spelling import AttentionSpeller
from fusegen.emitting.attention.wgmma_scores import WgmmaScoresSpeller, segment, times
from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import asks, float_text
from fusegen.emitting.hopper import box_functions, wgmma
from fusegen.emitting.prelude import NEAR_0
from fusegen.planner.attention.wgmma import ChainedWgmmaPlan, WgmmaAttentionPlan
from fusegen.planner.model import Access, Load, Store
from fusegen.planner.parts import Statement, used_by
from fusegen.planner.tile import LINE_BYTES


class ChainedWgmmaSpeller(WgmmaScoresSpeller, AttentionSpeller):
    """What both templates of attention by wgmma share; `context()` is what they see."""

    plan: ChainedWgmmaPlan
    writes_row = "inside && lane % 4 == 0"  # the test for one thread of those that have a row

    @abstractmethod
    def brought(self) -> dict[str, Any]:
        """What the producer copies, and where the numbers of its pages are read."""

    @abstractmethod
    def multiplies(self) -> list[Mapping[str, Any]]:
        """Functions of one wgmma each."""

    # ---- boxes

    def box_stores(self, access: Access) -> list[str]:
        found = self.plan.stored[access.tensor]
        self.moved.add(("store_box", 2 + len(found.others)))
        line = "static_cast<int>(row0) + warp_row"
        return [
            f"store_box({found.name}_map, staging{segment('query_segment', s)}, {self.coordinates(found, s, line)});"
            for s in range(found.segments)
        ]

    @property
    def place_in_tile(self) -> str:
        return ""

    # ---- a tanh of every score

    @property
    def votes(self) -> bool:
        return bool(self.plan.tangent)

    def near(self) -> Mapping[str, Any]:
        """The argument of a tanh of every score, and what is made of scores where all of a warp's are small."""
        plan = self.plan
        if not plan.tangent:
            return {}
        at = next(place for place, s in enumerate(plan.free.body) if s.name == plan.tangent)
        tanh = plan.free.body[at]
        (argument,) = tanh.uses
        wanted: set[str] = {argument}
        before: list[Statement] = []
        for s in reversed(plan.free.body[:at]):
            if s.name in wanted:
                before.insert(0, s)
                wanted |= s.uses
        loads = tuple(load for load in plan.free.loads if load.value in wanted)
        of = self.element_lines(
            replace(plan.free, body=tuple(before), loads=loads, value=argument), f"{self.scores}[i]"
        )
        small = replace(tanh, op=replace(tanh.op, expr="tangent_near_0({0})"))
        body = tuple(small if s is tanh else s for s in plan.free.body)
        lines = self.element_lines(replace(plan.free, body=body), f"{self.scores}[i]")
        return {"of": of, "value": argument, "asks_col": asks(of, self.col_name), "within": NEAR_0, "lines": lines}

    # ---- behind the sums

    def behind(self) -> Mapping[str, Any]:
        plan, behind = self.plan, self.plan.behind
        asked = used_by(behind.body) | used_by(behind.row_body) | used_by(behind.pivot_body)
        asked |= {store.value for store in (*behind.stores, *behind.row_stores)}
        row: list[str] = []
        if behind.top in asked or behind.pivot:
            times = f" * {float_text(plan.scale)}" if plan.scale != 1 else ""
            row.append(f"const float {behind.top} = largest[r]{times};")
        row += [self.row_value(load) for load in behind.row_loads]
        if behind.pivot:
            self.functions.add("exponential")
            row += self.statements(behind.pivot_body)
            row.append("// sums were carried against the largest logit")
            row.append(f"const float brought = exponential({behind.top} - {behind.pivot});")
        if behind.total:
            row.append(f"const float {behind.total} = summed[r]{' * brought' if behind.pivot else ''};")
        row += self.statements(behind.row_body)
        row += [
            f"if ({self.writes_row}) *({self.at(store.access)}) = {self.stored(store)};" for store in behind.row_stores
        ]
        boxed = [s for s in behind.stores if s.access.tensor in plan.stored]
        apart = [s for s in behind.stores if s.access.tensor not in plan.stored]
        pair = [
            f"const {self.vec(load.access.dtype, 2)} {load.access.name}_vec = {self.pair_load(load.access)};"
            for load in behind.loads
        ]
        pair += [f"float {s.access.name}_pair[2];" for s in boxed]
        pair += [f"{self.vec(s.access.dtype, 2)} {s.access.name}_vec;" for s in apart]
        brought = " * brought" if behind.pivot else ""
        body = [f"const float {behind.sums} = {self.sums}[n * 4 + r * 2 + j]{brought};"]

        def read(load: Load) -> str:
            return self.to_value(load.access.dtype, f"{load.access.name}_vec.at[j]")

        def write(store: Store) -> str:
            if store in boxed:
                return f"{store.access.name}_pair[j] = {store.value};"
            return f"{store.access.name}_vec.at[j] = {self.stored(store)};"

        body += element_lines(behind, Element(read, write), self)
        stores = [f"{s.access.name}_words[n * 2 + r] = {self.rounded(s.access)};" for s in boxed]
        stores += [f"if (inside) {self.pair_store(s.access)}" for s in apart]
        boxes = [{"words": f"{s.access.name}_words", "stores": self.box_stores(s.access)} for s in boxed]
        return {
            "row": row,
            "asks_row": asks((*row, *pair, *body, *stores), "row"),
            "asks_inside": asks((*row, *stores), "inside"),
            "vectors": bool(behind.loads or apart),
            "asks_col": asks([*pair, *body, *stores], "col"),
            "pair": pair,
            "body": body if behind.stores else [],
            "stores": stores,
            "boxes": boxes,
        }

    def pair_load(self, access: Access) -> str:
        return f"{self.moving('load', access)}<2>({self.at(access, 'col')})"

    def pair_store(self, access: Access) -> str:
        return f"{self.moving('store', access)}<2>({self.at(access, 'col')}, {access.name}_vec);"

    # ---- all of it

    def context(self) -> dict[str, Any]:
        plan = self.plan
        self.pairs.add(f"pair_{plan.dtype.name}")
        self.carry()
        tested = self.element_lines(plan.tested, f"{self.scores}[i]")
        free = self.element_lines(plan.free, f"{self.scores}[i]") if plan.tests else tested
        if not plan.free.body:
            free = []  # a score is its logit
        near = self.near()
        weighed = self.weight_words()
        launch_body = self.statements(plan.launch_body)
        ends, key_range, behind = self.ends(), self.key_range(), self.behind()
        row_setup, row_arrays, ahead = self.row_setup(), self.row_arrays(), self.ahead()
        asks_col = {
            name: asks(lines, self.col_name)
            for name, lines in (("tested", tested), ("free", free), ("weight", weighed["weight"]))
        }
        scale = plan.scale * (1.0 if plan.base_2 else math.log2(math.e))
        brought = self.brought()
        shuffle = self.spelling.shuffle_xor
        return {
            **self.frame(plan),
            "includes": self.headers_of({a.dtype for a in plan.accesses} | {plan.dtype}),
            "uses": {"vec": behind["vectors"] or bool(ahead), "functions": self.functions},
            "index": "int",
            "row_reduces": [],
            "sizes": self.sizes(),
            "launch_body": launch_body,
            "place": self.place(),
            "ends": ends,
            "key_range": key_range,
            "stride": self.stride,
            "met": len(self.named_ends(plan.ends)) if plan.meets else 0,
            **brought,
            "box_functions": box_functions(self.moved),
            "boxes": bool(behind["boxes"]),
            "multiplies": self.multiplies(),
            "pairs": [
                {"name": f"rounded_{kind}", "body": self.spelling.functions[kind]} for kind in sorted(self.pairs)
            ],
            "rounded": f"rounded_pair_{plan.dtype.name}",
            "fences_words": True,
            "ahead": ahead,
            "pair_col": plan.atom.fragment.col_text(("n", 2)),
            "head_lines": self.head_lines(),
            "row_setup": row_setup,
            "setup_asks_row": asks(row_setup, "row", "m"),
            "row_arrays": row_arrays,
            "slot": self.slot,
            "slot_row": self.slot_row,
            "scores": self.scores,
            "sums": self.sums,
            "col_name": self.col_name,
            "col": plan.atom.fragment.col_text(("i", 1)),
            "first_numbers": self.first_numbers(),
            "is_free": self.is_free(),
            "tested": tested,
            "tested_value": plan.tested.value,
            "free": free,
            "free_value": plan.free.value,
            "near": near,
            **weighed,
            "asks_col": asks_col,
            "asks_key": plan.tests or any(asks_col.values()),
            "nothing": self.nothing,
            "total": bool(plan.behind.total),
            **self.factors(float_text(scale) if scale != 1 else "", row="factors[r]"),
            "late": float_text(plan.late / scale) if plan.late else "",
            "behind": behind,
            "partner": shuffle,
            "peaks": f"peaks[{self.slot}][i % 2]" if plan.two_chains else f"peaks[{self.slot}]",
            "row_peak": "larger(peaks[r][0], peaks[r][1])" if plan.two_chains else "peaks[r]",
            "peak_partner": shuffle.format("peak", "step"),
            "summed_partner": shuffle.format("summed[r]", "step"),
        }


class WgmmaAttentionSpeller(ChainedWgmmaSpeller):
    """The words of one plan whose warpgroups have rows of their own."""

    plan: WgmmaAttentionPlan

    def brought(self) -> dict[str, Any]:
        plan = self.plan
        staged = {what: f"{what}s_ring + stage * {what}_bytes" for what in ("key", "value")}
        return {
            "copies": {
                "query": self.copies(plan.query_boxes, "query", "queries", "queries_full", "static_cast<int>(row0)"),
                "key": self.copies(plan.key_boxes, "key", staged["key"], "keys_full + 8 * stage", "key0"),
                "value": self.copies(plan.value_boxes, "value", staged["value"], "values_full + 8 * stage", "key0"),
            },
            "named_pages": {
                "key": self.named_pages(plan.key_boxes, "key"),
                "value": self.named_pages(plan.value_boxes, "value"),
            },
        }

    def multiplies(self) -> list[Mapping[str, Any]]:
        plan = self.plan
        keys, columns = plan.tile.keys, plan.value.padded
        scores = f"scores of 64 queries and {keys} keys: queries @ keys^T, 16 along K, added or put in their place"
        weights = f"sums of 64 queries and {columns} columns += weights @ values, 16 keys; weights come from registers"
        return [
            wgmma("multiply_scores", scores, plan.atom, keys, ", 0, 0", registers=False),
            wgmma("multiply_weights", weights, plan.atom, columns, ", 1", registers=True, always_adds=True),
        ]

    def sizes(self) -> list[str]:
        plan, t = self.plan, self.plan.tile
        staging = "values_at + stages * value_bytes" if plan.staging_at else "0"
        return [
            "// queries of a block, keys of a tile, and all keys",
            f"constexpr int tile_rows = {t.rows}, tile_keys = {t.keys}, keys = {plan.keys}, stages = {t.stages};",
            *self.dealing(),
            f"constexpr int warpgroup = 128, consumers = {plan.consumers};  // threads, and warpgroups"
            if plan.consumers > 1 or plan.stored
            else "constexpr int warpgroup = 128;  // threads",
            "// bytes of a line of shared memory, of 64 columns of a tile's lines, and of all of them",
            f"constexpr int line_bytes = {LINE_BYTES};",
            "constexpr int query_segment = tile_rows * line_bytes, key_segment = tile_keys * line_bytes;",
            "constexpr int value_segment = tile_keys * line_bytes;",
            f"constexpr int query_bytes = {times(plan.query_boxes)}query_segment, "
            f"key_bytes = {times(plan.key_boxes)}key_segment;",
            f"constexpr int value_bytes = {times(plan.value_boxes)}value_segment;",
            "// bytes from the queries, which come first, to the keys, the values, and what lies behind them",
            "constexpr int keys_at = query_bytes, values_at = keys_at + stages * key_bytes;",
            *([f"constexpr int staging_at = {staging};"] if plan.stored else []),
            f"constexpr int barriers_at = {plan.barriers_at};",
            *self.box_sizes(),
        ]
