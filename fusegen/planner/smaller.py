"""A plan of large products at a smaller width and K, of fewer groups or keys, to be judged in its place.

A reference in float64, or the emulator, takes minutes for what a GPU does at once. What a kernel's text could have
wrong shows at other sizes as well, if the text is the same but for numbers. So the small plan is by the same rule, in
the same configuration, and

- widths and K shrink to some whole tiles and what was left of the last one;
- K fills the ring of slices in shared memory if the whole K does, since loops over slices are unrolled then;
- of many groups as many stay as give a lane several, over which it has a loop;
- blocks wait for one another where those of the large launch do.

The number of rows stays free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, TypeGuard

from fusegen.errors import NoPlan, SpecError
from fusegen.language.graph import Graph
from fusegen.language.types import Dim, size_of
from fusegen.planner import candidates
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.model import Plan
from fusegen.planner.products.parts import ProductPlan

if TYPE_CHECKING:
    from fusegen.planner.products.wgmma import WgmmaPlan

TILE = 256  # of columns, or of K: the widest tile; the usual ones' widths, and every slice's k, divide it
WHOLE_TILES = 2 * TILE  # two of the widest tiles, and more slices than a ring of them has stages
GROUPS = 8  # of rows; a block reads the ends of so many at a time
MANY_GROUPS = 64  # of more than 32 a lane has several, and experts' logits are a product that wide
MOST_GROUPED_WEIGHTS = (MANY_GROUPS + GROUPS) * WHOLE_TILES**2
MOST_OWN_KEYS = 1024  # of attention whose queries are its keys: retention of 4096 tokens took 70 s to be judged


def weights(graph: Graph) -> int:
    """Elements of all right factors."""
    return sum(math.prod(size_of(s, graph.sizes) for s in n.inputs[1].shape) for n in graph.products)


def smaller(plan: Plan) -> Plan:
    """A plan of the same rule and, where it is a candidate there too, the same configuration, for a smaller product.

    The plan itself where no plan of its kind holds for one.
    """
    graph = plan.graph.written
    inner = {dim.name: graph.sizes[dim.name] for dim in inner_dims(graph)}
    sizes = {name: alike_size(shrunk(size), size, [plan]) for name, size in inner.items()}
    sizes |= {dim.name: fewer(graph.sizes[dim.name]) for dim in group_dims(graph)}
    try:
        found = candidates(graph.at(**sizes), plan.target, plan.layout).need()
    except (NoPlan, SpecError):
        return plan
    like = [other for other in found if other.template == plan.template]
    same = [other for other in like if other.configuration == plan.configuration]
    return next((written_as(other, plan) for other in (*same, *like)), plan)


def written_as(small: Plan, large: Plan) -> Plan:
    """The small plan with what the large one's text has because its launch is long."""
    return replace(small, stepped=large.tiles_in_step) if by_slices(small) and by_slices(large) else small


def by_slices(plan: Plan) -> TypeGuard[WgmmaPlan]:
    """Does a producer bring slices to a ring?"""
    return bool(plan.graph.products) and isinstance(plan, import_module("fusegen.planner.products.wgmma").WgmmaPlan)


def alike_size(least: int, whole: int, plans: Iterable[Plan]) -> int:
    """A width or a K of at least so much, with the same rest: columns beyond whole tiles are as many, and slices of K
    fill these plans' rings if those of the whole K do; the least one where there is none."""
    products = [plan for plan in plans if isinstance(plan, ProductPlan)]
    cols = [plan.tile.cols for plan in products if whole in widths(plan.graph)]
    rings = [(plan, plan.tile.stages) for plan in products if by_slices(plan) and plan.k == whole]
    filled = [plan.steps % stages == 0 for plan, stages in rings]
    found = (
        size for size in range(least, whole, TILE)
        if all((whole - size) % width == 0 for width in cols)
        and [plan.steps_of(size) % stages == 0 for plan, stages in rings] == filled
    )  # fmt: skip
    return next(found, least)


def needs_smaller(plan: Plan) -> bool:
    """Whether a kernel's reference would take minutes: of grouped products, whose launch has a tile for each group and
    reads as many weights as all of them have, and of products for each group of what is summed over; of attention whose
    queries and keys are one dim, so that no launch has few of the one and all of the other."""
    graph = plan.graph.written
    if isinstance(plan, AttentionPlan):
        rows, keys = graph.products[0].shape[-2:]
        return rows == keys and size_of(keys, graph.sizes) > MOST_OWN_KEYS
    return any(n.any_ends for n in graph.products) and weights(graph) > MOST_GROUPED_WEIGHTS


def inner_dims(graph: Graph) -> set[Dim]:
    """The dims that are a product's width or K."""
    sizes = [size for n in graph.products for size in (n.shape[-1], n.inputs[0].shape[-1])]
    return {size for size in sizes if isinstance(size, Dim)}


def widths(graph: Graph) -> set[int]:
    """Of all products."""
    return {size_of(n.shape[-1], graph.sizes) for n in graph.products}


def group_dims(graph: Graph) -> set[Dim]:
    """The dims that count groups of rows."""
    ends = [n.any_ends for n in graph.products if n.any_ends]
    return {size for node in ends for size in node.shape if isinstance(size, Dim)}


def shrunk(size: int) -> int:
    """A width or a K."""
    return min(size, WHOLE_TILES + size % TILE)


def fewer(groups: int, times: int = 1) -> int:
    """Groups of rows; so many times as few as there may be."""
    least = MANY_GROUPS if groups > MANY_GROUPS // 2 else GROUPS
    return min(groups, times * least + groups % GROUPS)
