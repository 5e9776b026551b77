"""What every part of a GemmPlan's spelling asks: names, types, and where things lie."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.emitting.dialect import VALUE_TYPES
from fusegen.emitting.products.words import ProductWords
from fusegen.language.types import f32
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.products.parts import Operand


@dataclass(frozen=True, slots=True)
class Own:
    """One factor's words: its place in a slice, and how the thread counts its chunks."""

    factor: Operand
    name: str  # in the kernel; that of the output group at hand where there are several
    extent: int  # of M or N, in a tile
    at: str  # its first element in a slice; "" for the first factor's

    @property
    def mn(self) -> str:
        return f"{self.name}_{'m' if self.factor.mn == 'rows' else 'n'}"

    @property
    def k(self) -> str:
        return f"{self.name}_k"


class GemmWords(ProductWords):
    """The small texts of a GemmPlan in one dialect."""

    def __init__(self, plan: GemmPlan) -> None:
        super().__init__(plan)
        self.plan = plan
        self.tile = plan.tile
        self.several = plan.several
        self.owns = self.own_factors()

    def own_factors(self) -> list[Own]:
        owns = [Own(factor, factor.name, self.tile.rows, "") for factor in self.plan.left]
        for place, right in enumerate(self.plan.output_groups[0].rights):
            name = (f"right_{place + 1}" if place else "right") if self.several else right.name
            owns.append(Own(right, name, self.tile.cols, f"{name}_at"))
        return owns

    # ---- small texts

    @property
    def rows_end(self) -> str:
        """Behind which row a tile has no more: all rows', or its group's."""
        return "segment_end" if self.plan.segments else "rows"

    @property
    def short(self) -> bool:
        """Is the end of a tile's rows kept as how many it has? Two registers of a group's end, which are kept while
        products are summed, had led to spills."""
        return self.plan.segments is not None and not self.tile.persistent

    def cols_ragged(self) -> bool:
        """Does an output group end inside of a tile?"""
        return any(s.cols % self.tile.cols for s in self.plan.output_groups)

    @property
    def element(self) -> str:
        return self.ctype(self.plan.dtype)

    @property
    def sum_type(self) -> str:
        """The C type of a sum."""
        return VALUE_TYPES[self.plan.atom.sum_type]

    @property
    def size(self) -> int:
        """Bytes of an element of a factor's tile."""
        return self.plan.dtype.bytes

    @property
    def place_across(self) -> str:
        """The function that says where an element lies in a tile whose rows run along M or N."""
        return "place_across" if self.plan.dtype is f32 else "place"

    @property
    def thread(self) -> str:
        """The thread's number in its slice-K group."""
        return f"threadIdx.x % {self.plan.slice_k_threads}" if self.tile.slice_k > 1 else "threadIdx.x"

    @property
    def barrier(self) -> str:
        """Between those who bring a slice and those who use it."""
        own = self.tile.slice_k > 1 and self.plan.slice_k_threads == self.plan.target.warp
        if "shared_barrier" in self.spelling.functions:
            self.functions.add("shared_barrier")
            return "shared_barrier();"
        return self.spelling.warp_barrier if own else self.spelling.barrier

    @property
    def number(self) -> str:
        """Of the part of K that this slice-K group has."""
        return (
            "k_part"
            if self.tile.slice_k > 1 and self.tile.cluster > 1
            else "k_group"
            if self.tile.slice_k > 1
            else "rank"
        )

    @property
    def band_rows(self) -> str:
        return "band_rows" if self.tile.bands > 1 else "tile_rows"

    @property
    def warp_row(self) -> str:
        """The warp's first row of the tile, before what is added to it."""
        return "warp_row + " if self.tile.warps_down > 1 else ""

    @property
    def warp_col(self) -> str:
        return "warp_col + " if self.tile.warps_across > 1 else ""

    def sum_name(self, place: int) -> str:
        if self.several:
            return self.owns[len(self.plan.left) + place].name
        return self.plan.output_groups[0].contractions[place].value
