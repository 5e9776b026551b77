"""Sizes of launches of which all computed ones, such as `H // G`, come out even."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen.errors import SpecError
from fusegen.language.graph import Graph
from fusegen.language.sizes import dims_in, unit_of

MOST_MORE = 64  # rows beside those asked for, until sizes that are computed come out even


def even_sizes(graph: Graph, sizes: Mapping[str, int], free: Sequence[str]) -> dict[str, int]:
    """About these sizes, of which those of the `free` dims may be others: some more of each; else multiples of what
    they are divided by; else of dims that computed sizes are made of the chain's own, with as many rows along the last
    one of the others as are left."""
    found = dict(sizes)
    for more in range(MOST_MORE):
        if comes_out_even(graph, found):
            return found
        found[free[more % len(free)]] += 1
    for name in free:
        unit = unit_of(graph.computed_sizes, name)
        found[name] = -(-found[name] // unit) * unit
    if comes_out_even(graph, found):
        return found
    bound = {dim.name for dim in dims_in(tuple(graph.computed_sizes))}
    others = [name for name in free if name not in bound]
    found = {**sizes, **{name: graph.sizes[name] for name in free if name in bound}}
    if others:
        rows, kept = (math.prod(size[name] for name in free) for size in (sizes, found))
        found[others[-1]] = max(1, -(-rows * found[others[-1]] // kept))
    return found


def comes_out_even(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Are there such sizes of all that is computed from them?"""
    try:
        replace(graph, sizes=sizes, origin=None).need_sizes()
    except SpecError:
        return False
    return True
