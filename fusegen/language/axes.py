"""Which axes a reduction takes: the last one, or those that `axis` counts as numpy does or `over` names by their dims.

`F.sum(x)` is of a row. `F.sum(x, over=M)` of x: [M, N] is of its columns, [1, N]; `over=(B, S)` of x: [B, S, N] is
[1, 1, N]; a sum over all axes is a sum of row sums. Axes are counted from the right, as shapes align there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fusegen.errors import SpecError
from fusegen.language.graph import Graph, Node, once_per_graph
from fusegen.language.op_table import OPS
from fusegen.language.promotion import promote
from fusegen.language.sizes import Dim
from fusegen.language.trace import Value, apply, caller, current, node_of, result_dtype, size_leaf, viewed
from fusegen.language.types import Shape, shape_text
from fusegen.language.views import View

Axis = int | tuple[int, ...] | None
Over = Dim | tuple[Dim, ...] | None
Axes = tuple[int, ...]
LAST: Axes = (-1,)


def axes_of(name: str, x: Any, axis: Axis = -1, over: Over = None) -> Axes:
    """The axes to reduce, in order, each counted from the right. Raises SpecError for what is no axis of x."""
    if isinstance(axis, Value):
        raise SpecError(f"{name}: reduces one value over its axes; of two values take F.{name}imum(x, y)", caller())
    if over is None and axis == -1:
        return LAST
    if not isinstance(x, Value) or not x.shape:
        return LAST  # which the op refuses
    if over is not None and axis != -1:
        raise SpecError(f"{name}: axis={axis!r} and over={over} both say what to reduce; give one of them", caller())
    if over is not None:
        found = tuple(named_axis(name, x.shape, dim) for dim in (over if isinstance(over, tuple) else (over,)))
    else:
        every = tuple(range(-len(x.shape), 0))
        found = tuple(numbered_axis(name, x.shape, a) for a in every) if axis is None else tuple(
            numbered_axis(name, x.shape, a) for a in (axis if isinstance(axis, tuple) else (axis,))
        )  # fmt: skip
    if not found or len(set(found)) < len(found):
        said = f"axis={axis!r}" if over is None else f"over={over}"
        raise SpecError(f"{name}: {said} names {'an axis twice' if found else 'no axis'}", caller())
    return tuple(sorted(found))


def named_axis(name: str, shape: Shape, dim: object) -> int:
    places = [place for place, size in enumerate(shape, -len(shape)) if isinstance(dim, Dim) and size == dim]
    if len(places) == 1:
        return places[0]
    if places:
        raise SpecError(f"{name}: {dim} is two axes of {shape_text(shape)}; say which one by axis=", caller())
    raise SpecError(
        f"{name}: over={dim!s} is no axis of {shape_text(shape)}; over= takes dims of it, as in over=M or over=(B, S), "
        "axis= numbers",
        caller(),
    )


def numbered_axis(name: str, shape: Shape, axis: object) -> int:
    rank = len(shape)
    if not isinstance(axis, int) or isinstance(axis, bool) or not -rank <= axis < rank:
        raise SpecError(f"{name}: axis={axis!r} is no axis of {shape_text(shape)}, which has {rank}", caller())
    return axis if axis < 0 else axis - rank


def reduce(name: str, x: Any, axes: Axes) -> Value:
    """One reduction over all of `axes`: of the rows first, where the last is one of them."""
    if axes == LAST:
        return apply(name, x)
    with current().operator(name):
        if -1 in axes and x.shape[-1] != 1:
            x = apply(name, x)
        leading = tuple(a for a in axes if a != -1 and x.shape[a] != 1)
        return over_leading(name, x, leading) if leading else x


def kept(x: Value, axes: Axes, keepdims: bool) -> Value:
    """What was reduced, with its axes as size 1, or without them."""
    if keepdims:
        return x
    return x[tuple(0 if place in axes else slice(None) for place in range(-len(x.shape), 0))]


def brought_last(name: str, x: Any, axis: object) -> tuple[Any, Callable[[Value], Value]]:
    """x with that axis as its last one, and what takes it back to its place in a result."""
    if axis == -1 or not isinstance(x, Value) or not x.shape:
        return x, lambda value: value
    place = numbered_axis(name, x.shape, axis)

    def swapped(value: Value) -> Value:
        order = list(range(len(value.shape)))
        order[place], order[-1] = order[-1], order[place]
        return viewed(
            value, View.identity(value.shape).transposed(tuple(order)), f"np.swapaxes({{0}}, {place}, -1)", name
        )

    return (x, lambda value: value) if place == -1 else (swapped(x), swapped)


def over_leading(name: str, x: Value, axes: Axes) -> Value:
    op = OPS[name]
    with current().operator(name) as operator:
        node = promote(op, [node_of(op, x, operator)], operator)[0]
        return Value(Node(op, (node,), reduced(node, axes), result_dtype(op, [node]), operator, over=axes))


def reduced(node: Node, axes: Axes) -> Shape:
    return tuple(1 if place in axes else size for place, size in enumerate(node.shape, -len(node.shape)))


def count(x: Value, axes: Axes) -> Value:
    """How many values each result of a reduction is made of."""
    found: Value | None = None
    for axis in axes:
        number = size_leaf(x.shape[axis])
        found = number if found is None else found * number
    assert found is not None
    return found


# ---------------------------------------------------------------- of a whole graph


@once_per_graph
def over_rows(graph: Graph) -> tuple[Node, ...]:
    """The reductions and running sums over axes of rows."""
    return tuple(node for node in (*graph.reductions, *graph.scans) if node.over)


@once_per_graph
def reduced_axes(graph: Graph) -> tuple[int, ...]:
    """The axes of the chain's shape, counted from the left, that the first of these takes; none without one."""
    rank = len(graph.shape)
    return tuple(rank + axis for node in over_rows(graph)[:1] for axis in node.over)


def axes_text(axes: Iterable[int]) -> str:
    """As numpy takes them: `-2`, `(-3, -2)`."""
    found = tuple(axes)
    return str(found[0]) if len(found) == 1 else str(found)
