"""A SlotsPlan in the words of one dialect: what templates/slot_sort.cu.j2 prints, in the order it prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegen.emitting.dialect import Dialect
from fusegen.planner.model import Access
from fusegen.planner.sorting.plan import SlotsPlan


class SlotsSpeller:
    def __init__(self, plan: SlotsPlan) -> None:
        self.plan = plan
        self.words = Dialect(plan.target.spelling)

    def context(self) -> dict[str, Any]:
        plan, words, spelling = self.plan, self.words, self.plan.target.spelling
        warp = plan.target.warp
        said = {
            "index": "int",
            "row_reduces": [],
            "partner": spelling.shuffle_xor.format("v", "step"),
            "lanes": spelling.lanes,
            "ballot": spelling.functions["ballot"][0],
            "popcount": spelling.functions["popcount"][0],
            "meet": spelling.functions["meet"],
            "shuffle_up": spelling.functions["shuffle_up"][0],
            "of_last_lane": spelling.shuffle.format("sum", warp - 1, warp),
            "id": words.to_value(plan.ids.dtype, f"{plan.ids.name}_ptr[slot]"),
            "ids": f"const {words.ctype(plan.ids.dtype)}* {plan.ids.name}_ptr",
            "ids_name": f"{plan.ids.name}_ptr",
            "writes_ends": self.writes(plan.ends, "group", "before + sum"),
            "writes_places": self.writes(plan.places, "slot", "place"),
            "writes_order": self.writes(plan.order_to, "place", "slot"),
        }
        uses = {"vec": False, "functions": words.functions}
        return {**words.frame(plan), "includes": [], "uses": uses, **said}

    def writes(self, outputs: Sequence[Access], at: str, value: str) -> list[str]:
        return [f"{a.name}_ptr[{at}] = {self.words.to_storage(a.dtype, value)};" for a in outputs]
