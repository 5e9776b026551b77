"""Views: the same memory with other axes, such as a slice, a permutation, or one axis split into two.

A view's index maps to an index of its base by an affine map, so a kernel that is given another pointer and other
strides reads it without a copy. `View.identity(shape)` is where each begins:

    half = View.identity((M, D)).sliced((..., slice(D // 2, None)))
    half.apply(address, strides, itemsize, sizes)        # the address, shape and strides of the view

Views of views are views: `inner.of(outer)` takes `inner` of what `outer` shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from fusegen.errors import ArgumentError, SpecError
from fusegen.language.sizes import (
    Dim,
    Expr,
    Shape,
    Size,
    at_text,
    leading_sign,
    replaced,
    shape_text,
    size_of,
    without_number,
)

if TYPE_CHECKING:
    import numpy as np

Column = tuple[Size, ...]
"""By how much each axis of the base moves for one step along an axis of the view."""
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class View:
    """What a view shows of its base: element i of the view is element `offset[b] + sum of steps[b][j] * i[j]` along
    each axis b of the base.

    Axes of the base that are taken as one, as `(h d)` of `h d`, are one entry of `base` with several sizes; their
    strides have to allow that, which `apply` checks. Everywhere else an entry is one axis.
    """

    shape: Shape
    base: tuple[Shape, ...]
    offset: tuple[Size, ...]
    steps: tuple[tuple[Size, ...], ...]  # a row for each axis of the base, a column for each of the view

    @staticmethod
    def identity(shape: Shape) -> View:
        """All of an array, as it lies."""
        return identity_of(shape)

    @property
    def base_shape(self) -> Shape:
        return tuple(size for sizes in self.base for size in sizes)

    @property
    def is_identity(self) -> bool:
        return self == View.identity(self.shape)

    def text(self, base: str) -> str:
        """What it shows of an array of that name: `x[..., :D // 2]`, or `x as [M, H, D]` where that is no slice."""
        dropped = len(self.base) - len(self.shape)
        axes = iter(range(len(self.shape)))
        parts: list[str] = []
        for sizes, start, row in zip(self.base, self.offset, self.steps, strict=True):
            moving = [axis for axis, step in enumerate(row) if step != 0]
            if dropped > 0 and not moving:
                dropped -= 1
                parts.append(str(start))
                continue
            axis = next(axes, None)
            if axis is None or len(sizes) != 1 or moving not in ([], [axis]):
                break
            part = stretch_text(start, self.shape[axis], row[axis] if moving else 1, sizes[0])
            if part is None:
                break
            parts.append(part)
        if len(parts) < len(self.base) or next(axes, None) is not None:
            return f"{base} as {shape_text(self.shape)}"
        changed = [place for place, part in enumerate(parts) if part != ":"]
        if not changed:
            return base
        if changed[0] > 0 and changed[-1] == len(parts) - 1:
            return f"{base}[..., {', '.join(parts[changed[0] :])}]"
        return f"{base}[{', '.join(parts[: changed[-1] + 1])}]"

    @property
    def adds_axes(self) -> bool:
        """Is it the base with axes of one element more, or without some of those?"""
        moving = [column for column in self.columns if any(step != 0 for step in column)]
        own = [(size, axis) for axis, size in enumerate(self.base_shape) if size != 1]
        shape = [size for size in self.shape if size != 1]
        units = [tuple(int(b == axis) for b in range(len(self.base))) for _, axis in own]
        return shape == [size for size, _ in own] and moving == units and all(o == 0 for o in self.offset)

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(zip(*self.steps, strict=True)) if self.steps else ((),) * len(self.shape)

    def of(self, other: View) -> View:
        """This view of what `other` shows: a view of other's base. Raises ValueError where axes that this one takes as
        one can't be that in other's base."""
        if self.base_shape != other.shape:
            raise ValueError(f"a view of {shape_text(self.base_shape)} is not one of {shape_text(other.shape)}")
        if self.is_identity:
            return other
        for at, sizes in enumerate(self.base):
            if len(sizes) != 1:
                other = other.merged(at, len(sizes))
        outer = other.columns
        still = (0,) * len(other.base)
        columns = tuple(combined(still, outer, column) for column in self.columns)
        offset = combined(other.offset, outer, self.offset)
        return made(self.shape, other.base, offset, columns)

    # ------------------------------------------------------------ views of this view

    def transposed(self, order: Sequence[int]) -> View:
        """Axis j of the result is axis `order[j]`; every axis once."""
        columns = self.columns
        shape = tuple(self.shape[j] for j in order)
        return made(shape, self.base, self.offset, tuple(columns[j] for j in order))

    def sliced(self, key: Any) -> View:
        """Numpy's basic indexing: slices, whole numbers, `...` and None. Raises SpecError for anything else.

        Bounds are inside the axis; `check` says so of known sizes.
        """
        shape: list[Size] = []
        columns: list[Column] = []
        offset = self.offset
        axes = iter(zip(self.shape, self.columns, strict=True))
        for part in expanded(key, self.shape):
            if part is None:
                shape.append(1)
                columns.append((0,) * len(self.base))
                continue
            size, column = next(axes)
            if isinstance(part, slice):
                start, length, step = positions(part, size)
                shape.append(length)
                columns.append(times(column, step))
            else:
                start = counted(part, size)
            offset = tuple(a + b for a, b in zip(offset, times(column, start), strict=True))
        return made(tuple(shape), self.base, offset, tuple(columns))

    def flipped(self, axis: int) -> View:
        """That axis from its end to its beginning."""
        return self.sliced((slice(None),) * (axis % len(self.shape)) + (slice(None, None, -1),))

    def broadcast(self, shape: Shape) -> View:
        """Axes of size 1, and those missing in front, repeated up to `shape`. Raises ValueError where sizes differ."""
        missing = len(shape) - len(self.shape)
        own: Shape = (1,) * missing + self.shape
        if missing < 0 or any(a not in (1, b) for a, b in zip(own, shape, strict=True)):
            raise ValueError(f"{shape_text(self.shape)} does not broadcast to {shape_text(shape)}")
        still = (0,) * len(self.base)
        columns = ((still,) * missing) + self.columns
        kept = tuple(c if a == b else still for c, a, b in zip(columns, own, shape, strict=True))
        return made(shape, self.base, self.offset, kept)

    def split(self, axis: int, sizes: Shape) -> View:
        """One axis as several, the last of them fastest. Raises ValueError where their product is another size."""
        whole: Size = 1
        for size in sizes:
            whole = whole * size
        if whole != self.shape[axis]:
            raise ValueError(f"{self.shape[axis]} is not {' * '.join(map(str, sizes))}")
        columns = list(self.columns)
        column, parts = columns[axis], []
        for size in reversed(sizes):
            parts.append(column)
            column = times(column, size)
        columns[axis : axis + 1] = reversed(parts)
        return made((*self.shape[:axis], *sizes, *self.shape[axis + 1 :]), self.base, self.offset, tuple(columns))

    def merged(self, axis: int, count: int) -> View:
        """So many axes as one, the last of them fastest; none at all are one of size 1. Raises ValueError where that
        is no view: no single step leads from each element to the next."""
        view = self if count else self.sliced((slice(None),) * axis + (None,))
        for at in range(axis + count - 2, axis - 1, -1):
            view = view.pair_merged(at)
        return view

    def pair_merged(self, at: int) -> View:
        """Axes `at` and `at + 1` as one."""
        (slow, size_slow), (fast, size_fast) = ((self.columns[j], self.shape[j]) for j in (at, at + 1))
        if size_slow != 1 and (size_fast == 1 or slow == times(fast, size_fast)):
            column = slow if size_fast == 1 else fast
        elif size_slow == 1:
            column = fast
        else:
            inner = self.base_merged(slow, fast)
            if inner is None:
                raise ValueError(
                    f"axes of {size_slow} and {size_fast} elements are one only where they lie in memory so: "
                    "no single step leads from each element to the next"
                )
            return inner.pair_merged(at)
        columns = (*self.columns[:at], column, *self.columns[at + 2 :])
        shape = (*self.shape[:at], size_slow * size_fast, *self.shape[at + 2 :])
        return made(shape, self.base, self.offset, columns)

    def base_merged(self, slow: Column, fast: Column) -> View | None:
        """The same view, where two axes of the base, one for each column, are taken as one, with those of one element
        between them; None without such two."""
        for b in range(len(self.base) - 1):
            n = next((n for n in range(b + 1, len(self.base)) if product(self.base[n]) != 1), b + 1)
            if slow[b] != 0 and fast[n] != 0:
                inner = product(self.base[n])

                def joined(column: Column, b: int = b, n: int = n, inner: Size = inner) -> Column:
                    return (*column[:b], column[b] * inner + column[n], *column[n + 1 :])

                if joined(slow) != times(joined(fast), self.shape[self.columns.index(fast)]):
                    continue
                between = tuple(size for sizes in self.base[b : n + 1] for size in sizes)
                base = (*self.base[:b], between, *self.base[n + 1 :])
                return made(self.shape, base, joined(self.offset), tuple(map(joined, self.columns)))
        return None

    def tight(self) -> View:
        """Without what repeats: axes along which nothing moves are of size 1, and there are none of those in front."""
        columns = self.columns
        still = [all(step == 0 for step in column) for column in columns]
        first = next((j for j, s in enumerate(still) if not s), len(still))
        shape = tuple(1 if s else n for s, n in zip(still, self.shape, strict=True))
        return made(shape[first:], self.base, self.offset, columns[first:])

    def inverse(self) -> View | None:
        """The view that shows the base in this view's axes, of an array that holds what this view shows; None where
        this one leaves out or repeats elements, or where that is no view."""
        moving = [j for j, size in enumerate(self.shape) if size != 1]
        rows = {j: [b for b in range(len(self.base)) if self.steps[b][j] != 0] for j in moving}
        if any(len(found) != 1 for found in rows.values()):
            return None
        groups: list[tuple[int, ...]] = []  # axes of this view that are one axis of the base, slow to fast
        signs: dict[int, int] = {}
        for b, sizes in enumerate(self.base):
            left = [j for j in moving if rows[j] == [b]]
            order: list[int] = []
            unit: Size = 1
            offset: Size = 0
            while left:
                j = next((j for j in left if self.steps[b][j] in (unit, -unit)), None)
                if j is None:
                    return None
                signs[j] = 1 if self.steps[b][j] == unit else -1
                offset = offset + (unit * (self.shape[j] - 1) if signs[j] < 0 else 0)
                unit = unit * self.shape[j]
                order.insert(0, j)
                left.remove(j)
            if unit != product(sizes) or offset != self.offset[b]:
                return None
            if len(order) > 1 and (order != sorted(order) or any(signs[j] < 0 for j in order)):
                return None
            if any(self.shape[j] != 1 for j in range(order[0], order[-1]) if j not in order) if order else False:
                return None
            groups.append(tuple(order))
        own = [tuple(range(g[0], g[-1] + 1)) for g in groups if g]
        inside = {j for g in own for j in g}
        own = sorted([*own, *((j,) for j in range(len(self.shape)) if j not in inside)])
        base = tuple(tuple(self.shape[j] for j in g) for g in own)
        at = {g: next(n for n, axes in enumerate(own) if set(g) <= set(axes)) for g in groups if g}
        columns: list[Column] = []
        start: list[Size] = [0] * len(own)
        for group, sizes in zip(groups, self.base, strict=True):
            flipped = bool(group) and signs[group[0]] < 0
            if flipped:
                start[at[group]] = product(sizes) - 1
            for position in range(len(sizes)):
                step = product(sizes[position + 1 :])
                step = -step if flipped else step
                columns.append(tuple(step if group and n == at[group] else 0 for n in range(len(own))))
        return made(self.base_shape, base, start, tuple(columns))

    # ------------------------------------------------------------ with numbers

    def renamed(self, table: Mapping[str, Size]) -> View:
        """The same view in other sizes' words: with those in place of dims of these names."""

        def each(sizes: Iterable[Size]) -> Shape:
            return tuple(replaced(size, table) for size in sizes)

        return View(each(self.shape), tuple(map(each, self.base)), each(self.offset), tuple(map(each, self.steps)))

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raises SpecError where, at these sizes, the view has no elements or shows some that its base has not."""
        shape = [size_of(size, sizes) for size in self.shape]
        for size, number in zip(self.shape, shape, strict=True):
            if number < 0:
                raise SpecError(f"an axis of {size} elements has {number} at {at_text(size, sizes)}")
        if 0 in shape:
            return
        for base, offset, row in zip(self.base, self.offset, self.steps, strict=True):
            first = size_of(offset, sizes)
            reach = [size_of(step, sizes) * (n - 1) for step, n in zip(row, shape, strict=True)]
            low, high = first + sum(r for r in reach if r < 0), first + sum(r for r in reach if r > 0)
            whole = product(base)
            length = size_of(whole, sizes)
            if length and not 0 <= low <= high < length:
                outside = low if low < 0 else high
                at = at_text((whole, offset, *row, *self.shape), sizes)
                raise SpecError(
                    f"element {outside} of an axis of {length}{f' ({whole})' if isinstance(whole, (Dim, Expr)) else ''}"
                    + (f" at {at}" if at else "")
                )

    def apply(
        self, address: int, strides: Sequence[int], itemsize: int, sizes: Mapping[str, int], name: str = "an array"
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The address, shape and strides of this view of an array at `address`. Strides count elements, `itemsize` is
        their bytes. Raises ArgumentError, naming the array, where its axes can't be taken as one."""
        steps, at = [], 0
        for group in self.base:
            numbers = [size_of(size, sizes) for size in group]
            steps.append(one_stride(numbers, strides[at : at + len(group)], name))
            at += len(group)
        start = sum(step * size_of(offset, sizes) for step, offset in zip(steps, self.offset, strict=True))
        shape = tuple(size_of(size, sizes) for size in self.shape)
        found = (sum(s * size_of(c, sizes) for s, c in zip(steps, column, strict=True)) for column in self.columns)
        return address + start * itemsize, shape, tuple(found)


def positions_in(view: View, sizes: Mapping[str, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where in its base, contiguous and flat, each element of a view lies."""
    import numpy as np  # tracing a spec does without

    base = [size_of(size, sizes) for size in view.base_shape]
    strides = [math.prod(base[axis + 1 :]) for axis in range(len(base))]
    start, shape, steps = view.apply(0, strides, 1, sizes)
    found = np.full(shape, start, np.int64)
    for axis, (extent, step) in enumerate(zip(shape, steps, strict=True)):
        found += (np.arange(extent) * step).reshape(-1, *(1,) * (len(shape) - axis - 1))
    return found


def made(shape: Shape, base: tuple[Shape, ...], offset: Iterable[Size], columns: tuple[Column, ...]) -> View:
    """A view from the columns of its steps. Along an axis of one element nothing moves."""
    moving = [(0,) * len(base) if size == 1 else column for size, column in zip(shape, columns, strict=True)]
    steps = tuple(zip(*moving, strict=True)) if moving else ((),) * len(base)
    return View(shape, base, tuple(offset), steps)


@functools.lru_cache(1024)  # a program's planner asks for the same ones thousands of times
def identity_of(shape: Shape) -> View:
    columns = tuple(tuple(int(b == j) for b in range(len(shape))) for j in range(len(shape)))
    return made(shape, tuple((size,) for size in shape), (0,) * len(shape), columns)


def stretch_text(start: Size, length: Size, step: Size, size: Size) -> str | None:
    """`D // 2:`, `1::2`, `::-1` of an axis of that size; None for what is written in no short way."""
    if step == -1 and start == size - 1 and length == size:
        return "::-1"
    first = "" if start == 0 else str(start)
    if step == 1:
        return f"{first}:{'' if start + length == size else start + length}"
    return f"{first}::{step}" if length * step == size else None


def product(sizes: Iterable[Size]) -> Size:
    whole: Size = 1
    for size in sizes:
        whole = whole * size
    return whole


def times(column: Column, by: Size) -> Column:
    return tuple(step * by for step in column)


def combined(start: Column, columns: tuple[Column, ...], by: Sequence[Size]) -> Column:
    """The sum of `start` and the columns, each taken so many times."""
    for column, factor in zip(columns, by, strict=True):
        if factor != 0:
            start = tuple(s + step * factor for s, step in zip(start, column, strict=True))
    return start


def one_stride(sizes: Sequence[int], strides: Sequence[int], name: str) -> int:
    """The stride of axes that are taken as one. Raises ArgumentError where there is no such stride."""
    stride, count = 0, 1
    for size, own in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if count == 1:
            stride = own
        elif own != stride * count:
            raise ArgumentError(
                f"{name} has strides of {tuple(strides)} elements along axes of {tuple(sizes)} that the chain takes as "
                "one, and no single step leads from each element to the next\n  pass a contiguous array"
            )
        count *= size
    return stride if math.prod(sizes) else strides[-1]


# ---------------------------------------------------------------- keys of basic indexing


def expanded(key: Any, shape: Shape) -> Key:
    """The key with an entry for every axis, `...` written out. Raises SpecError for what is no basic indexing."""
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        number = isinstance(part, (Integral, Dim, Expr)) and not isinstance(part, bool)
        if not (part is None or number or isinstance(part, (slice, EllipsisType))):
            raise SpecError(
                f"an index of {type(part).__name__}: basic indexing takes slices, whole numbers, sizes, ... and None"
            )
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dots = sum(part is Ellipsis for part in parts)
    if dots > 1:
        raise SpecError("... stands twice in one index; write the axes out")
    if taken > len(shape):
        raise SpecError(f"{taken} indices of {shape_text(shape)}, which has {len(shape)} axes")
    rest = (slice(None),) * (len(shape) - taken)
    if not dots:
        return (*parts, *rest)
    at = next(n for n, part in enumerate(parts) if part is Ellipsis)
    return (*parts[:at], *rest, *parts[at + 1 :])


def counted(index: Any, size: Size) -> Size:
    """An index counted from the axis' beginning: negative ones count from its end."""
    own = int(index) if isinstance(index, Integral) else index
    if isinstance(own, int) and isinstance(size, int) and not -size <= own < size:
        raise SpecError(f"index {own} of an axis of {size}")
    return from_beginning(own, size)


def from_beginning(own: Size, size: Size) -> Size:
    sign = leading_sign(own)
    if sign is None:
        raise SpecError(f"whether {own} counts from the beginning or the end of {size} depends on the sizes")
    return own + size if sign < 0 else own


def positions(part: slice, size: Size) -> tuple[Size, Size, int]:
    """A slice's first element, how many there are, and the step between them."""
    step = 1 if part.step is None else part.step
    if not isinstance(step, Integral) or isinstance(step, bool) or step == 0:
        raise SpecError(f"a slice's step is a whole number other than 0, found {part.step!r}")
    step = int(step)
    for bound in (part.start, part.stop):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (Integral, Dim, Expr))):
            raise SpecError(f"a slice's bounds are whole numbers and sizes, found {type(bound).__name__}")
    if step > 0:
        start: Size = 0 if part.start is None else bounded(part.start, size)
        stop: Size = size if part.stop is None else bounded(part.stop, size)
        length = stop - start
    else:
        start = size - 1 if part.start is None else counted(part.start, size)
        stop = -1 if part.stop is None else counted(part.stop, size)
        length = start - stop
    whole, number = without_number(length)
    length = whole // abs(step) - (-number // abs(step))
    if isinstance(length, int) and length < 1:
        raise SpecError(f"the slice {slice_text(part)} of an axis of {size} is empty")
    return start, length, step


def bounded(bound: Any, size: Size) -> Size:
    """A slice's bound, counted from the axis' beginning: inside the axis, or right behind it."""
    own = int(bound) if isinstance(bound, Integral) else bound
    if isinstance(own, int) and isinstance(size, int) and not -size <= own <= size:
        raise SpecError(f"the bound {own} of a slice lies outside of an axis of {size}")
    return own if own == size else from_beginning(own, size)


def key_text(key: Any) -> str:
    """`..., : D // 2`, as it was written."""
    parts = key if isinstance(key, tuple) else (key,)
    return ", ".join(
        slice_text(part) if isinstance(part, slice) else "..." if part is Ellipsis else str(part) for part in parts
    )


def slice_text(part: slice) -> str:
    """`1:N:2`."""
    start, stop = ("" if bound is None else str(bound) for bound in (part.start, part.stop))
    return f"{start}:{stop}" + ("" if part.step is None else f":{part.step}")
