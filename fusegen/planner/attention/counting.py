"""Whole numbers that move by one from a column to the next, as f32: converted once a tile, not once a score.

    f32(row - column)  ==  f32(row - first column) - (column - first column)

The left side is a conversion for each score, which takes as long as two additions. On the right the first number is
converted for each of a thread's rows, the second is known when the kernel is compiled, and their difference is exact:
all three are whole numbers up to 2^24. A tile where the first one is not takes the body that converts each of them.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.types import f32, i32
from fusegen.planner.attention.parts import Counted, ElementBody
from fusegen.planner.model import Argument, Statement, Value


def counted(body: ElementBody) -> ElementBody:
    """The same body, in which such numbers are counted from those of a thread's first column."""
    made = {s.name: s for s in body.body}
    unknown = frozenset((body.given, *(load.value for load in body.loads)))
    found: list[Counted] = []
    for s in body.body:
        if s.op.name != "to_f32" or s.dtype is not f32 or s.args[0].dtype is not i32:
            continue
        step = step_of(s.args[0], made, unknown)
        if step in (1, -1):
            found.append(Counted(s.name, behind(s, body), step))
    names = {c.value for c in found}
    kept = needed(tuple(s for s in body.body if s.name not in names), body.value)
    return replace(body, body=kept, counted=tuple(found)) if found else body


def step_of(arg: Argument, made: dict[str, Statement], unknown: frozenset[str]) -> int | None:
    """By how much a whole number grows from a column to the next, as 32 bits have it; None where that is not known."""
    if not isinstance(arg, Value):
        return 0
    s = made.get(arg.name)
    if s is None:
        return None if arg.name in unknown else 0  # of a row, or of the launch
    if s.op.name == "col_index":
        return 1
    steps = [step_of(a, made, unknown) for a in s.args]
    known = [step for step in steps if step is not None]
    if s.op.name not in ("add", "sub", "neg") or s.access is not None or len(known) < len(steps):
        return None
    if s.op.name == "neg":
        return -known[0]
    return known[0] + known[1] if s.op.name == "add" else known[0] - known[1]


def behind(last: Statement, body: ElementBody) -> tuple[Statement, ...]:
    """The statements that `last` is made of, and itself."""
    return needed(body.body[: body.body.index(last) + 1], last.name)


def needed(body: tuple[Statement, ...], value: str) -> tuple[Statement, ...]:
    """Those of which `value` is made."""
    wanted, found = {value}, list[Statement]()
    for s in reversed(body):
        if s.name in wanted:
            found.insert(0, s)
            wanted |= s.uses
    return tuple(found)
