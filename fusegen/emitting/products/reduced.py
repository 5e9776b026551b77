"""The words of a tile's columns that are reduced: a thread's part of a row, and what lanes make of theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen.emitting.dialect import Dialect
from fusegen.emitting.prelude import reducer_of
from fusegen.planner.model import Body, Reduction, used_by
from fusegen.planner.products.parts import OutputGroup


def part_words(r: Reduction, other: str, later: Sequence[Body], words: Dialect) -> Mapping[str, str | bool]:
    """A reduction's part of a thread, and what two lanes make of theirs; is the result `kept` for later bodies?
    `other`: the other lane's `v`."""
    reducer = reducer_of(r.kind, r.dtype)
    words.functions.update(reducer.needs)
    merge = re.sub(r"\bv\b", r.results[0], reducer.merge.format(other))
    start = words.noted(reducer.start)
    kept = any(r.results[0] in asked(body) for body in later)
    return {
        "ctype": reducer.ctype, "name": r.part, "start": start, "result": r.results[0], "merge": merge, "kept": kept,
    }  # fmt: skip


def updated(r: Reduction, place: str, words: Dialect) -> str:
    """The statement that adds a value to a thread's part."""
    part = f"{r.part}[{place}]"
    if r.kind == "sum":
        return f"{part} += {r.value};"
    function = "larger" if r.kind == "max" else "smaller"
    words.functions.add(function)
    return f"{part} = {function}({part}, {r.value});"


def asked(step: Body) -> frozenset[str]:
    """The values that a step's elements are made of, and those that it reduces or stores."""
    return used_by(step.body) | {r.value for r in step.reductions} | {s.value for s in step.stores}


def row_part(found: OutputGroup, wanted: frozenset[str]) -> OutputGroup:
    """The group with those loads and values of rows alone that `wanted` ones are made of."""
    needed, body = set(wanted), []
    for statement in reversed(found.row_body):
        if statement.name in needed:
            needed |= statement.uses
            body.append(statement)
    loads = tuple(load for load in found.row_loads if load.value in needed)
    return replace(found, row_loads=loads, row_body=tuple(reversed(body)))


def taken(step: Body, earlier: Sequence[Body], place: str) -> list[str]:
    """What a step takes of its row from those before it."""
    names = [r.results[0] for one in earlier for r in one.reductions]
    names += [s.name for one in earlier for s in one.row_body]
    return [f"const float {name} = {name}_of[{place}];" for name in names if name in asked(step)]


def kept(step: Body, steps: Sequence[Body]) -> list[str]:
    """What later steps take of a step's values of a row, beside its results."""
    later = frozenset().union(*(used_by(other.body) for other in steps))
    return [s.name for s in step.row_body if s.name in later]
