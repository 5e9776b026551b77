"""The words of a plan whose blocks take rows in turn.

A thread's vectors lie in two places, and each walk goes over both: first those that registers hold as they were read,
then those in shared memory. The last walk, done with a vector, asks for the next row's in its place: while results are
on their way out, the next row is on its way in. A thread touches only its own places, so no barrier stands between;
an asynchronous copy is issued after the instructions that used what it replaces, and writes hundreds of cycles later.

Results are written by an instruction of 16 bytes that is spelled out: in a loop over rows NVRTC 13 takes the store of a
vector apart, and by eight of two bytes each a softmax at 512 x 1048576 took 2471 us where it now takes 562.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.emitting.dialect import UNROLL
from fusegen.emitting.rows.spelling import Speller
from fusegen.planner.model import Access, Load, RowPlan, Stage
from fusegen.planner.pieces import stride_name


class RollingSpeller(Speller):
    """Of a rolling plan, for rolling.cu.j2."""

    parts = "part[turn]"

    def __init__(self, plan: RowPlan) -> None:
        super().__init__(plan)
        self.fetched = [load for load in plan.stages[0].loads if load.when == "keep"]
        self.held = plan.tile.per_thread - plan.tile.kept  # vectors of a thread in registers

    # ---- where a fetched vector is

    def next_row(self, load: Load) -> str:
        """The pointer to the row that is fetched next."""
        return f"{load.access.name}_next"

    def held_at(self, load: Load) -> str:
        return f"{load.access.name}_held[v - {self.plan.tile.kept}]"

    def stride(self, load: Load) -> str:
        (dim,) = load.access.strided
        return stride_name(load.access, self.plan.row_dims, dim)

    def fetches(self, held: bool) -> list[str]:
        """The statements that ask for one vector of each fetched tensor."""
        lines = []
        for load in self.fetched:
            width, source = load.access.vector, f"{self.next_row(load)} + col"
            self.functions.update(("load",) if held else ("copy_async", "commit_copies"))
            place = self.held_at(load) if held else f"&{self.kept_at(self.kept_name(load.access), True)}"
            lines.append(f"{place} = load<{width}>({source});" if held else f"copy_async<{width}>({place}, {source});")
        return lines

    # ---- what is said otherwise than by other plans

    def partly(self) -> str:
        """Nothing is read again."""
        return ""

    def row_pointers(self) -> list[Mapping[str, str]]:
        """Of what is not fetched a row ahead."""
        names = {f"{load.access.name}_row" for load in self.fetched}
        return [pointer for pointer in super().row_pointers() if pointer["name"] not in names]

    def store_call(self, access: Access) -> str:
        self.functions.add("store_words")
        return f"store_words<{access.vector}>({self.pointer(access)} + col, {access.name}_vec)"

    def walk(self, number: int, stage: Stage) -> Mapping[str, Any]:
        """As one over what registers hold and one over what shared memory has."""
        whole, tile = super().walk(number, stage), self.plan.tile
        last = stage is self.plan.stages[-1]
        staged = {f"{load.access.name}_vec": load for load in stage.loads if load.when != "now"}
        in_registers = [
            {**read, "call": self.held_at(staged[read["target"]])} if read["target"] in staged else read
            for read in whole["reads"]
        ]
        spans = []
        if self.held:
            spans.append({
                **whole, "head": f"int v = {tile.kept}; v < {tile.per_thread}; ++v", "unroll": UNROLL,
                "reads": in_registers, "pending": -1, "refill": self.refill(held=True) if last else [],
                "commits": False,
            })  # fmt: skip
        refill = self.refill(held=False) if last else []
        head = f"int v = 0; v < {tile.kept}; ++v"
        spans.append({**whole, "head": head, "refill": refill, "commits": bool(refill)})
        steps = [f"{self.next_row(load)} += step * {self.stride(load)};" for load in self.fetched]
        before = ["const bool more = row + step < rows;", *steps] if last else []
        return {**whole, "copies": [], "before": before, "spans": spans, "first_results": False}

    def refill(self, held: bool) -> list[str]:
        return [f"if (more) {line}" for line in self.fetches(held)]

    def context(self) -> dict[str, Any]:
        """What rolling.cu.j2 asks for beside the rest: the first row's fetch."""
        shared_by = self.plan.tile.blocks_per_row
        pointers = [
            {
                "type": f"const {self.ctype(load.access.dtype)}",
                "name": self.next_row(load),
                "expr": f"{load.access.name}_ptr + first * {self.stride(load)}",
            }
            for load in self.fetched
        ]
        arrays = [{"type": self.vec_type(load.access), "name": f"{load.access.name}_held"} for load in self.fetched]
        return {
            **super().context(),
            "step": f"gridDim.x / {shared_by}" if shared_by > 1 else "gridDim.x",
            "next_rows": pointers,
            "held": self.held,
            "held_arrays": arrays,
            "fetch_held": self.fetches(held=True) if self.held else [],
            "fetch_shared": self.fetches(held=False),
            "what": ", ".join(load.value for load in self.fetched),
        }
