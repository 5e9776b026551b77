"""The words of rows that come to shared memory and leave it by bulk copies.

A row lies as far behind a line of 128 bytes there as in global memory, so the copy engine moves whole blocks of 16, and
a thread reads and writes the element at any column: `x_at[col]`. The rows of a block of several come together, as one
copy.
"""

from __future__ import annotations

from fusegen.emitting.dialect import all_of
from fusegen.emitting.rows.frame import Part
from fusegen.planner.model import Access, Load, RowPass
from fusegen.planner.rows.bulk import brought, bulk_loads
from fusegen.planner.tile import LINE_BYTES, begins_anywhere


class BulkRows(Part):
    """Places in shared memory, what is brought there, and what leaves."""

    def at(self, access: Access) -> str:
        """The element at a pass's column."""
        return f"{access.name}_at[col + j]"

    def at_end(self, statement: str) -> str:
        """A statement for an element, where the row may end before it."""
        ragged = f"col + j < {self.frame.cols}" if self.plan.cols % self.plan.tile.vector else ""
        tests = all_of("live" * self.plan.contiguous_rows, ragged)
        return f"if ({tests}) {statement}" if tests else statement

    def element(self, load: Load, col: str = "col + j") -> str:
        """An element that was brought; zero where the row does not need it."""
        text = f"{load.access.name}_at[{col}]"
        test = self.words.within_limit(col, load.until)
        return f"({test} ? {text} : {self.frame.zero(load.access)})" if test else text

    # ---- places

    def offsets(self) -> dict[str, tuple[Access, int]]:
        """Each place's tensor, and where it begins."""
        found = {load.access.name: (load.access, load.offset_bytes) for load in bulk_loads(self.plan.passes)}
        stores = [store for row_pass in self.plan.passes for store in row_pass.stores if store.access.mode == "bulk"]
        found.update({store.access.name: (store.access, store.offset_bytes) for store in stores if store.staged})
        return found

    def place(self, access: Access, offset: int) -> str:
        at = self.frame.shared_at(f"{access.name}_at", offset)
        return f"reinterpret_cast<{self.words.ctype(access.dtype)}*>({at})"

    def bulk_places(self) -> list[str]:
        """The statements, once a row, that say where its elements lie and bring them."""
        if not self.plan.bulk:
            return []
        self.words.functions.add("phase")
        lines = []
        for name, (access, offset) in self.offsets().items():
            ctype, at = self.words.ctype(access.dtype), self.place(access, offset)
            if self.plan.contiguous_rows:
                if begins_anywhere(access, self.plan.tile, self.plan.cols):
                    at += f" + phase<{LINE_BYTES}>({self.first(access)})"
                lines.append(f"auto* const {name}_place = {at};")
                at = f"{name}_place + own_row * {self.frame.row_size}"
            else:
                at += f" + phase<{LINE_BYTES}>({self.frame.pointer(access)})"
            lines.append(f"{ctype}* const {name}_at = {at};")
        return [*lines, *self.bring()]

    def bring(self) -> list[str]:
        """One thread asks for all that is brought; all threads wait for it."""
        tensors = brought(self.plan.passes)
        if not tensors:
            return []
        self.words.functions.update(("bring", "copy_bulk"))
        lines = ["__shared__ unsigned long long arrivals;", "if (threadIdx.x == 0) {"]
        lines.append(f"  start_arrivals(arrivals, {len(tensors)});")
        for access in tensors.values():
            name = access.name
            what = f"{name}_at, {self.frame.pointer(access)}, {self.needed(access)}, {name}_ends"
            if self.plan.contiguous_rows:
                last = f"rows - first_row <= {self.plan.tile.rows_per_block}"
                what = f"{name}_place, {self.first(access)}, rows_here * {self.frame.row_size}, {last}"
            lines.append(f"  bring({what}, arrivals);")
        return [*lines, "}", self.words.spelling.barrier, "wait_arrivals(arrivals);"]

    def first(self, access: Access) -> str:
        """Where a block's rows begin in memory."""
        return f"{access.name}_ptr + first_row * {self.frame.row_size}"

    def needed(self, access: Access) -> str:
        """How many columns of the row are needed, from the first one on."""
        (until,) = {load.until for load in bulk_loads(self.plan.passes) if load.access.tensor == access.tensor}
        if until is None:
            return self.frame.cols
        bound = self.words.argument(until.bound)
        return f"({bound} < {self.frame.cols} ? {bound}{' + 1' if until.sign == '<=' else ''} : {self.frame.cols})"

    # ---- results

    def leave_calls(self, row_pass: RowPass) -> list[str]:
        """The statements that send off what the pass has written to shared memory."""
        staged = [store.access for store in row_pass.stores if store.staged and store.access.mode == "bulk"]
        if not staged:
            return []
        self.words.functions.update(("head_of", "leave"))
        tile = self.plan.tile
        lines = ["show_copies();", f"{self.words.spelling.barrier}  // the row is complete"]
        for access in staged:
            row, at, cols, lane = self.frame.pointer(access), f"{access.name}_at", self.frame.cols, "lane"
            if self.plan.contiguous_rows:
                row, at = self.first(access), f"{access.name}_place"
                cols, lane = f"rows_here * {self.frame.row_size}", "threadIdx.x"
            lines.append(f"leave<{tile.threads}>({row}, {at}, {cols}, {lane});")
        return lines
