"""From a compiled chain to what its exported launcher knows.

Layouts. At run time a kernel makes a variant for any layout that it meets. An export has a fixed set, from the fastest
to one that takes whatever has whole rows:

    as planned          as a rule contiguous: addresses and strides in multiples of what is moved at a time
    any strides         of rows, each axis by its own; still aligned
    any alignment       of addresses and of strides of rows
    anywhere            both
    w transposed        of products: every choice of factors that lie the other way round, aligned and anywhere
    in place            outputs over operands, where the plan allows it, aligned and anywhere

A launch of several steps has one variant, for the layout it was planned for; steps whose arrays lie otherwise are
launched one by one, each by its own variants, as at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusegen.errors import KernelError, NoPlan, RequestError
from fusegen.exporting.facts import (
    Argument,
    Between,
    Code,
    Exported,
    Fixed,
    Launch,
    Need,
    Part,
    Seen,
    Unit,
    Variant,
)
from fusegen.language.graph import Tensor
from fusegen.language.sizes import Size
from fusegen.language.types import Dim, i64
from fusegen.planner.model import Access, Layout, Needs, Param, Plan
from fusegen.planner.programs.model import Binding, Step
from fusegen.planner.programs.one_cluster import OneClusterPlan
from fusegen.planner.programs.side_by_side import JoinedPlan
from fusegen.runtime import Kernel, Program
from fusegen.runtime.arguments import compiled_sizes
from fusegen.runtime.calls import JoinedVariant
from fusegen.runtime.calls import Variant as Compiled
from fusegen.runtime.joined import Joined

AS_PLANNED = "as planned"
LARGEST_COUNT = 2**62  # of rows, which C counts in 64 bits
MOST_FACTORS = 2  # that are transposed in every choice; of more, all or none


def exported(made: Sequence[Kernel | Program], every_layout: bool) -> Exported:
    """A chain that was compiled for several targets. Raises RequestError for what a launcher in C can't hold."""
    graph = made[0].op_graph
    arrays = tuple(t for t in (*graph.inputs, *graph.outputs) if t.shape and t.name not in graph.updates)
    for tensor in arrays:
        if tensor.dtype.packed:
            raise RequestError(
                f"{graph.name}: {tensor.name} is {tensor.dtype}, and no array of an export holds two a byte"
            )
    values = tuple(t for t in graph.inputs if not t.shape)
    notes: list[str] = []
    units = tuple(unit_of(one, arrays, values, every_layout, notes) for one in made)
    first = made[0]
    reference = first.plan.reference if isinstance(first, Program) else first.source.reference
    return Exported(graph, arrays, values, units, reference, tuple(dict.fromkeys(notes)))


def unit_of(
    made: Kernel | Program, arrays: Sequence[Tensor], values: Sequence[Tensor], every_layout: bool, notes: list[str]
) -> Unit:
    """The launches on one target."""
    places = {tensor.name: place for place, tensor in enumerate(arrays)}
    scalars = [tensor.name for tensor in values]
    pairs = tuple(
        sorted((places[out], places[over]) for out, over in made.in_place if out in places and over in places)
    )
    if isinstance(made, Kernel):
        graph = made.plan.graph
        bindings = [(Binding(t.name, t.name), t in graph.outputs) for t in arrays]
        sizes = {name: Dim(name) for name in graph.sizes}
        launch = launch_of(made, bindings, places, sizes, scalars, scalars, every_layout, notes)
        return Unit(made.target, (launch,), (), pairs, frozenset(compiled_sizes(made.plan)))
    plan = made.plan
    places |= {output: places[operand] for output, operand in plan.graph.updates.items()}
    kept = [(s.name, s.type.dtype, s.type.shape) for s in plan.between] + [(name, i64, (1,)) for name in plan.counters]
    places |= {name: len(arrays) + place for place, (name, _, _) in enumerate(kept)}
    counters = {place: places[name] for name, place in plan.counters.items()}
    launches: list[Launch] = []
    at: list[int] = []  # where each of the plan's launches begins among these
    for place, (steps, kernel) in enumerate(zip(plan.launches, made.kernels, strict=True)):
        at.append(len(launches))
        if isinstance(kernel, Joined):
            own = [counters[place]] if place in counters else []
            launches += joined_of(kernel, steps, places, own, scalars, every_layout, notes)
        else:
            launches.append(step_of(kernel, steps[0], places, scalars, every_layout, notes))
    at.append(len(launches))
    ends = {**plan.lives, **{name: (place, place) for name, place in plan.counters.items()}}
    lives = {name: (at[first], at[last + 1] - 1) for name, (first, last) in ends.items()}
    between = tuple(Between(*one, *lives[one[0]]) for one in kept)
    return Unit(made.target, tuple(launches), between, pairs, plan.fixed)


def bindings_of(step: Step) -> list[tuple[Binding, bool]]:
    """The step's arrays, and which of them it writes."""
    return [*((binding, False) for binding in step.reads), *((binding, True) for binding in step.writes)]


def sizes_of(step: Step) -> dict[str, Size]:
    """The dims of the step's graph in those of the program."""
    return {name: step.sizes.get(name, Dim(name)) for name in step.plan.graph.sizes}


def step_of(
    kernel: Kernel, step: Step, places: Mapping[str, int], scalars: Sequence[str], every_layout: bool, notes: list[str]
) -> Launch:
    return launch_of(kernel, bindings_of(step), places, sizes_of(step), scalars, step.values, every_layout, notes)


def joined_of(
    kernel: Joined, steps: Sequence[Step], places: Mapping[str, int], own: Sequence[int], scalars: Sequence[str],
    every_layout: bool, notes: list[str],
) -> list[Launch]:  # fmt: skip
    """The launch of all steps, and behind it a launch of each. `own`: arrays of the launch itself."""
    alone = [
        step_of(kernel.alone(place), step, places, scalars, every_layout, notes) for place, step in enumerate(steps)
    ]
    sizes = [sizes_of(step) for step in steps]
    seen = tuple(one for step in steps for one in seen_of(bindings_of(step), places))
    seen += tuple(Seen(place, True) for place in own)
    parts = kernel.plan.parts
    extents = tuple(extents_of(part, own) for part, own in zip(parts, sizes, strict=True))
    values = tuple(scalars.index(name) for step in steps for name in step.values)
    fixed = fixed_sizes(parts, sizes)
    names = [[binding.tensor for binding, _ in bindings_of(step)] for step in steps]
    variant = variant_of(kernel.main, names, sizes, fixed, extents, AS_PLANNED)
    if isinstance(kernel.plan, OneClusterPlan):
        variant = replace(variant, pairs=(*variant.pairs, *handed_on(seen)))
    return [Launch(kernel.name, (variant,), numbered(seen), extents, tuple(fixed), values, len(steps)), *alone]


def handed_on(seen: Sequence[Seen]) -> list[tuple[int, int]]:
    """What one step of a launch writes and one behind it reads: no output over an operand of the caller's."""
    written = [(place, one.base) for place, one in enumerate(seen) if one.written]
    return [
        (output, operand)
        for output, base in written
        for operand, one in enumerate(seen)
        if operand > output and not one.written and one.base == base
    ]


def launch_of(
    kernel: Kernel, bindings: Sequence[tuple[Binding, bool]], places: Mapping[str, int], sizes: Mapping[str, Size],
    scalars: Sequence[str], values: Sequence[str], every_layout: bool, notes: list[str],
) -> Launch:  # fmt: skip
    """The launch of one kernel, in all its variants."""
    compiled = list(variants_of(kernel, every_layout, notes))
    fixed = fixed_sizes([one.plan for _, one in compiled], [sizes] * len(compiled))
    extents = tuple(dict.fromkeys(extents_of(one.plan, sizes) for _, one in compiled))
    names = [[binding.tensor for binding, _ in bindings]]
    found: list[Variant] = []
    for layout, one in compiled:
        variant = variant_of(one, names, [sizes], fixed, extents, layout)
        if all(replace(variant, layout=other.layout) != other for other in found):
            found.append(variant)
    return Launch(
        kernel.name, tuple(found), numbered(seen_of(bindings, places)), extents, tuple(fixed),
        tuple(scalars.index(name) for name in values),
    )  # fmt: skip


def seen_of(bindings: Sequence[tuple[Binding, bool]], places: Mapping[str, int]) -> tuple[Seen, ...]:
    return tuple(Seen(places[binding.base], written, binding.view) for binding, written in bindings)


def numbered(seen: Sequence[Seen]) -> tuple[Seen, ...]:
    """Each view with a number by which equal ones are known."""
    views = list(dict.fromkeys(one.view for one in seen if one.view is not None))
    return tuple(one if one.view is None else replace(one, number=views.index(one.view)) for one in seen)


def extents_of(plan: Plan, sizes: Mapping[str, Size]) -> tuple[Size, ...]:
    """The sizes of the plan's dimensions of rows, in the chain's dims."""
    shape = plan.graph.shape
    found = []
    for dim in plan.row_dims:
        extent: Size = 1
        for axis in dim.axes:
            extent = extent * in_dims(shape[axis], sizes)
        found.append(extent)
    return tuple(found)


def in_dims(size: Size, sizes: Mapping[str, Size]) -> Size:
    """A size of a step's graph in the chain's dims. Raises RequestError for one that is computed from computed dims."""
    if isinstance(size, int):
        return size
    if isinstance(size, Dim):
        return sizes[size.name]
    if all(sizes[name] == Dim(name) for name in sizes):
        return size
    raise RequestError(f"the size {size} of a step has no place in an export")


def fixed_sizes(plans: Sequence[Plan], sizes: Sequence[Mapping[str, Size]]) -> list[Size]:
    """What the plans are compiled for, each size once."""
    found = [own[name] for plan, own in zip(plans, sizes, strict=True) for name in compiled_sizes(plan)]
    return list(dict.fromkeys(size for size in found if not isinstance(size, int)))


# ---------------------------------------------------------------- variants


def variants_of(kernel: Kernel, every_layout: bool, notes: list[str]) -> Iterator[tuple[str, Compiled]]:
    """The kernel for each layout that is exported, the fastest first, with the layout in words."""
    yield AS_PLANNED, kernel.main
    for said, layout in layouts_of(kernel.plan) if every_layout else ():
        try:
            yield said, kernel.variant(layout)
        except (NoPlan, KernelError) as error:
            notes.append(f"{kernel.name} for {kernel.target}: none for {said}: {str(error).splitlines()[0]}")


def layouts_of(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Beside the plan's own, those that this module's docstring lists."""
    own = plan.layout
    if own.interleaved:
        own = replace(own, interleaved=frozenset(), apart=own.apart | own.woven)
        yield "elements apart", own
    over = frozenset(plan.in_place)
    loose = frozenset(access.tensor for access in plan.accesses) - own.apart
    anywhere = replace(own, split=True, unaligned=loose)
    factors = sorted(plan.transposable)
    counts = range(1, len(factors) + 1) if len(factors) <= MOST_FACTORS else (len(factors),)
    turned = [chosen for count in counts for chosen in itertools.combinations(factors, count)]
    turned = [chosen for chosen in turned if frozenset(chosen) != own.transposed]
    if over:
        yield "in place", replace(own, in_place=over)
    yield "any strides", replace(own, split=True)
    yield "any alignment", replace(own, unaligned=loose)
    for chosen in turned:
        yield f"{' and '.join(chosen)} transposed", replace(own, transposed=frozenset(chosen))
    yield "anywhere", anywhere
    for chosen in turned:
        yield f"{' and '.join(chosen)} transposed, anywhere", replace(anywhere, transposed=frozenset(chosen))
    if over:
        yield "in place, anywhere", replace(anywhere, in_place=over)


def variant_of(
    made: Compiled | JoinedVariant, names: Sequence[Sequence[str]], sizes: Sequence[Mapping[str, Size]],
    fixed: Sequence[Size], extents: Sequence[tuple[Size, ...]], layout: str,
) -> Variant:  # fmt: skip
    """A compiled launch as a launcher takes it. `names`: of each step, its arrays in the launch's order; `sizes`: its
    dims in the chain's; `fixed`: the launch's sizes that variants are compiled for; `extents`: what parts count."""
    plan, binary = made.plan, made.binary
    if binary is None:
        raise KernelError(f"{plan.name} has no machine code, which an export is made of")
    plans: tuple[Plan, ...] = plan.parts if isinstance(plan, JoinedPlan) else (plan,)
    most, each = ((0,) * len(plans),) * 2
    if isinstance(plan, OneClusterPlan):
        most, each = plan.most, (*plan.each, *each[len(plan.each) :])
    starts = itertools.accumulate((len(own) for own in names), initial=0)
    needs: list[Need] = []
    pairs: list[tuple[int, int]] = []
    woven: list[tuple[int, ...]] = []
    constants: list[Fixed] = []
    parts: list[Part] = []
    arguments: dict[str, list[Argument]] = {}
    for part, own, dims, start, *blocks in zip(plans, names, sizes, starts, most, each, strict=False):
        at = {name: start + place for place, name in enumerate(own)}
        counted = extents.index(extents_of(part, dims))
        needs += [need_of(part, access, at) for access in part.accesses]
        pairs += [(at[out], at[over]) for out, over in sorted(part.layout.in_place)]
        woven += [tuple(at[name] for name in group) for group in sorted(part.layout.interleaved)]
        constants += [
            Fixed(fixed.index(dims[name]), size, str(dims[name]))
            for name, size in compiled_sizes(part).items()
            if not isinstance(dims[name], int)
        ]
        rows, alone = min(part.max_rows, LARGEST_COUNT), part.writes_without_rows
        parts.append(Part(counted, part.block_count, part.persistent_rows, len(part.row_dims), rows, alone, *blocks))
        for param in part.params:
            arguments.setdefault(param.kind, []).append(argument_of(part, counted, param, at))
    if isinstance(plan, JoinedPlan):
        behind = sum(map(len, names))
        arguments["pointer"] += [Argument("pointer", behind + place) for place, _ in enumerate(plan.own_pointers)]
    return Variant(
        layout=layout,
        code=Code(plan.name, made.source.text, made.source.filename, binary.code, binary.compiler),
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        most_columns=plan.target.max_blocks(plan.threads) if isinstance(plan, Plan) and plan.folded else 0,
        most_blocks=plan.max_blocks,
        by_cluster=isinstance(plan, OneClusterPlan),
        waits=plan.waits,
        parts=tuple(parts),
        needs=tuple(needs),
        arguments=in_order(plan.params, arguments, plan.counted if isinstance(plan, JoinedPlan) else 0),
        fixed=tuple(constants),
        pairs=tuple(pairs),
        woven=tuple(woven),
    )


def in_order(params: Sequence[Param], found: Mapping[str, Sequence[Argument]], counted: int) -> tuple[Argument, ...]:
    """The arguments in the kernel's own order. A launch of several steps has all pointers first, then all scalars, then
    how many blocks those steps have that are `counted`, the first ones: each kind in the order of the steps."""
    queues = {kind: iter(own) for kind, own in found.items()}
    queues["blocks"] = iter([Argument("blocks", place) for place in range(counted)])
    values = itertools.count()
    ordered = []
    for param in params:
        argument = next(queues[param.kind])
        ordered.append(replace(argument, array=next(values)) if param.kind == "value" else argument)
    return tuple(ordered)


def argument_of(plan: Plan, extents: int, param: Param, at: Mapping[str, int]) -> Argument:
    if param.kind in ("value", "blocks"):
        return Argument(param.kind)
    if param.kind == "extent":
        return Argument("extent", extents=extents, dim=param.dim)
    array = at[param.tensor]
    if param.kind in ("pointer", "address"):
        return Argument("pointer", array)
    if param.kind == "map":
        tensor = next(t for t in (*plan.graph.inputs, *plan.graph.outputs) if t.name == param.tensor)
        axes = tuple(map(bits, param.box_axes))
        return Argument(
            "map", array, box_axes=axes, box=param.box, swizzle=param.swizzle, dtype=param.dtype or tensor.dtype
        )
    access = {access.tensor: access for access in plan.accesses}[param.tensor]
    axes_of = param.axes or (() if param.kind == "size" else plan.axes_walked(access, param.dim))
    return Argument(param.kind, array, axes=bits(axes_of))


def need_of(plan: Plan, access: Access, at: Mapping[str, int]) -> Need:
    needs: Needs = plan.needs_of(access)
    rows = access.by_column and not access.apart and not access.interleaved
    line = -access.line if access.transposable else 1 if rows else 0
    return Need(
        array=at[access.tensor],
        line=line,
        groups=tuple(bits(group) for group in needs.groups if group),
        dense=bits(needs.dense),
        dense_stride=needs.dense_stride,
        address_bytes=needs.address_bytes,
        stride_bytes=needs.stride_bytes,
        least_stride=needs.least_stride,
        anywhere=access.tensor in plan.layout.unaligned or access.interleaved is not None,
    )


def bits(axes: Sequence[int]) -> int:
    """Axes, counted from the right from -1 on, as bits."""
    return sum(1 << (-axis - 1) for axis in axes)
