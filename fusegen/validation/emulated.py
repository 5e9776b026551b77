"""A kernel that a GPU runs, once more in the checking emulator.

On a GPU only numbers can be compared. A race or a missing wait may give the right ones today and others tomorrow, and
an access beyond an array may meet memory that nobody misses. The emulator sees each of them in a single launch, so the
text that is handed out runs there once, on a few rows.

A large product would take the emulator minutes. A smaller one runs there instead (`fusegen.planner.smaller`).
"""

from __future__ import annotations

from fusegen.emitting.rendering import render
from fusegen.emitting.sources import remembered
from fusegen.language.types import size_of
from fusegen.planner.model import Plan, Source
from fusegen.planner.smaller import smaller
from fusegen.runtime import Kernel
from fusegen.runtime.finding import find

NAME = "emulated"
REASON = "the checking emulator, which sees races, missing waits and stray accesses that a GPU does not report"
MOST_WORK = 2**27  # multiplications of a launch: a quarter of a second of the emulator


def twin(kernel: Kernel) -> Kernel:
    """`kernel` for the checking emulator: the same text, or that of a smaller product of the same configuration.

    Raises EmulatorUnavailable where the checking build can't be made.
    """
    device = find(kernel.target, "emulator", check=True)
    return Kernel(text_of(kernel.source), None, device, kernel.make_variant)


def text_of(source: Source) -> Source:
    """What the twin of a source's kernel is made of."""
    small = smaller(source.plan) if work(source.plan) > MOST_WORK else source.plan
    return source if small is source.plan else remembered(small, render)


def build(source: Source) -> None:
    """Leave the twin's library where `twin` will find it. Raises what building one does."""
    find(source.plan.target, "emulator", check=True).load(text_of(source), None)


def work(plan: Plan) -> int:
    """Multiplications of products in a launch of two blocks of rows and one row more; of groups a block each."""
    sizes = plan.graph.sizes
    groups = max((size_of(n.ends.shape[0], sizes) for n in plan.graph.products if n.ends), default=0)
    return (max(2, groups) * plan.rows_per_block + 1) * sum(
        size_of(n.shape[-1], sizes) * size_of(n.inputs[0].shape[-1], sizes) for n in plan.graph.products
    )
