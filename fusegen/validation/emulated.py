"""A kernel that a GPU runs, once more in the checking emulator.

On a GPU only numbers can be compared. A race or a missing wait may give the right ones today and others tomorrow, and
an access beyond an array may meet memory that nobody misses. The emulator sees each of them in a single launch, so the
text that is handed out runs there once, on a few rows.

A large product would take the emulator minutes. It runs at a smaller width and K instead, by the same rule and, where
that is a candidate there too, the same configuration. What is left beyond multiples of 256 stays, and with it what is
left beyond whole tiles, but for tiles whose width does not divide 256, such as 96 or 192.
"""

from __future__ import annotations

from fusegen.emitting.rendering import render
from fusegen.errors import NoPlan
from fusegen.language.graph import Graph
from fusegen.language.types import Dim, size_of
from fusegen.planner import candidates
from fusegen.planner.model import Plan
from fusegen.runtime import Kernel
from fusegen.runtime.finding import find

NAME = "emulated"
REASON = "the checking emulator, which sees races, missing waits and stray accesses that a GPU does not report"
MOST_WORK = 2**28  # multiplications of a launch: half a second of the emulator
WHOLE_TILES = 512  # columns, or numbers along K: two of the widest tiles, more slices than a ring of them has stages
TILE = 256  # the widest tile; the usual ones' widths, and every slice's k, divide it


def twin(kernel: Kernel) -> Kernel:
    """`kernel` for the checking emulator: the same text, or that of a smaller product of the same configuration.

    Raises EmulatorUnavailable where the checking build can't be made.
    """
    device = find(kernel.target, "emulator", check=True)
    plan = kernel.plan
    small = smaller(plan) if work(plan) > MOST_WORK else plan
    source = kernel.source if small is plan else render(small)
    return Kernel(source, None, device, kernel.make_variant)


def work(plan: Plan) -> int:
    """Multiplications of products in a launch of two blocks of rows and one row more."""
    return (2 * plan.rows_per_block + 1) * sum(
        size_of(product.shape[-1], plan.graph.sizes) * size_of(product.inputs[0].shape[-1], plan.graph.sizes)
        for product in plan.graph.products
    )


def smaller(plan: Plan) -> Plan:
    """A plan of the same rule and, where it is a candidate there too, the same configuration, for a smaller product.

    The plan itself where no plan of its kind holds for one.
    """
    graph = plan.graph.written
    sizes = {dim: shrunk(size) for dim, size in graph.sizes.items() if Dim(dim) in inner_dims(graph)}
    try:
        found = candidates(graph.at(**sizes), plan.target, plan.layout).need()
    except NoPlan:
        return plan
    alike = [other for other in found if other.template == plan.template]
    same = [other for other in alike if other.configuration == plan.configuration]
    return next(iter([*same, *alike]), plan)


def inner_dims(graph: Graph) -> set[Dim]:
    """The dims that are a product's width or K."""
    sizes = [size for n in graph.products for size in (n.shape[-1], n.inputs[0].shape[-1])]
    return {size for size in sizes if isinstance(size, Dim)}


def shrunk(size: int) -> int:
    return min(size, WHOLE_TILES + size % TILE)
