"""A step's tensors as they lie in memory, and a step whose results lie along different rows as several."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusegen.language.graph import Tensor, behind
from fusegen.language.sizes import dims_in
from fusegen.language.types import Shape, size_of
from fusegen.language.views import View
from fusegen.planner.model import Layout
from fusegen.planner.programs.steps import Bound, Lowered

MANY = 2**5 * 3**3 * 5 * 7  # more of a dim: sizes that come out even at 1, as (M + 3) // 4, do so at 1 + MANY


def layout_of(step: Lowered, sizes: Mapping[str, int]) -> Layout:
    """How the step's tensors lie where those they are views of are contiguous, at the chain's sizes."""
    views = [(b, *place_of(b, sizes)) for b in step.bounds if not b.view.is_identity]
    elsewhere = at_other_calls(step, sizes)
    lie = [(b, strides) for b, _, shape, strides in views if shape and shape[-1] > 1 and is_apart(b, elsewhere)]
    outputs = {t.name for t in step.graph.outputs}
    alike = Counter((b.base, b.tensor in outputs, strides) for b, strides in lie)
    alone = frozenset(  # others lie between one's elements, where they are so many, and fill the same sectors
        (b.tensor, strides) for b, strides in lie if abs(strides[-1]) > alike[b.base, b.tensor in outputs, strides]
    )
    scattered = any(strides != contiguous(shape, strides) for _, _, shape, strides in views)
    return Layout(split=scattered and not step.graph.products, apart=frozenset(b.tensor for b, _ in lie), strides=alone)


def is_apart(bound: Bound, calls: Sequence[Mapping[str, int]]) -> bool:
    """Are the elements of its rows not next to each other, at some of these sizes?"""
    return any(place_of(bound, sizes)[2][-1] != 1 for sizes in calls)


def at_other_calls(step: Lowered, sizes: Mapping[str, int]) -> tuple[Mapping[str, int], ...]:
    """The chain's sizes, and those with more than one of each dim that a call chooses: x.T of one row lies as a row
    does, and its kernel is called with more of them."""
    fixed = {dim for size in dims_in(tuple(step.graph.fixed)) for dim in dims_in((step.sizes.get(size.name, size),))}
    chosen = {name for name, size in sizes.items() if size == 1} - {dim.name for dim in fixed}
    if not chosen:
        return (sizes,)
    return sizes, {**sizes, **dict.fromkeys(chosen, 1 + MANY)}


def interleaved(step: Lowered, layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout with tensors that are every second (third ...) element of one array as such: all of its elements are
    one of theirs. The same where there are none."""
    types = {t.name: t.dtype for t in (*step.graph.inputs, *step.graph.outputs)}
    outputs = {t.name for t in step.graph.outputs}
    alike: dict[tuple[object, ...], dict[int, str]] = {}
    for bound in step.bounds:
        if bound.tensor in layout.apart:
            first, shape, strides = place_of(bound, sizes)
            count = max(1, strides[-1])
            key = bound.base, bound.tensor in outputs, types[bound.tensor], shape, strides, first // count
            alike.setdefault((count, *key), {})[first % count] = bound.tensor
    found = {
        tuple(tensors[place] for place in sorted(tensors))
        for (count, *_), tensors in alike.items()
        if len(tensors) == count
    }
    woven = frozenset(name for names in found for name in names)
    alone = frozenset((tensor, strides) for tensor, strides in layout.strides if tensor not in woven)
    return replace(layout, interleaved=frozenset(found), apart=layout.apart - woven, strides=alone)


def within(step: Lowered, layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout with factors of products that are the first columns of another one's rows as such."""
    tensors = step.graph.tensor_of
    factors = [f for product in step.graph.products for f in product.factors]
    names = {tensors[n].name for n in behind(factors) if n in tensors}
    bounds = [b for b in step.bounds if b.tensor in names and b.view.shape]
    return replace(layout, within=frozenset(
        (part.tensor, whole.tensor) for part, whole in itertools.permutations(bounds, 2) if begins(part, whole, sizes)
    ))  # fmt: skip


def begins(part: Bound, whole: Bound, sizes: Mapping[str, int]) -> bool:
    """Are the rows of `part` the first columns of those of `whole`?"""
    *_, columns = part.view.shape
    longer = size_of(columns, sizes) < size_of(whole.view.shape[-1], sizes)
    wanted = replace(whole.view, shape=(*whole.view.shape[:-1], columns))
    return longer and part.base == whole.base and part.view == wanted


def again(step: Lowered, layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout with operands that show what another one shows, but for a few rows, as such: not those of which some
    rows are read that another operand names."""
    named = {n.inputs[0] for n in step.graph.gathers if any(a in step.graph.tensor_of for a in behind(n.inputs[1:]))}
    inputs = {t.name for t in step.graph.inputs if t.node not in named}
    spans = [(b, stretches(b.view, sizes)) for b in step.bounds if b.tensor in inputs and b.view.shape]
    spans.sort(key=lambda pair: -elements(pair[1]))
    found: dict[str, str] = {}
    for place, (part, own) in enumerate(spans):
        for whole, other in spans[:place]:
            alike = (part.base, part.view.base) == (whole.base, whole.view.base) and whole.tensor not in found
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, other, strict=False)] if alike else []
            if own and 2 * elements(both) > elements(own):
                found[part.tensor] = whole.tensor
                break
    return replace(layout, again=frozenset(found.items()))


Stretch = tuple[int, int]
"""The first and the last element along an axis."""


def elements(found: Sequence[Stretch]) -> int:
    return math.prod(max(0, last - first + 1) for first, last in found) if found else 0


def stretches(view: View, sizes: Mapping[str, int]) -> list[Stretch]:
    """What a view shows along each axis of its base; nothing where that is no stretch of neighbours."""
    found = []
    for start, row in zip(view.offset, view.steps, strict=True):
        first, unit = size_of(start, sizes), 1
        moving = [(size_of(step, sizes), size_of(size, sizes)) for step, size in zip(row, view.shape, strict=True)]
        for step, count in sorted((pair for pair in moving if pair[0] and pair[1] > 1), key=lambda pair: abs(pair[0])):
            if abs(step) != unit:
                return []
            first -= unit * (count - 1) if step < 0 else 0
            unit *= count
        found.append((first, first + unit - 1))
    return found


def place_of(bound: Bound, sizes: Mapping[str, int]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where a view of a contiguous array begins, in elements, its shape and its strides."""
    base = [size_of(size, sizes) for size in bound.view.base_shape]
    lies = [math.prod(base[axis + 1 :]) for axis in range(len(base))]
    return bound.view.apply(0, lies, 1, sizes)


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array of that shape; of axes of one element, which have none, those given."""
    lies = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return tuple(own if size == 1 else step for size, own, step in zip(shape, strides, lies, strict=True))


def parts_of(step: Lowered) -> Iterator[Lowered]:
    """A step for each shape of its results, which no one kernel has beside each other; none where there is one."""
    groups: dict[Shape, list[Tensor]] = {}
    for tensor in step.graph.outputs:
        groups.setdefault(tensor.shape, []).append(tensor)
    if len(groups) < 2:
        return
    for outputs in groups.values():
        graph = replace(step.graph, name=f"{step.graph.name}_{outputs[0].name}", outputs=tuple(outputs))
        nodes = set(graph.nodes)
        graph = replace(graph, inputs=tuple(t for t in graph.inputs if t.node in nodes))
        shapes = [*(t.shape for t in (*graph.inputs, *graph.outputs)), *(n.shape for n in nodes)]
        shapes += [(n.size,) for n in nodes if n.size is not None]
        dims = {dim.name for shape in shapes for dim in dims_in(shape)}
        kept = {t.name for t in (*graph.inputs, *graph.outputs)}
        graph = replace(
            graph,
            names={n: name for n, name in graph.names.items() if n in nodes},
            sizes={name: size for name, size in graph.sizes.items() if name in dims},
        )
        sizes = {name: size for name, size in step.sizes.items() if name in dims}
        yield Lowered(graph, tuple(b for b in step.bounds if b.tensor in kept), sizes)
