"""A chain's operands against the arrays of one call: every size, dtype, place and stride checked before a launch.

`measure` unifies the chain's symbolic shapes with the arrays' and says each size; `layout_needed` says what a plan may
assume of these arrays; `bind` gives the numbers of the launch. All three are functions of shapes, strides, dtypes,
places and alignment, never of the addresses themselves, so a Kernel remembers their results by exactly those.
`check_overlap` is the one that looks at addresses.

Every complaint is an ArgumentError, names the operand, and comes before anything is launched.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusegen.errors import ArgumentError, SpecError
from fusegen.language.graph import Graph, Tensor
from fusegen.language.sizes import Expr, Size, at_text, dims_in, solved
from fusegen.language.types import Dim, DType, f32, fits_u32, i32, size_of, u32
from fusegen.planner.model import Layout, Needs, Param, Plan
from fusegen.runtime.arrays import ArrayView, Place, a_thing, place_text
from fusegen.runtime.devices import Mapped
from fusegen.runtime.libraries import advice
from fusegen.targets.tensor_map import GRAIN

Views = Mapping[str, ArrayView]
Pairs = frozenset[tuple[str, str]]  # (output, operand)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one call. `shape` is the chain's iteration space in numbers."""

    by_name: Mapping[str, int]
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of `tensor` in this call."""
        return tuple(size_of(size, self.by_name) for size in tensor.shape)


@dataclass(frozen=True, slots=True)
class Bound:
    """The numbers of one launch; `numbers` are the extents and strides in the order of the plan's parameters, `maps`
    its tensor maps."""

    sizes: Sizes
    rows: int  # elements, in a flat plan
    blocks: int
    numbers: tuple[int, ...]
    maps: tuple[Mapped, ...] = ()


# ---------------------------------------------------------------- sizes


def compiled_sizes(plan: Plan) -> Mapping[str, int]:
    """The sizes that are constants of the kernel's text, by the dim's name."""
    graph = plan.graph
    fixed = {node.size for node in graph.nodes} if plan.flat else graph.fixed
    return {size.name: graph.sizes[size.name] for size in fixed if isinstance(size, Dim)}


def measure(plan: Plan, views: Views) -> Sizes:
    """Give every dim one size. `views` holds every input, and the outputs that the caller passed."""
    graph = plan.graph
    by_name = measure_dims(graph, compiled_sizes(plan), views)
    return Sizes(by_name, tuple(size_of(size, by_name) for size in graph.shape))


def measure_dims(graph: Graph, compiled: Mapping[str, int], views: Views) -> dict[str, int]:
    """The size of every dim of `graph`; `compiled` are those that can't be others."""
    found: dict[str, tuple[int, str]] = {}  # dim -> size, and where it was first seen
    here = [(tensor, views[tensor.name]) for tensor in (*graph.inputs, *graph.outputs) if tensor.name in views]
    for tensor, view in here:
        measure_tensor(graph, tensor, view, found, compiled)
    for tensor, view in here:
        measure_computed(graph, tensor, view, found, compiled)
    for name, size in compiled.items():
        actual, place = found.get(name, (size, ""))
        if actual != size:
            raise other_size(graph, name, size, actual, place)
    return {name: found[name][0] if name in found else size for name, size in graph.sizes.items()}


def other_size(graph: Graph, name: str, size: int, actual: int, place: str) -> ArgumentError:
    advice = f"compile {graph.name}.at({name}={actual}) for such arrays"
    try:
        graph.at(**{name: actual})
    except SpecError as error:  # a row without columns, or with fewer than are chosen of it
        advice = f"there is no kernel for such arrays: {str(error).removeprefix(f'{error.where}: ')}"
    return ArgumentError(f"the kernel is compiled for {name}={size}, and {place} has {actual}\n  {advice}")


def measure_tensor(
    graph: Graph, tensor: Tensor, view: ArrayView, found: dict[str, tuple[int, str]], compiled: Mapping[str, int]
) -> None:
    """Note the sizes of one tensor in `found`; a size that differs from what was found before is an error, of whichever
    of the two the kernel isn't compiled for."""
    if len(view.shape) != len(tensor.shape):
        axes = "1 axis" if len(view.shape) == 1 else f"{len(view.shape)} axes"
        raise ArgumentError(
            f"{tensor.name} has {axes}, shape {view.shape}, and {graph.name} takes {tensor.type}\n"
            f"  pass an array of {len(tensor.shape)} axes{', reshaped or expanded' if view.shape else ''}"
        )
    for axis, (size, actual) in enumerate(zip(tensor.shape, view.shape, strict=True)):
        here = f"{tensor.name} on axis {axis}"
        if isinstance(size, int):
            if actual != size:
                raise ArgumentError(f"{here} has {actual}, and {graph.name} takes {tensor.type}: exactly {size} there")
            continue
        if isinstance(size, Expr):  # once all dims are found
            continue
        first, place = found.setdefault(size.name, (actual, here))
        if first != actual:
            if compiled.get(size.name) == actual:
                raise other_size(graph, size.name, actual, first, place)
            raise ArgumentError(
                f"{here} has {actual}, and {size} is {first} already, from {place}\n"
                f"  {tensor.name} has shape {view.shape} and is declared {tensor.type}"
                + (f"; to broadcast it, expand it to {first} there" if actual == 1 else "")
            )


def measure_computed(
    graph: Graph, tensor: Tensor, view: ArrayView, found: dict[str, tuple[int, str]], compiled: Mapping[str, int]
) -> None:
    """Hold an axis such as `2 * N` against the dims that were found; one dim that nothing else has said follows."""
    for axis, (size, actual) in enumerate(zip(tensor.shape, view.shape, strict=True)):
        if not isinstance(size, Expr):
            continue
        here = f"{tensor.name} on axis {axis}"
        known = {**compiled, **{name: number for name, (number, _) in found.items()}}
        unknown = list(dict.fromkeys(d.name for d in dims_in(size) if d.name not in known))
        if not unknown:
            wanted = size_of(size, known)
            if actual != wanted:
                raise ArgumentError(
                    f"{here} has {actual}, and {size} is {wanted} at {at_text(size, known)}\n"
                    f"  {tensor.name} has shape {view.shape} and is declared {tensor.type}"
                )
            continue
        number = number_from(size, unknown, actual, known)
        if number is None:
            raise ArgumentError(
                f"{here} has {actual}, from which {' and '.join(unknown)} can't be told: it is declared {size}\n"
                f"  {tensor.name} has shape {view.shape} and is declared {tensor.type}"
            )
        found[unknown[0]] = number, here


def number_from(size: Size, unknown: Sequence[str], actual: int, known: Mapping[str, int]) -> int | None:
    """The one unknown dim of a size that is `actual`; None where there are more, or no whole number fits."""
    found = solved(size, unknown[0], actual) if len(unknown) == 1 else None
    try:
        number = None if found is None else size_of(found, known)
    except SpecError:  # it does not come out even
        return None
    return number if number is not None and number >= 0 else None


# ---------------------------------------------------------------- dtype, place, strides, overlap


FRESH = "pass an out= of that type and with contiguous rows, or leave it away"


def check_dtypes(graph: Graph, views: Views) -> None:
    """Every array holds what the chain declares."""
    for tensor in (*graph.inputs, *graph.outputs):
        view = views.get(tensor.name)
        if view is None or view.dtype == tensor.dtype:
            continue
        if tensor in graph.outputs:  # a converted copy would be written, and lost
            raise ArgumentError(f"{tensor.name} holds {view.dtype}, and {graph.name} writes {tensor.type}\n  {FRESH}")
        raise ArgumentError(
            f"{tensor.name} holds {view.dtype}, and {graph.name} takes {tensor.type}\n"
            f"  pass {advice(tensor.name, view.library, 'cast', tensor.dtype)}"
        )


def one_place(views: Views) -> Place:
    """The place that every array is in."""
    (first, view), *others = views.items()
    for name, other in others:
        if other.device != view.device:
            raise ArgumentError(
                f"{first} is on {place_text(view.device)} and {name} on {place_text(other.device)}\n"
                "  a kernel takes arrays of one device; move one of them"
            )
    return view.device


def check_strides(plan: Plan, views: Views, named: Mapping[str, str] | None = None) -> None:
    """The row itself is contiguous in every array that moves along it, where the plan knows no stride of its elements;
    and outputs hold every element once. `named`: what the caller calls a tensor that is a view of an array."""
    named = named or {}
    for access in plan.accesses:
        view = views.get(access.tensor)
        if view is None or view.size == 0:
            continue
        if access.output:
            check_output(access.tensor, view)
        name = named.get(access.tensor, access.tensor)
        if access.transposable:
            check_matrix(name, view)
        elif access.by_column and not access.apart and not access.interleaved and not in_line(view, -1):
            raise ArgumentError(
                f"{name} has a stride of {view.strides[-1]} elements along its last axis, "
                f"and a kernel {'writes' if access.output else 'reads'} rows whose elements are next to each other\n"
                f"  {FRESH if access.output else 'pass ' + advice(name, view.library, 'contiguous')}"
            )


def in_line(view: ArrayView, axis: int) -> bool:
    """Are the elements along that axis next to each other?"""
    return view.shape[axis] <= 1 or view.strides[axis] == 1


def check_matrix(name: str, view: ArrayView) -> None:
    if not in_line(view, -1) and not in_line(view, -2):
        raise ArgumentError(
            f"{name} has strides of {view.strides[-2]} and {view.strides[-1]} elements along its last two axes, and a "
            f"product reads matrices whose rows or columns lie next to each other\n"
            f"  pass {advice(name, view.library, 'contiguous')}"
        )


def check_output(name: str, view: ArrayView) -> None:
    if not view.writable:
        reason = "JAX arrays are immutable: leave out= away" if view.library == "jax" else "pass a writable one"
        raise ArgumentError(f"{name} is an output and its array is read-only\n  {reason}")
    axes = sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1)
    reach = 0  # of the axes with smaller strides: a larger stride must step over all of it
    for stride, extent in axes:
        if stride <= reach:
            raise ArgumentError(
                f"{name} is an output and its array overlaps itself: shape {view.shape}, strides {view.strides}\n"
                "  pass an array whose elements are all different memory"
            )
        reach += stride * (extent - 1)


def check_overlap(chain: str, in_place: Pairs, inputs: Views, outputs: Views) -> Pairs:
    """Which outputs are to be written over which operands, (output, operand): none but those of `in_place`, each with
    the operand's very strides. Raises ArgumentError for any other memory that an output shares."""
    found: set[tuple[str, str]] = set()
    seen: dict[str, ArrayView] = dict(inputs)
    for name, view in outputs.items():
        for other, there in seen.items():
            if not overlap(view, there):
                continue
            if other in inputs and (name, other) in in_place and in_the_place_of(view, there):
                found.add((name, other))
                continue
            raise ArgumentError(
                f"the output {name} shares memory with {'the input' if other in inputs else 'the output'} {other}\n"
                f"  {why_not(chain, in_place, name, other, other in inputs)}\n"
                "  pass an out= with memory of its own, or leave it away"
            )
        seen[name] = view
    return frozenset(found)


def in_the_place_of(view: ArrayView, there: ArrayView) -> bool:
    """Is each element of one array where that of the other one is?"""
    same = (view.address, view.shape, view.dtype) == (there.address, there.shape, there.dtype)
    axes = zip(view.shape, view.strides, there.strides, strict=True)
    return same and all(one == other for size, one, other in axes if size > 1)


def why_not(chain: str, in_place: Pairs, name: str, other: str, operand: bool) -> str:
    """Why an output may not lie where it does."""
    if not operand:
        return "each output needs its own"
    if (name, other) in in_place:
        return f"{name} may be {other} itself, with the same shape and strides, and no other part of its memory"
    over = sorted(operand for output, operand in in_place if output == name)
    instead = f"over {' or '.join(over)} alone" if over else "over no operand"
    return f"{chain} may not have read all of {other} where it writes {name}; it may write that {instead}"


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays may share a byte: exact where one lies beside the other, also column by column in one buffer.

    Every element of an array starts at its address plus multiples of its strides. With g a common divisor of all long
    strides of both, the bytes that an array touches, modulo g, are its short axes' reach from its address: two such
    intervals that don't meet on the circle of g bytes mean that the arrays don't meet.
    """
    (a_low, a_high), (b_low, b_high) = a.span, b.span
    if a_high <= b_low or b_high <= a_low or a_low == a_high or b_low == b_high:
        return False
    steps = {abs(s) * v.dtype.bytes for v in (a, b) for s, n in zip(v.strides, v.shape, strict=True) if n > 1 and s}
    for threshold in sorted(steps):
        circle = math.gcd(*(step for step in steps if step >= threshold))
        a_from, a_bytes = short_reach(a, threshold)
        b_from, b_bytes = short_reach(b, threshold)
        ahead = (b_from - a_from) % circle
        if a_bytes <= ahead and ahead + b_bytes <= circle:
            return False
    return True


def short_reach(view: ArrayView, threshold: int) -> tuple[int, int]:
    """Where the axes whose strides are below `threshold` bytes begin, and how many bytes they span."""
    each = view.dtype.bytes
    reach = [
        (n - 1) * s * each for s, n in zip(view.strides, view.shape, strict=True) if n > 1 and abs(s) * each < threshold
    ]
    below = sum(r for r in reach if r < 0)
    return view.address + below, sum(r for r in reach if r > 0) - below + each


# ---------------------------------------------------------------- layout


def merged_stride(view: ArrayView, axes: Iterable[int]) -> int | None:
    """One stride that passes all `axes`, counted from the right, 0 when there is nothing to pass; None when there is no
    such stride."""
    stride = 0
    steps = 0  # elements of the merged axis so far
    for axis in sorted(axes, reverse=True):
        extent = view.shape[axis]
        if extent == 1:
            continue
        if not steps:
            stride, steps = view.strides[axis], extent
        elif view.strides[axis] != stride * steps:
            return None
        else:
            steps *= extent
    return stride


def has_row_strides(needs: Needs, view: ArrayView) -> bool:
    """Whether each of the plan's row dimensions moves along this array by one stride."""
    if any(merged_stride(view, axes) is None for axes in needs.groups):
        return False
    return not moves(view, needs.dense) or merged_stride(view, needs.dense) == needs.dense_stride


def moves(view: ArrayView, axes: Iterable[int]) -> bool:
    """Is there more than one element along these axes?"""
    return math.prod(view.shape[axis] for axis in axes) > 1


def aligned(needs: Needs, view: ArrayView) -> bool:
    """Whether the array's address and strides are what the plan needs, where its row dimensions can pass it."""
    strides = [merged_stride(view, axes) or 0 for axes in needs.groups if moves(view, axes)]
    return (
        view.address % needs.address_bytes == 0
        and all(stride * view.dtype.bytes % needs.stride_bytes == 0 for stride in strides)
        and (needs.least_stride is None or all(stride >= needs.least_stride for stride in strides))
    )


def layout_needed(plan: Plan, views: Views, in_place: Pairs = frozenset()) -> Layout:
    """The least general layout that holds `plan.layout` and these arrays; `plan.layout` itself when the plan fits them.

    How a plan reads its operands depends on its layout, so alignment is judged only once each axis has its stride: a
    plan for the layout returned here is to be asked again. Each answer is more general than the last, so asking ends.
    Outputs that are not in `views` will be fresh, and fresh arrays fit every layout. `in_place`: the outputs that are
    to be written over operands.
    """
    layout = plan.layout
    if not in_place <= layout.in_place:
        return replace(layout, in_place=layout.in_place | in_place)
    here = [(needs, views[needs.tensor]) for needs in plan.needs if needs.tensor in views]
    here = [(needs, view) for needs, view in here if view.size]
    matrices = {needs.tensor: view for needs, view in here if needs.transposable}
    transposed = frozenset(name for name, view in matrices.items() if not in_line(view, -1))
    rights = {needs.tensor for needs, _ in here if needs.right}
    if transposed & rights:  # beside each other they lie alike; one of a single line lies either way
        transposed |= frozenset(name for name, view in matrices.items() if name in rights and in_line(view, -2))
    if not transposed <= layout.transposed:
        return replace(layout, transposed=layout.transposed | transposed)
    if not layout.split and any(not has_row_strides(needs, view) for needs, view in here):
        return replace(layout, split=True)
    loose = frozenset(needs.tensor for needs, view in here if not aligned(needs, view))
    for names in layout.interleaved:
        if loose & set(names) or not by_turns([views[name] for name in names if name in views]):
            kept = layout.interleaved - {names}
            return replace(layout, interleaved=kept, apart=layout.apart | set(names))
    apart = frozenset(pair for pair in layout.within if not begin_together(*(views[n] for n in pair if n in views)))
    return replace(layout, unaligned=layout.unaligned | loose, within=layout.within - apart)


def begin_together(part: ArrayView, whole: ArrayView) -> bool:
    """Are the rows of `part` the first columns of those of `whole`, in the same memory?"""
    moving = [axis for axis, size in enumerate(part.shape) if size > 1]
    alike = all(part.strides[axis] == whole.strides[axis] for axis in moving)
    return part.address == whole.address and part.shape[:-1] == whole.shape[:-1] and alike


def by_turns(views: Sequence[ArrayView]) -> bool:
    """Are these every so-many-th element of one array, one behind the other?"""
    first, count = views[0], len(views)
    return all(
        view.strides == first.strides and view.shape == first.shape and view.strides[-1] == count
        and view.address == first.address + place * view.dtype.bytes
        for place, view in enumerate(views)
    )  # fmt: skip


# ---------------------------------------------------------------- the launch


def bind(plan: Plan, sizes: Sizes, views: Views) -> Bound:
    """The numbers of a launch of `plan` over `views`, inputs and outputs, whose layout is the plan's."""
    accesses = {access.tensor: access for access in plan.accesses}
    extents = extents_of(plan, sizes)
    rows = math.prod(extents)
    if rows > plan.max_rows:
        what = "elements" if plan.flat else "rows"
        raise ArgumentError(
            f"{plan.name} got {rows} {what}, and a launch on {plan.target} takes {plan.max_rows}\n  pass them in parts"
        )
    numbers: list[int] = []
    for param in plan.params:
        if param.kind == "extent":
            numbers.append(extents[param.dim])
        elif param.kind == "size":
            numbers.append(math.prod(views[param.tensor].shape[axis] for axis in param.axes))
            if rows and not numbers[-1]:
                does = "writes" if accesses[param.tensor].output else "reads"
                raise ArgumentError(f"{param.tensor} has no rows, and {plan.name} {does} some of them")
        elif param.kind == "stride":
            access, view = accesses[param.tensor], views[param.tensor]
            numbers.append(merged_stride(view, param.axes or plan.axes_walked(access, param.dim)) or 0)
    maps = tuple(mapped(plan, param, views[param.tensor]) for param in plan.params if param.kind == "map")
    return Bound(sizes, rows, plan.blocks(*extents) if rows or plan.writes_without_rows else 0, tuple(numbers), maps)


def extents_of(plan: Plan, sizes: Sizes) -> list[int]:
    """The sizes of the plan's dimensions of rows."""
    return [math.prod(sizes.shape[axis] for axis in dim.axes) for dim in plan.row_dims]


def mapped(plan: Plan, param: Param, view: ArrayView) -> Mapped:
    """The tensor map of `param` over an array, without its address. An axis of one element has no stride of its own: it
    gets one that a tensor copy allows."""
    order = [p.tensor for p in plan.params if p.kind in ("pointer", "map")]
    shape, strides = [], []
    for axes in param.box_axes:
        shape.append(math.prod(view.shape[axis] for axis in axes))
        strides.append((merged_stride(view, axes) or 0) * view.dtype.bytes or GRAIN)
    dtype = param.dtype or view.dtype
    return Mapped(
        param.name, order.index(param.tensor), dtype, tuple(shape), tuple(strides[:-1]), param.box, param.swizzle
    )


# ---------------------------------------------------------------- run-time scalars

Number = int | float


def scalar(graph: Graph, tensor: Tensor, value: object) -> Number:
    """A run-time scalar as the number the kernel gets: f32 as a float, i32 as an int, u32 as the int of its bits.
    Raises ArgumentError."""
    wanted = f"{graph.name} takes {tensor.name}: {tensor.dtype}"
    if isinstance(value, (int, float, np.generic)) and not isinstance(value, np.complexfloating):
        number = SCALARS[tensor.dtype](value)
        if number is not None:
            return number
        raise ArgumentError(f"{tensor.name} is {value!r}, and {wanted}, which is {SCALAR_RANGES[tensor.dtype]}")
    if hasattr(value, "shape") and not isinstance(value, np.generic):  # no repr: to print what a GPU holds waits for it
        raise ArgumentError(
            f"{tensor.name} is {a_thing(type(value).__name__)}, and {wanted}, a number\n"
            f"  declare it {tensor.name}: {tensor.dtype}[1] in the spec, so that the kernel reads it where it is\n"
            "  for an array of one element on the CPU, pass its .item(); on a GPU that would wait for all work there"
        )
    raise ArgumentError(
        f"{tensor.name} is {value!r:.80}, and {wanted}, a number\n  pass a Python number or a numpy scalar"
    )


def as_float(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # text, a date, an int beyond every float
        return None
    return number if abs(number) <= f32.largest or not math.isfinite(number) else None


def as_int(value: Any) -> int | None:
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if -(2**31) <= number < 2**31 else None


def as_bits(value: Any) -> int | None:
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return (number if number < 2**31 else number - 2**32) if fits_u32(number) else None


SCALARS: Mapping[DType, Callable[[Any], Number | None]] = {f32: as_float, i32: as_int, u32: as_bits}
SCALAR_RANGES: Mapping[DType, str] = {
    f32: f"a number of magnitude up to {f32.largest:.8g}, an infinity or NaN",
    i32: "a whole number from -2147483648 to 2147483647",
    u32: "a whole number from 0 to 4294967295",
}
