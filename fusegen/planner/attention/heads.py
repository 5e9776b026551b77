"""What a head has one of, such as ALiBi's slope: made once a block, whose rows are all of one head.

An operand that does not move along the rows is such a value, and so is what is made of such values alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusegen.planner.model import Load, Statement
from fusegen.planner.pieces import POSITIONS


def of_head(loads: Iterable[Load], body: Iterable[Statement], rows: int) -> frozenset[str]:
    """Of row values that are read and made before the first tile, those of which a head has one; `rows`: the place of
    the rows among the dimensions that a kernel counts."""
    moving = {load.value for load in loads if rows in load.access.strided}
    shared = {load.value for load in loads} - moving
    for s in body:
        if s.op.name in POSITIONS or s.access is not None or s.uses & moving:
            moving.add(s.name)
        else:
            shared.add(s.name)
    return frozenset(shared)
