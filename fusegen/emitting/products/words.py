"""What kernels with products have in common, in the words of one dialect: elements in memory, and tiles in the grid."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.emitting.dialect import UNROLL, Dialect, choice
from fusegen.language.types import DType
from fusegen.planner.model import Access
from fusegen.planner.pieces import element_stride_name, stride_name
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.products.mma_operands import SEGMENT
from fusegen.planner.products.wgmma import WgmmaPlan

OF_GROUP = "of_group"  # of grouped products: are the tile's rows those of a group?


@dataclass(frozen=True, slots=True)
class TilePlace:
    """The lines that a tile's place is made with, and its numbers: from the top, and from the left."""

    lines: tuple[str, ...]
    down: str
    across: str


class ProductWords(Dialect):
    """The small texts of one plan in one dialect."""

    own_group, has_group = SEGMENT, OF_GROUP  # the kernel's names of a tile's group, and of whether it has one

    def __init__(self, plan: GemmPlan | WgmmaPlan) -> None:
        super().__init__(plan.target.spelling)
        self.pointers = {p.tensor: p.name for p in plan.params if p.kind in ("pointer", "address")}
        self.dims = plan.row_dims
        self.grid = plan
        self.uses_vec = False
        self.sizes: set[str] = set()  # of those that some kernels ask for, what this one does

    def segment_lanes(self) -> dict[str, object]:
        """How the lanes of a warp find a tile's group together, where they do."""
        lanes, warp, functions = self.grid.groups_a_lane, self.grid.target.warp, self.spelling.functions
        if not lanes:
            return {"groups_a_lane": 0, "keeps_groups": False}
        of = self.spelling.shuffle.format
        return {
            "groups_a_lane": lanes,
            "keeps_groups": False,
            "own_first": f"lane * {lanes}" if lanes > 1 else "lane",  # the lane's first group
            **{name: functions[name][0] for name in ("shuffle_up", "ballot", "popcount")},
            "of_lane": {name: of(name, "from", warp) for name in ("group", "row0", "end")},
            "of_own": {name: of(f"own.{name}", "from", warp) for name in ("begin", "before")},
            "of_one": {
                name: of(f"one.{name}", "from", warp) if lanes > 1 else of(f"own.{name}", "owner", warp)
                for name in ("begin", "before", "end")
            },
            "of_last": {name: of(f"own.{name}", warp - 1, warp) for name in ("behind", "end")},
            "unroll_lanes": f"{UNROLL} 2",  # of more the compiler keeps all ends, and spills
        }

    # ---- elements in memory

    def own_scales(self, access: Access) -> str:
        """Where the scales begin of the matrix that a tile's group has, and what is added to that."""
        return f"{self.own_group} * {access.name}_group + " if access.group_axis is not None else ""

    def vec(self, dtype: DType, count: int) -> str:
        self.uses_vec = True
        return f"Vec<{self.ctype(dtype)}, {count}>"

    def index(self, dim: int, row: str = "row") -> str:
        """The kernel's variable that counts a dimension of rows."""
        return row if dim == len(self.dims) - 1 else self.dims[dim].index

    def at(self, access: Access, *last: str, row: str = "row") -> str:
        """Where the tensor's row `row` begins, and then `last`."""
        terms = [f"{self.index(dim, row)} * {stride_name(access, self.dims, dim)}" for dim in access.strided]
        terms += [f"{self.own_group} * {access.name}_group"] * (access.group_axis is not None)
        return " + ".join([self.pointers[access.tensor], *terms, *last])

    def at_group(self, access: Access, number: str) -> str:
        """Where it has the value of a row's group of columns."""
        return self.at(access, f"({number}) * {element_stride_name(access)}" if access.apart else number)

    def moving(self, what: str, access: Access) -> str:
        """The function that loads or stores neighbours of a tensor: together, or each by itself."""
        name = what if access.mode == "vector" else f"{what}_each"
        self.functions.add(name)
        return name

    def load(self, access: Access, vector: int) -> str:
        return f"{self.moving('load', access)}<{vector}>({self.at(access, 'col')})"

    def store(self, access: Access, vector: int) -> str:
        return f"{self.moving('store', access)}<{vector}>({self.at(access, 'col')}, {access.name}_vec);"

    # ---- tiles in the grid

    def tile_place(self, integer: str) -> TilePlace:
        """Of the tile that is number `tile`: so many rows of tiles at a time, column by column."""
        across, group = self.grid.tiles_across, self.grid.tile.group
        if across == 1:
            return TilePlace((), "tile", "0")
        if group == 1:
            return TilePlace((), "tile / tiles_across", "tile % tiles_across")
        lines = (
            f"const {integer} first = tile / group_tiles * group;",
            f"const {integer} height = tiles_down - first < group ? tiles_down - first : group;",
        )
        return TilePlace(lines, "first + tile % group_tiles % height", "tile % group_tiles / height")

    def span_number(self) -> str:
        """Which output group a tile belongs to that is number `across` from the left."""
        output_groups = self.grid.output_groups
        return choice(
            [f"across < {s.first_tile + s.tiles}" for s in output_groups], [str(i) for i in range(len(output_groups))]
        )
