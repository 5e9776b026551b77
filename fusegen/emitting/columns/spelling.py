"""A ColumnsPlan in the words of one dialect: what templates/columns.cu.j2 prints, in the order it prints it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fusegen.emitting.columns.frame import ColumnsFrame
from fusegen.emitting.columns.running import RunningSums
from fusegen.emitting.dialect import VALUE_TYPES, all_of
from fusegen.emitting.loops import each_line
from fusegen.emitting.prelude import reducer_of
from fusegen.emitting.rows.reducing import WORDS
from fusegen.language.types import f32
from fusegen.planner.columns.plan import Behind, ColumnPass
from fusegen.planner.model import Load, Reduction, Store, counts


@dataclass(frozen=True, slots=True)
class Gathered:
    """One reduction's way from a thread's parts to the parts of the blocks."""

    name: str
    ctype: str
    init: str
    to_word: list[str]  # the statements that put a thread's parts into shared memory
    first: str
    merge: str  # with row r of the block
    places: list[str]  # where the block's part goes


@dataclass(frozen=True, slots=True)
class SpelledPass:
    """The texts of one pass, and of what is behind it."""

    parts: list[str]
    vectors: list[str]  # of all rows
    walk: str  # the head of the loop over turns
    turn: list[str]  # in each turn
    gathered: list[Gathered]
    results: list[str]
    body: list[str]
    writes: list[str]
    keeps: list[str]
    starts: bool  # in a cluster: is this the first time that a block writes to another?


class ColumnsSpeller(ColumnsFrame):
    def context(self) -> dict[str, Any]:
        plan, words = self.plan, self.words
        passes = [(one, self.spelled(number, one)) for number, one in enumerate(plan.passes)]
        said = {
            "index": "int",
            "row_reduces": [],
            "resident": f", {self.plan.cost.blocks_per_sm}" if self.plan.target.counts_blocks else "",
            "sizes": self.sizes(),
            "own_cols": self.own_cols,
            "places": self.places(),
            "counts": self.counted(),
            "pointers": self.pointers(),
            "once": [self.from_pointer(load) for load in plan.once_loads],
            "passes": passes,
            "reduces": bool(plan.reductions),
            "sums_dims": f"[{len(plan.reductions)}]{f'[{plan.cluster}]' * (plan.cluster > 1)}[{self.own_cols}]",
            "rows": self.rows,
            "writes_where": self.writes_where(),
            "kept": [name for one in plan.passes for name in one.keeps],
        }
        uses = {"vec": True, "functions": words.functions}
        return {**words.frame(plan), "includes": words.headers_of(a.dtype for a in plan.accesses), "uses": uses, **said}

    # ---- where a thread is

    @property
    def own_cols(self) -> str:
        """What the kernel calls the columns whose results a block makes."""
        return "tile_cols" if self.plan.own_cols == self.tile.cols else "own_cols"

    def sizes(self) -> list[str]:
        """The sizes of the block's part of the work."""
        tile = self.tile
        if not self.plan.reductions:
            return [
                f"constexpr int tile_cols = {tile.cols};",
                f"constexpr int rows_in_turn = {tile.rows_in_turn};  // {tile.turn} of each thread",
            ]
        lines = [
            f"constexpr int threads = {tile.threads};",
            f"constexpr int tile_cols = {tile.cols};",
            f"constexpr int tile_rows = {tile.rows};  // that the block's threads read at once",
        ]
        if self.own_cols != "tile_cols":
            lines.append(f"constexpr int own_cols = {self.plan.own_cols};  // whose results this block makes")
        if tile.turn > 1:
            of = "the cluster's" if tile.cluster > 1 else "the block's"
            lines.append(f"constexpr int row_step = {tile.row_step};  // rows that {of} threads read at once")
        step = f"{tile.turn} * row_step" if tile.turn > 1 else str(tile.rows_in_turn)
        lines.append(f"constexpr int rows_in_turn = {step};")
        return lines

    def places(self) -> list[str]:
        """The statements that say which columns and rows a thread has, and which rows the block's results are of."""
        plan, tile = self.plan, self.tile
        block = f"blockIdx.x / {tile.cluster}" if tile.cluster > 1 else "blockIdx.x"
        lines = []
        if tile.cluster > 1:
            lines.append("const int rank = __clusterRelativeBlockRank();")
        several = plan.col_tiles > 1
        first = (f"({block}) % {plan.col_tiles}" if " " in block else f"{block} % {plan.col_tiles}") if several else ""
        if several and not plan.kept_dims:
            first = block
        lane = f"threadIdx.x % {tile.lanes}" if tile.lanes < tile.threads else "threadIdx.x"
        lane = "0" if tile.lanes == 1 else lane
        lines.append(f"const int first_col = {f'static_cast<int>({first}) * tile_cols' if several else '0'};")
        own = lane if tile.vector == 1 or lane == "0" else f"{lane} * {tile.vector}"
        lines.append(f"const int from = {own};  // of the block's {tile.cols} columns, this thread's first")
        if self.ragged:
            lines.append(f"const bool live = first_col + from < {plan.cols};")
            lines.append(
                "const int col = live ? first_col + from : first_col;  // who has none reads the first once more"
            )
        else:
            lines.append("const int col = first_col + from;")
        row = f"threadIdx.x / {tile.lanes}" if tile.lanes > 1 else "threadIdx.x"
        lines.append(
            f"const int own = {row if tile.lanes < tile.threads else '0'};  // of the block's {tile.rows} rows"
        )
        if plan.kept_dims:
            divisor = tile.cluster * plan.col_tiles
            lines += self.indices(plan.kept_dims, f"blockIdx.x / {divisor}" if divisor > 1 else "blockIdx.x")
        if len(plan.reduced_dims) > 1:
            lines.append(f"const long long rows = {' * '.join(dim.extent for dim in plan.reduced_dims)};")
        return lines

    def counted(self) -> list[str]:
        """The sizes that a call chooses, as f32 and as whole numbers."""
        used = {name for one in self.plan.passes for body in (one.column_body, one.body, one.behind.body)
                for s in body for name in s.uses}  # fmt: skip
        kinds = (("float", "counted"), ("int", "counted_whole"))
        return [
            f"const {kind} {name}_{word} = static_cast<{kind}>({extent});"
            for name, extent in self.plan.counts.items()
            for kind, word in kinds
            if f"{name}_{word}" in used
        ]

    def pointers(self) -> list[str]:
        """Where each tensor's part of the dimensions that stay begins."""
        lines = []
        for access in self.plan.accesses:
            if steps := self.strides(access, False):
                const = "" if access.output else "const "
                ctype = self.words.ctype(access.dtype)
                lines.append(f"{const}{ctype}* const {access.name}_first = {access.name}_ptr + {' + '.join(steps)};")
        return lines

    def from_pointer(self, load: Load) -> str:
        text = self.words.to_value(load.access.dtype, f"*{self.pointer(load.access)}")
        return self.words.define(load.value, load.dtype, text)

    def writes_where(self) -> str:
        """When a thread writes the results of its column: where it lies in the row, and once a cluster."""
        once = self.plan.cluster > 1 and not self.plan.shared_out
        return all_of(f"own_col < {self.plan.cols}" * self.ragged, "rank == 0" * once)

    # ---- a pass

    def spelled(self, number: int, one: ColumnPass) -> SpelledPass:
        running = RunningSums(self, one) if one.scans else None
        first = "rank * tile_rows + own" if self.tile.cluster > 1 else "own"
        last = number == len(self.plan.passes) - 1
        before = self.plan.passes[:number]
        starts = self.plan.cluster > 1 and not any(other.reductions or other.scans for other in before)
        return SpelledPass(
            parts=[self.part(r) for r in one.reductions],
            vectors=[*map(self.vector_load, one.column_loads), *(running.starts(starts) if running else ())],
            walk=f"for (long long turn = {'0' if running else first}; turn < {self.rows}; turn += rows_in_turn)",
            turn=running.turn() if running else self.turn(one),
            gathered=[self.gathered(r) for r in one.reductions],
            results=[line for r in one.reductions for line in self.result(r)],
            body=self.behind(one.behind),
            writes=self.writes(one.behind.stores),
            keeps=[f"{name}_kept[c] = {name};" for name in one.keeps] if not last else [],
            starts=starts and bool(one.reductions),
        )

    def part(self, r: Reduction) -> str:
        reducer = reducer_of(r.kind, r.dtype)
        start, vector = self.words.noted(reducer.start), self.tile.vector
        zeros = "" if start in ("0.0f", "0u") else ", ".join([start] * vector)
        return f"{reducer.ctype} {r.part}[{vector}] = {{{zeros}}};"

    def vector_load(self, load: Load) -> str:
        return f"const {self.vec(load.access)} {load.access.name}_vec = {self.load_text(load.access)};"

    def turn(self, one: ColumnPass) -> list[str]:
        """One turn of a thread: the loads of all of its rows, what is made of them, and what is written."""
        turn, several = self.tile.turn, self.tile.turn > 1
        step = "turn + u * row_step"
        lines = [f"{self.vec(load.access)} {load.access.name}_vec[{turn}];" for load in one.loads]
        lines += [f"{self.words.ctype(load.access.dtype)} {load.access.name}_at[{turn}];" for load in one.row_loads]
        reads = [f"{load.access.name}_vec[u] = {self.load_text(load.access)};" for load in one.loads]
        reads += [f"{load.access.name}_at[u] = *({self.address(load.access)});" for load in one.row_loads]
        if reads:
            row = f"const long long row = {step} < {self.rows} ? {step} : {self.rows} - 1;" if several else ""
            lines += each_line([row or "const long long row = turn;", *self.row_indices(), *reads], "u", turn)
        lines += [f"{self.vec(store.access)} {store.access.name}_vec[{turn}];" for store in one.stores]
        lines += each_line(self.elements(one, step), "j", self.tile.vector)
        if one.stores:
            inside = all_of(f"{step} < {self.rows}" * several, "live" * self.ragged)
            writes = [self.store_text(store) for store in one.stores]
            known = bool(reads) and not several  # the row, as in the loads before
            body = writes if known else [f"const long long row = {step};", *self.row_indices(), *writes]
            if inside:
                body = [f"if ({inside}) {{", *(f"  {line}" for line in body), "}"]
            lines += each_line(body, "u", turn)
        return lines

    def row_indices(self) -> list[str]:
        dims = self.plan.reduced_dims
        return self.indices(dims, "static_cast<unsigned>(row)") if len(dims) > 1 else []

    def elements(self, one: ColumnPass, step: str) -> list[str]:
        """What is made of column j: of its own values once, then of each row's."""
        words, several = self.words, self.tile.turn > 1
        lines = [f"const {VALUE_TYPES[self.dtype_of(name)]} {name} = {name}_kept[from + j];" for name in one.takes]
        lines += [self.value(load, f"{load.access.name}_vec.at[j]") for load in one.column_loads]
        lines += words.statements(one.column_body)
        sums = [r for r in one.reductions if r.kind == "sum" and r.dtype is f32] if several else []
        lines += [f"float {r.results[0]}_turn = 0.0f;" for r in sums]
        row = []
        if counts(one.body, "row_index") and (several or not (one.loads or one.row_loads)):
            row += [f"const long long row = {step};", *self.row_indices()]
        row += [self.value(load, f"{load.access.name}_vec[u].at[j]") for load in one.loads]
        row += [self.value(load, f"{load.access.name}_at[u]") for load in one.row_loads]
        row += words.statements(one.body)
        places = [f"{r.results[0]}_turn" if r in sums else f"{r.part}[j]" for r in one.reductions]
        updates = [self.update(r, place, several) for r, place in zip(one.reductions, places, strict=True)]
        if several and updates:
            row.append(f"const bool inside = {step} < {self.rows};")
        row += updates
        row += [f"{s.access.name}_vec[u].at[j] = {words.stored(s)};" for s in one.stores]
        lines += each_line(row, "u", self.tile.turn)
        return [*lines, *(f"{r.part}[j] += {r.results[0]}_turn;" for r in sums)]

    def update(self, r: Reduction, part: str, several: bool) -> str:
        """What a row behind the last one has is not counted: by a choice and not a branch, into which a compiler would
        put off the load."""
        value = f"inside ? {r.value} : {self.words.noted(reducer_of(r.kind, r.dtype).start)}" if several else r.value
        if r.kind == "sum":
            return f"{part} += {value};"
        if r.kind == "prod":
            return f"{part} *= {value};"
        return f"{part} = {self.chooser(r)}({part}, {value});"

    def chooser(self, r: Reduction) -> str:
        if r.dtype is not f32:
            return r.kind
        function = "larger" if r.kind == "max" else "smaller"
        self.words.functions.add(function)
        return function

    # ---- behind a pass

    def gathered(self, r: Reduction) -> Gathered:
        reducer = reducer_of(r.kind, r.dtype)
        self.words.functions.update(reducer.needs)
        stored, taken = WORDS[reducer.ctype]
        place = f"sums[{r.slot}]"
        if self.plan.cluster == 1:
            places = [f"{place}[c] = {stored.format('v')};"]
        else:
            where, at = ("c / own_cols", "c % own_cols") if self.plan.shared_out else ("b", "c")
            far = (
                f"static_cast<float*>(__cluster_map_shared_rank({place}[rank], {where}))[{at}] = {stored.format('v')};"
            )
            places = [far] if self.plan.shared_out else each_line([far], "b", self.plan.cluster)
        return Gathered(
            name=r.results[0],
            ctype=reducer.ctype,
            init=reducer.start,
            to_word=each_line([f"part[own][from + j] = {stored.format(f'{r.part}[j]')};"], "j", self.tile.vector),
            first=taken.format("part[0][c]"),
            merge=reducer.merge.format(taken.format("part[r][c]")),
            places=places,
        )

    def result(self, r: Reduction) -> list[str]:
        """The parts of all blocks, in their order."""
        reducer = reducer_of(r.kind, r.dtype)
        _, taken = WORDS[reducer.ctype]
        name, blocks = r.results[0], self.plan.cluster
        whole = "static_cast<int>({})" if reducer.ctype == "unsigned" else "{}"
        if blocks == 1:
            return [self.words.define(name, r.dtype, whole.format(taken.format(f"sums[{r.slot}][c]")))]
        total = f"{name}_all"
        merge = reducer.merge.replace("v ", f"{total} ").replace("(v,", f"({total},")
        loop = f"for (int b = 1; b < {blocks}; ++b) {merge.format(taken.format(f'sums[{r.slot}][b][c]'))}"
        return [
            f"{reducer.ctype} {total} = {taken.format(f'sums[{r.slot}][0][c]')};",
            loop,
            self.words.define(name, r.dtype, whole.format(total)),
        ]

    def behind(self, behind: Behind) -> list[str]:
        ctype = VALUE_TYPES
        lines = [f"const {ctype[self.dtype_of(name)]} {name} = {name}_kept[c];" for name in behind.takes]
        lines += [self.value(load, f"*({self.address(load.access, 'own_col')})") for load in behind.loads]
        return [*lines, *self.words.statements(behind.body, "own_col")]

    def writes(self, stores: Iterable[Store]) -> list[str]:
        return [f"{self.pointer(store.access)}[own_col] = {self.words.stored(store)};" for store in stores]
