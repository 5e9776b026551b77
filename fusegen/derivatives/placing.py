"""Gradients of views: what a view shows is put back where it lies in its base, and what it leaves out counts as 0.

A view shows all of its base in other axes, or repeats some of it, or shows a part. The gradient of a part is a
`Placed`: parts that lie next to each other, as those of F.split, are put together by one F.concat; every second element
and the others by one F.stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen.errors import SpecError
from fusegen.language import ops as F
from fusegen.language.axes import reduce
from fusegen.language.elementwise import index_of
from fusegen.language.sizes import Shape, Size, size_of
from fusegen.language.trace import Value, size_leaf, viewed
from fusegen.language.views import View, product


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of an axis the elements start, start + step, ..., so many."""

    start: Size
    length: Size
    step: int = 1


@dataclass(frozen=True, slots=True)
class Placed:
    """The gradient of a part of a value. `at`: along each of its axes which part; None is all of it."""

    value: Value
    at: tuple[Stretch | None, ...]


def whole(value: Value, shape: Shape) -> Value:
    """A gradient in its full shape: one that is the same all along an axis may be of size 1 there."""
    return value if value.shape == shape else F.broadcast(value, shape)


def of_rank(value: Value, rank: int) -> Value:
    """A gradient without leading axes of 1 beyond so many, which are left of a sum over what had more axes."""
    extra = len(value.shape) - rank
    if extra <= 0:
        return value
    text = ", ".join(["0"] * extra)
    return viewed(value, View.identity(value.shape).sliced((0,) * extra), f"{{0}}[{text}]", "gradient")


def back(view: View, gradient: Value) -> Placed:
    """The gradient of a view's base. Raises SpecError for views that no function of fusegen.ops makes."""
    value = summed_over_repeats(view, gradient)
    rows = [[j for j in range(len(view.shape)) if row[j] != 0] for row in view.steps]
    if any(sum(j in row for row in rows) > 1 for j in range(len(view.shape))):
        raise SpecError("a diagonal has no gradient here")
    at: list[Stretch | None] = []
    groups: list[tuple[int, ...]] = []
    for sizes, start, row, axes in zip(view.base, view.offset, view.steps, rows, strict=True):
        size = product(sizes)
        if len(axes) > 1 or (axes and len(sizes) > 1):
            value = spread_out(value, axes, view)
            order = in_order(axes, row, view.shape, size)
            if start != 0 or order is None:
                raise SpecError("axes that are shown in part, as one or as several, have no gradient here")
            axes = order
            at += [None] * len(sizes)
        else:
            value, stretch = along(view, value, axes, start, row, size)
            at.append(stretch)
        groups.append(tuple(axes))
    return Placed(in_base_axes(value, groups, view.base), tuple(at))


def along(
    view: View, value: Value, axes: Sequence[int], start: Size, row: Sequence[Size], size: Size
) -> tuple[Value, Stretch | None]:
    """One axis of the base, which one axis of the view runs along or none: the gradient, and which part it is of."""
    if not axes:
        return value, None if size == 1 else Stretch(start, 1)
    (axis,) = axes
    length, step = view.shape[axis], row[axis]
    if not isinstance(step, int):
        raise SpecError(f"steps of {step} elements have no gradient here")
    if step < 0:
        start = start + step * (length - 1)
        if value.shape[axis] != 1:
            value = F.flip(value, axis)
    if abs(step) == 1 and start == 0 and length == size:
        return value, None
    return spread_out(value, axes, view), Stretch(start, length, abs(step))


def summed_over_repeats(view: View, value: Value) -> Value:
    """The sum over axes along which a view shows the same element again."""
    repeated = [
        j for j, size in enumerate(view.shape) if size != 1 and all(row[j] == 0 for row in view.steps)
    ]  # fmt: skip
    for j in repeated:
        if value.shape[j] == 1:
            value = value * size_leaf(view.shape[j])
    axes = tuple(j - len(view.shape) for j in repeated if value.shape[j] != 1)
    return reduce("sum", value, axes) if axes else value


def spread_out(value: Value, axes: Iterable[int], view: View) -> Value:
    """The gradient in full size along some axes of the view."""
    wanted = tuple(view.shape[j] if j in axes else size for j, size in enumerate(value.shape))
    return whole(value, wanted)


def in_order(axes: Sequence[int], row: Sequence[Size], shape: Shape, size: Size) -> list[int] | None:
    """The axes that are one axis of the base together, slow to fast; None where they leave something out."""
    left, order = list(axes), list[int]()
    unit: Size = 1
    while left:
        fastest = next((j for j in left if row[j] == unit), None)
        if fastest is None:
            return None
        unit = unit * shape[fastest]
        order.insert(0, fastest)
        left.remove(fastest)
    return order if unit == size else None


def in_base_axes(value: Value, groups: Sequence[tuple[int, ...]], base: tuple[Shape, ...]) -> Value:
    """Axes permuted, merged and split until they are those of the base; those of one element come and go."""
    order = [j for group in groups for j in group]
    rest = [j for j in range(len(value.shape)) if j not in order]
    if order + rest != list(range(len(value.shape))):
        view = View.identity(value.shape).transposed((*order, *rest))
        value = viewed(value, view, f"{{0}}.transpose({', '.join(map(str, (*order, *rest)))})", "rearrange")
    key: list[slice | int | None] = []
    for group in groups:
        key += [slice(None)] * len(group) if group else [None]
    key += [0] * len(rest)
    if None in key or 0 in key:
        value = value[tuple(key)]
    place = 0
    for group, sizes in zip(groups, base, strict=True):
        count = max(len(group), 1)
        if count > 1 and len(sizes) > 1 and value.shape[place : place + count] == sizes:
            place += count
            continue
        if count > 1:
            value = reshaped(value, View.identity(value.shape).merged(place, count))
        if len(sizes) > 1:
            value = reshaped(value, View.identity(value.shape).split(place, sizes))
        place += len(sizes)
    return value


def reshaped(value: Value, view: View) -> Value:
    return viewed(value, view, f"{{0}}.reshape({', '.join(map(str, view.shape))})", "rearrange")


# ---------------------------------------------------------------- several parts of one value


def together(shape: Shape, parts: Sequence[Placed], sizes: Mapping[str, int]) -> Value:
    """The gradient of a value whose parts have these, each counted as 0 elsewhere; `sizes` order what lies along an
    axis."""
    found = list(parts)
    for axis in range(len(shape) - 1, -1, -1):
        groups: dict[tuple[Stretch | None, ...], list[Placed]] = {}
        for part in found:
            groups.setdefault((*part.at[:axis], *part.at[axis + 1 :]), []).append(part)
        found = [one for group in groups.values() for one in filled(group, axis, shape, sizes)]
    total = found[0].value
    for one in found[1:]:
        total = total + one.value
    return total


def filled(parts: Sequence[Placed], axis: int, shape: Shape, sizes: Mapping[str, int]) -> list[Placed]:
    """Parts that differ along one axis alone, as parts that are all of it."""
    partial = [(part.value, at) for part in parts if (at := part.at[axis]) is not None]
    made = [part for part in parts if part.at[axis] is None]
    if not partial:
        return made
    others = parts[0].at
    full = tuple(size if at is None else at.length for size, at in zip(shape, others, strict=True))
    steps = {at.step for _, at in partial}
    for step in sorted(steps):
        own = [(value, at) for value, at in partial if at.step == step]
        make = one_behind_another if step == 1 else in_turn
        made += [
            Placed(value, tuple(None if n == axis else at for n, at in enumerate(others)))
            for value in make(own, axis, full, shape[axis], sizes)
        ]
    return made


Parts = Sequence[tuple[Value, Stretch]]


def one_behind_another(
    parts: Parts, axis: int, shape: Shape, size: Size, sizes: Mapping[str, int]
) -> list[Value]:  # fmt: skip
    """The fewest concatenations that hold all parts, with zeros between them."""

    def begin(part: tuple[Value, Stretch]) -> int:
        return size_of(part[1].start, sizes)

    left, made = sorted(parts, key=begin), list[Value]()
    while left:
        row, later = list[Value](), list[tuple[Value, Stretch]]()
        position: Size = 0
        zeros = zeros_like(left[0][0], axis, shape)
        for value, at in left:
            gap = at.start - position
            if size_of(gap, sizes) < 0:
                later.append((value, at))
                continue
            row += ([zeros(gap)] if gap != 0 else []) + [in_full(value, axis, shape, at.length)]
            position = at.start + at.length
        if position != size:
            row.append(zeros(size - position))
        made.append(F.concat(row, axis) if len(row) > 1 else row[0])
        left = later
    return made


def in_turn(
    parts: Parts, axis: int, shape: Shape, size: Size, sizes: Mapping[str, int]
) -> list[Value]:  # fmt: skip
    """Every step-th element and the others, next to each other."""
    step = parts[0][1].step
    made: list[Value] = []
    left = list(parts)
    while left:
        turn: dict[object, Value] = {}
        later: list[tuple[Value, Stretch]] = []
        for value, at in left:
            if at.start not in range(step) or at.length * step != size:
                raise SpecError(f"every {step}th element of {size} from {at.start} on has no gradient here")
            if at.start in turn:
                later.append((value, at))
            else:
                turn[at.start] = in_full(value, axis, shape, at.length)
        first = next(iter(turn.values()))
        zeros = zeros_like(first, axis, shape)
        size_each = first.shape[axis]
        stacked = F.stack([turn[n] if n in turn else zeros(size_each) for n in range(step)], axis + 1)
        made.append(reshaped(stacked, View.identity(stacked.shape).merged(axis, 2)))
        left = later
    return made


def in_full(value: Value, axis: int, shape: Shape, length: Size) -> Value:
    return whole(value, (*shape[:axis], length, *shape[axis + 1 :]))


def zeros_like(value: Value, axis: int, shape: Shape) -> Callable[[Size], Value]:
    """Zeros of a length along one axis, beside a value: a column of it where an index is below 0, which is nowhere."""

    def zeros(length: Size) -> Value:
        rank = len(shape)
        full = in_full(value, axis, shape, value.shape[axis])
        first = full[(*(slice(None),) * axis, slice(0, 1))]
        behind = rank - 1 - axis
        if behind > 1:
            index = index_of("col_index", (length,))[(slice(None), *(None,) * behind)]
        else:
            index = index_of("row_index", (length, 1)) if behind else index_of("col_index", (length,))
        return F.where(index < 0, first, 0.0)

    return zeros


def part_of(view: View, gradient: Value) -> Value:
    """The gradient of one value of a join, which lies in it as `view` says."""
    return viewed(gradient, view, view.text("{0}"), "part")
