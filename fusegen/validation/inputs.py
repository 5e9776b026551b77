"""Operands for one launch: sizes, values, and which pattern each row holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from fusegen.errors import RequestError
from fusegen.language.axes import reduced_axes
from fusegen.language.graph import Graph, Kind, Node, Tensor, behind, once_per_graph
from fusegen.language.sizes import dims_in
from fusegen.language.types import Dim, DType, b8, f32, i32, i64, size_of
from fusegen.planner.attention.operands import attention_uses, weights_uses
from fusegen.planner.attention.recognition import has_plain_weights, is_attention
from fusegen.planner.attention.written import is_written, written_weights
from fusegen.planner.model import Plan
from fusegen.planner.pieces import moves_along
from fusegen.planner.products.factors import Use, axis_of, uses
from fusegen.validation.grouped import ends_of, ends_of_some, group_ends
from fusegen.validation.patterns import (
    BELOW_TF32,
    GENTLE,
    INTEGER_ROWS,
    INTEGERS,
    PATTERNS,
    SETTINGS,
    UNIT_SETTING,
    Make,
    Pattern,
    Room,
    Setting,
    by_tf32,
    safe_magnitude,
    uniform_scale,
)  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]
NORMAL = PATTERNS[0]
USUAL = SETTINGS[0]
TABLE_ROWS = 37  # of a table whose rows an index names
FLAT_ROW = 1021  # elements of one pattern in a flat array; no vector divides it


@dataclass(frozen=True, slots=True)
class Operands:
    """What one launch reads. `labels` names the pattern of each row of the chain."""

    sizes: Mapping[str, int]
    values: tuple[Any, ...]  # in the spec's order: arrays in their storage type, Python numbers for scalars
    labels: tuple[str, ...]

    def text(self, graph: Graph) -> str:
        """`3x4096`."""
        return "x".join(str(size_of(size, self.sizes)) for size in graph.shape) or "scalar"


def need_numbers(seed: int, rows: Sequence[int] | None) -> None:
    """Raises RequestError for what is no seed or no number of rows."""
    for what, number in (("seed", seed), *(("rows", count) for count in rows or ())):
        if not isinstance(number, Integral) or number < 0:
            raise RequestError(f"{what}={number!r} is no whole number of at least 0")


def free_dims(plan: Plan, flat: bool) -> tuple[str, ...]:
    """The dims whose sizes are run-time arguments, outermost first; of a flat pass the last one too."""
    graph = plan.graph
    fixed = {node.size for node in graph.nodes} if flat else graph.fixed
    names = [size.name for size in graph.shape if isinstance(size, Dim) and size not in fixed]
    return tuple(dict.fromkeys(names))


def table_dims(graph: Graph) -> tuple[str, ...]:
    """The dims that count rows which indices name, and nothing else: a launch may have as few as it likes."""
    tables = {*read_tables(graph), *graph.written_at}
    arrays = (*graph.inputs, *graph.outputs)
    counted = {size for t in arrays if t.node in tables for size in t.shape[:1] if isinstance(size, Dim)}
    others = [t.shape[1:] if t.node in tables else t.shape for t in arrays]
    elsewhere = set(dims_in(tuple(size for shape in others for size in shape)))
    numbers = set(dims_in(tuple(node.size for node in graph.nodes if node.size is not None)))
    return tuple(name for name in graph.sizes if Dim(name) in counted - elsewhere - numbers)


def read_tables(graph: Graph) -> tuple[Node, ...]:
    """The operands whose rows are found by an index, through views too."""
    found: dict[Node, None] = {}
    for node in graph.gathers:
        source = node.inputs[0]
        while source.op.kind is Kind.VIEW:
            source = source.inputs[0]
        if node.op.name == "gather" and source.op.kind is Kind.INPUT:
            found[source] = None
    return tuple(found)


def rows_of_tables(graph: Graph) -> set[str]:
    """The dims that count rows which an index names: some of them without the others are another table."""
    return {d.name for n in graph.gathers if n.op.name == "gather" for d in dims_in(n.inputs[0].shape[:1])}


def slot_operands(graph: Graph) -> frozenset[str]:
    """The operands whose elements name rows to write, each another one."""
    sources = (source for node in graph.scatters for source in behind([node.inputs[-2]]))
    return frozenset(graph.tensor_of[source].name for source in sources if source in graph.tensor_of)


def with_places(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes with as many rows to write to as there are rows, and some more that stay."""
    found = dict(sizes)
    free = table_dims(graph)
    for tensor in graph.outputs:
        if tensor.node in graph.written_at and str(tensor.shape[0]) in free:
            count = math.prod(size_of(size, sizes) for size in tensor.node.inputs[-2].shape)
            found[str(tensor.shape[0])] = max(TABLE_ROWS, count + 7)
    return found


def index_limits(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """How many rows or columns the operands name that indices are made of; where they name several, the fewest."""
    found: dict[str, int] = {}
    places = {t.node: t.shape[0] for t in graph.outputs if t.node in graph.written_at}
    for node in (*graph.gathers, *graph.scatters):
        size = places[node] if node in places else node.inputs[0].shape[0 if node.op.name == "gather" else -1]
        for source in behind([node.inputs[-2 if node in places else 1]]):
            if source in graph.tensor_of and source.dtype is i32 and source.shape:  # of i64 too: the value's type
                name, number = graph.tensor_of[source].name, size_of(size, sizes)
                found[name] = min(number, found.get(name, number))
    for node in graph.orders:  # slots that name groups
        groups = size_of((node.inputs[1] if node.inputs[1:] else node).shape[-1], sizes)
        for source in behind([node.inputs[0]]):
            if source in graph.tensor_of and source.dtype is i32 and source.shape:
                found.setdefault(graph.tensor_of[source].name, groups)
    return found


def indices(rng: np.random.Generator, shape: tuple[int, ...], limit: int) -> Array:
    """Indices below `limit`, any number of them alike; and in place of one in three by turns its ends and what names
    nothing: beside both ends, far beyond them, and the number that by custom is ignored."""
    found = rng.integers(0, limit, shape)
    special = np.roll([limit, -1, 0, limit - 1, -(2**31), 2**31 - 1, -limit, -100], rng.integers(8))
    places = rng.permutation(found.size)[: found.size // 3]
    found.reshape(-1)[places] = np.resize(special, places.size)
    return found.astype(np.int32)


def slots(rng: np.random.Generator, shape: tuple[int, ...], limit: int) -> Array:
    """Indices below `limit`, each another one; and in place of one in three what names nothing."""
    count = math.prod(shape)
    found = np.resize([-1, limit, -(2**31), 2**31 - 1, -limit, limit + 1], max(count, 1))[:count]
    places = rng.permutation(count)[: min(limit, count - count // 3)]
    found[places] = rng.permutation(limit)[: places.size]
    return found.reshape(shape).astype(np.int32)


def made_wide(index: Array, limit: int, dtype: DType) -> Array:
    """Indices in their type, of 8 bits the nearest that it has; of 64 bits what names nothing is by turns a number
    whose low 32 bits would name a row."""
    if dtype.bytes == 1:
        return np.clip(index, int(dtype.least), int(dtype.largest)).astype(dtype.numpy)
    if dtype is not i64:
        return index
    wide = index.astype(np.int64)
    nothing = np.flatnonzero((wide < 0) | (wide >= limit))
    wide.reshape(-1)[nothing[::2]] = np.resize([2**32, -(2**33) + limit - 1, 2**62 + 1, -(2**63)], nothing[::2].size)
    return wide


def summed_dims(graph: Graph) -> frozenset[str]:
    """The dims over which rows are reduced or summed up: what is left of a launch without some of those rows is another
    result."""
    parts = (size for node in graph.parts for size in node.inputs[0].shape[:-1])
    groups = (n.inputs[0].shape[-1] for n in graph.products if n.inner_ends)
    along = (n.shape[-1] for n in graph.scans if not n.over)  # which may be an axis of rows to the kernel
    return frozenset(map(str, (*graph.counted, *parts, *groups, *along)))


def sizes_for(plan: Plan, rows: int, outer: Sequence[int] = (), flat: bool | None = None) -> dict[str, int]:
    """Sizes with at least `rows` rows (elements, in a flat pass), exactly so unless sizes are fixed or said twice.

    `outer`: sizes of the first free axes, where there are more than one; else they are 1. `flat` says whether the row
    length may change, as it may where the plan is flat.
    """
    graph = plan.graph
    flat = plan.flat if flat is None else flat
    free = free_dims(plan, flat)
    sizes = {**graph.sizes, **dict.fromkeys(free, 1), **dict.fromkeys(table_dims(graph), TABLE_ROWS)}
    if not free:
        return with_places(graph, sizes)
    for name, size in zip(free[:-1], outer, strict=False):
        sizes[name] = size if rows >= size else 1
    axes = graph.shape if flat else graph.shape[:-1]
    others = math.prod(size_of(size, sizes) for size in axes)
    sizes[free[-1]] = root(-(-rows // others), axes.count(Dim(free[-1])))
    return with_places(graph, sizes)


def flat_sizes(plan: Plan, rows: int) -> dict[str, int]:
    """Some rows of a length that no vector divides."""
    sizes = sizes_for(plan, 1)
    free = free_dims(plan, flat=True)
    if free and plan.graph.shape[-1] == Dim(free[-1]):
        sizes[free[-1]] = FLAT_ROW
        free = free[:-1]
    if free:
        sizes[free[-1]] = rows
    return sizes


def root(count: int, axes: int) -> int:
    """The least size that gives `count` or more along that many axes of it."""
    size = round(math.pow(count, 1 / axes))
    while size**axes < count:
        size += 1
    return size


def rows_of(graph: Graph, sizes: Mapping[str, int]) -> int:
    return math.prod(size_of(size, sizes) for size in graph.shape[:-1])


def make_operands(
    plan: Plan, sizes: Mapping[str, int], rng: np.random.Generator, patterns: Sequence[Pattern] = (NORMAL,),
    setting: Setting = USUAL,
) -> Operands:  # fmt: skip
    """Rows of `patterns`, one after another and over again; `setting` fills what rows share."""
    graph = plan.graph
    count = rows_of(graph, sizes)
    row_patterns = [patterns[i % len(patterns)] for i in range(count)]
    mains = main_tensors(graph)
    limits, unique, ends = index_limits(graph, sizes), slot_operands(graph), ends_of(graph)
    values: list[Any] = []
    for tensor in graph.inputs:
        shape = tuple(size_of(size, sizes) for size in tensor.shape)
        if tensor.name in limits:
            made = (slots if tensor.name in unique else indices)(rng, shape, limits[tensor.name])
            values.append(made_wide(made, limits[tensor.name], tensor.dtype))
            continue
        if tensor.name in ends:
            values.append(group_ends(rng, shape[0], size_of(ends[tensor.name], sizes)))
            continue
        cols = shape[-1] if shape else 1
        safe = safe_magnitude(tensor.dtype, cols)
        room = Room(rng, math.prod(shape[:-1]), cols, tensor.dtype, safe, graph.picks)
        if tensor in mains:
            place = mains.index(tensor)
            values.append(rows_of_patterns(graph, tensor, shape, room, row_patterns, place, len(mains)))
        elif tensor.node in graph.tables and not mains and tensor.dtype.kind == "float":
            made = mixed(room, [patterns[i % len(patterns)] for i in range(room.rows)], 0, 1)
            values.append(made.reshape(shape).astype(tensor.dtype.numpy))
        elif tensor in right_factors(graph):
            values.append(weights(graph, tensor, shape, room, setting))
        elif tensor.dtype.kind == "int" and cols > 1 and any(p not in (NORMAL, GENTLE) for p in patterns):
            values.append(integer_rows(room).reshape(shape).astype(tensor.dtype.numpy))
        else:
            values.append(shared(graph, tensor, shape, room, setting))
    labels = tuple(p.name for p in row_patterns) if mains else (NORMAL.name,) * count
    return Operands(sizes, tuple(values), labels)


def main_tensors(graph: Graph) -> tuple[Tensor, ...]:
    """The floating-point operands that are the chain's rows: those that move along every axis. Of products, those that
    move along every axis of rows, whatever their own columns."""
    floats = [t for t in graph.inputs if t.dtype.kind == "float" and t.shape and t.node not in graph.tables]
    axes = range(len(graph.shape))
    if not graph.products:
        return tuple(t for t in floats if all(moves_along(graph, t, a) for a in axes))
    whole = {
        use.tensor.name
        for use in uses_of(graph)
        if use.place != "right" and all(axis_of(graph, use, axis) is not None for axis in axes[:-1])
    }
    return tuple(t for t in floats if t.name in whole and len(t.shape) > 1 and t.shape[-1] != 1)


def uses_of(graph: Graph) -> tuple[Use, ...]:
    """How a chain of products, or of attention, reads its operands."""
    if is_attention(graph) or has_plain_weights(graph):
        return attention_uses(graph)
    return weights_uses(written_weights(graph)) if is_written(graph) else uses(graph)


def right_factors(graph: Graph) -> tuple[Tensor, ...]:
    """The floating-point operands of products' right factors that are matrices."""
    if not graph.products:
        return ()
    names = {use.tensor.name for use in uses_of(graph) if use.place == "right" and len(use.tensor.shape) > 1}
    return tuple(t for t in graph.inputs if t.name in names and t.dtype.kind == "float")


def transposed(graph: Graph, tensor: Tensor, right: bool = False) -> bool:
    """Is the tensor declared with the axes of its matrices the other way round, as a right factor or else as rows?"""
    if not graph.products:
        return False
    return any(use.transposed for use in uses_of(graph) if use.tensor is tensor and (use.place == "right") is right)


def rows_of_patterns(
    graph: Graph, tensor: Tensor, shape: tuple[int, ...], room: Room, patterns: Sequence[Pattern], place: int,
    operands: int,
) -> Array:  # fmt: skip
    """The chain's rows, in the tensor's own shape and type."""
    if reduced_axes(graph):  # down the columns, that each is of its own
        rows = math.prod(shape[:-1])
        down = replace(room, rows=shape[-1], cols=rows, safe=safe_magnitude(tensor.dtype, max(1, rows)))
        made = mixed(down, [patterns[0] if patterns else NORMAL] * shape[-1], place, operands)
        return np.ascontiguousarray(made.T).reshape(shape).astype(tensor.dtype.numpy)
    if not transposed(graph, tensor):
        return mixed(room, patterns, place, operands).reshape(shape).astype(tensor.dtype.numpy)
    *outer, cols, rows = shape
    room = replace(room, rows=math.prod(outer) * rows, cols=cols)
    made = mixed(room, patterns, place, operands).reshape(*outer, rows, cols)
    return np.ascontiguousarray(np.swapaxes(made, -1, -2)).astype(tensor.dtype.numpy)


def weights(graph: Graph, tensor: Tensor, shape: tuple[int, ...], room: Room, setting: Setting) -> Array:
    """A right factor. By turns, its columns [K] are as the setting has them, each number twice (what alternates on the
    left cancels), and all ones (what is left of a left row is its sum); of f32, half of the latter such that cutting
    them off adds up."""
    made = setting.vector(room)
    made = np.clip(made, -room.dtype.largest, room.dtype.largest, out=made).reshape(shape)
    columns = made if not transposed(graph, tensor, right=True) else np.swapaxes(made, -1, -2)  # [.., K, N]
    if setting is USUAL:
        depth = columns.shape[-2]
        columns[..., 1::2, 1::4] = columns[..., 0 : depth - 1 : 2, 1::4][..., : depth // 2, :]
        columns[..., :, 3::4] = 1.0
        if by_tf32(graph):
            columns[..., :, 7::8] = BELOW_TF32
    if setting is UNIT_SETTING:
        columns /= np.sqrt(columns.shape[-2])
    return made.astype(tensor.dtype.numpy)


@np.errstate(over="ignore")
def mixed(room: Room, patterns: Sequence[Pattern], place: int, operands: int) -> Array:
    """Row i by `patterns[i]`. Of those that only one operand may hold, operands take turns."""
    found = np.empty(room.shape)
    groups: dict[str, tuple[Make, list[int]]] = {}
    seen: dict[str, int] = {}
    for row, pattern in enumerate(patterns):
        turn = seen[pattern.name] = seen.get(pattern.name, -1) + 1
        chosen = NORMAL if pattern.alone and turn % operands != place else pattern
        groups.setdefault(chosen.name, (chosen.make, []))[1].append(row)
    for make, rows in groups.values():
        found[rows] = make(replace(room, rows=len(rows)))
    return np.clip(found, -room.dtype.largest, room.dtype.largest, out=found, where=np.isfinite(found))


def shared(graph: Graph, tensor: Tensor, shape: tuple[int, ...], room: Room, setting: Setting) -> Any:
    """An operand that is no row: a vector, a mask, one value a row, a run-time scalar."""
    if tensor.dtype is b8:
        return mask(room).reshape(shape)
    if tensor.dtype.kind == "int":
        made = INTEGERS[setting.integer](room, graph.cols + 2)
        if tensor.dtype.narrow and len(shape) > 1 and made.any():  # codes are of every kind
            made = room.rng.integers(int(tensor.dtype.least), int(tensor.dtype.largest) + 1, room.shape)
        return made.reshape(shape).astype(tensor.dtype.numpy) if shape else int(made.flat[0])
    make = setting.row if not shape or shape[-1] == 1 else setting.vector
    if not shape and setting.row is uniform_scale and tensor.node in chances(graph):
        return float(np.float32(room.rng.uniform(0.1, 0.6)))
    if not shape:
        return float(np.float32(make(Room(room.rng, 1, 1, f32, room.safe)).flat[0]))
    return np.clip(make(room), -room.dtype.largest, room.dtype.largest).reshape(shape).astype(tensor.dtype.numpy)


@once_per_graph
def chances(graph: Graph) -> frozenset[Node]:
    """The values that random numbers in [0, 1) are compared with: of others, such as a scale of 2, a dropout leaves
    nothing, and whatever was drawn would be right."""
    tests = [n for n in graph.nodes if n.op.name in ("lt", "le", "gt", "ge")]
    return frozenset(a for n in tests if any(b.op.name == "to_unit" for b in n.inputs) for a in n.inputs)


def integer_rows(room: Room) -> Array:
    """Rows of every kind of whole numbers by turns, beginning anywhere: two operands don't have the same together."""
    kinds = (np.arange(room.rows) + room.rng.integers(len(INTEGER_ROWS))) % len(INTEGER_ROWS)
    made = np.empty(room.shape, np.int64)
    for kind in np.unique(kinds):
        rows = kinds == kind
        made[rows] = INTEGER_ROWS[kind](replace(room, rows=int(rows.sum())))
    return made


def mask(room: Room) -> Array:
    """Rows of a mask by turns: random, nothing kept, everything kept, random and sparse."""
    keep = room.rng.random(room.shape)
    chances = np.array([0.7, 0.0, 1.0, 0.1])[np.arange(room.rows) % 4]
    return np.asarray(keep < chances[:, None])


def take(graph: Graph, operands: Operands, picks: Mapping[str, Sequence[int]]) -> Operands:
    """The same operands with only the picked indices of some dims, in that order."""
    values, ends = [], ends_of(graph)
    for tensor, value in zip(graph.inputs, operands.values, strict=True):
        if tensor.name in ends:
            value = ends_of_some(graph, tensor.name, value, operands.sizes, picks)
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Dim) and size.name in picks:
                value = np.take(value, list(picks[size.name]), axis)
        values.append(value)
    sizes = {**operands.sizes, **{name: len(picked) for name, picked in picks.items()}}
    return Operands(sizes, tuple(values), (NORMAL.name,) * rows_of(graph, sizes))


def repeated(value: Any) -> Any:
    """An array that is the same along its first axis, as a stride of 0 would read it."""
    array = np.asarray(value)
    return np.broadcast_to(array[:1], array.shape).copy() if array.ndim >= 2 else value
