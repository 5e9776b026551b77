"""The functions of `fusegen.ops` that take values apart and put them together: views, and joins of values.

None of them computes anything, and a view of an operand costs nothing: a kernel reads it where it lies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fusegen.errors import SpecError
from fusegen.language.graph import Node
from fusegen.language.op_table import OPS
from fusegen.language.sizes import Dim, Expr, Shape, Size, evenly, shape_text
from fusegen.language.trace import Value, caller, composite, current, viewed
from fusegen.language.types import b8, f32, i32
from fusegen.language.views import View, made, product


def need_array(name: str, x: object) -> Value:
    if not isinstance(x, Value):
        found = f"{x}, a dim," if isinstance(x, Dim) else repr(x)
        raise SpecError(f"{name}: found {found} where a traced value is wanted, as in F.{name}(x, ...)", caller())
    return x


def axis_in(name: str, axis: Any, rank: int) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise SpecError(f"{name}: axis={axis!r}; there are axes {-rank} to {rank - 1}", caller())
    return axis % rank


def split(x: Value, parts: int | Sequence[Size], axis: int = -1) -> tuple[Value, ...]:
    """So many equal parts of an axis, or parts of the sizes given: `gate, up = F.split(x, 2)`. Views, not copies."""
    need_array("split", x)
    at = axis_in("split", axis, len(x.shape))
    size = x.shape[at]
    if isinstance(parts, int) and not isinstance(parts, bool):
        if parts < 1 or (isinstance(size, int) and size % parts):
            raise SpecError(f"split: an axis of {size} has no {parts} equal parts", caller())
        sizes: tuple[Size, ...] = (evenly(size, parts),) * parts
    elif isinstance(parts, (list, tuple)) and all(isinstance(p, (int, Dim, Expr)) for p in parts):
        sizes = tuple(parts)
        whole: Size = 0
        for one in sizes:
            whole = whole + one
        if whole != size:
            raise SpecError(
                f"split: parts of {' + '.join(map(str, sizes))} are {whole}, and the axis has {size}", caller()
            )
    else:
        raise SpecError(f"split: parts={parts!r}; write how many equal parts, or the list of their sizes", caller())
    found: list[Value] = []
    start: Size = 0
    with current().operator("split"):
        for one in sizes:
            found.append(x[(*(slice(None),) * at, slice(start, start + one))])
            start = start + one
    return tuple(found)


def flip(x: Value, axis: int = -1) -> Value:
    """An axis from its end to its beginning."""
    need_array("flip", x)
    at = axis_in("flip", axis, len(x.shape))
    return viewed(x, View.identity(x.shape).flipped(at), f"np.flip({{0}}, {at - len(x.shape)})", "flip")


def broadcast(x: Value, shape: Sequence[Size]) -> Value:
    """x repeated along new leading axes and along axes of size 1, up to `shape`, as numpy's broadcast_to."""
    need_array("broadcast", x)
    if not isinstance(shape, (list, tuple)) or not all(isinstance(s, (int, Dim, Expr)) for s in shape):
        raise SpecError(f"broadcast: {shape!r} is no shape; write it as (M, N)", caller())
    try:
        view = View.identity(x.shape).broadcast(tuple(shape))
    except ValueError as error:
        raise SpecError(f"broadcast: {error}", caller()) from None
    return viewed(x, view, f"np.broadcast_to({{0}}, ({', '.join(map(str, shape))},))", "broadcast")


@composite
def roll(x: Value, shift: Size, axis: int = -1) -> Value:
    """Every element `shift` places further along an axis; what leaves it at its end comes in at its beginning."""
    need_array("roll", x)
    at = axis_in("roll", axis, len(x.shape))
    before = (slice(None),) * at
    if isinstance(shift, int) and isinstance(x.shape[at], int):
        shift = shift % x.shape[at]
    if shift == 0:
        return x
    return concat([x[(*before, slice(-shift, None))], x[(*before, slice(None, -shift))]], axis)


def concat(values: Sequence[Value], axis: int = -1) -> Value:
    """Values one behind another along an axis; their other axes are alike."""
    arrays = alike("concat", values)
    rank = len(arrays[0].shape)
    at = axis_in("concat", axis, rank)
    first = arrays[0].shape
    whole: Size = 0
    starts: list[Size] = []
    for value in arrays:
        others = (*value.shape[:at], *value.shape[at + 1 :])
        if len(value.shape) != rank or others != (*first[:at], *first[at + 1 :]):
            shapes = " and ".join(shape_text(v.shape) for v in arrays)
            raise SpecError(f"concat: {shapes} differ in more than axis {axis}", caller())
        starts.append(whole)
        whole = whole + value.shape[at]
    shape: Shape = (*first[:at], whole, *first[at + 1 :])
    parts = tuple(
        View.identity(shape).sliced((*(slice(None),) * at, slice(start, start + value.shape[at])))
        for start, value in zip(starts, arrays, strict=True)
    )
    names = ", ".join(f"{{{n}}}" for n in range(len(arrays)))
    return joined("concat", arrays, shape, parts, f"np.concatenate([{names}], axis={at - rank})")


def stack(values: Sequence[Value], axis: int = -1) -> Value:
    """Values of one shape next to each other along a new axis, the last one unless said otherwise."""
    arrays = alike("stack", values)
    first = arrays[0].shape
    if any(value.shape != first for value in arrays):
        raise SpecError(f"stack: {' and '.join(shape_text(v.shape) for v in arrays)} differ", caller())
    rank = len(first) + 1
    at = axis_in("stack", axis, rank)
    shape = (*first[:at], len(arrays), *first[at:])
    parts = tuple(View.identity(shape).sliced((*(slice(None),) * at, n)) for n in range(len(arrays)))
    names = ", ".join(f"{{{n}}}" for n in range(len(arrays)))
    return joined("stack", arrays, shape, parts, f"np.stack([{names}], axis={at - rank})")


def alike(name: str, values: Any) -> list[Value]:
    """The values of a join, all of one type: i32 become f32 beside an f32."""
    if not isinstance(values, (list, tuple)) or not values:
        raise SpecError(f"{name}: found {values!r:.60}, wanted a list of values, as in F.{name}([a, b])", caller())
    arrays = [need_array(name, value) for value in values]
    if any(not value.shape for value in arrays):
        raise SpecError(f"{name}: a scalar has no axis to lie along", caller())
    kinds = {value.dtype for value in arrays}
    if b8 in kinds and len(kinds) > 1:
        raise SpecError(f"{name}: a mask (b8) beside numbers; use F.cast(mask, f32)", caller())
    if kinds == {f32, i32}:
        raise SpecError(f"{name}: i32 beside f32; use F.cast(x, f32)", caller())
    return arrays


def joined(name: str, arrays: list[Value], shape: Shape, parts: tuple[View, ...], text: str) -> Value:
    with current().operator(name) as operator:
        nodes = tuple(value.node for value in arrays)
        return Value(Node(OPS["join"], nodes, shape, arrays[0].dtype, operator, parts=parts, text=text))


def groups(x: Value, size: Size) -> Value:
    """x's last axis [..., N] in groups of `size` neighbours: [..., N // size, size]. A view, not a copy.

    A reduction of its last axis is then one of each group: `F.amax(F.groups(x, 128))` has the shape [..., N // 128, 1].
    Groups of a power of two are reduced in the kernel that makes their rows, whatever else it reduces.
    """
    need_array("groups", x)
    if not x.shape:
        raise SpecError("groups: a scalar has no axis to take groups of", caller())
    whole = x.shape[-1]
    number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    if not number and not isinstance(size, (Dim, Expr)):
        raise SpecError(f"groups: a group has {size!r} elements; it is a whole number from 1 on, or a size", caller())
    if isinstance(whole, int) and isinstance(size, int) and whole % size:
        raise SpecError(
            f"groups: rows of {whole} are no whole number of groups of {size}; pad the rows, or take another size",
            caller(),
        )
    count = evenly(whole, size)
    view = View.identity(x.shape).split(len(x.shape) - 1, (count, size))
    return viewed(x, view, f"{{0}}.reshape({tuple_text(view.shape)})", "groups")


# ---------------------------------------------------------------- einops' notation

GROUP = re.compile(r"\(([^()]*)\)|(\S+)")


def rearrange(x: Value, pattern: str, **sizes: Size) -> Value:
    """Axes by names, in einops' notation: split, merged, permuted: `F.rearrange(x, "m (h d) -> h m d", h=H)`.

    Axes in one bracket lie behind one another as one axis, the last of them fastest; `...` are the axes before the
    others, or between; 1 or () is an axis of size 1. One size of each bracket follows from the others.
    """
    need_array("rearrange", x)
    left, right = sides(pattern)
    own, wanted = with_dots(left, right, len(x.shape), pattern)
    if len(own) != len(x.shape):
        raise SpecError(f"rearrange: {pattern!r} takes {len(own)} axes, found {shape_text(x.shape)}", caller())
    known: dict[str, Size] = {}
    for group, size in zip(own, x.shape, strict=True):
        known.update(sizes_in(group, size, sizes, pattern))
    names = [name for group in own for name in group]
    targets = [name for group in wanted for name in group]
    if sorted(names) != sorted(targets) or len(set(names)) < len(names):
        odd = sorted(set(names) ^ set(targets)) or names
        raise SpecError(f"rearrange: {pattern!r}: {', '.join(odd)}: each axis stands once on both sides", caller())
    if unknown := [name for name in sizes if name not in known]:
        raise SpecError(f"rearrange: {pattern!r} has no axis {unknown[0]!r} to be {sizes[unknown[0]]}", caller())
    return rearranged(x, own, wanted, known)


Groups = list[tuple[str, ...]]


def sides(pattern: Any) -> tuple[Groups, Groups]:
    if not isinstance(pattern, str) or pattern.count("->") != 1:
        raise SpecError(f"rearrange: {pattern!r} is no pattern; write it as 'm (h d) -> h m d'", caller())
    found = []
    for side in pattern.split("->"):
        groups: Groups = []
        for match in GROUP.finditer(side):
            inside = match[1].split() if match[2] is None else [match[2]]
            groups.append(tuple(name for name in inside if name != "1"))
            for name in inside:
                if name not in ("...", "1") and not name.isidentifier():
                    raise SpecError(f"rearrange: {pattern!r}: {name!r} is no name of an axis", caller())
                if name == "..." and match[2] is None:
                    raise SpecError(f"rearrange: {pattern!r}: ... stands outside of brackets", caller())
        found.append(groups)
    return found[0], found[1]


def with_dots(left: Groups, right: Groups, rank: int, pattern: str) -> tuple[Groups, Groups]:
    """Both sides with names in place of `...`."""
    dots = ("...",)
    if left.count(dots) != right.count(dots) or left.count(dots) > 1:
        raise SpecError(f"rearrange: {pattern!r}: ... stands once on both sides, or on neither", caller())
    if dots not in left:
        return left, right
    own = [(f"...{n}",) for n in range(rank - len(left) + 1)]
    return tuple(  # type: ignore[return-value]
        [*side[: side.index(dots)], *own, *side[side.index(dots) + 1 :]] for side in (left, right)
    )


def sizes_in(group: tuple[str, ...], whole: Size, sizes: dict[str, Size], pattern: str) -> dict[str, Size]:
    """The size of each axis in one bracket, of which one may follow."""
    known = {name: sizes[name] for name in group if name in sizes}
    for name, size in known.items():
        if isinstance(size, bool) or not isinstance(size, (int, Dim, Expr)):
            raise SpecError(f"rearrange: {name}={size!r} is not a size", caller())
    left = [name for name in group if name not in known]
    others = product(known.values())
    if len(left) > 1:
        raise SpecError(
            f"rearrange: {pattern!r}: give the size of {left[0]} or of {left[1]}, as in {left[0]}=8", caller()
        )
    if left:
        uneven = isinstance(whole, int) and isinstance(others, int) and whole % others
        if uneven:
            raise SpecError(f"rearrange: {pattern!r}: an axis of {whole} has no whole number of {others}", caller())
        known[left[0]] = evenly(whole, others)
    elif others != whole:
        raise SpecError(f"rearrange: {pattern!r}: ({' '.join(group)}) is {others}, and the axis has {whole}", caller())
    return {name: known[name] for name in group}


def rearranged(x: Value, own: Groups, wanted: Groups, known: dict[str, Size]) -> Value:
    """Axes split, then permuted, then merged: one view where that is one, else two."""
    names = [name for group in own for name in group]
    targets = [name for group in wanted for name in group]
    order = [names.index(name) for name in targets]
    apart: Shape = tuple(known[name] for name in names)
    text = "{0}"
    view = View.identity(x.shape)
    if apart != x.shape:
        text += f".reshape({tuple_text(apart)})"
        for at in range(len(own) - 1, -1, -1):
            view = view.split(at, tuple(known[name] for name in own[at])) if own[at] else dropped(view, at)
    if order != sorted(order):
        text += f".transpose({', '.join(map(str, order))})"
        view = view.transposed(order)
    merged: Shape = tuple(product(known[name] for name in group) for group in wanted)
    if merged == view.shape and all(len(group) == 1 for group in wanted):
        return viewed(x, view, text, "rearrange")
    with current().operator("rearrange"):
        try:
            whole, inner = regrouped(view, wanted), text
            return viewed(x, whole, f"{inner}.reshape({tuple_text(merged)})", "rearrange")
        except ValueError:
            between = viewed(x, view, text, "rearrange")
            again = regrouped(View.identity(view.shape), wanted)
            return viewed(between, again, f"{{0}}.reshape({tuple_text(merged)})", "rearrange")


def regrouped(view: View, groups: Groups) -> View:
    for at, group in enumerate(groups):
        view = view.merged(at, len(group))
    return view


def dropped(view: View, at: int) -> View:
    """Without an axis of size 1."""
    columns = (*view.columns[:at], *view.columns[at + 1 :])
    return made((*view.shape[:at], *view.shape[at + 1 :]), view.base, view.offset, columns)


def tuple_text(shape: Shape) -> str:
    return ", ".join(map(str, shape)) or "()"
