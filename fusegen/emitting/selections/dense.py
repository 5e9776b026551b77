"""The words of kernels that choose many columns of short rows: see planner/rules/dense.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.selections.choice import Choice
from fusegen.emitting.selections.held import HeldChoice, HeldWalk
from fusegen.planner.selections.density import COMPARED, GUESSES


class DenseChoice(Choice):
    """Of one plan whose Selection has a Dense: its rows come to registers as those that are held do."""

    def __init__(self, parts: Speller) -> None:
        super().__init__(parts)
        width = self.plan.tile.vector
        self.number = f"v * {width} + j" if width > 1 else "v"  # of an element among the thread's
        self.held = HeldChoice(parts, f"keys[{self.number}]")

    def walk(self) -> HeldWalk:
        return self.held.walk()

    def said(self) -> Mapping[str, Any]:
        plan, functions, dense = self.plan, self.spelling.functions, self.selection.dense
        assert dense is not None
        elements = plan.tile.per_thread * plan.tile.vector
        return {
            "key": self.held.key,
            "order": f"orders[{self.number}]",
            "elements": elements,
            "alone": dense.groups == elements,  # each element is a group
            "warp_groups": dense.groups * plan.target.warp,
            "bounded": dense.limit < plan.cols,
            "meet": functions["meet"],
            "warp_least": functions["warp_least"],
            "warp_most": functions["warp_most"],
            "warp_total": functions["warp_total"],
            "shuffle_up": functions["shuffle_up"][0],
            "bin_bits": dense.bins.bit_length() - 1,
            "sums": self.held.sums,
            "aim": (self.selection.k + dense.limit) // 2,
            "wanted": (dense.want + dense.enough) // 2,
            "guesses": GUESSES,
            "compared": COMPARED,
        }
