"""What every rule shares: how rows are passed over, how each tensor is read, the kernel's parameters, its
statements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from fusegen.language.eager import is_unfused
from fusegen.language.graph import Graph, Kind, Node, Tensor, once_per_graph
from fusegen.language.naming import value_names
from fusegen.language.nodes import size_number
from fusegen.language.types import b8, f32, i32, size_of, u32
from fusegen.planner.limits import limits
from fusegen.planner.model import (
    Access,
    Argument,
    Gathered,
    Layout,
    Mode,
    Number,
    Param,
    RowDim,
    Statement,
    Tile,
    Value,
)
from fusegen.planner.parts import Interleaved
from fusegen.planner.ranges import stays_inside
from fusegen.targets.base import Target

WORD_BYTES = 4  # of a register
VECTOR_BYTES = 16  # one 128-bit load or store: the widest an NVIDIA (LDG.128) or AMD (global_load_dwordx4) thread has
PIECE_BYTES = 8  # of a load across blocks: whole ones would take more registers, and more selections to shift


def arrays(graph: Graph) -> tuple[Tensor, ...]:
    """The tensors in memory, inputs first; run-time scalars are not among them."""
    return tuple(t for t in (*graph.inputs, *graph.outputs) if t.shape)


def moves_along(graph: Graph, tensor: Tensor, axis: int) -> bool:
    """Does the tensor move along axis `axis` of the chain's shape (counted from the left)? A table does so by the axes
    of its rows."""
    if tensor.node.op.kind is Kind.PART:
        return False
    own = axis - (len(graph.shape) - len(tensor.shape))
    return own >= int(tensor.node in graph.tables | graph.written_at) and tensor.shape[own] == graph.shape[axis]


def row_dims(graph: Graph, layout: Layout) -> tuple[RowDim, ...]:
    """The leading axes, neighbours merged; an axis that an index counts stays alone."""
    counted = len(graph.shape) - 2 if any(n.op.name == "row_index" for n in graph.nodes) else None
    return named_dims(graph, merged_axes(graph, layout, lambda axis: axis != counted))


def merged_axes(graph: Graph, layout: Layout, joins: Callable[[int], bool]) -> list[list[int]]:
    """The leading axes in groups that are one dimension each: an axis that `joins` the one before is of its group
    where every tensor moves along both or along neither. Under `layout.split` every axis stays alone."""
    groups: list[list[int]] = []
    for axis in range(len(graph.shape) - 1):
        along = [(moves_along(graph, t, axis - 1), moves_along(graph, t, axis)) for t in arrays(graph)]
        if groups and not layout.split and joins(axis) and all(before == own for before, own in along):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def named_dims(graph: Graph, groups: Sequence[Sequence[int]]) -> tuple[RowDim, ...]:
    """Groups of leading axes, as the kernel calls their sizes and indices: `B_H_size` and `B_H_at`. An axis whose size
    is a number, or a dim that stands there twice, goes by its place."""
    if len(groups) == 1:
        return (RowDim("rows", "row", tuple(groups[0])),)
    leading = graph.shape[:-1]
    named = {*value_names(graph).values(), *(t.name for t in graph.outputs)}
    found: list[RowDim] = []
    for group in groups:
        sizes = [(axis, str(leading[axis])) for axis in group]
        word = "_".join(
            name if name.isidentifier() and name.isascii() and leading.count(leading[axis]) == 1 else f"axis{axis}"
            for axis, name in sizes
        )
        taken = named | {dim.extent for dim in found}
        while word == "elements" or any(
            f"{word}_size" == name or f"{word}_at" == name or name.endswith(f"_stride_{word}") for name in taken
        ):
            word += "_2"
        found.append(RowDim(f"{word}_size", f"{word}_at", tuple(group)))
    return tuple(found)


def vector_widths(graph: Graph, layout: Layout) -> tuple[int, ...]:
    """Vector widths in elements worth trying, widest first: 16 bytes of the narrowest and of the widest operand.

    What takes one byte does not set the width: 16 of them would mean 64 bytes of a float beside them.
    """
    whole = [graph.tensor_of[table] for table in graph.tables if len(table.shape) > 1]
    sizes = {t.dtype.bytes for t in (*graph.iterated, *whole) if t.shape and t.dtype.bytes > 1} or {1}
    widths = {VECTOR_BYTES // size for size in sizes}
    # a narrower vector may divide the row, or waste less of a short one; and what moves by single elements moves best
    # when neighbouring threads take neighbouring elements
    widths |= {max(1, width // len(names)) for width in widths for names in layout.interleaved}
    if graph.cols % max(widths) or layout.unaligned or layout.apart:
        width = max(widths) // 2
        while width >= 1:
            widths.add(width)
            width //= 2
    bytes_of_one = {t.name: t.dtype.bytes for t in arrays(graph)}
    runs = [len(names) * bytes_of_one[names[0]] for names in layout.interleaved]
    return tuple(sorted((w for w in widths if all(is_vector(w * run) for run in runs)), reverse=True))


def is_vector(nbytes: int) -> bool:
    """Can a thread move so many bytes as whole vectors?"""
    return nbytes % VECTOR_BYTES == 0 or (nbytes < VECTOR_BYTES and nbytes & (nbytes - 1) == 0)


def accesses(graph: Graph, dims: tuple[RowDim, ...], layout: Layout, vector: int) -> tuple[Access, ...]:
    """How each tensor is read or written with `vector` elements a thread."""
    names = value_names(graph)
    limited = {graph.tensor_of[node].name for node in limits(graph)}
    anywhere = {node.inputs[0] for node in graph.gathers if node.op.name == "take_at"}
    found: list[Access] = []
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        gathered = gathered_rows(graph, tensor, dims)
        strided = tuple(
            i
            for i, d in enumerate(dims)
            if any(moves_along(graph, tensor, a) for a in d.axes) or (gathered and i in gathered.along)
        )
        picked = output and tensor.node in graph.picked  # k columns, written one by one
        by_column = tensor.shape[-1] != 1 if picked else graph.lies_along(tensor)
        if gathered:
            by_column = len(tensor.shape) > 1 and tensor.shape[-1] != 1
            by_column = by_column and (not output or tensor.shape[-1] == graph.shape[-1])
        group = graph.cols // size_of(tensor.shape[-1], graph.sizes) if tensor.node in graph.grouped else 0
        by_column = by_column and not group
        repeated = graph.repeated.get(tensor.node, 0)
        mode = "element" if picked else access_mode(graph, layout, tensor, strided, by_column, vector)
        if output and gathered and mode == "misaligned":  # blocks of a row may hold elements of others, that stay
            mode = "element"
        woven = interleaved_with(graph, layout, tensor)
        if woven:
            mode = "vector"
        if repeated:
            mode = "element"
        together = vector * (woven.count if woven else 1)
        width = tensor.dtype.bytes if mode == "element" else min(VECTOR_BYTES, together * tensor.dtype.bytes)
        found.append(
            Access(
                tensor=tensor.name,
                name=tensor.name if output else names[tensor.node],
                dtype=tensor.dtype,
                shape=tensor.shape,
                output=output,
                by_column=by_column,
                strided=strided,
                mode=mode,
                vector=1 if picked or group else vector,
                vector_bytes=width,
                evict_first=(
                    tensor.name in limited  # the unmasked have nothing to gain: every byte of theirs streams through
                    and len(strided) == len(dims)
                    and mode == "vector"
                    and vector * tensor.dtype.bytes == VECTOR_BYTES
                    and not woven
                ),
                apart=repeated > 0 or ((by_column or group > 0) and tensor.name in layout.apart),
                group=group or repeated,
                gathered=gathered,
                anywhere=tensor.node in anywhere,
                interleaved=woven,
            )
        )
    return tuple(found)


def interleaved_with(graph: Graph, layout: Layout, tensor: Tensor) -> Interleaved | None:
    """With which others the tensor's elements lie in one vector."""
    names = value_names(graph)
    called = {t.name: names[t.node] for t in graph.inputs} | {t.name: t.name for t in graph.outputs}
    for group in layout.interleaved:
        if tensor.name in group:
            return Interleaved(called[group[0]], group.index(tensor.name), len(group))
    return None


def one_named(accesses: Iterable[Access]) -> bool:
    """Are the rows that are read by columns those that one index names, and no others?"""
    rows = [a for a in accesses if a.by_column and not a.output and (a.gathered or a.strided)]
    return len(rows) == 1 and rows[0].gathered is not None


def gathered_rows(graph: Graph, tensor: Tensor, dims: tuple[RowDim, ...]) -> Gathered | None:
    """How rows that an index names are found, to be read or to be written; None of any other tensor."""
    if tensor.node in graph.written_at:
        index, name = tensor.node.inputs[0], tensor.name
    elif tensor.node in graph.tables:
        (node,) = (n for n in graph.gathers if n.inputs[0] is tensor.node)
        index, name = node.inputs[1], value_names(graph)[tensor.node]
    else:
        return None
    missing = len(graph.shape) - len(index.shape)
    moving = {axis + missing for axis, size in enumerate(index.shape) if size == graph.shape[axis + missing]}
    along = tuple(i for i, d in enumerate(dims) if moving & set(d.axes))
    walks = len(dims) == 1 and not along and any(moves_along(graph, tensor, axis) for axis in dims[0].axes)
    stride = f"{name}_stride_by_index" if walks else f"{name}_stride"  # which that of its rows is called
    return Gathered(argument(index, graph), f"{name}_count", stride, along)


def access_mode(
    graph: Graph, layout: Layout, tensor: Tensor, strided: tuple[int, ...], by_column: bool, vector: int
) -> Mode:
    """Whole vectors where rows start aligned; else across aligned blocks, which are words at least."""
    if not by_column or vector == 1 or tensor.name in layout.unaligned | layout.apart:
        return "element"
    if graph.cols % vector == 0 or not strided:
        return "vector"
    return "misaligned" if vector * tensor.dtype.bytes % WORD_BYTES == 0 else "element"


def staged_elements(tile: Tile) -> int:
    """Room for a row in shared memory: whole vectors, and one for what no vector holds."""
    return tile.cols + (tile.vector if tile.remainder else 0)


def row_threads_text(tile: Tile, target: Target) -> str:
    """`a block of 256 threads a row`: who shares one."""
    if tile.cluster > 1:
        return f"a cluster of {tile.cluster} blocks of {tile.threads} threads a row"
    if tile.threads_per_row == tile.threads:
        return f"a block of {tile.threads} threads a row"
    if tile.threads_per_row == target.warp:
        return f"a warp a row, {tile.rows_per_block} rows a block"
    plural = "s" if tile.threads_per_row > 1 else ""
    return f"{tile.threads_per_row} thread{plural} a row, {tile.rows_per_block} rows a block"


def words_of(access: Access) -> float:
    """Registers that a vector fills on its way: one across blocks those of all the pieces that it lies in."""
    size = access.vector * access.dtype.bytes
    return (size + (min(size, PIECE_BYTES) if access.mode == "misaligned" else 0)) / WORD_BYTES


def params(graph: Graph, dims: tuple[RowDim, ...], strided: Iterable[Access]) -> tuple[Param, ...]:
    """The kernel's arguments: operands in the spec's order, outputs, sizes, and the strides of those that have some."""
    return (*params_of(graph, dims), *stride_params(dims, strided))


def params_of(graph: Graph, dims: tuple[RowDim, ...]) -> Iterator[Param]:
    """The arguments of every kernel of `graph`: operands, outputs, and the sizes of `dims`."""
    names = value_names(graph)
    for tensor in graph.inputs:
        name = names[tensor.node]
        if tensor.shape:
            yield Param("pointer", f"{name}_ptr", tensor.name, dtype=tensor.dtype)
        else:
            yield Param("value", name, tensor.name, dtype=tensor.dtype)
    for tensor in graph.outputs:
        yield Param("pointer", f"{tensor.name}_ptr", tensor.name, dtype=tensor.dtype, output=True)
    for index, dim in enumerate(dims):
        yield Param("extent", dim.extent, dim=index)


def stride_params(dims: tuple[RowDim, ...], found: Iterable[Access]) -> Iterator[Param]:
    for access in found:
        if access.gathered:
            first = (-len(access.shape),)
            yield Param("size", access.gathered.count, access.tensor, axes=first)
            yield Param("stride", access.gathered.stride, access.tensor, axes=first)
        for index in () if access.led else access.walked:
            yield Param("stride", stride_name(access, dims, index), access.tensor, dim=index)
        if access.apart:
            yield Param("stride", element_stride_name(access), access.tensor, axes=(-1,))


def element_stride_name(access: Access) -> str:
    return f"{access.name}_stride_elements"


def stride_name(access: Access, dims: tuple[RowDim, ...], index: int) -> str:
    return f"{access.name}_stride" if len(dims) == 1 else f"{access.name}_stride_{dims[index].extent[:-5]}"


def argument(node: Node, graph: Graph) -> Argument:
    """A value as others use it: by its name, or as the number that it is."""
    names = value_names(graph)
    if node.op.kind is Kind.SPREAD:
        return argument(node.inputs[0], graph)
    if node in names:
        return Value(names[node], node.dtype)
    if node.op.name == "size":
        return Number(size_number(node, graph.sizes), node.dtype)
    assert node.literal is not None
    return Number(node.literal, node.dtype)


def reading(node: Node, graph: Graph, access: Access) -> Statement:
    """What is read at a computed place of a tensor."""
    missing = {f32: 0.0, i32: 0, u32: 0, b8: False}[node.dtype] if node.missing is None else node.missing
    args = (argument(node.inputs[1], graph),)
    name = value_names(graph)[node]
    return Statement(node.op, name, node.dtype, args, access=access, missing=Number(missing, node.dtype))


def putting(node: Node, graph: Graph, access: Access) -> Statement:
    """Where a row of an output is that an index names."""
    return Statement(node.op, access.name, node.dtype, (argument(node.inputs[0], graph),), access=access)


def statement(node: Node, graph: Graph) -> Statement:
    """The op of a node, on values by their names in the graph."""
    inputs = node.inputs[:2] if node.op.kind is Kind.BIAS else node.inputs
    name, args = value_names(graph)[node], tuple(argument(a, graph) for a in inputs)
    return Statement(node.op, name, node.dtype, args, stays_inside(node, graph))


def statements(graph: Graph, nodes: Iterable[Node]) -> tuple[Statement, ...]:
    """One statement a node."""
    return tuple(statement(node, graph) for node in nodes)


def slots(graph: Graph, vector: int) -> Mapping[str, float]:
    """Instructions that an element's values take, by name. One call of Philox is for four elements that lie in one
    vector: there compilers see that their counters are the same."""
    four = vector % 4 == 0 and (graph.cols % 4 == 0 or is_flat(graph))
    shares = {"philox": 4 if four else 1}
    return {name: node.op.issued / shares.get(node.op.name, 1) for node, name in value_names(graph).items()}


def digits(value: float) -> str:
    """The shortest digits that read back as the same f32; `inf` of what is too large for one."""
    with np.errstate(over="ignore"):
        return str(np.float32(value))


@once_per_graph
def roundings(graph: Graph) -> tuple[str, ...]:
    """Where the author asks for a value to be rounded, and the outputs that are stored as less than f32."""
    casts = [node for node in graph.nodes if node.op.name.startswith("round_")]
    return (
        *(f"{graph.names.get(node, 'a value')} to {node.op.name[6:]} {why_rounded(node)}" for node in casts),
        *(
            f"{t.name} to {t.dtype} when stored"
            for t in graph.outputs
            if t.dtype is not f32 and (t.dtype.kind == "float" or t.dtype.narrow)
        ),
    )


def why_rounded(node: Node) -> str:
    return f"behind {node.operator}, as when it is stored" if is_unfused(node) else "by an explicit cast"


POSITIONS = ("row_index", "col_index", "row_low", "row_high")
"""What a flat array does not know of its elements. The index of an element it does."""


def is_flat(graph: Graph) -> bool:
    """May the chain be taken as one flat array: every tensor has the whole shape, and nothing asks for a position?"""
    whole = all(t.shape == graph.shape for t in arrays(graph)) and not graph.scatters
    return whole and not graph.reductions and not graph.scans and not any(n.op.name in POSITIONS for n in graph.nodes)


def bytes_of(graph: Graph, tensor: Tensor) -> int:
    """Bytes of one tensor at the graph's sizes."""
    return tensor.dtype.bytes * math.prod(size_of(size, graph.sizes) for size in tensor.shape)
