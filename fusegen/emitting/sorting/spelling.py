"""A SlotsPlan in the words of one dialect: what templates/slot_sort.cu.j2 prints, in the order it prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegen.emitting.dialect import Dialect
from fusegen.emitting.loops import each_line
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
            **self.slots(),
            "writes_ends": self.writes(plan.ends, "group", "before + sum"),
            "writes_places": self.writes(plan.places, "slot", "place"),
            "writes_order": self.writes(plan.order_to, "place", "slot"),
        }
        uses = {"vec": False, "functions": words.functions}
        return {**words.frame(plan), "includes": [], "uses": uses, **said}

    def slots(self) -> dict[str, Any]:
        """Which slots a lane has, and how it reads their groups: several of them together, before it looks at any."""
        tile, warp, ids = self.plan.tile, self.plan.target.warp, f"{self.plan.ids.name}_ptr"
        clustered = tile.cluster > 1
        if tile.turns == 1:
            read = [f"const int named = group_of({ids}, slot);"]
            first = "slot = rank * threads + threadIdx.x" if clustered else "slot = threadIdx.x"
            return {"first_slot": first, "slot": "slot", "own": "named", "groups_read": read}
        of_warp = "rounds * round_slots" if tile.rounds > 1 else f"batch * {warp}"
        of_round = "round * round_slots + " if tile.rounds > 1 else ""
        slot = f"first_slot + {of_round}i * {warp}"
        return {
            "first_slot": f"first_slot = {'(rank * warps + warp)' if clustered else 'warp'} * ({of_warp}) + lane",
            "slot": slot,
            "own": "named[i]",
            "groups_read": ["int named[batch];", *each_line([f"named[i] = group_of({ids}, {slot});"], "i", tile.batch)],
        }

    def writes(self, outputs: Sequence[Access], at: str, value: str) -> list[str]:
        return [f"{a.name}_ptr[{at}] = {self.words.to_storage(a.dtype, value)};" for a in outputs]
