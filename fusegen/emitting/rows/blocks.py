"""How a plan writes rows that start anywhere: by aligned blocks.

A pass that sums nothing goes by an output's blocks: whatever lies like that output is aligned there and needs no shift.
A thread then has other columns than in the passes before, so what is one value a row must have the same bits in all of
them. What registers keep is bound to its columns; its results go by way of shared memory, where the row is complete
before whole blocks of it are written.

The few values that no block holds go one by one, at a row's ends; as do, in passes by vectors from the row's start,
those behind the last vector, where that saves all threads a turn.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.emitting.dialect import all_of
from fusegen.emitting.rows.frame import Frame, Part, in_later_turns
from fusegen.emitting.rows.vectors import PIECES, Vectors
from fusegen.planner.model import Access, Load
from fusegen.planner.pieces import VECTOR_BYTES, WORD_BYTES, staged_elements
from fusegen.planner.rows.tails import in_blocks


class Blocks(Part):
    """Blocks, what lies beside them, and rows on their way through shared memory."""

    def __init__(self, frame: Frame, vectors: Vectors) -> None:
        super().__init__(frame)
        self.vectors = vectors

    # ---- by an output's blocks

    def head(self) -> str:
        """The output by whose blocks a pass goes: what lies before the first one is counted once a row."""
        found = [row_pass.blocks_of for row_pass in self.plan.passes if row_pass.blocks_of]
        if not found:
            return ""
        (access,) = (a for a in self.plan.accesses if a.output and a.name == found[0])
        self.words.functions.update(("phase", "head_of"))
        return f"head_of<{access.vector}>({self.frame.pointer(access)}, {self.frame.cols})"

    def block_guard(self) -> str:
        """When a block is worth a look: when all of it lies in the row."""
        test = in_later_turns(f"col + {self.plan.tile.vector} <= {self.plan.cols}", in_blocks(self.plan))
        return all_of("live" * self.plan.lacks_rows, test)

    def from_blocks(self, load: Load) -> str:
        """The vector at a block's columns, from memory."""
        access = load.access
        if access.apart:
            return self.vectors.load_apart(access)
        if access.mode == "element" or access.vector * access.dtype.bytes % WORD_BYTES:
            self.words.functions.add("load_each")
            return f"load_each<{access.vector}>({self.frame.pointer(access)} + col)"
        self.words.functions.update((*PIECES, "load", "load_row_pieces", "load_misaligned", "load_block"))
        row, ends = self.frame.pointer(access), self.block_ends(access)
        return f"load_block<{access.vector}>({row}, col, {self.frame.cols}, {ends})"

    def block_ends(self, access: Access) -> str:
        certain = (self.plan.cols - access.vector + 1) // access.vector - 1
        return self.frame.in_last_turns(f"{access.name}_ends" if access.strided else "true", certain)

    def kept_at_blocks(self, load: Load) -> str:
        """The vector at a block's columns, from shared memory where that has all of it."""
        access = load.access
        if load.transport == "cp.async":
            self.words.functions.update((*PIECES, "load_row_pieces", "load_misaligned", "load_kept_block"))
            place = f"&{self.vectors.kept_block(access)}, {self.frame.pointer(access)}, col, head"
            text = f"load_kept_block<{access.vector}>(\n    {place}, {self.frame.cols}, {self.block_ends(access)})"
            part = self.vectors.partly()
        else:
            self.words.functions.update((*PIECES, "load_shifted"))
            text = f"load_shifted<{access.vector}>({self.vectors.kept_name(access)}->at + col)"
            held = min(self.plan.vector_cols, self.plan.tile.kept_cols)
            part = f"col + {access.vector} <= {held}" if held < self.plan.cols else ""
        return f"{part} ? {text} : {self.from_blocks(load)}" if part else text

    def store_at_blocks(self, access: Access, of: str) -> str:
        if access.apart:
            return self.vectors.store_apart(access)
        name = "store" if access.name == of else "store_each" if access.mode == "element" else "store_block"
        self.words.functions.update(("phase", "store", "store_each", name) if name == "store_block" else (name,))
        return f"{name}<{access.vector}>({self.frame.pointer(access)} + col, {access.name}_vec)"

    # ---- by way of shared memory

    def staged_rows(self) -> list[Mapping[str, str]]:
        """Where the results that are complete in shared memory first have their rows."""
        tile = self.plan.tile
        stores = [store for row_pass in self.plan.passes for store in row_pass.stores if store.staged]
        own = ""
        if stores and tile.rows_per_block > 1:
            stride = self.frame.size("staged_stride", staged_elements(tile), "elements from a row to the next")
            own = f" + ({self.frame.row_in_block()}) * {stride}"
        return [
            {
                "type": self.words.ctype(store.access.dtype),
                "name": f"{store.access.name}_staged",
                "expr": f"{self.frame.shared_at(f'{store.access.name}_staged', store.offset_bytes)}){own}",
            }
            for store in stores
        ]

    def staged_call(self, access: Access) -> str:
        """A thread's vector of a result, to shared memory."""
        self.words.functions.add("store")
        return f"store<{access.vector}>({access.name}_staged + col, {access.name}_vec)"

    def store_row_call(self, access: Access) -> str:
        self.words.functions.update((*PIECES, "load_shifted", "store", "head_of", "store_row"))
        tile = self.plan.tile
        turns = max(1, -(-(self.plan.cols * access.dtype.bytes // VECTOR_BYTES) // tile.threads_per_row))
        cols = f"live ? {self.plan.cols} : 0" if self.plan.lacks_rows else str(self.plan.cols)
        lane = "lane" if tile.threads_per_row > 1 else "0"
        return f"store_row<{turns}>({self.frame.pointer(access)}, {access.name}_staged, {cols}, {lane});"

    # ---- value by value

    def remainder_test(self) -> str:
        """Which threads have a value that no vector holds; empty where there are no such values."""
        if not self.plan.tile.remainder or all(row_pass.blocks_of for row_pass in self.plan.passes):
            return ""
        return all_of("live" * self.plan.lacks_rows, f"lane < {self.plan.tile.remainder}")

    def single_read(self, load: Load, test: str, col: str, suffix: str) -> str:
        """One value of a tensor, zero where the thread has none or the row does not need it."""
        access = load.access
        ctype = self.words.ctype(access.dtype)
        tests = all_of(test, self.words.within_limit(col, load.until))
        text = f"{self.frame.pointer(access)}[{self.frame.place(access, col)}]"
        text = f"{tests} ? {text} : {self.frame.zero(access)}" if tests else text
        return f"const {ctype} {access.name}{suffix} = {text};"
