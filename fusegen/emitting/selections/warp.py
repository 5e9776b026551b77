"""The words of warps, or parts of them, that choose from short rows: by rank, or one key after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusegen.emitting.dialect import UNROLL
from fusegen.emitting.selections.choice import Choice
from fusegen.planner.selections.choosing import COMPARED_CANDIDATES
from fusegen.planner.selections.small_k_cost import power_from
from fusegen.planner.ways import InWarp


class WarpChoice(Choice):
    """Of one plan by "warp"."""

    def spelled_pass(self) -> None:
        """None: templates ask for its body alone."""

    def said(self) -> Mapping[str, Any]:
        return self.one_by_one() if self.selection.one_by_one else self.ranks()

    def one_by_one(self) -> Mapping[str, Any]:
        chosen = self.selection
        entry = f"static_cast<Entry>(best) << column_bits | (last_column - {chosen.columns})"
        rank = "r" if chosen.k > 1 else "0"
        return {
            **self.keys("orders"),
            "turn_rank": rank,
            "team_names_col": self.names_col(),
            "lanes_most": self.by_shuffles("unsigned", ">"),
            "lanes_least": self.by_shuffles("int", "<"),
            "lanes_guard": self.lanes_guard(),
            "lanes_body": self.lanes_body(),
            "taken_out": f"best > masked ? {entry} : {self.none('all', rank)}",
        }

    def ranks(self) -> Mapping[str, Any]:
        plan = self.plan
        lanes, warp = plan.tile.threads_per_row, plan.target.warp
        functions = self.spelling.functions
        tile, own = plan.tile, "i"
        if tile.per_thread == 1:
            own = f"lane * {tile.vector} + i" if tile.vector > 1 else "lane"
        elif tile.vector == 1:
            own = f"i * {lanes} + lane"
        else:
            own = f"(i / {tile.vector} * {lanes} + lane) * {tile.vector} + i % {tile.vector}"
        keys = self.keys()
        chosen = power_from(self.selection.k)
        assert isinstance(self.selection.way, InWarp)
        return {
            **keys,
            "delegate": f"delegates[{keys['key_number'] or 0} % {self.selection.way.delegates}]",
            "merged": chosen,
            "delegate_partner": self.spelling.shuffle_xor.format(f"delegates[{chosen - 1} - q]", "step"),
            "own_col": own,
            "team_names_col": self.names_col(),
            "asks_col": self.names_col(),
            **self.groups(),
            "best_partner": self.spelling.shuffle_xor.format("best", "other"),
            "from_last_lane": self.spelling.shuffle.format("upto", lanes - 1, lanes),
            "shuffle_up": functions["shuffle_up"][0],
            "compared": COMPARED_CANDIDATES,
            "lanes_most": functions["warp_most"] if lanes == warp else self.by_shuffles("unsigned", ">"),
            "meet": functions["meet"],
            "entry_partner": self.spelling.shuffle_xor.format("best_entry", "step"),
            "lanes_guard": self.lanes_guard(),
            "lanes_body": self.lanes_body(),
        }

    def groups(self) -> Mapping[str, Any]:
        """Where columns are chosen of a row's best groups: a vector's place among its row's, and those of a group."""
        if not self.selection.limit:
            return {}
        tile, lanes = self.plan.tile, self.plan.tile.threads_per_row
        place = f"v * {lanes} + lane" if self.at_v else "lane"
        count = self.plan.cols // self.selection.limit.groups // tile.vector
        whole = tile.per_thread * lanes * tile.vector == self.plan.cols
        return {
            "vector_place": place,
            "asks_col": not whole,
            "in_row": "" if whole else f"col < {self.frame.cols} && ",
            "group_vectors": count,
            "own_group": place if count == 1 else f"{f'({place})' if self.at_v else place} / {count}",
            "group_place": "own_group" if count == 1 else f"own_group * {count} + i",
        }

    def by_shuffles(self, ctype: str, order: str) -> tuple[str, ...]:
        """The first of all v of a row's lanes, in that order."""
        return (
            UNROLL,
            f"for (int step = {self.plan.tile.threads_per_row // 2}; step > 0; step /= 2) {{",
            f"  const {ctype} other = {self.spelling.shuffle_xor.format('v', 'step')};",
            f"  v = v {order} other ? v : other;",
            "}",
            "return v;",
        )

    def lanes_body(self) -> list[str]:
        lines = self.parts.elements.body(replace(self.last, reductions=(), stores=()), loads_first=True)
        key = self.selection.key
        if self.selection.one_by_one:
            return [*lines, f"{self.key('orders')} = order_of({key});"]
        return [*lines, f"{self.key()} = {key};"]

    def names_col(self) -> bool:
        asks = self.frame.guard_names_col() or self.parts.elements.names_col(self.last)
        return bool(self.inside()) or asks

    @property
    def makes_keys(self) -> bool:
        return not self.selection.one_by_one

    @property
    def names_infinite(self) -> bool:
        return self.makes_keys
