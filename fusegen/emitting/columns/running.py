"""The words of a pass over rows with running sums: a block goes through its columns' rows from one end to the other.

In each turn a thread has rows that follow one another, and adds them up; the lanes of a warp bring together what comes
before each of them in the warp's rows, and each thread adds what the groups of rows before its own have made, in this
turn and in all turns before. What the groups make is in shared memory, in halves that are written by turns: so who
writes a half has waited, in the turn between, for those who read it. The next turn's rows are asked for before this
turn's are used.

Where the blocks of a cluster share a turn's rows, each of them tells all of them what its own rows make, and adds what
the blocks before it have told.
"""

from __future__ import annotations

from fusegen.emitting.columns.frame import ColumnsFrame
from fusegen.emitting.dialect import VALUE_TYPES, all_of
from fusegen.emitting.loops import each_line
from fusegen.emitting.rows.scanning import combined, start_of
from fusegen.language.scans import ScanKind, ScanWay
from fusegen.planner.columns.plan import ColumnPass
from fusegen.planner.model import Load, counts
from fusegen.planner.parts import Scan, Statement, Value


class RunningSums:
    def __init__(self, frame: ColumnsFrame, one: ColumnPass) -> None:
        self.frame, self.one = frame, one
        self.words, self.tile, self.rows = frame.words, frame.tile, frame.rows
        self.warp = frame.plan.target.warp
        self.neighbours, self.groups = self.tile.rows_of_warp(self.warp), self.tile.groups(self.warp)
        self.cluster = self.tile.cluster
        own = f"(rank * {self.tile.rows} + own)" if self.cluster > 1 and self.tile.turn > 1 else "own"
        own = f"rank * {self.tile.rows} + own" if self.cluster > 1 and self.tile.turn == 1 else own
        self.own = f"{own} * {self.tile.turn} + u" if self.tile.turn > 1 else own  # a row of the thread's in a turn
        self.here = f"turn + {self.own}"

    # ---- before the first turn

    def starts(self, waits: bool) -> list[str]:
        """`waits`: is this the first pass in which a block of a cluster writes to others?"""
        vector = self.tile.vector
        lines: list[str] = []
        for scan in self.one.scans:
            kind, start = self.type_of(scan), start_of(kind_of(scan), scan.dtype)
            starts = "" if kind_of(scan) == "sum" else ", ".join([start] * vector)
            lines.append(f"{kind} {scan.result}_so_far[{vector}] = {{{starts}}};  // of all rows of the turns before")
            if self.groups > 1:
                lines.append(
                    f"__shared__ __align__(16) {kind} {scan.result}_parts[2][{self.groups}][tile_cols];  "
                    "// of each group, by turns"
                )
            if self.cluster > 1:
                lines.append(
                    f"__shared__ __align__(16) {kind} {scan.result}_totals[2][{self.cluster}][tile_cols];  "
                    "// of each block, by turns"
                )
        if self.neighbours > 1:
            lines.append(f"const int place = threadIdx.x % {self.warp};  // in the warp")
        if self.groups > 1:
            of = f"of the block's rows: {self.neighbours} of a warp" if self.neighbours > 1 else "a row of the block's"
            group = f"threadIdx.x / {self.warp}" if self.neighbours > 1 else "own"
            lines.append(f"const int group = {group};  // {of}")
        if self.groups > 1 or self.cluster > 1:
            lines.append("int half = 0;")
        turn, ctype = self.tile.turn, self.words.ctype
        lines += [f"{self.frame.vec(load.access)} {load.access.name}_next[{turn}];" for load in self.one.loads]
        lines += [f"{ctype(load.access.dtype)} {load.access.name}_next[{turn}];" for load in self.one.row_loads]
        if asked := self.asked(self.own):
            lines += [f"if ({self.rows} > 0) {{", *(f"  {line}" for line in asked), "}"]
        if waits:
            lines.append("__cluster_barrier_wait();  // every block of the cluster runs, and may be written to")
        return lines

    def asked(self, at: str) -> list[str]:
        """The loads of a thread's rows; who has none reads the last one once more."""
        frame = self.frame
        reads = [f"{load.access.name}_next[u] = {frame.load_text(load.access)};" for load in self.one.loads]
        reads += [f"{load.access.name}_next[u] = *({frame.address(load.access)});" for load in self.one.row_loads]
        if not reads:
            return []
        inside, outside = (f"{self.rows} - 1 - at", "0") if self.one.reverse else ("at", f"{self.rows} - 1")
        row = [f"const long long at = {at};", f"const long long row = at < {self.rows} ? {inside} : {outside};"]
        return each_line([*row, *reads], "u", self.tile.turn)

    # ---- a turn

    def turn(self) -> list[str]:
        one, tile = self.one, self.tile
        turn, vector = tile.turn, tile.vector
        read = (*one.loads, *one.row_loads)
        lines = [f"{self.frame.vec(load.access)} {load.access.name}_vec[{turn}];" for load in one.loads]
        lines += [f"{self.words.ctype(load.access.dtype)} {load.access.name}_at[{turn}];" for load in one.row_loads]
        if read:
            taken = [f"{self.now(load)} = {load.access.name}_next[u];" for load in read]
            lines += each_line(taken, "u", turn)
            lines.append(f"if (turn + rows_in_turn < {self.rows}) {{  // the next turn's")
            lines += [f"  {line}" for line in self.asked(f"turn + rows_in_turn + {self.own}")]
            lines.append("}")
        for scan in one.scans:
            ctype = self.type_of(scan)
            lines.append(f"{ctype} {scan.result}_kept[{turn}][{vector}];  // of the thread's own rows")
            lines.append(f"{ctype} {scan.result}_before[{vector}];  // first what all of these make")
            if self.cluster > 1:
                starts = ", ".join([start_of(kind_of(scan), scan.dtype)] * vector) if kind_of(scan) == "prod" else ""
                lines.append(f"{ctype} {scan.result}_made[{vector}] = {{{starts}}};  // of the block's rows")
        lines += self.each_column(self.own_rows())
        for scan in one.scans:
            lines += self.each_column(self.through_lanes(scan) if self.neighbours > 1 else self.to_shared(scan))
        if self.groups > 1:
            lines.append(self.words.spelling.barrier)
            body = each_line([line for scan in one.scans for line in self.through_groups(scan)], "j", vector)
            lines += each_line(body, "g", self.groups)
        if self.cluster > 1:
            lines += self.through_cluster()
        if self.groups > 1 or self.cluster > 1:
            lines.append("half ^= 1;")
        lines += [f"{self.frame.vec(store.access)} {store.access.name}_vec[{turn}];" for store in one.stores]
        lines += self.each_column(self.results())
        return lines + self.stored()

    def each_column(self, lines: list[str]) -> list[str]:
        """The same for each column of a thread, whose names are its own."""
        if self.tile.vector > 1:
            return each_line(lines, "j", self.tile.vector)
        return ["{", *(f"  {line}" for line in each_line(lines, "j", 1)), "}"]

    def now(self, load: Load) -> str:
        return f"{load.access.name}_{'vec' if load.access.by_column else 'at'}[u]"

    def own_rows(self) -> list[str]:
        """Column j of a thread's rows, summed from the first on."""
        scans, body = self.one.scans, self.one.body
        wanted = {scan.value for scan in scans}
        columns, elements = self.values(body, wanted)
        lines = [*columns, *(f"{self.type_of(s)} {s.result} = {start_of(kind_of(s), s.dtype)};" for s in scans)]
        row = [f"const bool inside = {self.here} < {self.rows};", *self.row(body), *elements]
        for scan in scans:
            kind, start = kind_of(scan), start_of(kind_of(scan), scan.dtype)
            more = f"{scan.result} = {combined(kind, scan.dtype, scan.result, f'(inside ? {scan.value} : {start})')};"
            kept = f"{scan.result}_kept[u][j] = {scan.result};"
            row += [kept, more] if exclusive(scan) else [more, kept]
        lines += each_line(row, "u", self.tile.turn)
        return [*lines, *(f"{scan.result}_before[j] = {scan.result};" for scan in scans)]

    def through_lanes(self, scan: Scan) -> list[str]:
        """What the rows before the thread's own make of a warp's."""
        kind, ctype, lanes, warp = kind_of(scan), self.type_of(scan), self.tile.lanes, self.warp
        name, shuffle = scan.result, self.words.spelling.shuffle
        other = shuffle.format("to_here", "place >= step ? place - step : place", warp)
        ahead = shuffle.format("to_here", f"place >= {lanes} ? place - {lanes} : place", warp)
        lines = [
            f"{ctype} to_here = {name}_before[j];",
            "#pragma unroll",
            f"for (int step = {lanes}; step < {warp}; step *= 2) {{",
            f"  const {ctype} other = {other};",
            f"  if (place >= step) to_here = {combined(kind, scan.dtype, 'other', 'to_here')};",
            "}",
        ]
        if self.groups > 1:
            lines.append(f"if (place >= {warp - lanes}) {name}_parts[half][group][from + j] = to_here;  // of all rows")
        lines += [
            f"const {ctype} ahead = {ahead};",
            f"{name}_before[j] = place >= {lanes} ? ahead : {start_of(kind, scan.dtype)};",
        ]
        return lines

    def to_shared(self, scan: Scan) -> list[str]:
        """A group is one row of threads; a block of one such row goes through the turns by itself."""
        name, kind = scan.result, kind_of(scan)
        if self.groups > 1:
            lines = [f"{name}_parts[half][group][from + j] = {name}_before[j];",
                     f"{name}_before[j] = {start_of(kind, scan.dtype)};"]  # fmt: skip
        else:
            total = self.total(scan)
            more = combined(kind, scan.dtype, total, f"{name}_before[j]")
            lines = [f"const {self.type_of(scan)} to_here = {more};",
                     f"{name}_before[j] = {total};", f"{total} = to_here;"]  # fmt: skip
        return lines

    def through_groups(self, scan: Scan) -> list[str]:
        part = f"{scan.result}_parts[half][g][from + j]"
        return self.through("g == group", self.total(scan), part, scan)

    def total(self, scan: Scan) -> str:
        """Where the parts of a block's groups are brought together: behind all turns before, but where other blocks of
        the turn come between."""
        return f"{scan.result}_{'made' if self.cluster > 1 else 'so_far'}[j]"

    def through(self, own: str, total: str, part: str, scan: Scan) -> list[str]:
        """One part of many, in their order: it is behind what comes before a thread's own rows, and then of it."""
        kind, before = kind_of(scan), f"{scan.result}_before[j]"
        return [
            f"if ({own}) {before} = {combined(kind, scan.dtype, total, before)};",
            f"{total} = {combined(kind, scan.dtype, total, part)};",
        ]

    def through_cluster(self) -> list[str]:
        """Each block's part of the turn goes to all of them."""
        told: list[str] = []
        taken: list[str] = []
        for scan in self.one.scans:
            totals = f"{scan.result}_totals[half]"
            far = f"static_cast<{self.type_of(scan)}*>(__cluster_map_shared_rank({totals}[rank], b))"
            told.append(f"{far}[from + j] = {scan.result}_made[j];")
            taken += self.through("b == rank", f"{scan.result}_so_far[j]", f"{totals}[b][from + j]", scan)
        vector, cluster = self.tile.vector, self.cluster
        tells = each_line(each_line(told, "j", vector), "b", cluster)
        if self.tile.rows > 1:
            tells = ["if (own == 0) {", *(f"  {line}" for line in tells), "}"]
        barrier = ["__cluster_barrier_arrive();  // all blocks have told theirs", "__cluster_barrier_wait();"]
        return [*tells, *barrier, *each_line(each_line(taken, "j", vector), "b", cluster)]

    def results(self) -> list[str]:
        """What is made of column j of each row and its running sums."""
        one = self.one
        columns, elements = self.values(one.running_body, {store.value for store in one.stores})
        row = [*self.row(one.running_body)]
        for scan in one.scans:
            whole = combined(kind_of(scan), scan.dtype, f"{scan.result}_before[j]", f"{scan.result}_kept[u][j]")
            row.append(self.words.define(scan.result, scan.dtype, whole))
        row += elements
        row += [f"{s.access.name}_vec[u].at[j] = {self.words.stored(s)};" for s in one.stores]
        return [*columns, *each_line(row, "u", self.tile.turn)]

    def stored(self) -> list[str]:
        inside = all_of(f"{self.here} < {self.rows}", "live" * self.frame.ragged)
        row = f"{self.rows} - 1 - ({self.here})" if self.one.reverse else self.here
        writes = [self.frame.store_text(store) for store in self.one.stores]
        body = [f"if ({inside}) {{", f"  const long long row = {row};", *(f"  {line}" for line in writes), "}"]
        return each_line(body, "u", self.tile.turn)

    # ---- values

    def row(self, body: tuple[Statement, ...]) -> list[str]:
        """The row's number, where something counts it."""
        if not counts(body, "row_index"):
            return []
        return [f"const long long row = {f'{self.rows} - 1 - ({self.here})' if self.one.reverse else self.here};"]

    def values(self, body: tuple[Statement, ...], wanted: set[str]) -> tuple[list[str], list[str]]:
        """The statements that make `wanted`: of a column once, and of each row's element."""
        one, frame, words = self.one, self.frame, self.words
        wanted = wanted | {a.name for s in body for a in s.args if isinstance(a, Value)}
        own: list[Statement] = []
        for s in reversed(one.column_body):
            if s.name in wanted:
                own.insert(0, s)
                wanted |= {a.name for a in s.args if isinstance(a, Value)}
        columns = [
            f"const {VALUE_TYPES[frame.dtype_of(name)]} {name} = {name}_kept[from + j];"
            for name in one.takes
            if name in wanted
        ]
        columns += [
            frame.value(load, f"{load.access.name}_vec.at[j]") for load in one.column_loads if load.value in wanted
        ]
        columns += words.statements(own)
        used = [load for load in (*one.loads, *one.row_loads) if load.value in wanted]
        elements = [frame.value(load, f"{self.now(load)}{'.at[j]' if load.access.by_column else ''}") for load in used]
        return columns, [*elements, *words.statements(body)]

    def type_of(self, scan: Scan) -> str:
        return VALUE_TYPES[scan.dtype]


def kind_of(scan: Scan) -> ScanKind:
    return way_of(scan).kind


def exclusive(scan: Scan) -> bool:
    return way_of(scan).exclusive


def way_of(scan: Scan) -> ScanWay:
    assert isinstance(scan.way, ScanWay)
    return scan.way
