"""The functions of `fusegen.ops` that read or write an operand in rows or columns that an index names.

Indices are i32. One that names nothing is no error, and nothing is read for it: see fusegen.language.lookup.
"""

from __future__ import annotations

from typing import Any

from fusegen.errors import SpecError
from fusegen.language.graph import Kind, Node
from fusegen.language.op_table import OPS
from fusegen.language.sizes import broadcast, shape_text
from fusegen.language.trace import Number, Value, caller, composite, current, viewed
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


@composite
def gather_sum(table: Value, ids: Value, weights: Value | None = None) -> Value:
    """The sum of a table's rows that each row of ids names, times weights if given: an embedding bag, or what the
    experts of a token made of it.

    A table [V, N], ids i32[M, 8] and weights [M, 8] give [M, N], summed in f32 from the first id to the last; ids
    [B, S, 8] give [B, S, N]. An id that names no row, such as -1, adds 0 times its weight. How many ids a row has is a
    number and no dim. Raises SpecError for a dim, and for weights of another shape.
    """
    gather(table, ids)  # raises what is wrong with either
    count = ids.shape[-1] if ids.shape else None
    if not isinstance(count, int):
        raise SpecError(
            f"gather_sum: found ids {shape_text(ids.shape)}, wanted several a row, as many as a number says\n"
            "  declare them as ids: i32[M, 8]",
            caller(),
        )
    if weights is not None and (not isinstance(weights, Value) or weights.shape != ids.shape):
        found = shape_text(weights.shape) if isinstance(weights, Value) else repr(weights)
        raise SpecError(
            f"gather_sum: found weights {found} for ids {shape_text(ids.shape)}; wanted one for each id", caller()
        )
    ones = (None,) * (len(table.shape) - 1)
    total: Value | None = None
    for number in range(count):
        row = gather(table, ids[..., number])
        if weights is not None:
            row = row * weights[(..., number, *ones)]
        total = row if total is None else total + row
        if number:
            current().names[total.node] = f"sum_of_{number + 1}"
    assert total is not None
    return total


def scatter(out: Value, ids: Value, values: Any) -> Value:
    """The operand `out`, [V, ...], with `values` in the rows that i32 indices name: written in its own memory, as a KV
    cache is. The other rows stay as they are, untouched.

    Values [M, N] and ids [M] go to rows of [V, N]; [B, S, H, D] and ids [B, S] to those of [V, H, D]. An id that names
    no row, such as -1, leaves its values out. Two ids must not name one row: each element there would be either's.

    The chain returns what F.scatter gives, and reads `out` in no other way; a call returns the operand itself. Raises
    SpecError for what is no operand, and for shapes that do not fit.
    """
    for what, value in (("array", out), ("ids", ids)):
        if not isinstance(value, Value):
            raise SpecError(f"scatter: the {what} is {value!r}, not a traced value", caller())
    need_whole_numbers("scatter", "ids", ids)
    if not isinstance(values, Value):
        raise SpecError(f"scatter: the values are {values!r:.80}, not a traced value", caller())
    if out.node.op.kind is not Kind.INPUT or len(out.shape) < 2:
        found = shape_text(out.shape) if out.node.op.kind is Kind.INPUT else "a value that is computed"
        raise SpecError(
            f"scatter: found {found} to write to, wanted an operand of rows, as out: bf16[V, N]\n"
            "  the call hands the part of a larger array that is to be written",
            caller(),
        )
    if values.dtype is not out.dtype:
        raise SpecError(
            f"scatter: found values of {values.dtype} for an array of {out.dtype}; convert them with F.cast", caller()
        )
    row = out.shape[1:]
    rows = ids.shape[:-1] if ids.shape[-1:] == (1,) else ids.shape
    if not rows or values.shape != (*rows, *row):
        wanted = shape_text((*rows, *row)) if rows else "one id for each row of values, as ids: i32[M]"
        raise SpecError(
            f"scatter: found values {shape_text(values.shape)} and ids {shape_text(ids.shape)} for rows of "
            f"{shape_text(out.shape)}; wanted {'values ' * bool(rows)}{wanted}",
            caller(),
        )
    if shown(ids.node).op.kind is not Kind.INPUT:
        raise SpecError(
            "scatter: found ids that are computed, wanted an operand: no two may name one row, which the caller sees to"
            "\n  compute them in a chain of their own",
            caller(),
        )
    with current().operator("scatter") as operator:
        index = with_ones(ids, rows, len(row))
        return Value(Node(OPS["scatter"], (out.node, index, values.node), out.shape, out.dtype, operator))


def shown(node: Node) -> Node:
    """What a view is of."""
    while node.op.kind is Kind.VIEW:
        (node,) = node.inputs
    return node


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
