"""Which steps of a launch can be shared out to clusters, each with rows of its own, and how many rows each takes.

A step's blocks make whole rows, in the order of the rows; and what it reads of a step before it, it reads of its own
rows. Then a cluster needs nothing from any other until all of its rows are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusegen.language.sizes import Size
from fusegen.language.types import size_of
from fusegen.planner.model import Plan, RowPlan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.programs.model import Binding, Step
from fusegen.planner.programs.one_cluster import clusters_of


def rows_of_block(plan: Plan) -> int | None:
    """The rows of which a block makes all that it makes, where the next rows are those of the next blocks; None of
    other plans."""
    count = plan.block_count
    if len(plan.row_dims) != 1 or plan.flat or count.reduced or count.at_once or count.groups or count.blocks != 1:
        return None
    if isinstance(plan, GemmPlan):
        return None if plan.tile.group > 1 and plan.tiles_across > 1 else count.rows
    return count.rows if isinstance(plan, RowPlan) else None


def rows_each(plans: Sequence[Plan]) -> int:
    """Rows that a cluster takes in these steps, so that no SM has two blocks at a time where that can be."""
    own = math.lcm(*(plan.block_count.rows for plan in plans))
    rows = rows_planned(plans[0])
    return own * max(1, -(-rows // (own * clusters_of(plans[0].target))))


def rows_planned(plan: Plan) -> int:
    """Of a launch at the graph's sizes."""
    shape, sizes = plan.graph.shape, plan.graph.sizes
    return math.prod(size_of(shape[axis], sizes) for axis in plan.row_dims[0].axes)


def obstacle(plans: Sequence[Plan], rows: int) -> str:
    """Why clusters can't take so many rows each in these steps; empty where they can."""
    for plan in plans:
        own = rows_of_block(plan)
        if own is None or rows % own:
            return f"{plan.name} has no blocks of rows of which {rows} are a share"
    return ""


def row_by_row(plan: Plan, tensor: str) -> bool:
    """Does row r of the step read or write row r of the tensor, and no other one?"""
    found = [access for access in plan.accesses if access.tensor == tensor]
    return len(found) == 1 and all(
        access.strided == access.walked == (0,)
        and not (access.axes or access.gathered or access.anywhere or access.interleaved or access.right)
        for access in found
    )


def following(launches: Sequence[Sequence[Step]], plans: Sequence[Mapping[int, Plan]]) -> int:
    """How many of the first steps can be shared out: each makes a row of what those before it made of that row.
    `plans`: of each, those of clusters that share rows out."""
    written: dict[str, tuple[int, Binding]] = {}
    for place, (step, *_) in enumerate(launches):
        if not plans[place] or rows_of(step) != rows_of(launches[0][0]):
            return place
        for read in step.reads:
            if read.base not in written:
                continue
            earlier, made = written[read.base]
            ends = [(place, read), (earlier, made)]
            if any(b.view is not None or not all(row_by_row(p, b.tensor) for p in plans[n].values()) for n, b in ends):
                return place
        written |= {binding.base: (place, binding) for binding in step.writes}
    return len(launches)


def rows_of(step: Step) -> tuple[Size, ...]:
    """The sizes of a step's rows, in the program's dims."""
    shape, dims = step.graph.shape, step.plan.row_dims
    return tuple(step.sizes.get(str(size), size) for dim in dims for axis in dim.axes for size in [shape[axis]])
