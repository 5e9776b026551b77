"""The words of reductions: a thread's part of a row, what each value does to it, what all threads make of theirs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from fusegen.emitting.prelude import Reducer, reducer_of
from fusegen.emitting.rows.frame import Frame, Part
from fusegen.language.types import DType, i32
from fusegen.planner.model import Reduction, ReductionKind

WORDS: Mapping[str, tuple[str, str]] = {
    "float": ("{0}", "{0}"),
    "int": ("__int_as_float({0})", "__float_as_int({0})"),
    "unsigned": ("__uint_as_float({0})", "__float_as_uint({0})"),
}
"""Partial results of every type lie in one array of floats: to a word of it, and back."""


@dataclass(frozen=True, slots=True)
class RowReduce:
    """A function of the prelude: what all threads of a row make of their parts of one kind of reduction."""

    what: str
    function: str
    ctype: str
    shuffle_merge: str
    shared_parameters: str
    threads: int
    clustered: bool
    settled: list[str]
    fields: list[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class GroupReduce:
    """The same of the neighbouring threads that have a group of the row together. `own`: the bits of their lanes, where
    threads beyond the row's end take no part."""

    what: str
    function: str
    ctype: str
    shuffle_merge: str
    threads: int
    own: str


def group_function(r: Reduction) -> str:
    """`group_max`; of whole numbers, beside one of floats, it has a name of its own."""
    return f"group_{r.kind}{'_i32' * (r.dtype is i32)}"


class Reductions(Part):
    """What a plan says of its reductions, in one dialect. `pivoted`: softmaxes of what a selection decides by, whose
    largest value comes with the choice."""

    def __init__(self, frame: Frame, found: Iterable[Reduction], pivoted: Container[Reduction] = ()) -> None:
        super().__init__(frame)
        self.found = tuple(found)
        self.pivoted = pivoted

    @property
    def parts(self) -> str:
        """The array of a reduction's partial results; of two, by blocks that take rows in turn."""
        return "part[turn]" if self.plan.takes_turns else "part"

    def part(self, r: Reduction) -> Mapping[str, str]:
        if r in self.pivoted:
            self.words.functions.update(("PivotSum", "exponential"))
            self.words.constants.add("NAN")
            return {"ctype": "PivotSum", "name": r.part, "init": ""}
        reducer = reducer_of(r.kind, r.dtype)
        return {"ctype": reducer.ctype, "name": r.part, "init": f" = {self.words.noted(reducer.start)}"}

    def update(self, r: Reduction) -> str:
        if r.kind == "sum":
            return f"{r.part} += {r.value};"
        if r.kind == "prod":
            return f"{r.part} *= {r.value};"
        if r.kind in ("max", "min"):
            return f"{r.part} = {self.chooser(r)}({r.part}, {r.value});"
        if r.kind == "welford" and r.guarded:
            self.words.functions.add("infinite_mean")
        return f"{r.part}_values[j] = {r.value};" if r.kind == "softmax" else f"{r.part}.add({r.value});"

    def update_one(self, r: Reduction) -> str:
        """The same of a value that no vector holds."""
        return f"{r.part}.merge({r.value}, 1.0f);" if r.kind == "softmax" else self.update(r)

    def chooser(self, r: Reduction) -> str:
        return self.larger_or_smaller(r.kind, r.dtype)

    def larger_or_smaller(self, kind: ReductionKind, dtype: DType) -> str:
        """The function that gives the larger or the smaller of two."""
        if dtype is i32:
            return kind
        function = "larger" if kind == "max" else "smaller"
        self.words.functions.add(function)
        return function

    def update_masked(self, r: Reduction) -> str:
        """A whole vector of values that are all alike."""
        assert r.masked is not None
        suffix, rest = "u" if r.dtype is i32 else ".0f", self.words.argument(r.masked)
        if r.kind == "prod":
            suffix = ""
        count = f"{self.plan.tile.vector}{suffix}"
        if whole := self.frame.whole():
            count = f"({whole} ? {count} : {self.plan.cols % self.plan.tile.vector}{suffix})"
        if r.kind in ("max", "min"):
            return f"{r.part} = {self.chooser(r)}({r.part}, {rest});"
        return {
            "sum": f"{r.part} += {count} * {rest};",
            "prod": f"for (int j = 0; j < {count}; ++j) {r.part} *= {rest};",
            "softmax": f"{r.part}.merge({rest}, {count});",
            "welford": f"{r.part}.merge({count}, {rest}, 0.0f);",
        }[r.kind]

    def results(self, r: Reduction, function: str = "") -> list[str]:
        """What all threads of the row make of their parts, by the prelude's function or another."""
        reducer = reducer_of(r.kind, r.dtype)
        count = len(reducer.fields) if self.plan.slots else 0
        slots = [f", {self.parts}[{r.slot + i}]" for i in range(count)]
        call = f"{function or reducer.function}({r.part}{''.join(slots)})"
        if not function and self.has_rows_alone(reducer):
            call = r.part
        if r.kind == "softmax":
            whole = f"{r.results[1]}_all"
            total = f"{self.unless_masked(r, f'{whole}.top')}{whole}.total"
            return [
                f"const MaxSum {whole} = {call};",
                f"const float {r.results[0]} = {whole}.top;",
                f"const float {r.results[1]} = {total};",
            ]
        if r.kind == "welford":
            whole = f"{r.results[1]}_all"
            return [
                f"const Welford {whole} = {call};",
                f"const float {r.results[0]} = {whole}.mean * {whole}.count;",
                f"const float {r.results[1]} = {whole}.deviations;",
            ]
        if reducer.ctype == "unsigned":
            call = f"static_cast<int>({call})"
        return [self.words.define(r.results[0], r.dtype, call)]

    def has_rows_alone(self, reducer: Reducer) -> bool:
        """Has each thread the whole of what it reduces? Then there is no function to call."""
        return self.plan.tile.row_threads == 1 and self.plan.tile.cluster == 1 and len(reducer.fields) == 1

    # ---- of groups of the row

    def group_results(self, r: Reduction, size: int) -> list[str]:
        """What the threads of a group make of their parts."""
        reducer = reducer_of(r.kind, r.dtype)
        call = r.part if self.frame.group_lanes(size) == 1 else f"{group_function(r)}({r.part})"
        if reducer.ctype == "unsigned":
            call = f"static_cast<int>({call})"
        return [self.words.define(r.results[0], r.dtype, call)]

    def group_reduces(self) -> list[GroupReduce]:
        """The functions of the prelude that do so, one a kind that the plan uses."""
        steps = [step for row_pass in self.plan.passes for step in row_pass.groups]
        lanes = max((self.frame.group_lanes(step.size) for step in steps), default=1)
        kinds = dict.fromkeys((r.kind, r.dtype, group_function(r)) for step in steps for r in step.reductions)
        return [self.group_reduce(*kind, lanes) for kind in kinds] if lanes > 1 else []

    def group_reduce(self, kind: ReductionKind, dtype: DType, function: str, lanes: int) -> GroupReduce:
        reducer = reducer_of(kind, dtype)
        self.words.functions.update(reducer.needs)
        spelling, warp = self.words.spelling, self.plan.target.warp
        apart = bool(self.frame.guard()) and lanes < warp and "{2}" in spelling.shuffle_among
        shuffle = spelling.shuffle_among if apart else spelling.shuffle_xor
        own = f"{(1 << lanes) - 1:#x}u << threadIdx.x % {warp} / {lanes} * {lanes}" if apart else ""
        merge = reducer.merge.format(shuffle.format("v", "step", "own"))
        return GroupReduce(reducer.what, function, reducer.ctype, merge, lanes, own)

    def unless_masked(self, r: Reduction, top: str) -> str:
        """A softmax's sum is NaN in a row of nothing but -inf, unless the chain asks for that case itself."""
        return "" if r.guarded else self.words.noted(f"{top} == -INFINITY ? NAN : ")

    # ---- the prelude's functions

    def row_reduces(self) -> list[RowReduce]:
        """The reduction functions of the prelude, one a kind that the plan uses."""
        return [self.row_reduce(*kind) for kind in self.row_kinds() if not self.has_rows_alone(reducer_of(*kind))]

    def row_kinds(self) -> list[tuple[ReductionKind, DType]]:
        """And the type of what each reduces. A sum of exponentials needs no more than to be added up where their
        largest is known."""
        return list(dict.fromkeys(("sum" if r in self.pivoted else r.kind, r.dtype) for r in self.found))

    def row_reduce(self, kind: ReductionKind, dtype: DType) -> RowReduce:
        reducer = reducer_of(kind, dtype)
        self.words.functions.update(reducer.needs)
        single = len(reducer.fields) == 1
        shuffled = ["partner(v, step)" if single else f"partner(v.{f}, step)" for f in reducer.fields]
        to_word, from_word = WORDS[reducer.ctype if single else "float"]
        parts = [f"part_{f}" if len(reducer.fields) > 1 else "part" for f in reducer.fields]
        return RowReduce(
            what=reducer.what,
            function=reducer.function,
            ctype=reducer.ctype,
            shuffle_merge=reducer.merge.format(*shuffled),
            shared_parameters="".join(f", float* {p}" for p in parts) if self.plan.slots else "",
            threads=self.plan.tile.threads_per_row,
            clustered=self.plan.tile.cluster > 1,
            settled=self.settled(reducer),
            fields=[
                {"part": p, "value": "v" if single else f"v.{f}", "to": to_word, "from": from_word}
                for p, f in zip(parts, reducer.fields, strict=True)
            ],
        )

    def settled(self, reducer: Reducer) -> list[str]:
        """The statements that give all threads of a row the first one's bits."""
        plan = self.plan
        if len(reducer.fields) == 1 or plan.tile.row_threads == 1 or not plan.uniform_results:
            return []
        lanes, shuffle = min(plan.tile.row_threads, plan.target.warp), self.words.spelling.shuffle
        return [f"v.{field} = {shuffle.format(f'v.{field}', 0, lanes)};" for field in reducer.fields]
