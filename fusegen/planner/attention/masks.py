"""Which keys a row of attention can see: intervals of columns, found from the mask's own comparisons.

    col <= row + offset                            needed up to it, and free of tests there
    (col > row - window) & (col <= row)            needed between two ends
    (col >= start) & (col < end)                   start and end one value a row, as documents have them
    col // chunk == row // chunk                   the chunk that the row is in
    (col <= row) | (col < prefix)                  the farther of two ends
    (col <= row) & keep                            needed up to the end; `keep` is a test of its own, which stays

A condition of which nothing is known may hold anywhere. What is *needed* is where a logit may be more than -inf, or,
without a softmax, a weight something else than 0; what is *free* is where all conditions of known intervals surely
hold, so that they need no test there. Ends are made of whole numbers that are one value a row, in 64 bits: nothing is
taken to the other side of a comparison that might have wrapped in 32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fusegen.language.graph import Graph, Node, behind
from fusegen.language.types import i32, size_of
from fusegen.planner.attention.recognition import Scored, of_row
from fusegen.planner.ranges import Range, ranges

EXACT = 2.0**24  # whole numbers up to here are f32 values
MOST_ROWS = 2**30  # of a launch
Direction = Literal["up", "down", "level", "any"]


@dataclass(frozen=True, slots=True)
class Sum:
    """`plus` and the sum of values, each of which is one a row, times a number."""

    terms: tuple[tuple[Node, int], ...]
    plus: int = 0


@dataclass(frozen=True, slots=True)
class Least:
    of: tuple[End, ...]


@dataclass(frozen=True, slots=True)
class Most:
    of: tuple[End, ...]


End = Sum | Least | Most


@dataclass(frozen=True, slots=True)
class Interval:
    """`first` <= column < `end`; None: without that end. `nowhere`: no column at all is known to be in it."""

    first: End | None = None
    end: End | None = None
    nowhere: bool = False

    @property
    def everywhere(self) -> bool:
        return self.first is None and self.end is None and not self.nowhere


ALL = Interval()
NOWHERE = Interval(nowhere=True)


def both(a: Interval, b: Interval) -> Interval:
    if a.nowhere or b.nowhere:
        return NOWHERE
    return Interval(joined(Most, a.first, b.first), joined(Least, a.end, b.end))


def hull(a: Interval, b: Interval) -> Interval:
    """The least interval that has all of both in it."""
    if a.nowhere or b.nowhere:
        return b if a.nowhere else a
    first = None if a.first is None or b.first is None else joined(Least, a.first, b.first)
    end = None if a.end is None or b.end is None else joined(Most, a.end, b.end)
    return Interval(first, end)


def joined(how: type[Least] | type[Most], a: End | None, b: End | None) -> End | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    return how((a, b))


@dataclass(frozen=True, slots=True)
class Known:
    """Of a condition: outside of `may` it surely does not hold, inside of `must` it surely does."""

    may: Interval
    must: Interval

    @property
    def exact(self) -> bool:
        return self.may == self.must


UNKNOWN = Known(ALL, NOWHERE)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """What is known of a chain's logits, or of its weights without a softmax: the keys that a row needs, those of them
    that need no test, and the conditions that hold there, `settled`."""

    needed: Interval
    free: Interval
    settled: frozenset[Node]

    @property
    def ends(self) -> tuple[End, ...]:
        found = (self.needed.first, self.needed.end, self.free.first, self.free.end)
        return tuple(end for end in found if end is not None)


def mask_of(found: Scored) -> Mask:
    """The mask of recognized attention."""
    finder = Finder(found)
    needed = finder.needed(found.logits)
    settled = frozenset(finder.settled(found))
    free = ALL
    for node in sorted(settled, key=found.lowered.nodes.index):
        free = both(free, finder.known(node).must)
    return Mask(needed, free, settled)


class Finder:
    """The intervals of one chain's conditions, each found once."""

    def __init__(self, found: Scored) -> None:
        self.graph: Graph = found.lowered
        self.ranges = ranges(self.graph)
        self.last = size_of(found.keys, self.graph.sizes) - 1
        self.nothing = -math.inf if found.softmax else 0.0  # what weighs nothing
        self.seen: dict[Node, Known] = {}

    # ---------------------------------------------------------------- conditions

    def known(self, node: Node) -> Known:
        if node not in self.seen:
            self.seen[node] = self.found(node)
        return self.seen[node]

    def found(self, node: Node) -> Known:
        name, of = node.op.name, node.inputs
        if node.literal is not None:
            return Known(ALL, ALL) if node.literal else Known(NOWHERE, NOWHERE)
        if name == "logical_and":
            a, b = map(self.known, of)
            return Known(both(a.may, b.may), both(a.must, b.must))
        if name == "logical_or":
            a, b = map(self.known, of)
            return Known(hull(a.may, b.may), self.either(a.must, b.must))
        if name == "logical_not":
            a = self.known(of[0])
            return Known(outside(a.must), outside(a.may, NOWHERE))
        if name in ("lt", "le", "gt", "ge", "eq"):
            return self.compared(name, *of)
        return UNKNOWN

    def either(self, a: Interval, b: Interval) -> Interval:
        """An interval in which one or the other surely holds: both together where they are open to the same side."""
        if a.nowhere or b.nowhere:
            return b if a.nowhere else a
        if a.first is None and b.first is None:
            return hull(a, b)
        if a.end is None and b.end is None:
            return hull(a, b)
        return a

    def compared(self, name: str, left: Node, right: Node) -> Known:
        """`left` < `right` and its like, solved for the column."""
        if name in ("gt", "ge"):
            name, left, right = {"gt": "lt", "ge": "le"}[name], right, left
        a, b = self.line(left), self.line(right)
        if a is None or b is None:
            return UNKNOWN
        slope, chunks = a.slope - b.slope, {line.chunk for line in (a, b) if line.slope}
        if len(chunks) != 1 or abs(slope) != 1:
            return UNKNOWN
        (chunk,) = chunks
        # slope * col + rest < 0, or <= 0, or == 0
        terms = {node: 0 for node, _ in (*a.rest.terms, *b.rest.terms)}
        for line, sign in ((a, 1), (b, -1)):
            for node, times in line.rest.terms:
                terms[node] += sign * times
        rest = Sum(tuple((n, t) for n, t in terms.items() if t), a.rest.plus - b.rest.plus)
        if name == "eq":
            place = scaled(rest, -slope)
            exactly = Interval(scaled(place, chunk), added(scaled(place, chunk), chunk))
            return Known(exactly, exactly)
        strict = 1 if name == "lt" else 0
        if slope == 1:  # col // chunk <= -rest - strict
            interval = Interval(end=scaled(added(scaled(rest, -1), 1 - strict), chunk))
        else:  # col // chunk >= rest + strict
            interval = Interval(first=scaled(added(rest, strict), chunk))
        return Known(interval, interval)

    def line(self, node: Node) -> Line | None:
        """A whole number as a multiple of the column and what is one value a row; None where it may wrap, or is no such
        sum. An f32 is one as long as it holds every whole number of its size."""
        found = self.made(node)
        most = 2.0**31 - 1 if node.dtype is i32 else EXACT
        if found is not None and -most <= found.range.low and found.range.high <= most:
            return found
        if node.dtype is i32 and of_row(node):
            return Line(0, 1, Sum(((node, 1),)), self.ranges[node])
        return None

    def made(self, node: Node) -> Line | None:
        """By its arguments."""
        name, of, sizes = node.op.name, node.inputs, self.graph.sizes
        if node.literal is not None or node.size is not None:
            number = node.literal if node.size is None else size_of(node.size, sizes)
            assert number is not None
            return Line(0, 1, Sum((), int(number)), Range(number, number)) if number == int(number) else None
        if name == "col_index":
            return Line(1, 1, Sum(()), Range(0.0, float(self.last)))
        if name == "row_index":
            rows = self.graph.shape[-2]
            most = size_of(rows, sizes) if rows in self.graph.fixed else MOST_ROWS
            return Line(0, 1, Sum(((node, 1),)), Range(0.0, most - 1.0))
        if name == "to_f32" and of[0].dtype is i32:
            return self.line(of[0])
        if name == "floor_div":
            inner, by = self.line(of[0]), of[1].literal
            if inner is None or inner.slope != 1 or inner.rest != Sum(()) or not isinstance(by, int) or by < 1:
                return None
            return Line(1, by, Sum(()), Range(0.0, self.last // by)) if inner.chunk == 1 else None
        if name not in ("add", "sub"):
            return None
        a, b = map(self.line, of)
        if a is None or b is None or (a.slope and b.slope):
            return None
        sign = 1 if name == "add" else -1
        low = a.range.low + (b.range.low if sign > 0 else -b.range.high)
        high = a.range.high + (b.range.high if sign > 0 else -b.range.low)
        terms = (*a.rest.terms, *((n, sign * times) for n, times in b.rest.terms))
        chunk = a.chunk if a.slope else b.chunk
        return Line(a.slope + sign * b.slope, chunk, Sum(terms, a.rest.plus + sign * b.rest.plus), Range(low, high))

    # ---------------------------------------------------------------- logits

    def needed(self, node: Node) -> Interval:
        """Where a logit may be something else than -inf, or a weight without a softmax something else than 0."""
        name, of = node.op.name, node.inputs
        if node.literal is not None:
            return NOWHERE if node.literal == self.nothing else ALL
        if name == "where":
            test = self.known(of[0])
            return hull(both(test.may, self.needed(of[1])), both(outside(test.must), self.needed(of[2])))
        if self.nothing == 0:  # conditions come last
            return ALL
        if name in ("add", "sub") and self.finite(of[1]):
            return self.needed(of[0])
        if name == "add" and self.finite(of[0]):
            return self.needed(of[1])
        if name in ("mul", "div") and self.positive(of[1]):
            return self.needed(of[0])
        if name == "mul" and self.positive(of[0]):
            return self.needed(of[1])
        return ALL

    def finite(self, node: Node) -> bool:
        return self.ranges[node].finite

    def positive(self, node: Node) -> bool:
        return self.ranges[node].low > 0 and self.ranges[node].finite

    def settled(self, found: Scored) -> Iterator[Node]:
        """The largest conditions of which it is known exactly where they hold."""
        tests = {n.inputs[0] for n in found.score_body if n.op.name == "where"}
        stack = list(tests)
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or of_row(node):
                continue
            seen.add(node)
            known = self.known(node)
            if known.exact and not known.may.everywhere and not known.may.nowhere:
                yield node
            elif node.op.name == "logical_and":
                stack.extend(node.inputs)


@dataclass(frozen=True, slots=True)
class Line:
    """`slope` * (column // `chunk`) + `rest`, within `range`."""

    slope: int
    chunk: int
    rest: Sum
    range: Range


def scaled(end: Sum, times: int) -> Sum:
    return Sum(tuple((node, own * times) for node, own in end.terms), end.plus * times)


def added(end: Sum, more: int) -> Sum:
    return Sum(end.terms, end.plus + more)


def outside(interval: Interval, otherwise: Interval = ALL) -> Interval:
    """The columns that are not in an interval, which is open to one side; else `otherwise`."""
    if interval.nowhere:
        return ALL
    if interval.everywhere:
        return NOWHERE
    if interval.first is None:
        return Interval(first=interval.end)
    if interval.end is None:
        return Interval(end=interval.first)
    return otherwise


# ---------------------------------------------------------------- along the rows


def terms_of(end: End) -> Iterator[tuple[Node, int]]:
    if isinstance(end, Sum):
        yield from end.terms
    else:
        for inner in end.of:
            yield from terms_of(inner)


def direction(mask: Mask, graph: Graph) -> Direction:
    """How the ends move from row to row: what is known of a tile's first and last row is known of all, unless "any"."""
    found = {direction_of(node, times, graph) for end in mask.ends for node, times in terms_of(end)} - {"level"}
    if not found:
        return "level"
    return found.pop() if len(found) == 1 else "any"


def direction_of(node: Node, times: int, graph: Graph) -> Direction:
    rows = graph.shape[-2]
    moving = [n for n in behind([node]) if not n.inputs and n.shape[-2:-1] == (rows,)]
    if not moving:
        return "level"
    if not rises(node):
        return "any"
    return "up" if times > 0 else "down"


def rises(node: Node) -> bool:
    """Does it surely not fall from row to row?"""
    name, of = node.op.name, node.inputs
    if name == "row_index" or not node.shape or (len(node.shape) > 1 and node.shape[-2] == 1):
        return True
    if name == "floor_div":
        return rises(of[0]) and isinstance(of[1].literal, int) and of[1].literal > 0
    return False


def values_of(mask: Mask) -> tuple[Node, ...]:
    """The values that ends are made of, each once, in the order of their use."""
    return tuple(dict.fromkeys(node for end in mask.ends for node, _ in terms_of(end)))
