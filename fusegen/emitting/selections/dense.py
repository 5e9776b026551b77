"""The words of kernels that choose many columns of short rows: see planner/rules/dense.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.selections.held import HeldSpeller
from fusegen.planner.held_rows import Dense
from fusegen.planner.selections.density import COMPARED, GUESSES


class DenseSpeller(HeldSpeller):
    """The words of one plan whose Selection has a Dense."""

    @property
    def dense(self) -> Dense:
        assert self.selection.dense is not None
        return self.selection.dense

    @property
    def key(self) -> str:
        return f"keys[{self.number}]"

    @property
    def number(self) -> str:
        """Of an element among the thread's."""
        width = self.plan.tile.vector
        return f"v * {width} + j" if width > 1 else "v"

    def words(self) -> Mapping[str, Any]:
        plan, functions, dense = self.plan, self.plan.target.spelling.functions, self.dense
        elements = plan.tile.per_thread * plan.tile.vector
        return {
            "key": self.key,
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
            "sums": self.sums,
            "aim": (self.selection.k + dense.limit) // 2,
            "wanted": (dense.want + dense.enough) // 2,
            "guesses": GUESSES,
            "compared": COMPARED,
        }
