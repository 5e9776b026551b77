"""A plan of large products at a smaller width and K, of fewer groups or keys, to be judged in its place.

A reference in float64, or the emulator, takes minutes for what a GPU does at once. What a kernel's text could have
wrong shows at other sizes as well, if it is by the same rule, in the same configuration, and what is left of the last
tile is as much: sizes shrink to some whole tiles and that rest. What is left beyond multiples of 256 stays, and with it
what is left beyond whole tiles, but for tiles whose width does not divide 256, such as 96 or 192. The number of rows
stays free.
"""

from __future__ import annotations

import math

from fusegen.errors import NoPlan, SpecError
from fusegen.language.graph import Graph
from fusegen.language.types import Dim, size_of
from fusegen.planner import candidates
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.model import Plan

TILE = 256  # of columns, or of K: the widest tile; the usual ones' widths, and every slice's k, divide it
WHOLE_TILES = 2 * TILE  # two of the widest tiles, and more slices than a ring of them has stages
GROUPS = 8  # of rows; a block reads the ends of so many at a time
MOST_GROUPED_WEIGHTS = 2**24  # of 16 groups of 1024 x 1024
MOST_OWN_KEYS = 1024  # of attention whose queries are its keys: retention of 4096 tokens took 70 s to be judged


def weights(graph: Graph) -> int:
    """Elements of all right factors."""
    return sum(math.prod(size_of(s, graph.sizes) for s in n.inputs[1].shape) for n in graph.products)


def smaller(plan: Plan) -> Plan:
    """A plan of the same rule and, where it is a candidate there too, the same configuration, for a smaller product.

    The plan itself where no plan of its kind holds for one.
    """
    graph = plan.graph.written
    sizes = {dim.name: shrunk(graph.sizes[dim.name]) for dim in inner_dims(graph)}
    sizes |= {dim.name: fewer(graph.sizes[dim.name]) for dim in group_dims(graph)}
    try:
        found = candidates(graph.at(**sizes), plan.target, plan.layout).need()
    except (NoPlan, SpecError):
        return plan
    alike = [other for other in found if other.template == plan.template]
    same = [other for other in alike if other.configuration == plan.configuration]
    return next(iter([*same, *alike]), plan)


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


def group_dims(graph: Graph) -> set[Dim]:
    """The dims that count groups of rows."""
    ends = [n.any_ends for n in graph.products if n.any_ends]
    return {size for node in ends for size in node.shape if isinstance(size, Dim)}


def shrunk(size: int) -> int:
    """A width or a K."""
    return min(size, WHOLE_TILES + size % TILE)


def fewer(groups: int, times: int = 1) -> int:
    """Groups of rows; so many times as few as there may be."""
    return min(groups, times * GROUPS + groups % GROUPS)
