"""The words of running sums and products: in a thread, over the lanes of a warp, over a row's warps, in one order.

A thread's vectors lie apart, and those of all threads side by side make one turn: so columns go by turns, in a turn by
lanes, in a lane by elements. Each thread adds up each of its vectors; lanes bring together what comes before them in
their warp's turn; each thread adds what other warps and turns before it have made.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.emitting.dialect import VALUE_TYPES
from fusegen.emitting.loops import each_line
from fusegen.emitting.rows.frame import Frame, Part
from fusegen.emitting.rows.vectors import Vectors
from fusegen.language.scans import ScanKind
from fusegen.language.types import DType, i32
from fusegen.planner.parts import RowPass, Scan


@dataclass(frozen=True, slots=True)
class RowScan:
    """A function of the prelude: what comes before each of a thread's vectors in the row."""

    what: str
    name: str
    ctype: str
    start: str
    to_here: str  # the sum of to_here and what `other` says
    with_total: str
    more: str
    lanes: int
    warps: int
    turns: int
    reverse: bool
    other: str  # to_here of the lane `step` before
    last: str  # to_here of the last lane
    before: str  # to_here of the lane before
    own: str  # which is `before`, or nothing for the first lane


class Scans(Part):
    """What a plan says of its running sums, in one dialect."""

    def __init__(self, frame: Frame, vectors: Vectors) -> None:
        super().__init__(frame)
        self.vectors = vectors

    def both(self, scan: Scan, first: str, second: str) -> str:
        """Of two, both."""
        return combined(scan.way.kind, scan.dtype, first, second)

    def name(self, scan: Scan) -> str:
        return f"row_{scan.way.name.removesuffix('_exclusive')}"

    def starts(self, row_pass: RowPass) -> list[str]:
        """The statements that make what lies behind the row's end count for nothing."""
        if not self.frame.guard() and not self.frame.whole():
            return []
        lines: list[str] = []
        for scan in row_pass.scans:
            place = self.vectors.kept_at(f"{scan.result}_kept", False)
            inner = each_line([f"{place} = {start_of(scan.way.kind, scan.dtype)};"], "j", self.plan.tile.vector)
            lines += each_line(inner, "v", self.plan.tile.per_thread)
        return lines

    def results(self, row_pass: RowPass) -> list[str]:
        return [line for scan in row_pass.scans for line in self.made(scan)]

    def made(self, scan: Scan) -> list[str]:
        """One scan, of what the pass has left in the places of its results."""
        tile, ctype = self.plan.tile, VALUE_TYPES[scan.dtype]
        place = self.vectors.kept_at(f"{scan.result}_kept", False)
        if scan.way.exclusive:
            element = [f"const {ctype} own = {place};", f"{place} = so_far;",
                       f"so_far = {self.both(scan, 'so_far', 'own')};"]  # fmt: skip
        else:
            element = [f"so_far = {self.both(scan, 'so_far', place)};", f"{place} = so_far;"]
        turn = [f"{ctype} so_far = {start_of(scan.way.kind, scan.dtype)};"]
        turn += [*self.elements(element, scan.way.reverse), "before[v] = so_far;"]
        warps = tile.row_threads // self.plan.target.warp
        lines = [f"{ctype} before[{tile.per_thread}];  // each of the thread's vectors; first what these make"]
        if warps > 1:
            lines.append(f"__shared__ {ctype} parts[{tile.per_thread * warps}];  // of all warps, in every turn")
        lines += each_line(turn, "v", tile.per_thread)
        lines.append(f"{self.name(scan)}(before{', parts' * (warps > 1)});")
        whole = each_line([f"{place} = {self.both(scan, 'before[v]', place)};"], "j", tile.vector)
        lines += each_line(whole, "v", tile.per_thread)
        return [f"{{  // {scan.result}", *(f"  {line}" for line in lines), "}"]

    def elements(self, lines: list[str], reverse: bool) -> list[str]:
        """The lines for each element of a vector, or from its last one on."""
        width = self.plan.tile.vector
        found = each_line(lines, "j", width)
        if reverse and width > 1:
            forward = f"for (int j = 0; j < {width}; ++j)"
            found = [line.replace(forward, f"for (int j = {width - 1}; j >= 0; --j)") for line in found]
        return found

    def row_scans(self) -> list[RowScan]:
        """The functions of the prelude, one a kind that the plan uses."""
        scans = {(self.name(s), s.dtype): s for row_pass in self.plan.passes for s in row_pass.scans}
        return [self.row_scan(scan) for scan in scans.values()]

    def row_scan(self, scan: Scan) -> RowScan:
        tile, target = self.plan.tile, self.plan.target
        lanes = min(tile.row_threads, target.warp)
        shuffle = self.words.spelling.shuffle
        kind, dtype, reverse = scan.way.kind, scan.dtype, scan.way.reverse
        ahead, edge = ("place + {0} < {1}", "place + {0}") if reverse else ("place >= {0}", "place - {0}")
        near = "place + 1 < {1}" if reverse else "place > 0"
        other = shuffle.format("to_here", f"{ahead.format('step', lanes)} ? {edge.format('step')} : place", lanes)
        before = shuffle.format("to_here", f"{near.format(1, lanes)} ? {edge.format(1)} : place", lanes)
        return RowScan(
            what=f"the {'sum' if kind == 'sum' else 'product'} of what the row has "
            f"{'behind' if reverse else 'before'} each of a thread's vectors, of which own is each one's own",
            name=self.name(scan),
            ctype=VALUE_TYPES[dtype],
            start=start_of(kind, dtype),
            to_here=f"if ({ahead.format('step', lanes)}) to_here = {combined(kind, dtype, 'other', 'to_here')};",
            with_total=combined(kind, dtype, "total", "own[v]"),
            more=combined(kind, dtype, "total", "{0}"),
            lanes=lanes,
            warps=max(1, tile.row_threads // target.warp),
            turns=tile.per_thread,
            reverse=reverse,
            other=other,
            last=shuffle.format("to_here", 0 if reverse else lanes - 1, lanes),
            before=before,
            own=f"{near.format(1, lanes)} ? before : {start_of(kind, dtype)}",
        )


def start_of(kind: ScanKind, dtype: DType) -> str:
    number = "0" if kind == "sum" else "1"
    return number if dtype is i32 else f"{number}.0f"


def combined(kind: ScanKind, dtype: DType, first: str, second: str) -> str:
    """Of i32 by unsigned numbers, which wrap."""
    symbol = "+" if kind == "sum" else "*"
    if dtype is i32:
        return f"static_cast<int>(static_cast<unsigned>({first}) {symbol} {second})"
    return f"{first} {symbol} {second}"
