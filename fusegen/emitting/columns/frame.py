"""What every part of a column kernel's text asks: where elements lie, how vectors move, what values are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegen.emitting.dialect import Dialect
from fusegen.planner.columns.plan import ColumnsPlan
from fusegen.planner.model import Access, Load, RowDim, Store
from fusegen.planner.pieces import VECTOR_BYTES, stride_name


class ColumnsFrame:
    def __init__(self, plan: ColumnsPlan) -> None:
        last = len(plan.graph.shape) - 2
        self.plan = plan
        row = next((self.index(dim) for dim in plan.row_dims if last in dim.axes), "")
        self.tile = plan.tile
        self.words = Dialect(plan.target.spelling, row_number=row)
        self.dims = {dim.index: dim for dim in plan.reduced_dims}

    @property
    def ragged(self) -> bool:
        """Have some threads of the last tile no column?"""
        return self.plan.cols % self.tile.cols != 0

    @property
    def rows(self) -> str:
        """How many are reduced."""
        return self.plan.reduced_dims[0].extent if len(self.plan.reduced_dims) == 1 else "rows"

    def strides(self, access: Access, reduced: bool) -> list[str]:
        """The steps along dimensions that are reduced, or along those that stay."""
        places = [place for place in access.strided if (place in self.plan.reduced) is reduced]
        dims = self.plan.row_dims
        return [f"{self.index(dims[place])} * {stride_name(access, dims, place)}" for place in places]

    def index(self, dim: RowDim) -> str:
        """One dimension's alone is the row."""
        return "row" if len(self.plan.reduced_dims) == 1 and dim in self.plan.reduced_dims else dim.index

    def indices(self, dims: Sequence[RowDim], number: str) -> list[str]:
        """Each dimension's own index, from the number of what they count together."""
        if len(dims) == 1:
            return [f"const unsigned {dims[0].index} = {number};"]
        sizes = [f"static_cast<unsigned>({dim.extent})" for dim in dims]
        lines = []
        for place, dim in enumerate(dims):
            inner = " / ".join(reversed(sizes[place + 1 :]))
            base = f"{number} / {inner}" if inner else number
            lines.append(f"const unsigned {dim.index} = {base}" + (f" % {sizes[place]};" if place else ";"))
        return lines

    def pointer(self, access: Access) -> str:
        return f"{access.name}_first" if self.strides(access, False) else f"{access.name}_ptr"

    def address(self, access: Access, col: str = "col") -> str:
        return " + ".join([self.pointer(access), *self.strides(access, True), *([col] if access.by_column else [])])

    def dtype_of(self, name: str) -> Any:
        return next(r.dtype for r in self.plan.reductions if name in r.results)

    def value(self, load: Load, text: str) -> str:
        return self.words.define(load.value, load.dtype, self.words.to_value(load.access.dtype, text))

    def vec(self, access: Access) -> str:
        return f"Vec<{self.words.ctype(access.dtype)}, {access.vector}>"

    def load_text(self, access: Access) -> str:
        name = "load" if access.mode == "vector" else "load_each"
        self.words.functions.add(name)
        return f"{name}<{access.vector}>({self.address(access)})"

    def store_text(self, store: Store) -> str:
        access = store.access
        name = "store" if access.mode == "vector" else "store_each"
        wide = access.vector * access.dtype.bytes > VECTOR_BYTES
        if name == "store" and wide and self.plan.target.async_copies:
            name = "store_words"
        self.words.functions.add(name)
        return f"{name}<{access.vector}>({self.address(access)}, {access.name}_vec[u]);"
