"""How a kernel chooses columns of rows that registers hold: a few of long rows (Hold), many of short ones (Dense)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hold:
    """How the warps of a block or a cluster choose from a row that their registers hold. See planner/holding.py.

    Of `warps` that share the row, `need` have `want` threads each with a key that reaches the bar. What reaches it is a
    candidate: a block has `room` for its own, and `limit` of them in all are ranked, with counts of `bins` ranges of
    keys. A thread adds up the exponentials of `turn` vectors at a time, while others are on their way.
    """

    warps: int
    want: int
    need: int
    turn: int
    room: int
    limit: int
    bins: int


@dataclass(frozen=True, slots=True)
class Dense:
    """How the warps of a block choose many columns of a row that their registers hold. See planner/density.py.

    A thread's keys are parted into `groups`. Of each of the `warps`, `want` groups to `enough` of them have a key that
    reaches what it says. 0 groups: every key is a candidate. There is room for `limit` candidates, which are ranked
    with counts of `bins` ranges of keys.
    """

    warps: int
    groups: int
    want: int
    enough: int
    limit: int
    bins: int
