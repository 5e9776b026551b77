"""One launch of several steps, one after another: a cluster of blocks takes them in turn.

Steps that take a few microseconds, as of a mixture's router, are mostly launches. Here one cluster does the work of
each step's blocks, which its own take in turn, and waits for itself between two steps:

    cluster   a release and an acquire, so that all blocks read what any of them wrote: less than a launch takes
    time      the steps' own on so few SMs, a barrier for each, and one launch; what a step reads that other SMs would
              have brought at once takes longer, so that little work is a launch of this kind
    blocks    as many as a cluster may have on every GPU that has clusters

Longer steps share a launch where their rows are shared out to clusters, and they are a small part of a program.

Where the first steps follow one another row by row, as the choice of experts follows the logits of a token, these are
shared out: each of many clusters takes the blocks of its own rows, in all of these steps. What comes behind them, such
as the sort of all slots, the cluster does that is the last to arrive. No cluster waits for another, so that they need
not run at once, as they would have to for a barrier of the grid. They are counted in a word of the workspace, which
nobody clears: its upper bits say whether it is a count, and the last cluster leaves it at none.

What may be such a step are kernels of rows, sorts of slots, and tiles of products by a warp's own instructions, all of
one block size. A step's text is that of its own kernel, in a namespace, and is told the block's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module

from fusegen.language.types import i64
from fusegen.planner.model import Cost, Plan, RowPlan
from fusegen.planner.parts import Param
from fusegen.planner.programs.side_by_side import MOST_STEPS, JoinedPlan, traffic_of
from fusegen.planner.rows.duration import LAUNCH_US
from fusegen.targets.base import Target

SHORT_US = 16.0  # a step of one cluster: on so few SMs longer ones take longer than launches do
MOST_CLUSTER = 8  # blocks: the most that every GPU with clusters takes
SM_GBS = 80.0  # that one SM brings
# Fitted to routers with their sorts, 10 shapes of 1 to 512 tokens and 8 to 256 experts, on an H200 (cold L2, medians of
# 20; benchmarks/one_cluster.py): all three steps by one cluster took 3.1 us less than three launches for 8 tokens, 0.9
# less for 64, 1.2 less for 128, 0.1 more for 256 and 5.3 more for 512. The constants say 3.6, 2.1, 1.8 and 0.6 less,
# and 7.2 more. With the first one or two steps shared out to 14 clusters, of 64 to 4096 tokens and 64 experts, they are
# within 1.2 us of what 20 ways took. One launch then takes, and took as three: 64 tokens 9.6 and 11.2, 256 10.7 and
# 12.4, 512 11.6 and 13.0, 2048 15.3 and 15.5, 4096 25.2 and 18.7. The choice of experts and the sort without the
# product, of 2048 to 65536 tokens: 9.6, 11.0, 13.9, 20.6, 31.9 and 53.7 us in one launch, said within
# 10 %, and 8.3, 9.5, 12.2, 15.5, 22.0 and 35.7 in two. Of 4096 to 65536 tokens and seven models' routers, 8 to 384
# experts, the product too: said within 12 %, but for 128 experts and a K of 2048 (15 to 18 % more: its tiles of
# 256 x 128 took 60 us each, where those of a K of 2880 took 55), and 65536 tokens, 8 experts (said 206, took 166).
BARRIER_US = 0.9  # between two steps
TURN_US = 1.2  # of a block behind the first one that an SM takes: nothing else of the step runs beside it
SOONER_US = 2.6  # that a product of few bytes takes less than the cost of products says, which is fitted to many
# The same of one of many clusters: of products with a norm behind them whose blocks took 2 and 4 turns, 2048 numbers
# a row took 19.4 and 24.6 us of 4 and 64 rows, and 11.2 and 12.9 in two launches
SHARE_TURN_US = 3.0
NETWORK_US = 0.8  # that one cluster takes longer than said to choose columns by a network, as few rows have it wait
ARRIVAL_US = 1.0  # until the last cluster knows that it is the last
MOST_MORE = 4  # times as many blocks as were planned for, at other sizes
COUNT_BITS = 20  # of the word in which clusters are counted


@dataclass(frozen=True)
class OneClusterPlan(JoinedPlan):
    """One launch of several steps that a cluster takes one after another; of the first ones, of which `shared_out` are,
    each cluster takes the blocks of `rows` rows of its own."""

    shared_out: int = 0
    rows: int = 0

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

    def obstacle(self, plans: Sequence[Plan]) -> str:
        shares = import_module("fusegen.planner.programs.shares")
        return obstacle(plans) or shares.obstacle(plans[: self.shared_out], self.rows)

    @property
    def cluster(self) -> int:
        return cluster_of(self.target)

    @property
    def regime(self) -> str:
        clusters = "clusters" if self.shared_out else "a cluster"
        blocks = f"{clusters} of {self.cluster} blocks of {self.threads} threads"
        return f"{len(self.parts)} steps in one launch, one after another, by {blocks}"

    @property
    def shares(self) -> str:
        if not self.shared_out:
            return ""
        if not self.counts:
            return f"each cluster takes {self.rows}"
        steps = "step" if self.shared_out == 1 else f"{self.shared_out} steps"
        return f"each cluster takes {self.rows} in the first {steps}; the last one to arrive does what follows"

    @property
    def counts(self) -> bool:
        """Are clusters counted, as one of them goes on alone?"""
        return 0 < self.shared_out < len(self.plans)

    @property
    def none_arrived(self) -> int:
        """The word in which clusters are counted, before any has arrived. Memory that holds anything else holds the
        upper 44 bits with a probability of 2^-44."""
        named = hashlib.sha256(f"{self.name} {self.configuration}".encode()).digest()
        return int.from_bytes(named[:8], "big") >> COUNT_BITS << COUNT_BITS

    @property
    def most_arrived(self) -> int:
        """That the word can count."""
        return (1 << COUNT_BITS) - 1

    @property
    def own_pointers(self) -> tuple[Param, ...]:
        if not self.counts:
            return ()
        return (Param("pointer", "arrived_ptr", "arrived", dtype=i64, output=True, shared=True, updated=True),)

    @cached_property
    def each(self) -> tuple[int, ...]:
        """Blocks that a cluster takes of each step that is shared out."""
        return tuple(blocks_each(plan, self.rows) for plan in self.plans[: self.shared_out])

    @property
    def counted(self) -> int:
        return len(self.plans)

    @property
    def most(self) -> tuple[int, ...]:
        """Blocks of each step: with more, a launch of its own takes less time. 0: any, of those that are shared out."""
        return tuple(
            0 if place < self.shared_out else MOST_MORE * max(self.cluster, plan.planned_blocks)
            for place, plan in enumerate(self.plans)
        )

    @property
    def max_blocks(self) -> int:
        """No more clusters than the word in which they are counted can tell apart."""
        return min(super().max_blocks, self.most_arrived * self.cluster) if self.counts else super().max_blocks

    def blocks(self, counts: Sequence[int]) -> int | None:
        if any(most and count > most for count, most in zip(counts, self.most, strict=True)):
            return None
        shares = [-(-count // each) for count, each in zip(counts, self.each, strict=False)]
        clusters = max(1, *shares) if shares else 1
        if clusters * self.cluster > self.max_blocks:
            return None
        return clusters * self.cluster if any(counts) else 0

    @cached_property
    def cost(self) -> Cost:
        return cost_in_turn(self.plans, self.shared_out, self.rows)

    @property
    def why(self) -> str:
        short = all(plan.cost.time_us <= SHORT_US for plan in self.plans)
        said = "steps this short are mostly launches" if short else "steps this small a part of a program share one"
        return f"one launch is expected to take {self.cost.time_us:.1f} us: {said}"


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


def clusters_of(target: Target) -> int:
    """That run at once. SMs that lie together are no whole clusters: of 132 on an H200 15 clusters of 8 run at once,
    and where 16 had rows the last one took a turn of its own."""
    return max(1, target.sms // (cluster_of(target) + 1))


def narrowed(target: Target, clusters: int = 1) -> Target:
    """The target with no more SMs than the launch has blocks."""
    blocks = cluster_of(target) * clusters
    return replace(target, sms=blocks, dram_gbs=min(target.dram_gbs, SM_GBS * blocks), shares=clusters)


def blocks_each(plan: Plan, rows: int) -> int:
    """Blocks of a step of so many rows."""
    count = plan.block_count
    return rows // count.rows * count.across


def step_us(plan: Plan, rows: int = 0) -> float:
    """Of one step as a launch of so few SMs; of clusters that take so many `rows` each."""
    blocks = blocks_each(plan, rows) if rows else plan.planned_blocks
    turns = -(-blocks // cluster_of(plan.target))
    waits = NETWORK_US * (not rows and isinstance(plan, RowPlan) and bool(plan.selection and plan.selection.packed))
    time = plan.cost.time_us
    if rows and plan.graph.products:
        # 9 tiles of a cluster's rows take two turns, though there are as many SMs as tiles
        at_once = clusters_of(plan.target) * cluster_of(plan.target)
        time *= max(1.0, turns / -(-plan.planned_blocks // at_once))
    more = (turns - 1) * (SHARE_TURN_US if rows else TURN_US)
    return time + more + waits - SOONER_US * bool(plan.graph.products)


def on(target: Target, plan: Plan, floor_us: float) -> Plan:
    """A plan for so few SMs as one of a kernel for `target`, whose bytes take `floor_us` at the least."""
    return replace(plan, target=target, cost=replace(plan.cost, floor_us=floor_us))


def cost_in_turn(plans: Sequence[Plan], shared_out: int = 0, rows: int = 0) -> Cost:
    """Of one launch in place of several, whose own costs are those on so few SMs. Of the first steps, so many as are
    `shared_out`, a cluster takes `rows` rows."""
    costs = [plan.cost for plan in plans]
    steps = sum(step_us(plan, rows if place < shared_out else 0) for place, plan in enumerate(plans))
    arrival = ARRIVAL_US if 0 < shared_out < len(plans) else 0.0
    return Cost(
        traffic=traffic_of([cost.traffic for cost in costs]),
        floor_us=sum(cost.floor_us for cost in costs),
        time_us=steps + arrival - (len(costs) - 1) * (LAUNCH_US - BARRIER_US),
        bound=max(costs, key=lambda cost: cost.time_us).bound,
        in_flight_bytes=min(cost.in_flight_bytes for cost in costs),
        registers=max(cost.registers for cost in costs),
        blocks_per_sm=1,
    )
