"""What a kernel does with one element: a Body's statements in order, wherever elements come from and go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusegen.emitting.dialect import ZEROS, Dialect
from fusegen.language.scans import Sorted
from fusegen.planner.parts import Body, ColumnPart, Keep, Load, Reduction, Scan, Store


def none(part: Load | Keep | Reduction | ColumnPart | Store) -> str:
    """Of bodies that have no such part."""
    raise AssertionError(f"nothing spells {part}")


@dataclass(frozen=True, slots=True)
class Element:
    """Where the element at hand is, in the words of one kernel."""

    read: Callable[[Load], str] = none  # its value; "" where the body does not ask for it
    write: Callable[[Store], str] = none  # the statement that stores a result
    reduce: Callable[[Reduction], str] = none  # the statement that adds a value to a part of a reduction
    kept: Callable[[Keep], str] = none  # the place of a computed value between passes
    part: Callable[[ColumnPart], str] = none  # the statement that adds a value to its column's part
    col: str = "col + j"  # its column


def where_found(load: Load, text: str, words: Dialect) -> str:
    """A value of a table's row, 0 where there is no such row; of a group's vector, 0 in rows of no group."""
    if load.access.group_axis is not None:
        return f"{words.has_group} ? {text} : {ZEROS[load.dtype]}"
    return f"{load.access.name}_found ? {text} : {ZEROS[load.dtype]}" if load.access.gathered else text


def entered(scan: Scan) -> str:
    """An element as its place holds it before the scan: where that will be a column, by its bits."""
    bits = isinstance(scan.way, Sorted) and scan.dtype is not scan.source
    return f"__float_as_int({scan.value})" if bits else scan.value


def element_lines(body: Body, at: Element, words: Dialect) -> list[str]:
    """Everything that is made of one element: read, computed, kept, reduced and written."""
    reads = [(load, text) for load in body.loads if (text := at.read(load))]
    lines = [words.define(load.value, load.dtype, where_found(load, text, words)) for load, text in reads]
    lines += [words.define(keep.value, keep.dtype, at.kept(keep)) for keep in body.takes]
    lines += words.statements(body.body, at.col)
    lines += [f"{at.kept(keep)} = {keep.value};" for keep in body.keeps]
    lines += [f"{at.kept(scan.keep)} = {entered(scan)};" for scan in body.scans]
    lines += [*map(at.reduce, body.reductions), *map(at.part, body.parts)]
    return [*lines, *map(at.write, body.stores)]
