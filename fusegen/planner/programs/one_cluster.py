"""One launch of several steps, one after another: a cluster of blocks takes them in turn.

Steps that take a few microseconds, as of a mixture's router, are mostly launches. Here one cluster does the work of
each step's blocks, which its own take in turn, and waits for itself between two steps:

    cluster   a release and an acquire, so that all blocks read what any of them wrote: less than a launch takes
    time      the steps' own on so few SMs, a barrier for each, and one launch; what a step reads that other SMs would
              have brought at once takes longer, so that little work is a launch of this kind
    blocks    as many as a cluster may have on every GPU that has clusters

A barrier of a whole grid would take any number of SMs. But its blocks all have to run at once, which a launch beside
others does not promise, and its counter lies in memory that somebody has to clear.

What may be such a step are kernels of rows, sorts of slots, and tiles of products by a warp's own instructions, all of
one block size. A step's text is that of its own kernel, in a namespace, and is told the block's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusegen.planner.model import Cost, Plan
from fusegen.planner.programs.side_by_side import MOST_STEPS, JoinedPlan, traffic_of
from fusegen.planner.rows.duration import LAUNCH_US
from fusegen.targets.base import Target

MOST_CLUSTER = 8  # blocks: the most that every GPU with clusters takes
SM_GBS = 80.0  # that one SM brings
# Fitted to routers with their sorts, 10 shapes of 1 to 512 tokens and 8 to 256 experts, on an H200 (cold L2, medians of
# 20; benchmarks/one_cluster.py): all three steps by one cluster took 3.1 us less than three launches for 8 tokens, 0.9
# less for 64, 1.2 less for 128, 0.1 more for 256 and 5.3 more for 512. The constants say 3.6, 2.1, 1.8 and 0.6 less,
# and 7.2 more. What they choose takes 0.5 us more than the best of what was timed, at worst; since top-k sorts words,
# 1.4 for 512 tokens, whose blocks of 256 threads take longer than said, and 0.3 elsewhere.
BARRIER_US = 0.9  # between two steps
TURN_US = 1.2  # of a block behind the first one that an SM takes: nothing else of the step runs beside it
SOONER_US = 2.6  # that a product of few bytes takes less than the cost of products says, which is fitted to many
MOST_MORE = 4  # times as many blocks as were planned for, at other sizes


@dataclass(frozen=True)
class OneClusterPlan(JoinedPlan):
    """One launch of several steps that a cluster takes one after another."""

    template = "one_cluster.cu.j2"

    @cached_property
    def parts(self) -> tuple[Plan, ...]:
        """The plans, as parts of this launch. What one step writes another one reads: no pointer is promised to be the
        only one to its memory."""
        if why := self.obstacle(self.plans):
            raise ValueError(f"{self.name} is no launch: {why}")
        return tuple(
            replace(
                plan,
                joined=True,
                folded=False,
                dependent=None,
                params=tuple(replace(param, shared=True) for param in plan.params),
            )
            for plan in self.plans
        )

    @staticmethod
    def obstacle(plans: Sequence[Plan]) -> str:
        return obstacle(plans)

    @property
    def cluster(self) -> int:
        return cluster_of(self.target)

    @property
    def regime(self) -> str:
        blocks = f"a cluster of {self.cluster} blocks of {self.threads} threads"
        return f"{len(self.parts)} steps in one launch, one after another, by {blocks}"

    @property
    def counted(self) -> int:
        return len(self.plans)

    @property
    def most(self) -> tuple[int, ...]:
        """Blocks of each step: with more, a launch of its own takes less time."""
        return tuple(MOST_MORE * max(self.cluster, plan.planned_blocks) for plan in self.plans)

    def blocks(self, counts: Sequence[int]) -> int | None:
        if any(count > most for count, most in zip(counts, self.most, strict=True)):
            return None
        return self.cluster if any(counts) else 0

    @cached_property
    def cost(self) -> Cost:
        return cost_in_turn(self.plans)

    @property
    def why(self) -> str:
        return f"one launch is expected to take {self.cost.time_us:.1f} us: steps this short are mostly launches"


# ---------------------------------------------------------------- what may be one


def cluster_of(target: Target) -> int:
    """Blocks of the launch."""
    return min(MOST_CLUSTER, target.max_cluster)


def obstacle(plans: Sequence[Plan]) -> str:
    """Why these can't be one launch; empty where they can."""
    for plan in plans:
        if not plan.in_any_block:
            return f"{plan.name} has no blocks that others can take in turn"
        if plan.cluster not in (1, cluster_of(plan.target)):
            return f"{plan.name} has clusters of {plan.cluster} blocks"
    if len(plans) > MOST_STEPS:
        return f"there are more than {MOST_STEPS} of them"
    if len({plan.threads for plan in plans}) > 1:
        return "their blocks differ in threads"
    room = sum(plan.static_shared_bytes for plan in plans) + max(plan.shared_bytes for plan in plans)
    if room > (most := plans[0].target.shared_bytes):
        return f"together they take {room} bytes of shared memory, of which a block has {most}"
    return ""


# ---------------------------------------------------------------- what it costs


def narrowed(target: Target) -> Target:
    """The target with no more SMs than the launch has blocks."""
    blocks = cluster_of(target)
    return replace(target, sms=blocks, dram_gbs=min(target.dram_gbs, SM_GBS * blocks))


def step_us(plan: Plan) -> float:
    """Of one step as a launch of so few SMs."""
    turns = -(-plan.planned_blocks // cluster_of(plan.target))
    return plan.cost.time_us + (turns - 1) * TURN_US - SOONER_US * bool(plan.graph.products)


def on(target: Target, plan: Plan, floor_us: float) -> Plan:
    """A plan for so few SMs as one of a kernel for `target`, whose bytes take `floor_us` at the least."""
    return replace(plan, target=target, cost=replace(plan.cost, floor_us=floor_us))


def cost_in_turn(plans: Sequence[Plan]) -> Cost:
    """Of one launch in place of several, whose own costs are those on so few SMs."""
    costs = [plan.cost for plan in plans]
    return Cost(
        traffic=traffic_of([cost.traffic for cost in costs]),
        floor_us=sum(cost.floor_us for cost in costs),
        time_us=sum(map(step_us, plans)) - (len(costs) - 1) * (LAUNCH_US - BARRIER_US),
        bound=max(costs, key=lambda cost: cost.time_us).bound,
        in_flight_bytes=min(cost.in_flight_bytes for cost in costs),
        registers=max(cost.registers for cost in costs),
        blocks_per_sm=1,
    )
