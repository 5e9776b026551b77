"""The launches that a validation makes: of how many rows, on which grid, in which order of warps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fusegen.language.types import size_of
from fusegen.planner.model import Plan
from fusegen.runtime import Kernel
from fusegen.runtime.devices import Device

DEPTH = 256  # products of numbers that count as one element


def row_counts(plan: Plan, most: int) -> tuple[int, ...]:
    """None, one, and around a block's rows and several blocks'; elements, where the plan is flat."""
    block = plan.rows_per_block
    limit = max(2, most_rows(plan, most))
    counts = (0, 1, block - 1, block, block + 1, 3 * block, 5 * block + 2)
    return tuple(sorted({n for n in counts if 0 <= n <= limit}))


def most_rows(plan: Plan, most: int) -> int:
    """Rows of a launch of `most` elements; of products an element is as much work as a few hundred others."""
    depth = max((size_of(n.inputs[0].shape[-1], plan.graph.sizes) for n in plan.graph.products), default=1)
    return most // max(1, plan.cols * max(1, depth // DEPTH))


def narrowed(kernel: Kernel, blocks: int) -> Kernel:
    """The same text and binary on a grid with at most `blocks` in a line: only huge launches have several lines."""
    plan = kernel.plan
    small = replace(plan, target=replace(plan.target, max_grid=blocks))
    return Kernel(replace(kernel.source, plan=small), kernel.binary, kernel.device, kernel.make_variant)


def folding(blocks: int) -> int:
    """Blocks of a line, so that there are several lines, the last of them with a gap where that can be."""
    return next((width for width in (3, 2, 5, 7) if width < blocks and blocks % width), 1)


@contextmanager
def other_order(device: Device, seed: int) -> Iterator[None]:
    """Let the emulator run warps in another order meanwhile; a GPU has its own."""
    before = getattr(device, "seed", None)
    if before is None:
        yield
        return
    device.seed = before + seed + 1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        device.seed = before  # type: ignore[attr-defined]
