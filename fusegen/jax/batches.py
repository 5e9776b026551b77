"""jax.vmap of an operator: a batch more is rows more, where the chain computes each row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegen.errors import RequestError
from fusegen.jax import ffi
from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.sizes import Dim, dims_in
from fusegen.language.views import View

BY_ROW = (Kind.INPUT, Kind.LEAF, Kind.MAP, Kind.REDUCE, Kind.SCAN, Kind.GROUP, Kind.SPREAD, Kind.SELECT, Kind.GATHER,
          Kind.PRODUCT, Kind.TRANSPOSE, Kind.VIEW, Kind.JOIN)  # fmt: skip
COUNTS = ("row_low", "row_high", "element_low", "element_high")  # over all rows, whatever their axes


def batched(arrays: Sequence[Any], axes: Sequence[Any], *, operator: Any, numbers: tuple[int, ...]) -> Any:
    """JAX's rule: the results with their batch in front, which is axis 0 of each."""
    numpy = ffi.need_jax().numpy
    graph: Graph = operator.graph
    rows = row_axis(graph, [t.name for t, axis in zip(operator.arrays, axes, strict=True) if axis is not None])
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    taken = []
    for tensor, array, axis in zip(operator.arrays, arrays, axes, strict=True):
        if axis is not None:
            array = numpy.moveaxis(array, axis, 0)
        elif has(rows, tensor.shape):
            array = numpy.broadcast_to(array, (size, *array.shape))
        else:
            taken.append(array)
            continue
        taken.append(array.reshape(size * array.shape[1], *array.shape[2:]))
    found = operator.bind(numbers, taken)
    return [one.reshape(size, one.shape[0] // size, *one.shape[1:]) for one in found], [0] * len(found)


def row_axis(graph: Graph, operands: Sequence[str]) -> Dim:
    """The dim that a batch of these operands makes longer: the first axis of each and of every output, along which
    nothing but rows of their own is computed. Raises RequestError where there is none."""
    first = [t for t in (*graph.inputs, *graph.outputs) if t.name in operands or t in graph.outputs]
    rows = first[0].shape[0]
    if not isinstance(rows, Dim):
        raise refused(graph, f"{first[0].name} has {rows} on its first axis, and not a dim")
    for tensor in first:
        if not tensor.shape or tensor.shape[0] != rows:
            raise refused(graph, f"{rows} is not the first axis of {tensor.name}: {tensor.type}")
    if rows in graph.fixed:
        raise refused(graph, f"a kernel is compiled for one {rows}")
    for node in graph.nodes:
        if why := mixes(rows, node):
            raise refused(graph, f"{why}, at {node.where}")
    return rows


def mixes(rows: Dim, node: Node) -> str:
    """Why a node may see more than one row, or where its row lies; empty where it does not."""
    if node.op.name in COUNTS or (node.op.name == "row_index" and has(rows, node.shape)):
        return f"{node.operator} numbers the rows"
    if (node.ends and has(rows, node.shape)) or (node.inner_ends and has(rows, node.inputs[0].shape)):
        return f"{node.operator} takes rows by groups, which end where they end"
    for one in (node, *node.inputs):
        if has(rows, one.shape[1:]):
            return f"{node.operator} has {rows} behind its first axis"
    if not has(rows, node.shape) and not any(has(rows, one.shape) for one in node.inputs):
        return ""
    views = (*node.parts, *filter(None, (node.view,)))
    if node.op.kind not in BY_ROW or not all(keeps(rows, view) for view in views):
        return f"{node.operator} puts rows elsewhere"
    if not has(rows, node.shape) or (node.op.name == "gather" and has(rows, node.inputs[0].shape)):
        return f"{node.operator} takes rows together"
    ranks = {len(one.shape) for one in (node, *node.inputs) if has(rows, one.shape)}
    return f"{node.operator} broadcasts {rows} to another axis" if len(ranks) > 1 else ""


def keeps(rows: Dim, view: View) -> bool:
    """Is the first axis of a view that of its base, as it is?"""
    along, across = view.steps[0], view.columns[0]
    rest = all(step == 0 for step in (*along[1:], *across[1:]))
    return view.base[0] == (rows,) and view.shape[0] == rows and view.offset[0] == 0 and along[0] == 1 and rest


def has(rows: Dim, shape: Sequence[Any]) -> bool:
    return rows in dims_in(tuple(shape))


def refused(graph: Graph, why: str) -> RequestError:
    return RequestError(
        f"{graph.name} is no chain for jax.vmap: {why}\n"
        "  a batch becomes more rows, so these are to be the first axis, and computed one by one\n"
        "  call it by jax.lax.map, or pass the whole batch to a chain that has an axis for it"
    )
