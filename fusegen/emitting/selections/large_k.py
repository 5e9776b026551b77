"""The words of register-resident top-k for large k: see planner/selections/large_k.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusegen.emitting.rows.frame import constant
from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.selections.choice import Choice
from fusegen.emitting.selections.small_k import ResidentPass, SmallKChoice
from fusegen.planner.selections.large_k_cost import COMPARED_CANDIDATES, GUESSES
from fusegen.planner.ways import LargeK


class LargeKChoice(Choice):
    """Of one plan whose Selection has a LargeK: its rows come to registers as those that are held do."""

    def __init__(self, parts: Speller) -> None:
        super().__init__(parts)
        both = f"[v * {self.plan.tile.vector} + j]" if self.at_v and self.at_j else ""
        self.number = both or self.at_v or self.at_j  # of an element among the thread's
        self.held = SmallKChoice(parts, f"keys{self.number}")

    def spelled_pass(self) -> ResidentPass:
        return self.held.spelled_pass()

    def said(self) -> Mapping[str, Any]:
        plan, functions, large_k = self.plan, self.spelling.functions, self.way
        asks = self.frame.guard() or self.inside() or self.parts.elements.names_col(self.last)
        return {
            "key": self.held.place,
            "order": f"orders{self.number}",
            "key_col": "col + j" if self.at_j else "col",
            "elements": self.elements,
            "at_v": self.at_v,
            "at_i": "[i]" if self.elements > 1 else "",
            "at_g": "[g]" if large_k.groups > 1 else "",
            "peaks": self.peaks(),
            "padded": self.own_bins > 2,
            "row_warps": large_k.warps,
            "row_warps_name": "warps",
            "names_col": bool(asks),
            "warp_groups": large_k.groups * plan.target.warp,
            "bounded": self.bounded,
            "meet": functions["meet"],
            "warp_least": functions["warp_least"],
            "warp_most": functions["warp_most"],
            "warp_total": functions["warp_total"],
            "shuffle_up": functions["shuffle_up"][0],
            "sums": self.held.sums,
            "guesses": GUESSES,
        }

    @property
    def elements(self) -> int:
        """Of a thread."""
        return self.plan.tile.per_thread * self.plan.tile.vector

    @property
    def bounded(self) -> bool:
        """Is there room for fewer candidates than the row has columns?"""
        return self.way.limit < self.plan.cols

    @property
    def way(self) -> LargeK:
        assert isinstance(self.selection.way, LargeK)
        return self.selection.way

    def peaks(self) -> str:
        """The largest keys of groups: those of the thread's keys, its one largest key, or others."""
        groups = self.way.groups
        return "peak" if groups == 1 else "keys" if groups == self.elements else "peaks" if groups else ""

    @property
    def bins(self) -> int:
        return self.way.bins

    @property
    def names_infinite(self) -> bool:
        return self.way.groups > 0

    def more_sizes(self) -> Iterator[str]:
        if self.elements > 1:
            yield constant("elements", self.elements, "of a thread")
        if self.way.groups > 1:
            yield constant("groups", self.way.groups, "of a thread's keys")
        yield constant("limit", self.way.limit, "candidates that there is room for")
        yield constant("compared", COMPARED_CANDIDATES, "of them, that each one is compared with at a time")
        if self.bounded:
            yield constant("aim", self.way.aim, "candidates that a search tries for", "unsigned")
