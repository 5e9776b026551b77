"""Whole numbers that move by one from a column to the next, as f32: converted once a tile, not once a score.

    f32(row - column)  ==  f32(row - first column) - (column - first column)

The left side is a conversion for each score, which takes as long as two additions. On the right the first number is
converted for each of a thread's rows, the second is known when the kernel is compiled, and their difference is exact:
all three are whole numbers up to 2^24. A tile where the first one is not takes the body that converts each of them, as
tiles do that an end of a mask cuts.

Numbers of row - column alone are the same along a diagonal. By the layouts of mma.sync and wgmma a thread has rows 8
apart, and of each 8 columns the same ones: the second row has the first row's numbers, 8 columns further on. They are
counted from the first row's first number, by differences that two scores have in common, so that the compiler makes
each number once for both, and what is made of it and of a head's values alone, as ALiBi's bias and retention's decay.
The body that converts each takes the whole numbers so: in 32 bits the difference is always right.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.types import f32, i32
from fusegen.planner.attention.parts import Counted, ElementBody, ScoresPlan
from fusegen.planner.model import Argument, Statement, Value
from fusegen.planner.pieces import POSITIONS


def counted(plan: ScoresPlan) -> tuple[ElementBody, ElementBody]:
    """The plan's bodies, tested and free, in which such numbers are counted from those of a thread's first column."""
    body = plan.free
    elements = frozenset((body.given, *(load.value for load in body.loads)))
    made = {s.name: s for s in body.body}
    of_rows = {s.name: s for s in plan.row_body if s.name not in plan.head_values}
    moving = {load.value for load in plan.row_loads} - plan.head_values
    found: list[Counted] = []
    for s in body.body:
        if s.op.name != "to_f32" or s.dtype is not f32 or s.args[0].dtype is not i32:
            continue
        step = step_of(s.args[0], "col_index", made, elements)
        if step in (1, -1):
            down = step_of(s.args[0], "row_index", {**of_rows, **made}, elements | moving)
            found.append(Counted(s.name, behind(s, body), step, down == -step and plan.atom.shares_diagonals))
    whole = {c.body[-2].name: replace(c, value=c.body[-2].name, body=c.body[:-1]) for c in found if c.diagonal}
    return without(plan.tested, tuple(whole.values())), without(body, tuple(found))


def without(body: ElementBody, found: tuple[Counted, ...]) -> ElementBody:
    """The body that takes these numbers as they are counted."""
    names = {c.value for c in found}
    kept = needed(tuple(s for s in body.body if s.name not in names), body.value)
    return replace(body, body=kept, counted=found) if found else body


def step_of(arg: Argument, along: str, made: dict[str, Statement], unknown: frozenset[str]) -> int | None:
    """By how much a whole number grows where `along`, the index of a column or of a row, grows by one, as 32 bits have
    it; None where that is not known. `made`: statements of what may move; other values don't, but for `unknown` ones.
    """
    if not isinstance(arg, Value):
        return 0
    s = made.get(arg.name)
    if s is None:
        return None if arg.name in unknown else 0
    if s.op.name in POSITIONS:
        return 1 if s.op.name == along else 0 if s.op.name in ("row_index", "col_index") else None
    steps = [step_of(a, along, made, unknown) for a in s.args]
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
