"""The words of kernels that choose columns: what `emitting.rows.spelling` says of passes, and the choice behind them.

Nothing is decided here either: `planner/selections/topk.py` is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusegen.emitting.body import Element, element_lines
from fusegen.emitting.dialect import ZEROS
from fusegen.emitting.prelude import reducer_of
from fusegen.emitting.rows.reducing import RowReduce
from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.selections.choice import Choice
from fusegen.emitting.selections.large_k import LargeKChoice
from fusegen.emitting.selections.methods import opening
from fusegen.emitting.selections.small_k import SmallKChoice, adds_up, told
from fusegen.emitting.selections.streaming import StreamingChoice, of_key
from fusegen.emitting.selections.warp import WarpChoice
from fusegen.emitting.selections.words import WordsChoice
from fusegen.language.types import DType, f32, i32
from fusegen.planner.heading import WIDTH
from fusegen.planner.model import Access, Keep, Load, Reduction, RowPass, RowPlan, Store
from fusegen.planner.parts import used_by
from fusegen.planner.selections.choosing import MOST_COMPARED_CANDIDATES
from fusegen.planner.selections.picker import picker
from fusegen.planner.ways import InWarp, LargeK, OneByOne, Packed, SmallK, Streaming, Way

KEYS: Mapping[DType, Mapping[str, str]] = {
    f32: {"ctype": "float", "least": "-INFINITY", "larger": "larger", "lesser": "fminf",
              "to_word": "__float_as_int({0})", "from_word": "__int_as_float({0})"},
    i32: {"ctype": "int", "least": "least_key", "larger": "max", "lesser": "min", "to_word": "{0}", "from_word": "{0}"},
}  # fmt: skip
"""What a key is, the masked one, the larger and the lesser of two; how one goes to a word of notes and back."""
ROLLED = "#pragma unroll 1"
CHOICES: Mapping[type[Way], type[Choice]] = {
    OneByOne: WarpChoice, InWarp: WarpChoice, Packed: WordsChoice, Streaming: StreamingChoice, SmallK: SmallKChoice,
    LargeK: LargeKChoice,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PickedPass:
    """One pass over the chosen columns, for its template."""

    title: list[str]
    parts: list[Mapping[str, str]]
    live: bool  # does a thread without a row skip it?
    names_entry: bool
    names_column: bool
    names_key: bool
    names_rank: bool
    body: list[str]
    results: list[str]
    behind: list[str]
    together: list[Mapping[str, Any]]  # vectors of results, which a lane writes at the end


class SelectionSpeller:
    """The words of one plan that has a Selection."""

    def __init__(self, plan: RowPlan) -> None:
        assert plan.selection is not None
        held = plan.selection.by in ("small_k", "large_k")
        self.plan = plan
        self.selection = plan.selection
        self.parts = Speller(plan, told(plan)) if held else Speller(plan, pivoted=of_key(plan))
        self.frame = self.parts.frame
        self.words = self.frame.words
        self.reductions = self.parts.reductions
        if plan.selection.dtype is f32:
            self.words.constants.add("INFINITY")
            if not plan.selection.one_by_one and not plan.selection.packed:
                self.words.functions.add("larger")

    def context(self) -> dict[str, Any]:
        plan, chosen, choice = self.plan, self.selection, CHOICES[type(self.selection.way)](self.parts)
        last, said = choice.spelled_pass(), choice.said()
        picked = [(row_pass, self.picked_pass(i, row_pass)) for i, row_pass in enumerate(chosen.picked, 1)]
        rows = self.parts.said(self.parts.spelled(plan.passes[:-1]), self.row_reduces())
        functions = plan.target.spelling.functions
        lane, lanes = self.pickers()
        many_bins = choice.own_bins > 1
        choose = {
            "padded": False,
            **said,
            "sizes": list(choice.sizes()),
            "shares": f": of {plan.tile.rows_per_block} rows" if plan.tile.rows_per_block > 1 else "",
            "key_at": bool(chosen.values) or choice.makes_keys,
            "key_of": bool(chosen.values) or chosen.by == "large_k",
            "infinite": choice.names_infinite,
            "cuts": chosen.by == "streaming",
            "warps": plan.threads // plan.target.warp,
            "own_bins": choice.own_bins,
            "at_q": "[q]" if many_bins else "",
            "own_sum": "sum" if many_bins else "own",
            "own_bin": f"bins - 1 - threadIdx.x{' * own_bins - q' if many_bins else ''}",
            "most_compared": MOST_COMPARED_CANDIDATES,
            "picker": tuple(picker(chosen, plan.tile, plan.target.warp, adds_up(plan)).lines()),
            "functions": f"parts/selections/picking{'_words' if chosen.packed else ''}.j2",
            "lanes": plan.target.spelling.lanes,
            "ballot": functions["ballot"][0],
            "popcount": functions["popcount"][0],
            "column_bits": max(1, (plan.cols - 1).bit_length()),
            "pick_lane": lane,
            "pick_threads": "threads" if self.frame.counts_named else lanes,
            "rank": self.rank(),
            "names_columns": self.names_columns(),
            "pick_turns": -(-chosen.k // lanes),
            "none": choice.none("held" if chosen.by == "large_k" else "all", "i"),
            "picks": self.picks(),
            "pick": self.pick(),
            "is_chosen": self.is_chosen(),
            "key_there": self.key_there(),
            "own_ranks": self.own_ranks(),
            "ranks_end": self.ranks_end(),
        }
        return {
            **rows,
            "header": [*rows["header"], *opening(plan)],
            "resident": f", {chosen.resident}" if chosen.resident else "",
            "key": KEYS[chosen.dtype],
            "s": chosen,
            "way": chosen.way,
            "inside": choice.inside(),
            "choose": choose,
            "rolled": ROLLED,
            "last_pass": last,
            "picked_passes": picked,
        }

    # ---- passes over the chosen columns

    def rank(self) -> str:
        """A chosen column's place in the results; where a thread has one at most, it is the thread's."""
        lane, lanes = self.pickers()
        return "rank" if self.own_ranks() > 1 or self.selection.k > lanes else lane

    def own_ranks(self) -> int:
        """Of a lane whose registers hold them, one after another; 0 where chosen columns lie in shared memory."""
        way, k = self.selection.way, self.selection.k
        return min(k, way.own(self.plan.tile.threads_per_row)) if isinstance(way, Packed) else 0

    def ranks_end(self) -> bool:
        """Has a lane ranks behind the last one, where registers hold them?"""
        lanes = self.plan.tile.threads_per_row
        return lanes > 1 and self.own_ranks() * lanes > self.selection.k

    def is_chosen(self) -> str:
        """Has a rank a column? Entries of keys that are words stay as they are, and those that are masked come last."""
        if not self.selection.packed:
            return "entry"
        return "entry > least" if self.selection.bare else "entry > masked"

    def key_there(self) -> str:
        """The key of the column that an entry names."""
        if self.selection.packed:
            return f"own_keys[{self.own_at()}]" if self.selection.clipped else "key_of(entry)"
        return f"entry ? key_of(entry) : {KEYS[self.selection.dtype]['least']}"

    def pick(self) -> str:
        """The entry of a rank."""
        if self.own_ranks():
            return f"picks[{self.own_at()}]"
        return f"{self.picks()}[{self.rank()}]"

    def picks(self) -> str:
        """Where the entries of the chosen columns are, by rank."""
        return {"warp": "picker.picks[at]", "small_k": "picker.picks"}.get(self.selection.by, "picks")

    def pickers(self) -> tuple[str, int]:
        """What numbers the threads that share the chosen columns of a row, and how many there are. Of a cluster these
        are the first block's."""
        lanes = self.plan.threads if self.frame.counts_named else self.plan.tile.threads_per_row
        return ("lane" if lanes > 1 else "0"), lanes

    def names_columns(self) -> bool:
        """Are the chosen columns asked for, beside the keys there?"""
        graph, chosen = self.plan.graph, self.plan.graph.selection
        assert chosen is not None
        keys = [node for node in graph.users[chosen] if node.op.name == "take" and node.inputs[0] is chosen.inputs[0]]
        written = any(tensor.node is chosen for tensor in graph.outputs)
        return written or any(node not in keys for node in graph.users[chosen])

    def picked_pass(self, number: int, row_pass: RowPass) -> PickedPass:
        count = len(self.selection.picked)
        what = f"of {count} " if count > 1 else ""
        asked = used_by(row_pass.body) | {r.value for r in row_pass.reductions} | {s.value for s in row_pass.stores}
        names_column = bool(row_pass.loads) or self.selection.columns in asked
        names_key = self.selection.values in asked
        title = f"the {self.selection.k} chosen, pass {number} {what}over them: {row_pass.title}"
        return PickedPass(
            title=textwrap.wrap(title, WIDTH, subsequent_indent="  "),
            parts=[*map(self.reductions.part, row_pass.reductions), *map(self.held, row_pass.keeps)],
            live=self.plan.lacks_rows
            and not (self.plan.stands_in and all(s.access.mode == "vector" for s in row_pass.stores)),
            names_rank=any(s.access.mode != "vector" for s in row_pass.stores)
            or (self.ranks_end() and bool(row_pass.reductions)),
            names_entry=names_column or (names_key and not self.selection.clipped),
            names_column=names_column,
            names_key=names_key,
            body=element_lines(
                row_pass, Element(self.gathered, self.write_at_rank, self.add_rank, self.kept), self.words
            ),
            results=[line for r in row_pass.reductions for line in self.picked_results(r)],
            behind=self.parts.passes.behind(row_pass),
            together=[self.written_together(s.access) for s in row_pass.stores if s.access.mode == "vector"],
        )

    def gathered(self, load: Load) -> str:
        """An operand's element at the chosen column."""
        at = f"{self.frame.pointer(load.access)}[{self.selection.columns}]"
        value = self.words.to_value(load.access.dtype, at)
        return f"{self.selection.columns} < 0 ? {ZEROS[load.dtype]} : {value}"

    def for_ranks(self, statement: str) -> str:
        """Of a lane's ranks those behind the last one have no part in it."""
        ends = self.ranks_end() and self.own_ranks() > 1
        return f"if (rank < {self.selection.k}) {statement}" if ends else statement

    def add_rank(self, r: Reduction) -> str:
        return self.for_ranks(self.reductions.update(r))

    def write_at_rank(self, store: Store) -> str:
        value = self.words.stored(store)
        if store.access.mode == "vector":
            vector, element = self.place_in_vectors(store.access, self.own_at())
            return f"{store.access.name}_vec{vector}.at[{element}] = {value};"
        return self.for_ranks(f"{self.frame.pointer(store.access)}[{self.rank()}] = {value};")

    def held(self, keep: Keep) -> Mapping[str, str]:
        """What registers hold of a value at a lane's ranks, from one pass over them to a later one."""
        own = self.own_ranks()
        size = f"[{own}]" if own > 1 else ""
        return {"ctype": self.words.ctype(keep.dtype), "name": f"{keep.value}_kept{size}", "init": ""}

    def kept(self, keep: Keep) -> str:
        return f"{keep.value}_kept{f'[{self.own_at()}]' if self.own_ranks() > 1 else ''}"

    def own_at(self) -> str:
        """The number of a rank among the lane's own."""
        return "0" if self.own_ranks() == 1 else "r" if self.plan.tile.threads_per_row > 1 else "rank"

    def place_in_vectors(self, access: Access, number: str) -> tuple[str, str]:
        """Which of a lane's vectors, and which of its elements."""
        if self.own_ranks() == access.vector:
            return "", number
        return f"[{number} / {access.vector}]", f"{number} % {access.vector}"

    def written_together(self, access: Access) -> Mapping[str, Any]:
        """The vectors of a lane, and where each of them goes."""
        self.words.functions.add("store")
        self.frame.uses_vec = True
        own, lanes, width = self.own_ranks(), self.plan.tile.threads_per_row, access.vector
        many = own > width
        first = " + ".join(filter(None, (f"lane * {own}" * (lanes > 1), f"q * {width}" * many))) or "0"
        return {
            "type": f"Vec<{self.words.ctype(access.dtype)}, {width}>",
            "name": f"{access.name}_vec",
            "count": own // width,
            "many": many,
            "ends": first if self.ranks_end() else "",
            "store": f"store({self.frame.pointer(access)}{f' + {first}' if first != '0' else ''}, "
                     f"{access.name}_vec{'[q]' * many});",
        }  # fmt: skip

    def picked_results(self, r: Reduction) -> list[str]:
        clustered = self.plan.tile.cluster > 1
        return self.reductions.results(r, self.picked_function(reducer_of(r.kind, r.dtype).function) * clustered)

    def picked_function(self, function: str) -> str:
        """Only one block of a cluster goes on behind the selection."""
        return f"picked_{function.removeprefix('row_')}" if self.plan.tile.cluster > 1 else function

    def row_reduces(self) -> list[RowReduce]:
        """Those of passes over the row, and over the chosen columns."""
        whole = self.reductions.row_reduces()
        kinds = dict.fromkeys((r.kind, r.dtype) for row_pass in self.selection.picked for r in row_pass.reductions)
        behind = [
            self.reductions.row_reduce(*kind) for kind in kinds
            if self.plan.tile.cluster > 1 or not self.reductions.has_rows_alone(reducer_of(*kind))
        ]  # fmt: skip
        if self.plan.tile.cluster > 1:
            threads, name = self.plan.threads, self.picked_function
            return [*whole, *(replace(r, threads=threads, clustered=False, function=name(r.function)) for r in behind)]
        there = {(r.function, r.ctype) for r in whole}
        return [*whole, *(r for r in behind if (r.function, r.ctype) not in there)]
