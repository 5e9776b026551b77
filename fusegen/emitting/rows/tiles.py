"""How tensors that lie turned round go through shared memory, in the words of one dialect: a block's rows and columns
of one are a tile there, column by column, which all threads read from memory, or write to it, along its columns."""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.emitting.rows.frame import Part, scaled
from fusegen.planner.model import Access, Load, RowPass, Store
from fusegen.planner.pieces import element_stride_name, stride_name


class Tiles(Part):
    """The tiles of one plan."""

    def shared(self) -> list[Mapping[str, str]]:
        """Where they are."""
        ways: list[Load | Store] = [load for row_pass in self.plan.passes for load in row_pass.loads]
        ways += [store for row_pass in self.plan.passes for store in row_pass.stores]
        found = {way.access.tensor: way for way in ways if way.transport == "turned"}
        return [
            {
                "type": self.words.ctype(way.access.dtype),
                "name": f"{way.access.name}_tile",
                "expr": f"{self.frame.shared_at(f'{way.access.name}_tile', way.offset_bytes)})",
            }
            for way in found.values()
        ]

    def before(self, row_pass: RowPass) -> list[str]:
        """What all threads read for it."""
        read = {load.access.tensor: load.access for load in row_pass.loads if load.transport == "turned"}
        calls = [self.moved("read_tile", access) for access in read.values()]
        return [*calls, f"{self.words.spelling.barrier}  // what was read is complete"] if calls else []

    def behind(self, row_pass: RowPass) -> list[str]:
        """What all threads write of it."""
        return [self.moved("write_tile", store.access) for store in row_pass.stores if store.transport == "turned"]

    def load_call(self, access: Access) -> str:
        self.words.functions.add("load_turned")
        return f"load_turned<{access.vector}, {self.pitch()}>({self.own_place(access)})"

    def store_call(self, access: Access) -> str:
        self.words.functions.add("store_turned")
        return f"store_turned<{access.vector}, {self.pitch()}>({self.own_place(access)}, {access.name}_vec)"

    def pitch(self) -> str:
        rows = self.frame.tiling()["rows"]
        return self.frame.size("tile_pitch", f"{rows} + 1", "elements from a column of a tile to the next")

    def own_place(self, access: Access) -> str:
        """Of the thread's row, in the first of its columns."""
        col, row = scaled("lane", self.plan.tile.vector), self.frame.row_in_block()
        return f"{access.name}_tile + {scaled(col, self.pitch())} + {row}"

    def moved(self, function: str, access: Access) -> str:
        self.words.functions.add(function)
        tiling, dims = self.frame.tiling(), self.plan.row_dims
        cols = self.frame.size("tile_cols", self.plan.tile.cols, "that a block takes")
        threads = self.frame.size("threads", self.plan.tile.threads, "of a block")
        strides = f"{stride_name(access, dims, 0)}, {element_stride_name(access)}"
        whole = "true" if self.plan.tail == "none" else "false"
        first_col = self.frame.first_col_of_block() or "0"
        return (
            f"{function}<{cols}, {tiling['rows']}, {threads}, {whole}>(\n    {access.name}_ptr, {strides},\n"
            f"    {tiling['first']}, rows,\n    {first_col}, {self.plan.cols}, {access.name}_tile);"
        )
