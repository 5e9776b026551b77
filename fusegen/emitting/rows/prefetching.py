"""The words of vectors that bulk copies bring to shared memory while the first pass runs, for later ones to take.

They lie there as in global memory. One thread asks for them once the row's own loads are under way; the barrier of the
first pass's reduction stands between it and the threads that wait.
"""

from __future__ import annotations

from fusegen.emitting.rows.frame import Part
from fusegen.planner.model import RowPass
from fusegen.planner.tile import LINE_BYTES


class Prefetching(Part):
    """Their places, who asks for them, who waits, and what a pass takes."""

    def prefetched_shared(self) -> list[str]:
        """Where they lie."""
        prefetched = self.plan.prefetched
        if not prefetched:
            return []
        cols = self.plan.cols
        aligned = f"__shared__ __align__({LINE_BYTES})"
        lines = [f"{aligned} {self.frame.vec_type(a)} {a.name}_prefetched[{cols // a.vector}];" for a in prefetched]
        return [*lines, "__shared__ unsigned long long arrivals;"]

    def asks(self, row_pass: RowPass) -> list[str]:
        """What one thread asks for in this pass, behind its loads."""
        prefetched = self.plan.prefetched
        if not prefetched or row_pass is not self.plan.passes[0]:
            return []
        self.words.functions.add("copy_bulk")
        sizes = {a.name: self.plan.cols * a.dtype.bytes for a in prefetched}
        return [
            "if (threadIdx.x == 0) {",
            "  start_arrivals(arrivals, 1);",
            f"  expect_arrival(arrivals, {sum(sizes.values())});",
            *(
                f"  copy_bulk({a.name}_prefetched, {self.frame.pointer(a)}, {sizes[a.name]}, arrivals);"
                for a in prefetched
            ),
            "}",
        ]

    def before(self, row_pass: RowPass) -> list[str]:
        """What a pass waits for. The first one that takes a prefetched vector waits for all."""
        lines = [f"{self.words.spelling.barrier}  // all have read what was brought"] if row_pass.behind_barrier else []
        takes = (other for other in self.plan.passes if any(load.when == "prefetched" for load in other.loads))
        return [*lines, "wait_arrivals(arrivals);"] if row_pass is next(takes, None) else lines

    def takes(self, row_pass: RowPass) -> list[str]:
        """A thread's vector v of each that this pass takes."""
        place = self.frame.vector_place()
        prefetched = [load.access for load in row_pass.loads if load.when == "prefetched"]
        return [f"const {self.frame.vec_type(a)} {a.name}_vec = {a.name}_prefetched[{place}];" for a in prefetched]
