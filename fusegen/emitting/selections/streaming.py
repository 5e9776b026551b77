"""The words of blocks and clusters that choose from rows that stream by: streaming threshold select."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import all_of
from fusegen.emitting.rows.frame import constant, scaled
from fusegen.emitting.rows.passes import Output
from fusegen.emitting.selections.choice import Choice
from fusegen.language.types import f32
from fusegen.planner.model import Load, Reduction, RowPlan
from fusegen.planner.rows.tails import turns_inside
from fusegen.planner.selections.choosing import BISECTIONS, MANY_MARKS
from fusegen.planner.ways import Streaming


@dataclass(frozen=True, slots=True)
class Ahead:
    """A vector that is read a turn before it is used: what lies across blocks is shifted into place only then.
    `inside` reads one that is known to lie in the row."""

    type: str
    name: str
    call: str
    inside: str
    made: str
    start: str = ""


@dataclass(frozen=True, slots=True)
class KeySum:
    """A softmax of what decides, whose largest is known; `slots` are where its parts are added up."""

    top: str
    total: str
    part: str
    slots: list[str]
    guarded: bool


@dataclass(frozen=True, slots=True)
class StreamingPass:
    """The pass that chooses, for its template."""

    title: list[str]
    parts: list[Mapping[str, str]]
    vectors: list[Ahead]
    names_col: bool
    outputs: tuple[Output, ...]
    vector_reductions: tuple[str, ...]
    body: list[str]
    key_reductions: list[str]
    alike: bool  # a vector inside of the row is read as any is
    masks: bool  # what lies outside of the row counts for nothing but keys
    results: list[str]
    key_sums: list[KeySum]
    behind: list[str]


def of_key(plan: RowPlan) -> tuple[Reduction, ...]:
    """Softmaxes of what decides, where the row's largest key comes with the threshold."""
    chosen = plan.selection
    assert chosen is not None
    softmaxes = (r for r in plan.passes[-1].reductions if r.kind == "softmax")
    way = chosen.way
    return tuple(r for r in softmaxes if isinstance(way, Streaming) and way.groups and r.value == chosen.key)


def ordinal(k: int) -> str:
    return f"{k}th" if k > 3 else ("", "1st", "2nd", "3rd")[k]


class StreamingChoice(Choice):
    """Of one plan by "streaming"."""

    def spelled_pass(self) -> StreamingPass:
        return self.spelled

    @cached_property
    def spelled(self) -> StreamingPass:
        """The key's own maximum serves a softmax of the key too."""
        parts, pivoted = self.parts, of_key(self.plan)
        others = tuple(r for r in self.last.reductions if r not in pivoted)
        row_pass = replace(self.last, reductions=others)
        vectors = [self.ahead(load) for load in self.last.loads]
        outputs = tuple(parts.passes.outputs(row_pass))
        asks = self.frame.guard_names_col() or bool(self.frame.whole()) or parts.elements.names_col(row_pass)
        return StreamingPass(
            title=self.title(),
            parts=[parts.reductions.part(r) for r in self.last.reductions],
            vectors=vectors,
            names_col=asks or bool(outputs),
            outputs=outputs,
            vector_reductions=tuple(r.part for r in others if r.kind == "softmax"),
            body=[*parts.elements.body(row_pass, loads_first=False), f"keys[j] = {self.selection.key};"],
            key_reductions=[r.part for r in pivoted],
            alike=all(v.call == v.inside for v in vectors),
            masks=not others and not self.last.stores,
            results=[line for r in others for line in parts.reductions.results(r)],
            key_sums=[self.key_sum(r) for r in pivoted],
            behind=parts.passes.behind(self.last),
        )

    def ahead(self, load: Load) -> Ahead:
        frame, vectors = self.frame, self.parts.vectors
        name, row, vector = f"{load.access.name}_vec", frame.pointer(load.access), frame.vec_type(load.access)
        if load.access.mode != "misaligned":
            return Ahead(
                type=vector,
                name=f"{name}_next",
                call=vectors.from_memory(load, inside=False),
                inside=vectors.from_memory(load, inside=False, sure=True),
                made=f"const {vector} {name} = {name}_next[p];",
            )
        ctype, pieces = self.words.ctype(load.access.dtype), frame.pieces_type(load.access)
        start = f"{load.access.name}_start"
        return Ahead(
            type=pieces,
            name=f"{name}_next",
            call=vectors.pieces_from_memory(load, inside=False),
            inside=vectors.within(load, f"load_pieces<{load.access.vector}>({start} + col)", False, pieces),
            made=f"const {vector} {name} = joined({name}_next[p], {row});",
            start=f"const {ctype}* const {start} = {row} - phase<{pieces}::piece>({row});",
        )

    def key_sum(self, r: Reduction) -> KeySum:
        parts = self.parts.reductions.parts
        slots = [f", {parts}[{r.slot + i}]" if self.plan.slots else "" for i in range(2)]
        top, total = r.results
        return KeySum(top, total, r.part, slots, r.guarded)

    def said(self) -> Mapping[str, Any]:
        plan, chosen, way = self.plan, self.selection, self.way
        tile, warp = plan.tile, plan.target.warp
        functions = self.spelling.functions
        noted = way.turn // way.note  # by a thread in a turn
        place = f"(slot / {noted} * {warp} + lane_of_warp) * {noted} + slot % {noted}"
        vector = "slot" if way.note == 1 else f"slot * {way.note}"
        if way.segment < tile.per_thread:
            vector = f"from + {vector}"
        first_col = f"notes[place / {way.note}] + place % {way.note} * vector_step"
        slots = way.segment // way.note
        guard, ctype = self.frame.guard(), "float" if chosen.dtype is f32 else "int"
        return {
            "meet": functions["meet"],
            "warp_least": functions["warp_least"],
            "warp_most": functions["warp_most"],
            "shuffle_up": functions["shuffle_up"][0],
            "from_first_lane": functions["from_first_lane"][0],
            "unbinned": "merged[0]" if tile.cluster > 1 else "entries[side]",
            "binned": "merged[1]" if tile.cluster > 1 else "entries[side ^ 1]",
            "bisections": BISECTIONS,
            "slots": slots,
            "kth": ordinal(chosen.k),
            "read_inside": bool(guard) or not self.spelled.alike,
            "see_inside": bool(guard or self.frame.whole() or self.turns_ahead()),
            "at_g": "[g]" if way.groups > 1 else "",
            "peaks_parameter": f"const {ctype} {'(&peaks)[groups]' if way.groups > 1 else 'peak'}",
            "enough": self.enough(),
            "waits": plan.told_first is None or plan.told_first is self.last,
            "col": self.col_of("turn + p"),
            "next_col": self.col_of(f"turn + {way.turn}"),
            "inside_turns": turns_inside(plan),
            "ahead": self.turns_ahead(),
            "group": "[p % groups]" if way.groups > 1 else "",
            "noted_key": place if noted > 1 else f"slot * {warp} + lane_of_warp",
            "noted_col": self.col_of(vector) if slots > 1 else scaled("lane", tile.vector),
            "looks": all_of("place < vectors", "!late" * way.ties_last, guard * (way.note > 1)),
            "many_marks": MANY_MARKS,
            "col_of_v": self.col_of("v"),
            "first_col": first_col if way.note > 1 else "notes[place]",
            "reads": [self.again(load) for load in chosen.key_body.loads],
            "body": [*self.parts.elements.body(chosen.key_body, loads_first=False), f"keys[j] = {chosen.key};"],
            "key_at_col": self.key_at_col(),
        }

    def turns_ahead(self) -> str:
        """The turns that read the next one's vectors; empty where none do."""
        turns = turns_inside(self.plan) - self.way.turn
        return f"turn < {turns}" if turns > 0 else ""

    @property
    def way(self) -> Streaming:
        assert isinstance(self.selection.way, Streaming)
        return self.selection.way

    @property
    def bins(self) -> int:
        return self.way.bins

    @property
    def makes_keys(self) -> bool:
        return bool(self.way.groups) or self.way.segment < self.plan.tile.per_thread

    @property
    def names_infinite(self) -> bool:
        return self.selection.dtype is f32 and self.makes_keys

    def more_sizes(self) -> Iterator[str]:
        plan, way = self.plan, self.way
        if self.turns_ahead() or way.note > 1:
            step = scaled(self.frame.row_threads, plan.tile.vector)
            yield constant("vector_step", step, "columns from a thread's vector to its next one")
        if way.groups > 1:
            yield constant("groups", way.groups, "of a thread's elements, each with a largest key")
        yield constant("room", way.entries // (plan.threads // plan.target.warp), "candidates of a warp")

    def again(self, load: Load) -> str:
        """A vector that is read again where its note exceeds the threshold."""
        call = self.parts.vectors.from_memory(load, inside=False)
        return f"const {self.frame.vec_type(load.access)} {load.access.name}_vec = {call};"

    def key_at_col(self) -> list[str]:
        """The key of the element at `col`."""

        def read(load: Load) -> str:
            return self.words.to_value(load.access.dtype, f"{self.frame.pointer(load.access)}[col]")

        return element_lines(self.selection.key_body, Element(read, col="col"), self.words)

    def enough(self) -> str:
        """How many candidates of a warp behind a segment make a cut. Empty where there is room for all."""
        way, count = self.way, self.plan.tile.per_thread
        if way.segment < count:
            return f"(turn + {way.turn} < {count} ? {way.cut_early} : {way.cut_last})"
        return str(way.cut_last) if way.cut_last else ""
