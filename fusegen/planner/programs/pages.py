"""Keys and values that lie in pages: what views of a gather say of its table and of its index.

    k = F.rearrange(F.gather(keys, pages), "b p l g d -> b g (p l) d")

Attention reads row t of such rows as row t % L of the page that the index names at t // L, and needs no copy of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.language.graph import Kind, Node
from fusegen.language.sizes import Shape, Size
from fusegen.language.views import Column, View, made


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows [.., P * L, D] of pages that the gather `node` finds. Its table is the operand `table`, of which `shown` is
    the view [N, .., L, D]; `named` is the view [.., 1, P] of its index, spread over the gather's shape."""

    node: Node
    table: Node
    shown: View
    named: View
    shape: Shape


def paged_in(node: Node, view: View) -> Paged | None:
    """What `view` shows of a value, where it shows rows of pages, page behind page; None of anything else."""
    apart: View | None = None  # the same as [.., P, L, D]
    try:
        while (step := node.view) is not None:
            view = (apart or view).of(step)
            apart = view if apart is not None else rows_apart(view)
            node = node.inputs[0]
        return paged(node, apart) if apart is not None and node.op.name == "gather" else None
    except ValueError:  # axes that are taken as one, and lie apart
        return None


def rows_apart(view: View) -> View | None:
    """A view whose rows are two axes of its base taken as one, with two axes in their place; None of others."""
    groups = [b for b, sizes in enumerate(view.base) if len(sizes) != 1]
    if len(view.shape) < 2 or len(groups) != 1 or len(view.base[groups[0]]) != 2:
        return None
    (at,) = groups
    *lead, rows, last = view.columns
    first, second = view.base[at]
    whole = rows == unit(at, len(rows)) and view.offset[at] == 0 and view.shape[-2] == first * second
    if not whole or any(column[at] != 0 for column in (*lead, last)):
        return None

    def wider(column: Column, *own: Size) -> Column:
        return (*column[:at], *own, *column[at + 1 :])

    still = (0,) * len(rows)
    columns = (*(wider(c, 0, 0) for c in lead), wider(still, 1, 0), wider(still, 0, 1), wider(last, 0, 0))
    base = (*view.base[:at], (first,), (second,), *view.base[at + 1 :])
    return made((*view.shape[:-2], first, second, view.shape[-1]), base, wider(view.offset, 0, 0), columns)


def paged(node: Node, view: View) -> Paged | None:
    """What a view [.., P, L, D] shows of a gather, where P is the last axis of its index. Raises ValueError where its
    table can't be seen so."""
    table, index = node.inputs
    rank, rest = len(node.shape), len(table.shape) - 1
    first = rank - rest  # of the axes of a page
    *lead, number, row, width = view.columns
    one = view.shape[-1] == 1 and not any(width)  # value a row, as scales are
    if first < 1 or rest < (1 if one else 2) or any(len(sizes) != 1 for sizes in view.base):
        return None
    at, last = first - 1, rank if one else rank - 1
    line = next((b for b in range(first, last) if row == unit(b, rank)), None)
    if line is None or number != unit(at, rank) or not (one or width == unit(last, rank)):
        return None
    whole = (at, line) if one else (at, line, last)
    if any(view.offset[b] != 0 or any(column[b] != 0 for column in lead) for b in whole):
        return None
    if view.shape[-3:-1] != (node.shape[at], node.shape[line]):  # of their columns it may be the first ones
        return None
    named = [any(step != 0 for step in column[:at]) for column in lead]
    shown = [any(step != 0 for step in column[first:]) for column in lead]
    if any(a and b for a, b in zip(named, shown, strict=True)):
        return None
    sizes, none = view.shape[:-3], (0,) * rank
    of_table = made(
        (table.shape[0], *(size if own else 1 for size, own in zip(sizes, shown, strict=True)), *view.shape[-2:]),
        tuple((size,) for size in table.shape),
        (0, *view.offset[first:]),
        (unit(0, rest + 1), *((0, *column[first:]) for column in (*lead, row, width))),
    )
    of_index = made(
        (*(size if own else 1 for size, own in zip(sizes, named, strict=True)), 1, view.shape[-3]),
        view.base,
        (*view.offset[:at], *(0,) * (rest + 1)),
        (*((*column[:at], *(0,) * (rest + 1)) for column in lead), none, number),
    )
    while table.view is not None:
        of_table, table = of_table.of(table.view), table.inputs[0]
    while index.view is not None:
        index = index.inputs[0]
    if table.op.kind is not Kind.INPUT or index.op.kind is not Kind.INPUT:
        return None
    leading = (size if a or b else 1 for size, a, b in zip(sizes, named, shown, strict=True))
    shape = (*leading, view.shape[-3] * view.shape[-2], view.shape[-1])
    return Paged(node, table, of_table, of_index, shape)


def unit(place: int, count: int) -> Column:
    """One step along an axis of so many."""
    return tuple(int(b == place) for b in range(count))
