"""The words of vectors that bulk copies bring to shared memory while the first walk runs, for later ones to take.

They lie there as in global memory. One thread asks for them once the row's own loads are under way; the barrier of the
first walk's reduction stands between it and the threads that wait.
"""

from __future__ import annotations

from fusegen.emitting.rows.frame import Part
from fusegen.planner.model import LINE_BYTES, Stage


class Fetching(Part):
    """Their places, who asks for them, who waits, and what a walk takes."""

    def fetched_shared(self) -> list[str]:
        """Where they lie."""
        fetched = self.plan.fetched
        if not fetched:
            return []
        cols = self.plan.cols
        aligned = f"__shared__ __align__({LINE_BYTES})"
        lines = [f"{aligned} {self.frame.vec_type(a)} {a.name}_fetched[{cols // a.vector}];" for a in fetched]
        return [*lines, "__shared__ unsigned long long arrivals;"]

    def asks(self, stage: Stage) -> list[str]:
        """What one thread asks for in this walk, behind its loads."""
        fetched = self.plan.fetched
        if not fetched or stage is not self.plan.stages[0]:
            return []
        self.words.functions.add("copy_bulk")
        sizes = {a.name: self.plan.cols * a.dtype.bytes for a in fetched}
        return [
            "if (threadIdx.x == 0) {",
            "  start_arrivals(arrivals, 1);",
            f"  expect_arrival(arrivals, {sum(sizes.values())});",
            *(f"  copy_bulk({a.name}_fetched, {self.frame.pointer(a)}, {sizes[a.name]}, arrivals);" for a in fetched),
            "}",
        ]

    def before(self, stage: Stage) -> list[str]:
        """What a walk waits for. The first one that takes a fetched vector waits for all."""
        lines = [f"{self.words.spelling.barrier}  // all have read what was brought"] if stage.behind_barrier else []
        takes = (other for other in self.plan.stages if any(load.when == "fetched" for load in other.loads))
        return [*lines, "wait_arrivals(arrivals);"] if stage is next(takes, None) else lines

    def takes(self, stage: Stage) -> list[str]:
        """A thread's vector v of each that this walk takes."""
        place = f"v * {self.plan.tile.team} + lane" if self.frame.loops() else "lane"
        fetched = [load.access for load in stage.loads if load.when == "fetched"]
        return [f"const {self.frame.vec_type(a)} {a.name}_vec = {a.name}_fetched[{place}];" for a in fetched]
