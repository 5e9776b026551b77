"""The words of kernels that choose columns of rows that they hold: see planner/rules/held.py."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusegen.emitting.prelude import REDUCERS
from fusegen.emitting.selections.selection import SelectionSpeller
from fusegen.planner.heading import WIDTH
from fusegen.planner.held_rows import Hold
from fusegen.planner.model import Load, Reduction

MAX_SUM = REDUCERS["softmax"].function


class HeldSpeller(SelectionSpeller):
    """The words of one plan whose Selection has a Hold."""

    @property
    def hold(self) -> Hold:
        assert self.selection.hold is not None
        return self.selection.hold

    @property
    def key(self) -> str:
        """Where an element's key stays."""
        return "keys[v][j]"

    def last_walk(self) -> Mapping[str, Any]:
        """The only walk: it leaves keys in registers, and parts of what is one value a row. Of the keys' own maximum
        and sum warps tell each other with the rest."""
        chosen = self.selection
        sums = [r for r in self.last.reductions if r.kind == "softmax"]
        others = tuple(r for r in self.last.reductions if r not in sums)
        best = f"choose {chosen.columns} = the columns of the {chosen.k} largest {chosen.key}"
        title = f"walk 1 of 1: {self.last.title + '; ' if self.last.title else ''}{best}"
        return {
            "title": textwrap.wrap(title, WIDTH, subsequent_indent="  "),
            "vectors": [self.read(load) for load in self.last.loads],
            "parts": [self.part(r) for r in others],
            "body": [
                *self.body(replace(self.last, reductions=others), loads_first=False),
                f"{self.key} = {chosen.key};",
            ],
            "others": [line for r in others for line in self.results(r)],
            "sums": [line for r in sums for line in self.results(r)],
            "behind": self.behind(self.last),
        }

    def read(self, load: Load) -> Mapping[str, str]:
        """A vector on its way, and how it is made of what came."""
        name = load.access.name
        if load.access.mode == "across":
            joined = f"joined({name}_read[v], {self.pointer(load.access)})"
            return {
                "type": self.span_type(load.access),
                "name": f"{name}_read",
                "call": self.span_from_memory(load, inside=False),
                "made": f"const {self.vec_type(load.access)} {name}_vec = {joined};",
            }
        return {
            "type": self.vec_type(load.access),
            "name": f"{name}_read",
            "call": self.from_memory(load, inside=False),
            "made": f"const {self.vec_type(load.access)}& {name}_vec = {name}_read[v];",
        }

    def results(self, r: Reduction, function: str = "") -> list[str]:
        """A softmax's maximum and sum come from what the warps said."""
        if r.kind != "softmax" or r not in self.last.reductions:
            return super().results(r, function)
        top, total = r.results
        return [
            f"const float {top} = key_at(most_of(picker));",
            f"const float {total} = {self.unless_masked(r, top)}sum_of(picker, {top});",
        ]

    def row_reduces(self) -> list[Mapping[str, Any]]:
        """Without that softmax's, unless the chosen columns have one too."""
        found = super().row_reduces()
        if any(r.kind == "softmax" for stage in self.selection.picked for r in stage.reductions):
            return found if self.plan.cluster == 1 else [r for r in found if r["function"] != MAX_SUM]
        self.functions.discard("MaxSum")
        self.functions |= {"larger", "exponential"} if self.sums else {"larger"}
        return [r for r in found if r["function"] != MAX_SUM]

    @property
    def sums(self) -> bool:
        """Are the exponentials of the keys added up?"""
        return any(r.kind == "softmax" for r in self.last.reductions)

    def words(self) -> Mapping[str, Any]:
        plan, spelling, width = self.plan, self.plan.target.spelling, self.plan.tile.vector
        return {
            "element": f"v * {width} + j" if width > 1 else "v",
            "vector_of": f"v = element / {width}, j = element % {width}" if width > 1 else "v = element, j = 0",
            "meet": spelling.functions["meet"],
            "warp_least": spelling.functions["warp_least"],
            "warp_most": spelling.functions["warp_most"],
            "shuffle_up": spelling.functions["shuffle_up"][0],
            "of_lane": spelling.shuffle.format("order", "lane", plan.target.warp),
            "warps": plan.threads // plan.target.warp,
            "bin_bits": self.hold.bins.bit_length() - 1,
            "bins": self.hold.bins,
            "sums": self.sums,
            "aim": (self.selection.k + self.hold.room) // 2,
            "binned": "binned",
            "readers": plan.threads // plan.cluster,
        }
