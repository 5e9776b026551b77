"""The words of a row's largest elements, and of running sums and products, which are made in one order.

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
from fusegen.language.scans import Largest, ScanKind, ScanWay, Sorted
from fusegen.language.types import DType, f32, i32
from fusegen.planner.parts import Number, Reduction, RowPass, Scan


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

    def name(self, way: ScanWay) -> str:
        return f"row_{way.name.removesuffix('_exclusive')}"

    def starts(self, row_pass: RowPass) -> list[str]:
        """The statements that make what lies behind the row's end count for nothing."""
        if not self.frame.guard() and not self.frame.whole():
            return []
        lines: list[str] = []
        for scan in row_pass.scans:
            place = self.vectors.kept_at(f"{scan.result}_kept", False)
            way = scan.way
            if isinstance(way, Sorted):  # which knows the row's length
                continue
            rest = self.words.argument(Number(way.rest, f32)) if isinstance(way, Largest) else ""
            start = start_of(way.kind, scan.dtype) if isinstance(way, ScanWay) else rest
            inner = each_line([f"{place} = {start};"], "j", self.plan.tile.vector)
            lines += each_line(inner, "v", self.plan.tile.per_thread)
        return lines

    def results(self, row_pass: RowPass) -> list[str]:
        together: dict[tuple[str, bool], list[Scan]] = {}
        lines: list[str] = []
        for scan in row_pass.scans:
            if isinstance(scan.way, Sorted):
                together.setdefault((scan.value, scan.way.descending), []).append(scan)
            else:
                lines += self.made(scan)
        return [*lines, *(line for (_, down), scans in together.items() for line in self.sorted(scans, down))]

    def sorted(self, scans: list[Scan], descending: bool) -> list[str]:
        """A row in order, by a bitonic sort in shared memory (Batcher 1968) of keys with their columns behind them,
        which makes it stable: the values, the columns, or both."""
        tile, scan = self.plan.tile, scans[0]
        threads, lane = (self.frame.row_threads, "lane") if tile.threads_per_row > 1 else ("1", "0")
        own = f" + ({self.frame.row_in_block()}) * {scan.places}" if tile.rows_per_block > 1 else ""
        here = f"{self.vectors.kept_at(f'{scan.result}_kept', False)}"
        value = f"__int_as_float({here})" if scan.dtype is not scan.source else here
        flip = "~" if descending else ""
        if scan.source is i32:
            key, back = f"(static_cast<unsigned>({here}) ^ 0x80000000u)", "static_cast<int>({0} ^ 0x80000000u)"
        else:
            self.words.functions.update(("place_in_order", "number_in_order"))
            key, back = f"place_in_order({value})", "number_in_order({0})"
        col = "col + j" if tile.vector > 1 else "col"
        cols = self.frame.row_size

        def each(line: str) -> list[str]:
            inner = each_line([f"if ({col} < {cols}) {line}"], "j", tile.vector)
            lines = each_line([f"const int col = {self.frame.col()};", *inner], "v", tile.per_thread)
            return lines if tile.per_thread > 1 else ["{", *(f"  {line}" for line in lines), "}"]

        lines = [
            f"__shared__ unsigned long long in_order[{scan.places * tile.rows_per_block}];  // a key and its column",
            f"unsigned long long* const own = in_order{own};",
            *each(f"own[{col}] = static_cast<unsigned long long>({flip}{key}) << 32 | ({col});"),
            f"for (int i = {cols} + {lane}; i < {scan.places}; i += {threads}) own[i] = ~0ull;",
            self.words.spelling.barrier,
            "#pragma unroll 1",
            f"for (int size = 2; size <= {scan.places}; size *= 2) {{  // runs of so many, up and down by turns",
            "  #pragma unroll 1",
            "  for (int step = size / 2; step > 0; step /= 2) {",
            f"    for (int pair = {lane}; pair < {scan.places // 2}; pair += {threads}) {{",
            "      const int low = 2 * pair - (pair & (step - 1)), high = low + step;",
            "      const unsigned long long one = own[low], other = own[high];",
            "      if ((one > other) == ((low & size) == 0)) own[low] = other, own[high] = one;",
            "    }",
            f"    {self.words.spelling.barrier}",
            "  }",
            "}",
        ]
        for made in scans:
            place = self.vectors.kept_at(f"{made.result}_kept", False)
            bits = f"static_cast<unsigned>(own[{col}] >> 32)"
            text = back.format(f"({flip}{bits})" if flip else bits)
            if isinstance(made.way, Sorted) and made.way.what == "columns":
                text = f"static_cast<int>(own[{col}])"
            lines += each(f"{place} = {text};")
        names = ", ".join(made.result for made in scans)
        return [f"{{  // {names}", *(f"  {line}" for line in lines), "}"]

    def largest(self, scan: Scan, way: Largest) -> list[str]:
        """The row's largest, of what the pass has left in the places of its results: the least of them is found bit by
        bit from the highest on, each by a sum over the row of what reaches the number so far."""
        assert scan.limit is not None
        tile, at = self.plan.tile, self.vectors.kept_at(f"{scan.result}_kept", False)
        by_sum = way.by == "sum"
        number, found, weight, rest = "__uint_as_float({0})", "__uint_as_float(bits)", at, "0.0f"
        if not by_sum:
            self.words.functions.add("number_in_order")
            number, weight, rest = "number_in_order({0})", "1.0f", self.words.noted("-INFINITY")
            found = f"bits == 0u ? {rest} : number_in_order(bits)"  # where there are no more than are to be kept, all
        slots = ""
        if self.plan.slots:  # by turns: who reads one may meet who writes the other
            slots = f", step % 2 == 0 ? part[{scan.slot}] : part[{scan.slot + 1}]"

        def each(line: str) -> list[str]:
            return each_line(each_line([line], "j", tile.vector), "v", tile.per_thread)

        return [
            f"{{  // {scan.result}",
            f"  unsigned bits = 0;  // {'' if by_sum else 'in the order of numbers, '}of the smallest one that is kept",
            "  #pragma unroll 1",
            f"  for (int step = {way.steps - 1}; step >= 0; --step) {{",
            f"    const float least = {number.format('bits | 1u << step')};",
            f"    float reach = 0.0f;  // {'the sum' if by_sum else 'the count'} of what is as large",
            *(f"    {line}" for line in each(f"reach += {at} >= least ? {weight} : 0.0f;")),
            f"    if (row_sum(reach{slots}) >= {self.words.argument(scan.limit)}) bits |= 1u << step;",
            "  }",
            f"  const float least = {found};",
            *(f"  {line}" for line in each(f"{at} = {at} >= least ? {at} : {rest};")),
            "}",
        ]

    def made(self, scan: Scan) -> list[str]:
        """One scan, of what the pass has left in the places of its results."""
        if isinstance(scan.way, Largest):
            return self.largest(scan, scan.way)
        assert isinstance(scan.way, ScanWay)
        return self.running(scan, scan.way)

    def running(self, scan: Scan, way: ScanWay) -> list[str]:
        """A running sum or product."""
        tile, ctype = self.plan.tile, VALUE_TYPES[scan.dtype]
        place = self.vectors.kept_at(f"{scan.result}_kept", False)
        if way.exclusive:
            element = [f"const {ctype} own = {place};", f"{place} = so_far;",
                       f"so_far = {combined(way.kind, scan.dtype, 'so_far', 'own')};"]  # fmt: skip
        else:
            element = [f"so_far = {combined(way.kind, scan.dtype, 'so_far', place)};", f"{place} = so_far;"]
        turn = [f"{ctype} so_far = {start_of(way.kind, scan.dtype)};"]
        turn += [*self.elements(element, way.reverse), "before[v] = so_far;"]
        warps = tile.row_threads // self.plan.target.warp
        lines = [f"{ctype} before[{tile.per_thread}];  // each of the thread's vectors; first what these make"]
        if warps > 1:
            lines.append(f"__shared__ {ctype} parts[{tile.per_thread * warps}];  // of all warps, in every turn")
        lines += each_line(turn, "v", tile.per_thread)
        lines.append(f"{self.name(way)}(before{', parts' * (warps > 1)});")
        whole = each_line([f"{place} = {combined(way.kind, scan.dtype, 'before[v]', place)};"], "j", tile.vector)
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
        every = [scan for row_pass in self.plan.passes for scan in row_pass.scans]
        ways = {(self.name(s.way), s.dtype): s.way for s in every if isinstance(s.way, ScanWay)}
        return [self.row_scan(way, dtype) for (_, dtype), way in ways.items()]

    def row_scan(self, way: ScanWay, dtype: DType) -> RowScan:
        tile, target = self.plan.tile, self.plan.target
        lanes = min(tile.row_threads, target.warp)
        shuffle = self.words.spelling.shuffle
        kind, reverse = way.kind, way.reverse
        ahead, edge = ("place + {0} < {1}", "place + {0}") if reverse else ("place >= {0}", "place - {0}")
        near = "place + 1 < {1}" if reverse else "place > 0"
        other = shuffle.format("to_here", f"{ahead.format('step', lanes)} ? {edge.format('step')} : place", lanes)
        before = shuffle.format("to_here", f"{near.format(1, lanes)} ? {edge.format(1)} : place", lanes)
        return RowScan(
            what=f"the {'sum' if kind == 'sum' else 'product'} of what the row has "
            f"{'behind' if reverse else 'before'} each of a thread's vectors, of which own is each one's own",
            name=self.name(way),
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


def searches(row_pass: RowPass) -> list[Reduction]:
    """What sums over the row a pass makes to find its largest elements, as reductions."""
    return [
        Reduction("sum", scan.value, (scan.result,), scan.slot)
        for scan in row_pass.scans
        if isinstance(scan.way, Largest)
    ]


def start_of(kind: ScanKind, dtype: DType) -> str:
    number = "0" if kind == "sum" else "1"
    return number if dtype is i32 else f"{number}.0f"


def combined(kind: ScanKind, dtype: DType, first: str, second: str) -> str:
    """Of i32 by unsigned numbers, which wrap."""
    symbol = "+" if kind == "sum" else "*"
    if dtype is i32:
        return f"static_cast<int>(static_cast<unsigned>({first}) {symbol} {second})"
    return f"{first} {symbol} {second}"
