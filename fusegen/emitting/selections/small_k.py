"""The words of register-resident top-k for small k: see planner/selections/small_k.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusegen.emitting.rows.frame import constant
from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.selections.choice import Choice
from fusegen.planner.model import Load, Reduction, RowPlan
from fusegen.planner.ways import SmallK


@dataclass(frozen=True, slots=True)
class ResidentRead:
    """A vector on its way, and how it is made of what came."""

    type: str
    name: str
    call: str
    made: str


@dataclass(frozen=True, slots=True)
class ResidentPass:
    """The only pass, for its templates: it leaves keys in registers, and parts of what is one value a row. Of the keys'
    own maximum and sum warps tell each other with the rest."""

    title: list[str]
    vectors: list[ResidentRead]
    parts: list[Mapping[str, str]]
    body: list[str]
    others: list[str]
    sums: list[str]
    behind: list[str]


def adds_up(plan: RowPlan) -> bool:
    """Are the exponentials of the keys added up?"""
    return any(r.kind == "softmax" for r in plan.passes[-1].reductions)


def told(plan: RowPlan) -> tuple[Reduction, ...]:
    """What is reduced by the prelude's functions: all but a softmax of the keys."""
    return tuple(r for row_pass in plan.passes for r in row_pass.reductions if r.kind != "softmax")


class SmallKChoice(Choice):
    """Of one plan whose Selection has a SmallK. `place`: where an element's key stays."""

    def __init__(self, parts: Speller, place: str = "") -> None:
        super().__init__(parts)
        self.place = place or self.key()
        self.sums = adds_up(self.plan)
        self.words.functions |= {"larger", "exponential"} if self.sums else {"larger"}

    def spelled_pass(self) -> ResidentPass:
        parts = self.parts
        others = tuple(r for r in self.last.reductions if r.kind != "softmax")
        body = parts.elements.body(replace(self.last, reductions=others), loads_first=False)
        return ResidentPass(
            title=self.title(),
            vectors=[self.read(load) for load in self.last.loads],
            parts=[parts.reductions.part(r) for r in others],
            body=[*body, f"{self.place} = {self.selection.key};"],
            others=[line for r in others for line in parts.reductions.results(r)],
            sums=[line for r in self.last.reductions if r not in others for line in self.key_sum(r)],
            behind=parts.passes.behind(self.last),
        )

    def read(self, load: Load) -> ResidentRead:
        frame, vectors, name = self.frame, self.parts.vectors, load.access.name
        vector = frame.vec_type(load.access)
        if load.access.mode == "misaligned":
            return ResidentRead(
                type=frame.pieces_type(load.access),
                name=f"{name}_read",
                call=vectors.pieces_from_memory(load, inside=False),
                made=f"const {vector} {name}_vec = joined({name}_read{self.at_v}, {frame.pointer(load.access)});",
            )
        return ResidentRead(
            type=vector,
            name=f"{name}_read",
            call=vectors.from_memory(load, inside=False),
            made=f"const {vector}& {name}_vec = {name}_read{self.at_v};",
        )

    def key_sum(self, r: Reduction) -> list[str]:
        """The keys' maximum and sum come from what the warps said."""
        top, total = r.results
        nothing = self.parts.reductions.unless_masked(r, top)
        return [
            f"const float {top} = key_at(most_of(picker));",
            f"const float {total} = {nothing}sum_of(picker, {top});",
        ]

    def said(self) -> Mapping[str, Any]:
        plan, spelling, hold, width = self.plan, self.spelling, self.small_k, self.plan.tile.vector
        return {
            **self.keys(),
            "by_turns": hold.turn < plan.tile.per_thread,
            "higher": "higher" if hold.turn < plan.tile.per_thread else "peak",
            "element": self.element(),
            "element_vector": f"v = element / {width}, j = element % {width}" if self.at_v and self.at_j else "",
            "element_col": self.element_col(),
            "meet": spelling.functions["meet"],
            "warp_least": spelling.functions["warp_least"],
            "warp_most": spelling.functions["warp_most"],
            "shuffle_up": spelling.functions["shuffle_up"][0],
            "of_lane": spelling.shuffle.format("order", "lane", plan.target.warp),
            "row_warps": hold.warps,
            "row_warps_name": "row_warps" if plan.cluster > 1 else "warps",
            "sums": self.sums,
            "binned": "binned",
        }

    def element(self) -> str:
        """The number of an element among the thread's."""
        if self.at_v and self.at_j:
            return f"v * {self.plan.tile.vector} + j"
        return "v" if self.at_v else "j" if self.at_j else "0"

    def element_col(self) -> str:
        """The column of the thread's element of that number."""
        if self.at_v and self.at_j:
            return f"{self.frame.col()} + j"
        if self.at_v:
            return self.col_of("element")
        return "col + element" if self.at_j else "col"

    @property
    def small_k(self) -> SmallK:
        assert isinstance(self.selection.way, SmallK)
        return self.selection.way

    @property
    def bins(self) -> int:
        return self.small_k.bins

    def more_sizes(self) -> Iterator[str]:
        hold, cluster = self.small_k, self.plan.cluster
        if cluster > 1:
            yield constant("row_warps", f"warps * {cluster}")
            yield constant("readers", f"threads / {cluster}", "that count the candidates of one block")
        yield constant("room", hold.room, "candidates of a block")
        if cluster > 1 or hold.limit < hold.room:
            yield constant("limit", hold.limit, "candidates in all")
        yield constant("aim", hold.aim, "candidates that a search tries for", "unsigned")
