"""Where groups of rows end, for launches of grouped products: ends right and wrong, of some rows, and of far ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusegen.language.graph import Graph
from fusegen.language.segments import group_bounds
from fusegen.language.sizes import Size
from fusegen.language.types import Dim, i32, size_of

Array = np.ndarray[Any, np.dtype[Any]]
MOST = int(i32.largest)
OTHER_GROUPS = "other groups"


def ends_of(graph: Graph) -> dict[str, Size]:
    """The operands that say where groups end, each with the number of rows that are grouped, or of what is summed over;
    computed ends are none."""
    found = [(n.any_ends, n.shape[0] if n.ends else n.inputs[0].shape[-1]) for n in graph.products if n.any_ends]
    return {graph.tensor_of[ends].name: size for ends, size in found if ends in graph.tensor_of}


def computed_ends(graph: Graph) -> bool:
    """Does the chain itself compute where groups end?"""
    return any(n.any_ends and n.any_ends not in graph.tensor_of for n in graph.products)


def group_ends(rng: np.random.Generator, groups: int, rows: int) -> Array:
    """Where groups of rows end: any number of rows in each, now and then all in one; half of the time an empty group
    and one of a single row, and half of the time some rows behind all. And what a caller got wrong: mostly an end below
    the one before it, or negative, and now and then a last one beyond the rows, far beyond too."""
    rows = min(rows, MOST)
    ends = np.sort(rng.integers(0, rows + 1, groups))
    if rng.random() < 0.1:
        ends = np.where(np.arange(groups) < rng.integers(groups), 0, rows)
    elif rng.random() < 0.5:
        ends[1:2] = ends[:1]
        ends[2:3] = ends[1:2] + 1
    behind = -(-rows // int(rng.integers(4, 9)))
    ends[-1] = rows + rng.choice(np.array([-behind, -1, 0, 1, MOST]), p=(0.25, 0.25, 0.25, 0.125, 0.125))
    if groups > 2 and rng.random() < 0.75:
        place = int(rng.integers(1, groups - 1))
        ends[place] = rng.choice(np.array([-1, 0, -MOST - 1, ends[place - 1] - 1]))
    return np.clip(ends, -MOST - 1, MOST).astype(np.int32)


def in_groups(
    graph: Graph, values: Sequence[Any], sizes: Mapping[str, int], picks: Mapping[str, Sequence[int]]
) -> dict[str, Sequence[int]]:
    """The picks of some rows, those of each group side by side, in the order of the groups; others as they are."""
    found = dict(picks)
    for name, size in ends_of(graph).items():
        if isinstance(size, Dim) and size.name in found:
            groups = group_of(value_of(graph, values, name), size_of(size, sizes))
            found[size.name] = sorted(found[size.name], key=lambda row: groups[row])
    return found


def ends_of_some(
    graph: Graph, name: str, ends: Array, sizes: Mapping[str, int], picks: Mapping[str, Sequence[int]]
) -> Array:
    """Where the groups end of which picks leave some rows, that lie in the order of the groups."""
    size = ends_of(graph)[name]
    if not isinstance(size, Dim) or size.name not in picks:
        return ends
    left = group_of(ends, size_of(size, sizes))[list(picks[size.name])]
    return np.cumsum(np.bincount(left, minlength=len(ends) + 1)[: len(ends)]).astype(np.int32)


def behind(graph: Graph, values: Sequence[Any], skip: int) -> tuple[Any, ...]:
    """Operands of the same rows behind `skip` more, which are of the first group."""
    names = {graph.tensor_of[n.ends].name for n in graph.products if n.ends and n.ends in graph.tensor_of}
    return tuple(
        (np.clip(value.astype(np.int64), 0, MOST - skip) + skip).astype(np.int32) if tensor.name in names else value
        for tensor, value in zip(graph.inputs, values, strict=True)
    )


def group_of(ends: Array, rows: int) -> Array:
    """Of each row the number of its group; of rows of no group that of groups."""
    return np.repeat(np.arange(len(ends) + 1), np.diff(group_bounds(ends, rows), append=rows))


def spoiled(graph: Graph, values: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, tuple[Any, ...]] | None:
    """The group with most to sum, and the operands with NaN in all that is summed in others or in none; None where sums
    are not of groups whose ends are an operand."""
    products = [n for n in graph.products if n.inner_ends in graph.tensor_of]
    if not products or len({n.inner_ends for n in graph.products}) > 1:
        return None
    product = products[0]
    assert product.inner_ends is not None
    summed, groups = product.inputs[0].shape[-1], product.shape[0]
    if not isinstance(summed, Dim) or any(t.shape[:1] != (groups,) for t in graph.outputs):
        return None
    here = group_of(value_of(graph, values, graph.tensor_of[product.inner_ends].name), size_of(summed, sizes))
    group = int(np.bincount(here, minlength=size_of(groups, sizes) + 1)[:-1].argmax())
    found = list(values)
    for place, tensor in enumerate(graph.inputs):
        if tensor.dtype.kind == "float" and summed in tensor.shape:
            found[place] = values[place].copy()
            np.moveaxis(found[place], tensor.shape.index(summed), 0)[here != group] = np.nan
    return group, tuple(found)


def value_of(graph: Graph, values: Sequence[Any], name: str) -> Array:
    return next(np.asarray(v) for t, v in zip(graph.inputs, values, strict=True) if t.name == name)
