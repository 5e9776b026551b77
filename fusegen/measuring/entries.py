"""What is measured of one way to run a chain, and its share of the floor; a time that can't be is refused.

`Work` is what has to be done, whoever does it: of one kernel, its plan's bytes and operations; of a program, the bytes
of its operands and outputs, and the products of all its kernels. What lies between kernels is no part of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from fusegen.language.views import View
from fusegen.measuring.timing import Timing
from fusegen.planner.model import Plan
from fusegen.planner.pieces import arrays, bytes_of
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.side_by_side import JoinedPlan

LEEWAY_FACTOR = 1.03  # over the copy rate: on an H200 fusegen's own copy reached 1.01 of the driver's
# from this share of writes on, a copy is the ceiling; reads alone don't turn the memory's bus around
BALANCED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to run the chain, or a part of it.

    `kind`: fusegen, unfused, torch, library, peer; of parts piece (one operator), kernel (one of a program's), between
    (two of these). `share` is the floor's time over the median; a piece and a kernel have floors of their own. `rate`
    is that of the bytes that have to move, in bytes per µs. `refused` says why there is none: a time that can't be (it
    stays in `timing`), a package that is missing, an error.
    """

    name: str
    kind: str
    timing: Timing | None
    share: float | None = None
    launches: int | None = None  # kernels of one run, where that is known
    refused: str = ""
    rate: float | None = None
    product_flops: int | None = None  # of a program's kernel, its own

    @property
    def part(self) -> bool:
        """Is it not the whole chain?"""
        return self.kind in ("piece", "kernel", "between")

    @property
    def us(self) -> float | None:
        """The median, unless refused."""
        return self.timing.median if self.timing is not None and not self.refused else None


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be done: bytes that have to move, those written among them; operations, those of matrix products
    among them. `unfused` are the bytes of one kernel an operator; `matrix_tflops` and `dram_gbs` are by the data sheet.
    """

    ideal: int
    written: int
    unfused: int
    flops: int
    product_flops: int
    matrix_tflops: float
    dram_gbs: float


def work_of(plan: Plan | JoinedPlan | ProgramPlan) -> Work:
    if isinstance(plan, ProgramPlan):
        return work_of_program(plan)
    traffic = plan.cost.traffic
    written = sum(t.ideal for t in traffic.tensors if t.output)
    return Work(
        traffic.ideal, written, traffic.unfused, traffic.flops, traffic.product_flops, plan.matrix_tflops,
        plan.target.dram_gbs,
    )  # fmt: skip


def work_of_program(plan: ProgramPlan) -> Work:
    """An operand that several kernels read counts once, and for no more than what they read of it."""
    parts = [work_of(step.plan) for step in plan.steps]
    read: dict[str, dict[View | None, int]] = defaultdict(dict)
    for step in plan.steps:
        least = {traffic.tensor: traffic.ideal for traffic in step.plan.cost.traffic.tensors}
        for binding in step.bindings:
            found = read[binding.base]
            found[binding.view] = max(found.get(binding.view, 0), least[binding.tensor])
    graph = plan.graph
    moved = {t.name: min(bytes_of(graph, t), sum(read[t.name].values())) for t in arrays(graph)}
    multiplying = [part for part in parts if part.product_flops] or parts
    return Work(
        ideal=sum(moved.values()),
        written=sum(moved[t.name] for t in graph.outputs),
        unfused=sum(part.unfused for part in parts),
        flops=sum(part.flops for part in parts),
        product_flops=sum(part.product_flops for part in parts),
        matrix_tflops=max(part.matrix_tflops for part in multiplying),
        dram_gbs=plan.target.dram_gbs,
    )


@dataclass(frozen=True, slots=True)
class Judge:
    """Makes entries of timings: with the share of the floor, or refused."""

    work: Work
    rate: float  # of a copy, bytes per µs
    matrix_rate: float  # flop per µs of matrix products

    @property
    def floor_us(self) -> float:
        return max(self.work.ideal / self.rate, self.work.product_flops / self.matrix_rate)

    @property
    def ceiling(self) -> float:
        """Bytes per µs that no launch can exceed: those of a copy, or the data sheet's where little is written."""
        copied = self.rate * LEEWAY_FACTOR
        sheet = self.work.dram_gbs * 1e3
        return copied if self.work.written >= BALANCED_SHARE * self.work.ideal else max(copied, sheet)

    def entry(self, name: str, kind: str, timing: Timing, launches: int | None = None) -> Entry:
        moved = self.work.ideal / timing.median if timing.median else math.inf
        if moved > self.ceiling:
            reason = (
                f"{timing.median:.1f} us would be {moved / 1e3:.0f} GB/s, and memory gives at most "
                f"{self.ceiling / 1e3:.0f}: data in cache, or not all of the work done"
            )
            return Entry(name, kind, timing, None, launches, reason)
        flops = self.work.product_flops / timing.median / 1e6
        if flops > self.work.matrix_tflops:
            reason = (
                f"{timing.median:.1f} us would be {flops:.0f} TFLOP/s, and the data sheet has "
                f"{self.work.matrix_tflops:.0f}: not all of the work done"
            )
            return Entry(name, kind, timing, None, launches, reason)
        return Entry(name, kind, timing, self.floor_us / timing.median, launches, rate=moved)


def entry_of(judge: Judge, name: str, kind: str, timed: Timing | str) -> Entry:
    """Of times, or of why there are none."""
    return judge.entry(name, kind, timed) if isinstance(timed, Timing) else refusal(name, kind, timed)


def refusal(name: str, kind: str, reason: object) -> Entry:
    return Entry(name, kind, None, refused=str(reason).splitlines()[0] if str(reason) else type(reason).__name__)
