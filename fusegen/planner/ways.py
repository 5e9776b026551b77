"""How a kernel chooses columns of each row: one type for each algorithm, with what that one alone has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fusegen.language.types import DType, f32


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A few lanes hold a row, and the largest key is taken out k times."""

    by: ClassVar[Literal["warp"]] = "warp"


@dataclass(frozen=True, slots=True)
class InWarp:
    """A warp, or a part of it, holds a row. What reaches the k-th of the delegates is ranked by comparison.

    A lane has `delegates`: each the largest of some of its keys. Of one, the k-th is found `by_rounds`, k of them, or
    as each lane counts how many are ahead of its own. Several are sorted by a network, and lanes merge their best k.
    More candidates than `most_ranked` are ties: the largest is then taken out k times.
    """

    by: ClassVar[Literal["warp"]] = "warp"
    by_rounds: bool
    most_ranked: int
    delegates: int = 1


@dataclass(frozen=True, slots=True)
class Packed:
    """A few lanes hold a row of keys, each in one word of 32 bits with its column: in the upper half, where keys are
    `stored` as 16 bits or rounded to them; else, of f32, `clipped`: without the last bits of its order, in whose place
    the column stands.

    A network sorts a lane's words, `sorted` at a time, of which the best stay; then lanes merge theirs. As words
    differ, there are no ties. Clipped words may be in another order than their keys, which shared memory holds: where
    two agree in all bits but the column's, and that makes a difference, the row's best are found again, one after
    another. Of `group` keys next to each other the largest is their delegate: so many of the best groups as are sorted
    at a time hold the best keys, which are sorted alone. 1: every key is its own delegate.
    """

    by: ClassVar[Literal["warp"]] = "warp"
    sorted: int
    stored: DType
    group: int = 1

    @property
    def clipped(self) -> bool:
        return self.stored is f32

    def parted(self, lanes: int) -> bool:
        """Do lanes part the best among themselves, and never hold all of them?"""
        return 1 < lanes <= self.sorted

    def own(self, lanes: int) -> int:
        """Of the best, those that a lane is left with, one rank after another."""
        return max(1, self.sorted // lanes)


@dataclass(frozen=True, slots=True)
class Streaming:
    """A row streams by, `turn` vectors of a thread at a time. See planner/selections/topk.py.

    Of every `note` vectors the largest key stays, in one of `notes` words of the warp. Behind every `segment` vectors
    of a thread the largest keys of `groups` parts of what it has seen give a threshold: each warp says what `want` to
    `wanted_at_most` of its keys reach, and the row's is the least of these, or, `ranked`, the k-th largest. A lane
    looks at one vector that exceeds it at a time; `ties_last`: those that but equal it come last.

    The block holds `entries` candidates. They are cut down to `limit`, with counts of `bins` ranges of keys, where
    there is no more room, where a warp has more than `cut_early` behind a segment that others follow, and where it has
    more than `cut_last` behind the last one (0: there is room for all).
    """

    by: ClassVar[Literal["streaming"]] = "streaming"
    turn: int
    groups: int  # 0: the first cut gives the threshold
    note: int
    notes: int
    segment: int
    want: int
    wanted_at_most: int
    ranked: bool
    ties_last: bool
    entries: int
    limit: int
    cut_early: int
    cut_last: int
    bins: int


@dataclass(frozen=True, slots=True)
class SmallK:
    """How the warps of a block or a cluster choose from a row that their registers hold. See
    planner/selections/small_k_cost.py.

    Of `warps` that share the row, `need` have `want` threads each with a key that reaches the bar. What reaches it is a
    candidate: a block has `room` for its own, and `limit` of them in all are ranked, with counts of `bins` ranges of
    keys. Where they are too many, a cutoff is tried for that `aim` reach. A thread adds up the exponentials of `turn`
    vectors at a time, while others are on their way.
    """

    by: ClassVar[Literal["small_k"]] = "small_k"
    warps: int
    want: int
    need: int
    turn: int
    room: int
    limit: int
    aim: int
    bins: int


@dataclass(frozen=True, slots=True)
class LargeK:
    """How the warps of a block choose many columns of a row that their registers hold. See
    planner/selections/large_k_cost.py.

    A thread's keys are parted into `groups`. Of each of the `warps`, `want` groups to `enough` of them have a key that
    reaches what it says. 0 groups: every key is a candidate. There is room for `limit` candidates, which are ranked
    with counts of `bins` ranges of keys; of more, a cutoff is tried for that `aim` reach.
    """

    by: ClassVar[Literal["large_k"]] = "large_k"
    warps: int
    groups: int
    want: int
    enough: int
    limit: int
    aim: int
    bins: int


Way = OneByOne | InWarp | Packed | Streaming | SmallK | LargeK
