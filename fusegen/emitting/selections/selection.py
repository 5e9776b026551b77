"""The words of kernels that choose columns: what `emitting.rows.spelling` says of a walk, and the choice around it.

Nothing is decided here either: `planner/selections/topk.py` is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import ZEROS, all_of
from fusegen.emitting.prelude import reducer_of
from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.rows.vectors import in_later_turns, scaled
from fusegen.language.types import LEAST_INT, DType, bf16, f32, i32
from fusegen.planner.heading import WIDTH
from fusegen.planner.model import Load, Reduction, ReductionKind, RowPlan, Stage, Store
from fusegen.planner.rows.tails import single, turns_inside
from fusegen.planner.selections.choosing import COMPARED, most_ranked
from fusegen.planner.selections.picker import picker

KEYS: Mapping[DType, Mapping[str, str]] = {
    f32: {"ctype": "float", "least": "-INFINITY", "larger": "larger",
              "to_word": "__float_as_int({0})", "from_word": "__int_as_float({0})"},
    i32: {"ctype": "int", "least": LEAST_INT, "larger": "max", "to_word": "{0}", "from_word": "{0}"},
}  # fmt: skip
"""What a key is, the masked one, the larger of two; how one goes to a word of notes and back."""
ROLLED = "#pragma unroll 1"
MANY_MARKS = 8  # of a thread's vectors: random order marks one or two
ENOUGH = 8  # a threshold that an eighth more groups reach than need to will do


class SelectionSpeller(Speller):
    """The words of one plan that has a Selection."""

    def __init__(self, plan: RowPlan) -> None:
        super().__init__(plan)
        assert plan.selection is not None
        self.selection = plan.selection
        self.key_words = KEYS[plan.selection.dtype]
        if plan.selection.dtype is f32:
            self.constants.add("INFINITY")
            if not plan.selection.in_turn:
                self.functions.add("larger")
        self.last = plan.stages[-1]

    @property
    def by_team(self) -> bool:
        return self.selection.by == "team"

    def to_value(self, dtype: DType, text: str) -> str:
        if dtype is not bf16:
            return super().to_value(dtype, text)
        self.functions.add("widened")
        return f"widened({text})"

    # ---- the walk that chooses

    def col_of(self, vector: str) -> str:
        """The first column of the thread's vector of that number."""
        tile = self.plan.tile
        vector = vector if vector.isidentifier() else f"({vector})"
        return scaled(f"{vector} * {tile.threads_per_row} + lane", tile.vector)

    def in_last_turns(self, test: str, vectors: int) -> str:
        """Nothing lies behind the row where the plan's tail is none."""
        return "false" if self.plan.tail == "none" else super().in_last_turns(test, vectors)

    def read_ahead(self, loads: tuple[Load, ...]) -> Sequence[Mapping[str, str]]:
        """Vectors that are read a turn before they are used: what lies across blocks is shifted into place only then.
        `inside` reads one that is known to lie in the row."""
        within = SelectionSpeller(replace(self.plan, tail="none"))
        found: list[dict[str, str]] = []
        for load in loads:
            name, vector = f"{load.access.name}_vec", self.vec_type(load.access)
            row = self.pointer(load.access)
            found.append(
                {
                    "type": vector,
                    "name": f"{name}_next",
                    "call": self.from_memory(load, inside=False),
                    "inside": within.from_memory(load, inside=False),
                    "made": f"const {vector} {name} = {name}_next[p];",
                    "start": "",
                }
            )
            if load.access.mode == "across":
                ctype, span = self.ctype(load.access.dtype), self.span_type(load.access)
                start = f"{load.access.name}_start"
                pieces = f"load_pieces<{load.access.vector}>({start} + col)"
                found[-1] |= {
                    "type": span,
                    "call": self.span_from_memory(load, inside=False),
                    "inside": self.within(load, pieces, False, span),
                    "made": f"const {vector} {name} = joined({name}_next[p], {row});",
                    "start": f"const {ctype}* const {start} = {row} - phase<{span}::piece>({row});",
                }
        self.functions |= within.functions
        return found

    def key_at_col(self) -> list[str]:
        """The key of the element at `col`."""

        def read(load: Load) -> str:
            return self.to_value(load.access.dtype, f"{self.pointer(load.access)}[col]")

        return element_lines(self.selection.key_body, Element(read, col="col"), self)

    @property
    def of_key(self) -> list[Reduction]:
        """Softmaxes of what decides, where the row's largest key comes with the threshold."""
        softmaxes = [r for r in self.last.reductions if r.kind == "softmax"]
        return [r for r in softmaxes if self.selection.groups and r.value == self.selection.key]

    def part(self, r: Reduction) -> Mapping[str, str]:
        if r not in self.of_key:
            return super().part(r)
        self.functions.update(("PivotSum", "exponential"))
        self.constants.add("NAN")
        return {"ctype": "PivotSum", "name": r.part, "init": ""}

    def key_sum(self, r: Reduction) -> Mapping[str, Any]:
        """A softmax of what decides, whose largest is known; `slots` are where its parts are added up."""
        top, total = r.results
        slots = [f", {self.parts}[{r.slot + i}]" if self.plan.slots else "" for i in range(2)]
        return {"top": top, "total": total, "part": r.part, "slots": slots, "guarded": r.guarded}

    def row_kinds(self) -> list[tuple[ReductionKind, DType]]:
        """A sum of exponentials needs no more than to be added up where their largest is known."""
        found = [r for stage in self.plan.stages for r in stage.reductions]
        return list(dict.fromkeys(("sum" if r in self.of_key else r.kind, r.dtype) for r in found))

    def last_walk(self) -> Mapping[str, Any]:
        """The walk that chooses by a threshold: the key's own maximum serves a softmax of the key too."""
        of_key = self.of_key
        others = tuple(r for r in self.last.reductions if r not in of_key)
        stage = replace(self.last, reductions=others)
        walk = dict(self.walk(len(self.plan.stages), stage))
        best = f"choose {self.selection.columns} = the columns of the {self.selection.k} largest {self.selection.key}"
        number = len(self.plan.stages)
        vectors = self.read_ahead(self.last.loads)
        title = f"walk {number} of {number}: {self.last.title + '; ' if self.last.title else ''}{best}"
        body = [*self.body(stage, loads_first=False), f"keys[j] = {self.selection.key};"]
        return {
            **walk,
            "names_col": bool(self.guard_names_col() or self.whole() or self.body_names_col(stage) or walk["outputs"]),
            "title": textwrap.wrap(title, WIDTH, subsequent_indent="  "),
            "parts": [self.part(r) for r in self.last.reductions],
            "vectors": vectors,
            "body": body,
            "key_reductions": [r.part for r in of_key],
            "alike": not self.guard() and all(v["call"] == v["inside"] for v in vectors),
            "masks": not others and not self.last.stores,  # what lies outside of the row counts for nothing else
            "results": [line for r in others for line in self.results(r)],
            "key_sums": [self.key_sum(r) for r in of_key],
        }

    def inside(self) -> str:
        """When element j of a vector lies in the row; empty where every one does."""
        turns = single(self.plan)
        return "" if turns is None else in_later_turns(f"col + j < {self.cols}", turns)

    def team_guard(self) -> str:
        if not self.inside():
            return self.guard()
        return all_of("live" * self.plan.lacks_rows, self.inside())

    def team_body(self) -> list[str]:
        lines = self.body(replace(self.last, reductions=(), stores=()), loads_first=True)
        key = self.selection.key
        return [*lines, f"orders[v][j] = order_of({key});" if self.selection.in_turn else f"keys[v][j] = {key};"]

    # ---- behind it

    def picked_walk(self, number: int, stage: Stage) -> Mapping[str, Any]:
        count = len(self.selection.picked)
        what = f"of {count} " if count > 1 else ""
        title = f"the {self.selection.k} chosen, walk {number} {what}over them: {stage.title}"
        return {
            "title": textwrap.wrap(title, WIDTH, subsequent_indent="  "),
            "parts": [self.part(r) for r in stage.reductions],
            "body": element_lines(stage, Element(self.gathered, self.write_at_rank, self.update), self),
            "results": [line for r in stage.reductions for line in self.picked_results(r)],
            "behind": self.behind(stage),
        }

    def gathered(self, load: Load) -> str:
        """An operand's element at the chosen column."""
        at = f"{self.pointer(load.access)}[{self.selection.columns}]"
        value = self.to_value(load.access.dtype, at)
        return f"{self.selection.columns} < 0 ? {ZEROS[load.dtype]} : {value}"

    def write_at_rank(self, store: Store) -> str:
        return f"{self.pointer(store.access)}[rank] = {self.to_storage(store.access.dtype, store.value)};"

    def picked_results(self, r: Reduction) -> list[str]:
        return self.results(r, self.picked_function(reducer_of(r.kind, r.dtype).function))

    def picked_function(self, function: str) -> str:
        """Only one block of a cluster goes on behind the selection."""
        return f"picked_{function.removeprefix('row_')}" if self.plan.tile.cluster > 1 else function

    def row_reduces(self) -> list[Mapping[str, Any]]:
        whole = super().row_reduces()
        kinds = dict.fromkeys((r.kind, r.dtype) for stage in self.selection.picked for r in stage.reductions)
        behind = [self.row_reduce(*kind) for kind in kinds]
        if self.plan.tile.cluster > 1:
            alone = {"threads": self.plan.threads, "clustered": False}
            return [*whole, *({**r, **alone, "function": self.picked_function(str(r["function"]))} for r in behind)]
        there = {(r["function"], r["ctype"]) for r in whole}
        return [*whole, *(r for r in behind if (r["function"], r["ctype"]) not in there)]

    # ---- all of it

    def walks(self) -> list[tuple[Stage, Mapping[str, Any]]]:
        return super().walks()[:-1]

    def context(self) -> dict[str, Any]:
        plan, chosen = self.plan, self.selection
        last = {} if self.by_team else self.last_walk()
        words = self.words()
        lane, team = ("lane", plan.tile.threads_per_row) if self.by_team else ("threadIdx.x", plan.threads)
        lane = lane if team > 1 else "0"
        picked = [(stage, self.picked_walk(i, stage)) for i, stage in enumerate(chosen.picked, 1)]
        target = plan.target
        functions = target.spelling.functions
        choose = {
            **words,
            "picker": tuple(picker(chosen, plan.tile, plan.target.warp).lines()),
            "lanes": target.spelling.lanes,
            "ballot": functions["ballot"][0],
            "popcount": functions["popcount"][0],
            "column_bits": max(1, (plan.cols - 1).bit_length()),
            "pick_lane": lane,
            "pick_team": team,
            "pick_turns": -(-chosen.k // team),
            "none": self.none("held" if chosen.dense else "all", "i"),
            "picks": {"team": "picker.picks[at]", "hold": "picker.picks"}.get(chosen.by, "picks"),
        }
        context = super().context()
        resident = f", {chosen.resident}" if chosen.resident else ""
        return {
            **context,
            "resident": resident,
            "key": self.key_words,
            "s": chosen,
            "inside": self.inside(),
            "choose": choose,
            "rolled": ROLLED,
            "last_walk": last,
            "picked_walks": picked,
        }

    def none(self, candidates: str, rank: str) -> str:
        """What stands for a rank behind the last candidate: no entry; in a row without any, where that is NaN, the
        column of that number."""
        return f"{candidates} ? 0 : entry_of(-INFINITY, {rank})" if self.selection.bare else "0"

    def words(self) -> Mapping[str, Any]:
        """Of the walk that chooses."""
        if self.selection.in_turn:
            return self.turn_words()
        return self.team_words() if self.by_team else self.threshold_words()

    def turn_words(self) -> Mapping[str, Any]:
        chosen = self.selection
        entry = f"static_cast<Entry>(best) << column_bits | (last_column - {chosen.columns})"
        return {
            "team_most": self.by_shuffles("unsigned", ">"),
            "team_least": self.by_shuffles("int", "<"),
            "team_guard": self.team_guard(),
            "team_body": self.team_body(),
            "taken_out": f"best > masked ? {entry} : {self.none('all', 'r')}",
        }

    def by_shuffles(self, ctype: str, order: str) -> tuple[str, ...]:
        """The first of all v of a team of lanes, in that order."""
        return (
            "#pragma unroll",
            f"for (int step = {self.plan.tile.threads_per_row // 2}; step > 0; step /= 2) {{",
            f"  const {ctype} other = {self.plan.target.spelling.shuffle_xor.format('v', 'step')};",
            f"  v = v {order} other ? v : other;",
            "}",
            "return v;",
        )

    def team_words(self) -> Mapping[str, Any]:
        plan = self.plan
        team, warp = plan.tile.threads_per_row, plan.target.warp
        functions = plan.target.spelling.functions
        tile, own = plan.tile, "i"
        if tile.per_thread == 1:
            own = f"lane * {tile.vector} + i"
        elif tile.vector == 1:
            own = f"i * {team} + lane"
        else:
            own = f"(i / {tile.vector} * {team} + lane) * {tile.vector} + i % {tile.vector}"
        return {
            "own_col": own,
            "best_partner": plan.target.spelling.shuffle_xor.format("best", "other"),
            "from_last_lane": plan.target.spelling.shuffle.format("upto", team - 1, team),
            "shuffle_up": functions["shuffle_up"][0],
            "compared": COMPARED,
            "team_most": functions["warp_most"] if team == warp else self.by_shuffles("unsigned", ">"),
            "meet": functions["meet"],
            "most_ranked": most_ranked(self.selection.k),
            "entry_partner": plan.target.spelling.shuffle_xor.format("best_entry", "step"),
            "team_guard": self.team_guard(),
            "team_body": self.team_body(),
        }

    def threshold_words(self) -> Mapping[str, Any]:
        plan, chosen = self.plan, self.selection
        tile, warp = plan.tile, plan.target.warp
        functions = plan.target.spelling.functions
        warps = plan.threads // warp
        room = chosen.entries // warps
        want = -(-chosen.k // (warps * tile.cluster))
        noted = chosen.turn // chosen.note  # by a thread in a turn
        place = f"slot / {noted} * {noted * warp} + lane_of_warp * {noted} + slot % {noted}"
        vector = "slot" if chosen.note == 1 else f"slot * {chosen.note}"
        if chosen.segment < tile.per_thread:
            vector = f"from + {vector}"
        step = tile.threads_per_row * tile.vector
        ahead = turns_inside(plan) - chosen.turn
        last = f"notes[place / {chosen.note}] + place % {chosen.note} * {step}"
        return {
            "meet": functions["meet"],
            "warp_least": functions["warp_least"],
            "warp_most": functions["warp_most"],
            "shuffle_up": functions["shuffle_up"][0],
            "from_first_lane": functions["from_first_lane"][0],
            "warps": warps,
            "room": room,
            "unbinned": "merged[0]" if tile.cluster > 1 else "entries[side]",
            "binned": "merged[1]" if tile.cluster > 1 else "entries[side ^ 1]",
            "bin_bits": chosen.bins.bit_length() - 1,
            "want": want,
            "ranked": chosen.k < warps and tile.cluster == 1,
            "enough": self.enough(room, chosen.limit // warps),
            "waits": not any(stage.reductions for stage in plan.stages[:-1]),
            "col": self.col_of("turn + p"),
            "next_col": self.col_of(f"turn + {chosen.turn}"),
            "step": step,
            "inside_turns": turns_inside(plan),
            "ahead": f"turn < {ahead}" if ahead > 0 else "false",
            "group": f"p % {chosen.groups}" if chosen.groups > 1 else "0",
            "wanted_at_most": want + want // ENOUGH,
            "noted_key": place if noted > 1 else f"slot * {warp} + lane_of_warp",
            "noted_col": self.col_of(vector),
            "looks": all_of("place < vectors", "!late" * bool(chosen.groups), self.guard() * (chosen.note > 1)),
            "many_marks": MANY_MARKS,
            "col_of_v": self.col_of("v"),
            "first_col": last if chosen.note > 1 else "notes[place]",
            "reads": [
                f"const {self.vec_type(load.access)} {load.access.name}_vec = {self.from_memory(load, inside=False)};"
                for load in chosen.key_body.loads
            ],
            "body": [*self.body(chosen.key_body, loads_first=False), f"keys[j] = {chosen.key};"],
            "rest_bits": f"{0xFFFFFFFF & ~(0xFFFFFFFF >> plan.cols % tile.vector):#x}u",
            "key_at_col": self.key_at_col(),
        }

    def enough(self, room: int, limit: int) -> str:
        """How many candidates of a warp behind a segment make a cut: fewer where later segments bring more, and what a
        cluster's first block has room for. Empty where there is room for all."""
        plan = self.plan
        last = str(limit if plan.cluster > 1 else room)
        if self.selection.segment >= plan.tile.per_thread:
            return last if plan.cluster > 1 else ""
        return f"(turn + {self.selection.turn} < {plan.tile.per_thread} ? {(room + limit) // 2} : {last})"
