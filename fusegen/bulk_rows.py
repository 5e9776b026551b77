"""The words of rows that come to shared memory and leave it by bulk copies.

A row lies as far behind a block of 16 bytes there as in global memory, so the copy engine moves whole blocks, and a
thread reads and writes the element at any column: `x_at[col]`. The rows of a block of several come together, as one
copy where they follow one another.
"""

from __future__ import annotations

from fusegen.blocks import Blocks
from fusegen.dialect import UNROLL
from fusegen.planner.bulk import brought, bulk_loads, place_elements
from fusegen.planner.model import Access, Load, Stage
from fusegen.planner.pieces import VECTOR_BYTES, stride_name


class BulkRows(Blocks):
    """Places in shared memory, what is brought there, and what leaves."""

    def together(self) -> bool:
        """Do the rows of a block come together?"""
        return self.plan.bulk and self.plan.tile.rows_per_block > 1

    def tests_rows(self) -> bool:
        """Where all that threads read of a row is brought, those behind the last one are zeros."""
        rest = [
            access for access in self.plan.accesses if access.strided and access.by_column and access.mode != "bulk"
        ]
        return super().tests_rows() and (bool(rest) or not self.plan.bulk)

    def team(self) -> str:
        """A warp's rows that come together lie as many rows apart as there are warps: in shared memory rows that
        follow one another may begin in the same banks, as those of 127 halves do."""
        tile, warp = self.plan.tile, self.plan.target.warp
        if not self.together() or tile.threads_per_row == warp:
            return super().team()
        own = "threadIdx.x % 32" if tile.threads_per_row == 1 else f"threadIdx.x % {warp} / {tile.threads_per_row}"
        return f"{own} * {tile.threads // warp} + threadIdx.x / {warp}"

    def ends(self, access: Access) -> str:
        return "" if self.together() else super().ends(access)

    # ---- places

    def at(self, access: Access) -> str:
        """The element at a walk's column."""
        return f"{access.name}_at[col + j]"

    def at_end(self, statement: str) -> str:
        """A statement for an element, where the row may end before it."""
        ragged = self.plan.cols % self.plan.tile.vector
        return f"if (col + j < {self.cols}) {statement}" if ragged else statement

    def element(self, load: Load, col: str = "col + j") -> str:
        """An element that was brought; zero where the row does not need it."""
        text = f"{load.access.name}_at[{col}]"
        return f"({col} {load.until} ? {text} : {self.zero(load.access)})" if load.until else text

    def offsets(self) -> dict[str, tuple[Access, int]]:
        """Each place's tensor, and where it begins."""
        found = {load.access.name: (load.access, load.offset_bytes) for load in bulk_loads(self.plan.stages)}
        stores = [store for stage in self.plan.stages for store in stage.stores if store.access.mode == "bulk"]
        found.update({store.access.name: (store.access, store.offset_bytes) for store in stores if store.staged})
        return found

    def place(self, access: Access, offset: int) -> str:
        return f"reinterpret_cast<{self.ctype(access.dtype)}*>(shared + {offset})"

    def row_stride(self, access: Access) -> str:
        return stride_name(access, self.plan.row_dims, 0)

    def bulk_places(self) -> list[str]:
        """The statements, once a row, that say where its elements lie and bring them."""
        if not self.plan.bulk:
            return []
        self.functions.add("phase")
        tile = self.plan.tile
        lines = []
        if self.together():
            rows = tile.rows_per_block
            lines.append(f"const int own_row = {self.team()};")
            lines.append("const long long first_row = row - own_row;")
            lines.append(
                f"const int rows_here = rows - first_row < {rows} ? static_cast<int>(rows - first_row) : {rows};"
            )
            lines.append("const long long rows_after = rows - first_row - rows_here;")
        for name, (access, offset) in self.offsets().items():
            ctype, place = self.ctype(access.dtype), self.place(access, offset)
            if self.together():
                room, const = place_elements(access, self.plan.cols), "" if access.output else "const "
                lines.append(
                    f"{const}{ctype}* const {name}_first = {name}_ptr + first_row * {self.row_stride(access)};"
                )
                lines.append(f"{ctype}* const {name}_place = {place};")
                where = f"{name}_place, {name}_first, {self.pointer(access)}, {self.row_stride(access)}"
                lines.append(f"{ctype}* const {name}_at =\n    row_at<{room}>({where}, {self.cols}, own_row);")
            else:
                behind = f"phase<{VECTOR_BYTES}>({self.pointer(access)})"
                lines.append(f"{ctype}* const {name}_at = {place} + {behind};")
        return [*lines, *self.bring()]

    def bring(self) -> list[str]:
        """One thread asks for all that is brought; all threads wait for it."""
        tensors = brought(self.plan.stages)
        if not tensors:
            return []
        tile = self.plan.tile
        lines = ["__shared__ unsigned long long arrivals;"]
        asks = [f"start_arrivals(arrivals, {len(tensors)});"]
        for access in tensors.values():
            name = access.name
            if self.together():
                room = place_elements(access, self.plan.cols)
                rows = f"{name}_first, {self.row_stride(access)}, rows_here"
                asks.append(f"bring_rows<{room}>({name}_place, {rows}, {self.cols}, rows_after, arrivals);")
            else:
                cols = self.needed(access)
                asks.append(f"bring({name}_at, {self.pointer(access)}, {cols}, {name}_ends, arrivals);")
        self.functions.add("bring")
        first = "threadIdx.x == 0" if self.together() else "lane == 0"
        body = "\n".join(asks).replace("\n", "\n  ")
        lines.append(f"if ({first}) {{\n  {body}\n}}")
        if self.together() and not self.tests_rows():
            step = f"col += {tile.threads_per_row}" if tile.threads_per_row > 1 else "++col"
            start = "lane" if tile.threads_per_row > 1 else "0"
            lines.append("if (!live) {  // no such row: zeros in its place")
            for access in tensors.values():
                zero = f"{access.name}_at[col] = {self.zero(access)};"
                lines.append(f"  {UNROLL} 1\n  for (int col = {start}; col < {self.cols}; {step}) {zero}")
            lines.append("}")
        return [*lines, self.spelling.barrier, "wait_arrivals(arrivals);"]

    def needed(self, access: Access) -> str:
        """How many columns of the row are needed, from the first one on."""
        (until,) = {load.until for load in bulk_loads(self.plan.stages) if load.access.tensor == access.tensor}
        if not until:
            return self.cols
        sign, bound = until.split(" ", 1)
        return f"({bound} < {self.cols} ? {bound}{' + 1' if sign == '<=' else ''} : {self.cols})"

    # ---- results

    def gives_way(self, stage: Stage) -> bool:
        """Do the walk's results take the place of rows that another warp may still be reading?"""
        if not self.together() or not brought(self.plan.stages) or not any(store.staged for store in stage.stores):
            return False
        return not bulk_loads(self.plan.stages[self.plan.stages.index(stage) :])

    def leave_calls(self, stage: Stage) -> list[str]:
        """The statements that send off what the walk has written to shared memory."""
        staged = [store.access for store in stage.stores if store.staged and store.access.mode == "bulk"]
        if not staged:
            return []
        self.functions.update(("head_of", "leave"))
        tile = self.plan.tile
        lane = "lane" if tile.threads_per_row > 1 else "0"
        lines = ["show_copies();", f"{self.spelling.barrier}  // the row is complete"]
        for access in staged:
            row, at = self.pointer(access), f"{access.name}_at"
            if self.together():
                block = f"{access.name}_place, {access.name}_first, {self.row_stride(access)}, rows_here"
                lines.append(f"leave_rows({block}, {row}, {at}, {self.cols}, {lane}, live);")
            else:
                lines.append(f"leave<{tile.threads_per_row}>({row}, {at}, {self.cols}, {lane});")
        return lines
