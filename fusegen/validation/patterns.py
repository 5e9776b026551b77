"""The table of what rows are made of, by seed and by malice, each with the reason it is there.

A pattern makes float64 values for `rows` rows of `cols` columns; rounding them to the storage type is the caller's
business. Which patterns apply is derived from the graph and the storage types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegen.language.graph import Graph
from fusegen.language.types import DType, f32

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Room:
    """What a pattern is made for."""

    rng: np.random.Generator
    rows: int
    cols: int
    dtype: DType
    safe: float  # magnitude whose row sums of squares stay finite in f32
    picks: int = 0  # columns that the chain keeps of a row

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    def normal(self) -> Array:
        """Normal numbers; of many each is one of MANY, whose drawing takes a tenth of the time."""
        if self.rows * self.cols < 4 * MANY:
            return self.rng.standard_normal(self.shape)
        drawn: Array = self.rng.standard_normal(MANY)[self.rng.integers(0, MANY, self.shape, np.uint16)]
        return drawn

    def column(self) -> Array:
        """One random column in each row, as an index array."""
        return self.rng.integers(0, self.cols, self.rows)


Make = Callable[[Room], Array]
NAN = np.uint64(2**63 - 1).view(np.float64)  # all bits set, as NVIDIA's arithmetic gives it: an addition carries out
MANY = 2**16  # all that 16 bits count
BELOW_TF32 = 1 + 2.0**-10 - 2.0**-23  # the f32 before a tf32: as near to that as cutting 13 bits off is far away


@dataclass(frozen=True, slots=True)
class Pattern:
    """A named way to fill rows. `alone`: only one operand of a row gets it, the others stay normal."""

    name: str
    reason: str
    make: Make
    alone: bool = False
    needs: str = ""  # "reduction" of the row or a selection from it, "selection", or "tf32": pointless without one


def spiked(value: float | np.float64) -> Make:
    """Normal rows with one element of `value`."""

    def make(room: Room) -> Array:
        x = room.normal()
        x[np.arange(room.rows), room.column()] = value
        return x

    return make


def ends(room: Room) -> Array:
    """All that matters is in the first and the last column."""
    x = room.normal() / 16
    x[:, 0], x[:, -1] = 5.0, 6.0
    return x


def sparse(room: Room) -> Array:
    """Zeros, and in each row some columns of 12."""
    x = np.zeros(room.shape)
    for _ in range(8):
        x[np.arange(room.rows), room.column()] = 12.0
    return x


def inside_spread(room: Room) -> Array:
    """A large mean with a spread of a unit in the last place; of an f32 a few, for its mean to be known."""
    mean = min(1000.0, room.dtype.largest / 64)
    steps = 8 if room.dtype is f32 else 2
    return mean * (1 + steps * room.dtype.epsilon * np.round(room.normal() * 2) / 2)


def alternating(room: Room) -> Array:
    """+big, -big, ... with a small rest that is all of the sum."""
    sign = np.where(np.arange(room.cols) % 2, -1.0, 1.0)
    return sign * min(1000.0, room.dtype.largest / 64) + room.normal()


def half_masked(room: Room) -> Array:
    return np.where(room.rng.random(room.shape) < 0.5, -np.inf, room.normal())


def masked_but_one(room: Room) -> Array:
    x = np.full(room.shape, -np.inf)
    x[np.arange(room.rows), room.column()] = 1.0
    return x


def zeros(room: Room) -> Array:
    return np.where(room.rng.random(room.shape) < 0.5, -0.0, 0.0)


def ascending(room: Room) -> Array:
    return np.sort(room.normal() * 4, axis=-1)


def huge(room: Room) -> Array:
    return room.dtype.largest * (1 - room.rng.random(room.shape) / 2) * np.sign(room.normal())


def tiny(room: Room) -> Array:
    return room.normal() * max(room.dtype.tiny * 16, 2.0**-130)


def small(room: Room) -> Array:
    return room.normal() * max(room.dtype.tiny * 2.0**12, 2.0**-60)


def ties(room: Room) -> Array:
    return room.rng.choice([-1.0, 0.0, 0.5, 2.0], room.shape)


def descending(room: Room) -> Array:
    return ascending(room)[:, ::-1]


def two_values(room: Room) -> Array:
    """One value all over, but for as many of a larger one, half of k, as leave ties to be kept and to be left out."""
    x = np.zeros(room.shape)
    for _ in range(max(1, room.picks // 2)):
        x[np.arange(room.rows), room.column()] = 1.0
    return x


def all_but_one_above(room: Room) -> Array:
    """One value all over, but for k - 1 columns of another one each, larger."""
    best = min(max(1, room.picks - 1), room.cols)
    above = np.where(np.arange(room.cols) < best, 1 + np.arange(room.cols) / 64, 0.0)
    return room.rng.permuted(np.broadcast_to(above, room.shape), axis=-1)


def unmasked(room: Room, count: int) -> Array:
    """Normal rows with `count` columns left, anywhere."""
    keep = room.rng.permuted(np.broadcast_to(np.arange(room.cols) < count, room.shape), axis=-1)
    return np.where(keep, room.normal(), -np.inf)


def some_nan(room: Room) -> Array:
    """More or fewer NaN than are kept."""
    share = np.array([0.5, 2.0])[np.arange(room.rows) % 2, None] * room.picks / room.cols
    return np.where(room.rng.random(room.shape) < share, np.nan, room.normal())


def best_last(room: Room) -> Array:
    """The best are in the last columns, and the best of all in the last one."""
    x = room.normal()
    best = min(room.picks, room.cols)
    x[:, room.cols - best :] = 8 + np.arange(best) / 8
    return x


PATTERNS: tuple[Pattern, ...] = (
    Pattern("normal", "unit scale, what users have", Room.normal),
    Pattern("nan", "one NaN element: its row is NaN where the reference says so, and no other row is",
            spiked(NAN), alone=True),
    Pattern("-inf row", "nothing is left of the row: softmax gives zeros, not NaN",
            lambda room: np.full(room.shape, -np.inf), alone=True),
    Pattern("mean >> spread", "the row's mean dwarfs its spread: a variance by E[x^2] - E[x]^2 cancels",
            inside_spread, needs="reduction"),
    Pattern("ends", "all weight in the first and the last column: a tail cut short shows", ends),
    Pattern("sparse", "a few random columns hold all that matters: one that is skipped shows", sparse),
    Pattern("part -inf", "masked scores: exp(-inf) is 0 and -inf - -inf must not happen", half_masked, alone=True),
    Pattern("one left", "all but one element masked: the softmax is 1 there", masked_but_one, alone=True),
    Pattern("+inf", "one +inf element: infinities and NaN as the reference has them", spiked(np.inf), alone=True),
    Pattern("large", "near where sums of squares leave f32: too narrow an intermediate overflows",
            lambda room: room.normal() * room.safe),
    Pattern("wide", "differences of hundreds: exponentials overflow unless the maximum is taken off first",
            lambda room: room.normal() * 64),
    Pattern("ties", "few distinct values: equal maxima, exact cancellation", ties),
    Pattern("constant", "each row one value: the variance is 0, the softmax uniform",
            lambda room: np.broadcast_to(room.rng.standard_normal((room.rows, 1)), room.shape)),
    Pattern("alternating", "+1000, -1000, ...: the sum is what is left of the cancellation", alternating,
            needs="reduction"),
    Pattern("ascending", "every element a new maximum: an online softmax rescales each time", ascending,
            needs="reduction"),
    Pattern("all negative", "below zero everywhere: a maximum that starts from 0 shows",
            lambda room: -1 - np.abs(room.normal())),
    Pattern("zeros", "0 and -0: nothing to divide by", zeros),
    Pattern("huge", "near the storage type's largest: no intermediate may be narrower than f32", huge),
    Pattern("small", "squares are small: an epsilon that is missing or misplaced shows", small),
    Pattern("two values", "fewer than k above a plateau: the lowest columns of the plateau fill up", two_values,
            needs="selection"),
    Pattern("k - 1 left", "one column too few: it ends in a -1",
            lambda room: unmasked(room, room.picks - 1), alone=True, needs="selection"),
    Pattern("k left", "just enough: no column is masked that is chosen, and all others are",
            lambda room: unmasked(room, room.picks), alone=True, needs="selection"),
    Pattern("some NaN", "several NaN: before every number, by column among themselves", some_nan, alone=True,
            needs="selection"),
    Pattern("descending", "the best come first: a threshold that starts there holds", descending, needs="selection"),
    Pattern("best last", "what was kept so far is all replaced at the row's end", best_last, needs="selection"),
    Pattern("k - 1 above", "a threshold between them and the plateau below is one column short", all_but_one_above,
            needs="selection"),
    Pattern("below a tf32", "factors that round up by an ulp of f32: to cut them off instead adds up",
            lambda room: np.full(room.shape, BELOW_TF32), needs="tf32"),
    Pattern("tiny", "at and below the storage type's smallest normal", tiny),
)  # fmt: skip
"""In order of what they find: a launch with room for few rows takes the first ones."""


def patterns_for(graph: Graph) -> tuple[Pattern, ...]:
    """The patterns that can tell something about this graph."""
    has = {"", *(["reduction"] if graph.reductions or graph.scans or graph.products or graph.selection else []),
           *(["selection"] if graph.selection else []), *(["tf32"] if by_tf32(graph) else [])}  # fmt: skip
    return tuple(p for p in PATTERNS if p.needs in has)


def by_tf32(graph: Graph) -> bool:
    """Has the chain products of f32 factors?"""
    return f32 in graph.factor_types.values()


def safe_magnitude(dtype: DType, cols: int) -> float:
    """Where row sums of squares of a few such operands still fit f32."""
    return float(min(dtype.largest / 16, np.sqrt(f32.largest / max(1, cols)) / 64))


# ---------------------------------------------------------------- operands that rows share


@dataclass(frozen=True, slots=True)
class Setting:
    """What the operands that are no rows (vectors, one value a row, run-time scalars) hold during a launch."""

    name: str
    reason: str
    vector: Make
    row: Make
    integer: str  # "small", "negative", "extreme"


def uniform_scale(room: Room) -> Array:
    return np.exp2(room.rng.uniform(-1, 1, room.shape))


SETTINGS: tuple[Setting, ...] = (
    Setting("usual", "weights of unit scale, positive scales and counts", Room.normal, uniform_scale, "small"),
    Setting("zero", "weights, scales and counts of 0",
            lambda room: np.zeros(room.shape), lambda room: np.zeros(room.shape), "negative"),
    Setting("large", "weights of thousands", lambda room: room.normal() * min(1000.0, room.safe),
            lambda room: -uniform_scale(room) * min(1000.0, room.safe), "extreme"),
    Setting("tiny", "weights at the storage type's smallest", tiny, tiny, "small"),
)  # fmt: skip

UNIT_SETTING = Setting("unit", "weights of 1 / sqrt(K), as layers have them: results of unit scale",
                       Room.normal, uniform_scale, "small")  # fmt: skip
GENTLE = Pattern("gentle", "an eighth of unit scale, where a chain blows unit scale up beyond what f32 can bound",
                 lambda room: room.normal() / 8)  # fmt: skip
GENTLE_SETTING = Setting("gentle", GENTLE.reason, GENTLE.make, uniform_scale, "few")
STEADY = Pattern("steady", "between a half and 1, where unit scale leaves too much open: no sum of operands cancels, "
                 "and none is almost 0", lambda room: room.rng.uniform(0.5, 1, room.shape))  # fmt: skip
STEADY_SETTING = Setting("steady", STEADY.reason, STEADY.make, STEADY.make, "few")

LEAST, MOST, EXACT = -(2**31), 2**31 - 1, 2**24  # of i32; and up to where f32 holds each whole number
EXTREMES = (LEAST, LEAST + 1, -EXACT - 1, -EXACT, -1, 0, 1, EXACT - 1, EXACT, EXACT + 1, EXACT + 2, MOST - 1, MOST)

INTEGERS: Mapping[str, Callable[[Room, int], Array]] = {
    "small": lambda room, most: room.rng.integers(0, most if room.cols == 1 else min(most, 65), room.shape),
    "few": lambda room, most: room.rng.integers(0, 3, room.shape),
    "negative": lambda room, most: room.rng.integers(-3, 1, room.shape),
    "extreme": lambda room, most: room.rng.choice(EXTREMES, room.shape),
}
"""For i32, which counts columns where there is one a row. All of it is defined: sums wrap, as numpy's int32 do."""

INTEGER_ROWS: tuple[Callable[[Room], Array], ...] = (
    lambda room: room.rng.choice(EXTREMES, room.shape),  # what a detour through f32 rounds, or takes beyond i32
    lambda room: EXACT + room.rng.integers(-2, 4, room.shape),  # neighbours that are one f32
    lambda room: room.rng.integers(LEAST, MOST, room.shape, endpoint=True),  # sums that wrap
    lambda room: room.rng.integers(0, 3, room.shape),  # ties
    lambda room: MOST - room.rng.integers(0, 3, room.shape),  # ties and neighbours at the end,
    lambda room: LEAST + room.rng.integers(0, 3, room.shape),  # and at the beginning, where a maximum of 0 shows
    lambda room: np.full(room.shape, LEAST),  # nothing above what a maximum starts from
)
"""Rows of i32 where rows are made by malice, by turns."""
