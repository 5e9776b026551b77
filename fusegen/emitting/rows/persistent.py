"""The words of a plan of persistent blocks, which prefetch the next row.

A thread's vectors lie in two places, and each pass goes over both: first those that registers hold as they were read,
then those in shared memory. The last pass, done with a vector, asks for the next row's in its place: while results are
on their way out, the next row is on its way in. A thread touches only its own places, so no barrier stands between;
an asynchronous copy is issued after the instructions that used what it replaces, and writes hundreds of cycles later.

Results are written by an instruction of 16 bytes that is spelled out: in a loop over rows NVRTC 13 takes the store of a
vector apart, and by eight of two bytes each a softmax at 512 x 1048576 took 2471 us where it now takes 562.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusegen.emitting.dialect import UNROLL
from fusegen.emitting.rows.frame import Frame, Part
from fusegen.emitting.rows.passes import SpelledPass
from fusegen.emitting.rows.vectors import Vectors
from fusegen.planner.model import Load, RowPass
from fusegen.planner.pieces import stride_name


class Persistent(Part):
    """The next row's fetch, and passes over both places, for persistent.cu.j2."""

    def __init__(self, frame: Frame, vectors: Vectors) -> None:
        super().__init__(frame)
        self.vectors = vectors
        self.prefetched = self.plan.rows_ahead
        self.held = self.plan.tile.per_thread - self.plan.tile.kept  # vectors of a thread in registers

    # ---- where a prefetched vector is

    def next_row(self, load: Load) -> str:
        """The pointer to the row that is prefetched."""
        return f"{load.access.name}_next"

    def held_at(self, load: Load) -> str:
        return f"{load.access.name}_held[v - {self.plan.tile.kept}]"

    def stride(self, load: Load) -> str:
        (dim,) = load.access.strided
        return stride_name(load.access, self.plan.row_dims, dim)

    def fetches(self, held: bool) -> list[str]:
        """The statements that ask for one vector of each prefetched tensor."""
        lines = []
        for load in self.prefetched:
            width, source = load.access.vector, f"{self.next_row(load)} + col"
            self.words.functions.update(("load",) if held else ("copy_async", "commit_copies"))
            kept = self.vectors.kept_at(self.vectors.kept_name(load.access), True)
            copy = f"copy_async<{width}>(&{kept}, {source});"
            lines.append(f"{self.held_at(load)} = load<{width}>({source});" if held else copy)
        return lines

    # ---- passes

    def twice(self, row_pass: RowPass, whole: SpelledPass) -> SpelledPass:
        """As one over what registers hold and one over what shared memory has."""
        tile, last = self.plan.tile, row_pass is self.plan.passes[-1]
        staged = {f"{load.access.name}_vec": load for load in row_pass.loads if load.when != "now"}
        in_registers = tuple(
            replace(read, call=self.held_at(staged[read.target])) if read.target in staged else read
            for read in whole.reads
        )
        refill = self.refill(held=False) if last else ()
        head = f"int v = 0; v < {tile.kept}; ++v"
        runs = [replace(whole, head=head, refill=refill, commits=bool(refill))]
        if self.held:
            held = replace(
                whole, head=f"int v = {tile.kept}; v < {tile.per_thread}; ++v", unroll=UNROLL, reads=in_registers,
                pending=-1, refill=self.refill(held=True) if last else (),
            )  # fmt: skip
            runs.insert(0, held)
        steps = [f"{self.next_row(load)} += step * {self.stride(load)};" for load in self.prefetched]
        before = ("const bool more = row + step < rows;", *steps) if last else ()
        return replace(whole, copies=(), before=before, runs=tuple(runs), first_results=False)

    def refill(self, held: bool) -> tuple[str, ...]:
        return tuple(f"if (more) {line}" for line in self.fetches(held))

    def context(self) -> dict[str, Any]:
        """What persistent.cu.j2 asks for beside the rest: the first row's fetch."""
        pointers = [
            {
                "type": f"const {self.words.ctype(load.access.dtype)}",
                "name": self.next_row(load),
                "expr": f"{load.access.name}_ptr + first * {self.stride(load)}",
            }
            for load in self.prefetched
        ]
        arrays = [
            {"type": self.frame.vec_type(load.access), "name": f"{load.access.name}_held"} for load in self.prefetched
        ]
        return {
            "step": f"gridDim.x / {self.frame.row_blocks}" if self.plan.tile.blocks_per_row > 1 else "gridDim.x",
            "next_rows": pointers,
            "held": self.held,
            "held_arrays": arrays,
            "fetch_held": self.fetches(held=True) if self.held else [],
            "fetch_shared": self.fetches(held=False),
            "what": ", ".join(load.value for load in self.prefetched),
        }
