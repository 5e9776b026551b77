"""The functions of `fusegen.ops` that read an operand in rows or columns that an index names.

Indices are i32. One that names nothing is no error, and nothing is read for it: see fusegen.language.lookup.
"""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.graph import Node
from fusegen.language.op_table import OPS
from fusegen.language.sizes import broadcast, shape_text
from fusegen.language.trace import Number, Value, caller, current, viewed
from fusegen.language.types import Shape, i32
from fusegen.language.views import View


def gather(table: Value, ids: Value) -> Value:
    """Rows of a table that i32 indices name: `table[ids]` along the table's first axis, 0 where it has no such row.

    A table [V, N] and ids [M] give [M, N]; ids [B, S] give [B, S, N]; a table [V, H, D] and ids [M] give [M, H, D].
    Ids of [M, 1] are one a row as well, and a run-time scalar gives one row. A table [V] of values and ids [M, N] give
    [M, N]. Numpy's negative indices name no row.
    """
    for what, value in (("table", table), ("ids", ids)):
        if not isinstance(value, Value):
            raise SpecError(f"gather: the {what} is {value!r}, not a traced value", caller())
    need_whole_numbers("gather", "ids", ids)
    if not table.shape:
        raise SpecError("gather: the table is a scalar; declare it with an axis of rows, as f32[V, N]", caller())
    with current().operator("gather") as operator:
        rows = ids.shape[:-1] if ids.shape[-1:] == (1,) and len(table.shape) > 1 else ids.shape
        index = with_ones(ids, rows, len(table.shape) - 1)
        return Value(Node(OPS["gather"], (table.node, index), (*rows, *table.shape[1:]), table.dtype, operator))


def with_ones(ids: Value, rows: Shape, count: int) -> Node:
    """An index with so many axes of one element behind those of its rows; of a scalar itself."""
    missing = len(rows) + count - len(ids.shape)
    if not missing or not ids.shape:
        return ids.node
    view = View.identity(ids.shape).sliced((..., *(None,) * missing))
    return viewed(ids, view, f"{{0}}[..., {', '.join(['None'] * missing)}]", "gather").node


def take_at(x: Value, columns: Value, missing: Number | bool) -> Value:
    """x at one column of each row, [..., 1]. Columns have one axis less than x, or a last one of 1."""
    need_whole_numbers("take", "columns", columns)
    if not x.shape or x.shape[-1] == 1:
        raise SpecError(f"take: {shape_text(x.shape)} has no row to take a column of", caller())
    if len(columns.shape) == len(x.shape) - 1 and columns.shape:
        columns = viewed(columns, View.identity(columns.shape).sliced((..., None)), "{0}[..., None]", "take")
    if columns.shape and columns.shape[-1] != 1:
        raise SpecError(
            f"take: found columns {shape_text(columns.shape)} for rows of {shape_text(x.shape)}; wanted one column a "
            "row, of [..., 1], or those that F.topk or F.argmax chose",
            caller(),
        )
    with current().operator("take") as operator:
        try:
            rows = broadcast(x.shape[:-1], columns.shape[:-1])
        except ValueError as error:
            raise SpecError(
                f"take: rows of {shape_text(x.shape)} and of {shape_text(columns.shape)} do not broadcast: "
                f"{error} differ",
                operator.where,
            ) from None
        return Value(Node(OPS["take_at"], (x.node, columns.node), (*rows, 1), x.dtype, operator, missing=missing))


def need_whole_numbers(name: str, what: str, value: Value) -> None:
    """Raises SpecError for what is no i32."""
    if value.dtype is not i32:
        raise SpecError(
            f"{name}: found {what} of {value.dtype}, wanted i32\n  declare them as i32, or convert with F.cast(x, i32)",
            caller(),
        )
