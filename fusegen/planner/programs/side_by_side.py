"""One launch of several steps: what it is, what may be one, and what it costs.

Its first blocks do the first step, the next ones the second: each step's text is a function of its own, with its own
constants, that is told the block's number among the step's.

    time    the steps' own, less a launch: the second step's blocks start while the last ones of the first run
    blocks  an SM holds as many as it does of the step that takes the most registers, which may be too few for another

What may be one launch are row kernels of one block size whose rows stay in registers; of those that reduce, each row
has as many threads in one step as in the other, so that both call the same functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusegen.planner.heading import field, header_lines
from fusegen.planner.model import Cost, Plan, RowPlan, Traffic
from fusegen.planner.parts import Dependent, Param
from fusegen.planner.rows.duration import LAUNCH_US, LOAD_US
from fusegen.targets.base import Target

LETTERS = "abcdefgh"  # of the steps of a launch, before their parameters' names
MOST_STEPS = len(LETTERS)
RULES = ("elementwise", "rowwise")  # whose kernels may be one step among several


@dataclass(frozen=True)
class JoinedPlan:
    """One launch of several steps. `plans`: their own, in the order in which they have its blocks; `said`: what each
    makes, in the spec's words."""

    name: str
    target: Target
    plans: tuple[Plan, ...]
    said: tuple[str, ...]

    persistent_rows = False
    template = "joined.cu.j2"

    @cached_property
    def parts(self) -> tuple[Plan, ...]:
        """The plans, as parts of this launch."""
        if why := self.obstacle(self.plans):
            raise ValueError(f"{self.name} is no launch: {why}")
        return tuple(replace(plan, joined=True, folded=False, dependent=None) for plan in self.plans)

    def obstacle(self, plans: Sequence[Plan]) -> str:
        """Why these can't be such a launch; empty where they can."""
        return obstacle(plans)

    @property
    def dependent(self) -> Dependent | None:
        """Of the launch, for all of its steps."""
        return self.plans[0].dependent

    @property
    def waits(self) -> bool:
        return self.plans[0].waits

    @property
    def launched(self) -> str:
        return self.plans[0].launched

    @property
    def threads(self) -> int:
        return self.parts[0].threads

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shared_bytes(self) -> int:
        return max(part.shared_bytes for part in self.parts)

    @property
    def regime(self) -> str:
        return f"{len(self.parts)} steps in one launch of {self.threads} threads a block"

    @property
    def shares(self) -> str:
        """Which rows blocks take that share them out, in words; empty where none do."""
        return ""

    @property
    def configuration(self) -> str:
        return " + ".join(part.configuration for part in self.parts)

    @property
    def max_blocks(self) -> int:
        """Of one launch: along one dimension of the grid."""
        return self.target.max_blocks(self.threads)

    def grid(self, blocks: int) -> tuple[int, int]:
        return blocks, 1

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """Pointers, run-time scalars and numbers of all steps, each by a letter of its step; behind the pointers those
        of the launch itself; and of the first steps, how many blocks they have."""
        each = [
            [replace(p, name=f"{letter}_{p.name}", tensor=f"{letter}_{p.tensor}") for p in part.params]
            for letter, part in zip(LETTERS, self.parts, strict=False)
        ]
        every = list(itertools.chain(*each))
        counts = [Param("blocks", self.blocks_name(place)) for place in range(self.counted)]
        pointers = [p for p in every if p.kind == "pointer"]
        values = [p for p in every if p.kind == "value"]
        numbers = [p for p in every if p.kind not in ("pointer", "value")]
        return (*pointers, *self.own_pointers, *values, *counts, *numbers)

    @property
    def own_pointers(self) -> tuple[Param, ...]:
        """To what no step reads or writes."""
        return ()

    @property
    def counted(self) -> int:
        """Of so many steps, the first ones, the kernel is told how many blocks they have."""
        return len(self.parts) - 1

    def blocks(self, counts: Sequence[int]) -> int | None:
        """Of a launch whose steps have so many; None where it can't be one."""
        return total if (total := sum(counts)) <= self.max_blocks else None

    def blocks_name(self, place: int) -> str:
        return f"blocks_{LETTERS[place]}"

    @cached_property
    def cost(self) -> Cost:
        """Of the launch."""
        return cost_of([part.cost for part in self.parts], self.target)

    @property
    def why(self) -> str:
        apart = sum(part.cost.time_us for part in self.parts)
        return f"one launch is expected to take {self.cost.time_us:.1f} us, and one for each step {apart:.1f}"

    @property
    def matrix_tflops(self) -> float:
        return self.parts[0].matrix_tflops

    def __str__(self) -> str:
        return "\n".join(joined_lines(self))


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """A rendered launch: its plan and its text."""

    plan: JoinedPlan
    text: str
    filename: str


def joined_lines(plan: JoinedPlan) -> list[str]:
    """What opens the kernel's text: the launch, and each of its steps."""
    lines = [f"{plan.name}: {plan.regime}", "", *field("because", plan.why)]
    lines += field("rows", plan.shares) if plan.shares else []
    lines += field("launch", plan.launched) if plan.launched else []
    for letter, part in zip(LETTERS, plan.parts, strict=False):
        lines += ["", *(f"{letter}. {line}" if not n else f"   {line}" for n, line in enumerate(header_lines(part)))]
    return [line.rstrip() for line in lines]


# ---------------------------------------------------------------- what it costs


def cost_of(costs: Sequence[Cost], target: Target) -> Cost:
    """Of one launch in place of several."""
    resident = min(cost.blocks_per_sm for cost in costs)
    needed = target.dram_gbs / target.sms * 1e3 * LOAD_US  # bytes that an SM asks for while it waits for the first
    time = sum(cost.time_us * slower(cost, resident, needed) for cost in costs) - (len(costs) - 1) * LAUNCH_US
    return Cost(
        traffic=traffic_of([cost.traffic for cost in costs]),
        floor_us=sum(cost.floor_us for cost in costs),
        time_us=time,
        bound=max(costs, key=lambda cost: cost.time_us).bound,
        in_flight_bytes=min(cost.in_flight_bytes * resident // cost.blocks_per_sm for cost in costs),
        registers=max(cost.registers for cost in costs),
        blocks_per_sm=resident,
    )


def slower(cost: Cost, resident: int, needed: float) -> float:
    """How many times as long a step takes with `resident` blocks an SM in place of its own: it is as fast as long as
    what it has asked for fills the time until the first of that arrives."""
    own = cost.in_flight_bytes / needed
    return min(1.0, own) / min(1.0, own * resident / cost.blocks_per_sm) if own else 1.0


def traffic_of(parts: Sequence[Traffic]) -> Traffic:
    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    most = max(parts, key=lambda part: part.moved)
    counted = ("ideal", "moved", "unfused", "per_element_fused", "per_element_unfused", "flops", "special",
               "launches_unfused", "product_flops")  # fmt: skip
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return replace(most, tensors=tensors, **{name: total(name) for name in counted})


def launch_cost(plans: Sequence[Plan], target: Target) -> Cost:
    return plans[0].cost if len(plans) == 1 else cost_of([plan.cost for plan in plans], target)


# ---------------------------------------------------------------- what may be one


def obstacle(plans: Sequence[Plan]) -> str:
    """Why these can't be one launch; empty where they can."""
    for plan in plans:
        if not isinstance(plan, RowPlan) or plan.rule not in RULES or plan.selection or plan.in_turn:
            return f"{plan.name} is no kernel of rows"
        if plan.cluster > 1 or plan.persistent_rows:
            return f"{plan.name} has clusters or persistent blocks"
        if plan.shared_bytes or plan.prefetched or plan.bulk or any(row_pass.scans for row_pass in plan.passes):
            return f"{plan.name} keeps something in shared memory"
    rows = [plan for plan in plans if isinstance(plan, RowPlan)]
    if len({(plan.threads, plan.flat) for plan in rows}) > 1:
        return "their blocks differ in threads"
    reducing = [plan for plan in rows if plan.misaligned_rows or any(p.reductions or p.groups for p in plan.passes)]
    if len({(plan.tile.threads_per_row, plan.tile.vector, plan.uniform_results) for plan in reducing}) > 1:
        return "their rows have other numbers of threads, which reduce or write them together"
    return ""
