"""The words of blocks that take rows in turn and reduce columns over them: see planner/rows/parts_rule.py.

A thread's copies go to places of its own, which it alone reads: once its own have arrived, it waits for nobody. A place
is asked for again behind the last pass that reads it.
"""

from __future__ import annotations

from typing import Any

from fusegen.emitting.loops import each_line
from fusegen.emitting.prelude import reducer_of
from fusegen.emitting.rows.frame import Frame, Part
from fusegen.emitting.rows.vectors import Vectors
from fusegen.planner.model import Load
from fusegen.planner.parts import ColumnPart
from fusegen.planner.pieces import VECTOR_BYTES, stride_name


class InTurn(Part):
    """The parts' registers, the ring of rows, and what stands around the loop over rows."""

    def __init__(self, frame: Frame, vectors: Vectors) -> None:
        super().__init__(frame)
        self.vectors = vectors
        self.parts = tuple(part for row_pass in self.plan.passes for part in row_pass.parts)
        every = (load for row_pass in self.plan.passes for load in row_pass.loads if load.when == "held")
        self.held = tuple({load.access.tensor: load for load in every}.values())

    # ---- before the rows

    def starts(self) -> list[str]:
        """Each column's value of no rows, where that is not 0."""
        lines: list[str] = []
        for part in self.parts:
            start = reducer_of(part.kind, part.dtype).start
            if start not in ("0.0f", "0u"):
                place = self.vectors.part_at(part)
                fill = each_line([f"{place} = {self.words.noted(start)};"], "j", self.plan.tile.vector)
                lines += each_line(fill, "v", self.plan.tile.per_thread)
        return lines

    def held_vectors(self) -> list[str]:
        """What all rows share, in registers for all of them."""
        if not self.held:
            return []
        arrays, reads = [], []
        for load in self.held:
            name, dims = f"{load.access.name}_vec", self.vectors.register_dims(True)
            arrays.append(f"{self.frame.vec_type(load.access)} {name}{dims};")
            reads.append(f"{name}{'[v]' * self.frame.loops()} = {self.vectors.load_call(load.access)};")
        return [*arrays, *self.for_each_vector(reads)]

    def for_each_vector(self, lines: list[str]) -> list[str]:
        """The lines for each of the thread's vectors that has columns."""
        if guard := self.column_guard():
            lines = [f"if ({guard}) {{", *(f"  {line}" for line in lines), "}"]
        lines = [f"const int col = {self.frame.col()};", *lines]
        if self.frame.loops():
            return each_line(lines, "v", self.plan.tile.per_thread)
        return ["{", *(f"  {line}" for line in lines), "}"]

    def column_guard(self) -> str:
        return self.frame.guard().removeprefix("live && ").replace("live", "") if self.frame.guard() else ""

    # ---- the ring

    def row_values(self) -> tuple[Load, ...]:
        """What is one value a row, a row ahead."""
        return tuple(load for load in self.plan.rows_ahead if not load.access.by_column)

    def at(self, load: Load, row: str) -> str:
        (dim,) = load.access.strided
        return f"{load.access.name}_ptr + {row} * {stride_name(load.access, self.plan.row_dims, dim)}"

    def first_values(self) -> list[str]:
        lines = []
        for load in self.row_values():
            ctype = self.words.ctype(load.access.dtype)
            lines += [f"{ctype} {load.access.name}_read{{}};", f"if (first < rows) {self.read(load, 'first')}"]
        return lines

    def next_values(self) -> list[str]:
        own = "own_row" if self.plan.stands_in else "row"
        return [f"if ({own} + step < rows) {self.read(load, f'({own} + step)')}" for load in self.row_values()]

    def read(self, load: Load, row: str) -> str:
        return f"{load.access.name}_read = *({self.at(load, row)});"

    def fetch(self, slot: str) -> list[str]:
        """The statements that ask for the row `ahead`, to a slot of the ring."""
        self.words.functions.update(("copy_async", "commit_copies"))
        row = "from_row" if self.plan.stands_in else "ahead"
        copies = [
            f"copy_async<{load.access.vector}>(&{self.vectors.ring_at(load.access, slot)}, {self.at(load, row)} + col);"
            for load in self.plan.ring_loads
        ]
        lines = self.for_each_vector(copies)
        test = "ahead < rows"
        if self.plan.stands_in:
            lines = ["const long long from_row = ahead < rows ? ahead : rows - 1;", *lines]
            test = f"ahead - {self.frame.row_in_block()} < rows"
        if lines[0] == "{" and lines[-1] == "}":
            body = [f"if ({test}) {{", *lines[1:]]
        else:
            body = [f"if ({test}) {{", *(f"  {line}" for line in lines), "}"]
        return [*body, "commit_copies();"]

    # ---- behind the rows

    def stores(self) -> list[str]:
        """This part's row of each result."""
        lines = []
        for part in self.parts:
            access = part.access
            width, name = access.vector, f"{access.name}_vec"
            element = self.words.to_storage(access.dtype, self.vectors.part_at(part))
            store = "store" if width > 1 else "store_each"
            if self.plan.target.async_copies and width * access.dtype.bytes > VECTOR_BYTES:
                store = "store_words"
            self.words.functions.add(store)
            lines.append(f"{self.frame.vec_type(access)} {name};")
            lines += each_line([f"{name}.at[j] = {element};"], "j", width)
            place = f"{access.name}_ptr + first * {self.frame.row_size} + col"
            lines.append(f"{store}<{width}>({place}, {name});")
        return self.for_each_vector(lines)

    def registers(self, part: ColumnPart) -> str:
        reducer = reducer_of(part.kind, part.dtype)
        loops = f"[{self.plan.tile.per_thread}]" * self.frame.loops()
        return f"{reducer.ctype} {part.name}{loops}[{self.plan.tile.vector}] = {{}};  // of this thread's columns"

    def context(self) -> dict[str, Any]:
        """What row_parts.cu.j2 asks for beside the rest."""
        plan, rows = self.plan, self.plan.tile.rows_per_block
        own = self.frame.row_in_block() if rows > 1 else ""
        block = f"static_cast<long long>(blockIdx.x) * {self.frame.tiling()['rows']} + " if rows > 1 else "blockIdx.x"
        ring = plan.in_turn.ring if plan.in_turn else 0
        said: dict[str, Any] = {
            "first": f"{block}{own}",
            "step": f"static_cast<long long>(gridDim.x) * {self.frame.tiling()['rows']}" if rows > 1 else "gridDim.x",
            "own": own,
            "column_parts": [*map(self.registers, self.parts), *self.starts()],
            "held": self.held_vectors(),
            "held_names": ", ".join(load.value for load in self.held),
            "stores": self.stores(),
            "resident": f", {plan.cost.blocks_per_sm}" if plan.target.counts_blocks else "",
        }
        if ring:
            offsets, at = {}, 0
            for load in plan.ring_loads:
                offsets[load.access] = at
                at += ring * plan.tile.threads * plan.tile.per_thread * load.access.vector * (
                    load.access.dtype.bytes
                )  # fmt: skip
            said |= {
                "kept_shared": [
                    {
                        "type": self.frame.vec_type(access),
                        "name": self.vectors.ring_name(access),
                        "at": self.frame.shared_at(self.vectors.ring_name(access), offset),
                    }
                    for access, offset in offsets.items()
                ],
                "what": ", ".join(load.value for load in plan.ring_loads),
                "first_values": self.first_values(),
                "next_values": self.next_values(),
                "fetch_first": self.fetch("s"),
                "fetch_next": self.fetch("slot"),
            }
        return said
