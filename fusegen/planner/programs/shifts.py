"""Joins that are read across their parts: a shift is arithmetic on the number of a row, or of a column.

    concat([a, b], -2)[..., o:, :]    at row r is    a at r + o    where r + o < len(a), else    b at r + o - len(a)

Each part is read as a table, in the row that this number names, and what a part has no row for counts as 0: see
`fusegen.language.lookup`. So F.roll, a causal convolution by taps and a sequence with rows of zeros in front are one
kernel, whatever the number of rows. Of `where(r >= k, roll(x, k), 0)` only those rows are left that the mask shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from fusegen.language.axes import over_rows
from fusegen.language.graph import Graph, Kind, Node, behind
from fusegen.language.sizes import Shape, Size, broadcast
from fusegen.language.trace import OPS
from fusegen.language.types import b8, i32
from fusegen.language.views import View, made
from fusegen.planner.programs.seen import axis_by_axis, number, plus, times, within
from fusegen.planner.programs.steps import NotOneStep

COMPARED = {"lt": (False, 0), "le": (False, 1), "gt": (True, 1), "ge": (True, 0)}
"""Of a comparison with a number: does it hold from the bound on, or below it, and by how much is the bound another?"""
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class Sees(Protocol):
    """What a lowering knows of values through views."""

    graph: Graph
    names: dict[Node, str]

    def seen(self, node: Node, view: View, full: bool = False) -> Node: ...
    def composed(self, view: View, other: View, node: Node) -> View: ...
    def table(self, source: Node, shown: View, index: Node, named: str = "") -> Node: ...


def may_shift(graph: Graph) -> bool:
    """Can a kernel of these values read joins across their parts? Tiles of products, selections and reductions over
    rows take no rows at an index."""
    apart = graph.products or graph.selections or graph.scatters or over_rows(graph)
    return not apart and any(node.op.kind is Kind.JOIN for node in graph.nodes)


def shifts(graph: Graph) -> bool:
    """Is an operand read in several places by way of a join? Results of such a join's parts would each read it."""
    for join in graph.nodes:
        if join.op.kind is Kind.JOIN:
            sources = [{n for n in behind((a,)) if n.op.kind is Kind.INPUT and n.shape} for a in join.inputs]
            inside = set(behind((join,)))
            elsewhere = {n for s in sources for n in s if any(u not in inside for u in graph.users[n])}
            if elsewhere or len(set().union(*sources)) < sum(map(len, sources)):
                return True
    return False


class Shifts:
    """The rows and columns that a lowering finds by their numbers."""

    def __init__(self, sees: Sees) -> None:
        self.sees = sees
        self.places: dict[tuple[int, Size, Size, Size], Node] = {}
        self.made: dict[tuple[Node, View], Node] = {}

    def join(self, node: Node, view: View, left: int = 0) -> Node:
        """What a view shows of a join: from each part what lies there. `left`: the axis along which the view may leave
        the join, if there is one. Raises NotOneStep."""
        for argument, part in zip(node.inputs, node.parts, strict=True):
            if (inner := within(view, part)) is not None:
                return self.beyond(argument, inner, left) if left else self.sees.seen(argument, inner)
        view, axis = axis_by_axis(view), joined_axis(node)
        if axis is None or any(len(group) != 1 for group in view.base):
            raise across(node)
        place, at = self.place(node, view, axis), self.counted(node, view, axis)
        if left and at != left:  # of what lies beside all rows, as a shift of rows and of columns would read
            raise across(node)
        found, behind_it, spans = None, 0, False
        for argument, part in reversed(list(zip(node.inputs, node.parts, strict=True))):
            start = part.offset[axis]
            if not isinstance(start, int):
                raise across(node)
            offset = (*view.offset[:axis], view.offset[axis] - start, *view.offset[axis + 1 :])
            inner = made(view.shape, tuple((size,) for size in argument.shape), offset, view.columns)
            value = self.beyond(argument, inner, at)
            spans = spans or value.shape[at:][:1] == view.shape[at:][:1]
            if found is not None:
                lower = Node(OPS["lt"], (place, number(behind_it, node)), place.shape, b8, node.operator)
                shape = broadcast(broadcast(place.shape, value.shape), found.shape)
                value = Node(OPS["where"], (lower, value, found), shape, node.dtype, node.operator)
            found, behind_it = value, start
        if found is None or not spans:  # no operand says how many there are
            raise across(node)
        return found

    def beyond(self, node: Node, view: View, at: int) -> Node:
        """What a view shows of a value which it may leave along its axis `at`, counted from the right: nothing is read
        there, and any number may stand for it. Raises NotOneStep."""
        view = axis_by_axis(view).tight()
        if len(view.shape) < -at or not any(row[at] != 0 for row in view.steps):  # one row stands for all
            return self.sees.seen(node, view)
        if (node, view) not in self.made:
            self.made[node, view] = self.look(node, view, at)
        return self.made[node, view]

    def look(self, node: Node, view: View, at: int) -> Node:
        source, shown = node, View.identity(node.shape)
        while (step := source.view) is not None:
            source, shown = source.inputs[0], self.sees.composed(shown, step, node)
        if source.op.kind is Kind.INPUT:
            return self.taken(node, view, at, source, shown)
        if node.view is not None:
            return self.beyond(node.inputs[0], self.sees.composed(view, node.view, node), at)
        if node.op.kind is Kind.LEAF:
            return self.sees.seen(node, view)
        if node.op.kind is Kind.JOIN:
            return self.join(node, view, at)
        if node.op.kind is not Kind.MAP:
            raise NotOneStep(node, f"{node.operator}: what is read of it is shifted along its rows or columns")
        arguments: list[Node] = []
        for argument in node.inputs:
            own = self.sees.composed(view, View.identity(argument.shape).broadcast(node.shape), node)
            moves = any(row[at] != 0 for row in own.steps)
            arguments.append(self.beyond(argument, own, at) if moves else self.sees.seen(argument, own))
        shape: Shape = ()
        for argument in arguments:
            shape = broadcast(shape, argument.shape)
        return replace(node, inputs=tuple(arguments), shape=shape)

    def taken(self, node: Node, view: View, at: int, source: Node, shown: View) -> Node:
        """What an index names of an operand, of which `shown` is the `node`."""
        moved = [b for b, row in enumerate(view.steps) if row[at] != 0]
        if len(moved) != 1 or any(len(group) != 1 for group in view.base):
            raise across(node)
        (axis,) = moved
        index = self.place(node, view, axis)
        place = len(view.shape) + at
        shape = (*view.shape[:place], 1, *view.shape[place + 1 :])
        still = (0,) * len(view.base)
        columns = (*view.columns[:place], still, *view.columns[place + 1 :])
        first = (*still[:axis], 1, *still[axis + 1 :])
        offset = (*view.offset[:axis], 0, *view.offset[axis + 1 :])
        lines = made((node.shape[axis], *shape), view.base, offset, (first, *columns))
        named = self.sees.graph.tensor_of[source].name + place_words(offset_of(index))
        table = self.sees.table(source, self.sees.composed(lines, shown, node), index, named)
        found = Node(OPS["gather"], (table, index), broadcast(index.shape, shape), node.dtype, node.operator)
        self.sees.names[found] = f"{named}_or_0"
        return found

    def counted(self, node: Node, view: View, axis: int) -> int:
        """The view's own axis, counted from the right, that alone moves along an axis of its base, and along no other.
        Raises NotOneStep where kernels do not count it."""
        moving = [j for j, step in enumerate(view.steps[axis]) if step != 0]
        at = moving[0] - len(view.shape) if len(moving) == 1 else 0
        if at not in INDICES or sum(step != 0 for step in view.columns[at]) != 1:
            raise across(node)
        return at

    def place(self, node: Node, view: View, axis: int) -> Node:
        """The numbers of the rows or columns that a view shows along an axis of its base."""
        at = self.counted(node, view, axis)
        size, step, offset = view.shape[at], view.steps[axis][at], view.offset[axis]
        if not (isinstance(step, int) and isinstance(offset, int)):
            raise across(node)
        key = at, size, step, offset
        if key not in self.places:
            first = min(n.operator.index for n in self.sees.graph.nodes) - 1  # whoever reads it, it comes before
            op, shape = (INDICES[at], (size, 1) if at == -2 else (size,))
            index = Node(OPS[op], (), shape, i32, replace(node.operator, index=first))
            found = plus(times(index, step), number(offset, index) if offset else None, index)
            if offset and offset_of(found) is not None:
                self.sees.names[found] = op.removesuffix("_index") + place_words(offset)
            self.places[key] = found
        return self.places[key]


INDICES = {-2: "row_index", -1: "col_index"}
"""What counts along an axis of a kernel, by its place from the right."""


def joined_axis(node: Node) -> int | None:
    """The axis along which the parts of a join lie one behind another; None where they lie otherwise."""
    part = node.parts[0]
    if len(part.shape) < len(part.base):
        return None
    return next((b for b, group in enumerate(part.base) if group != part.shape[b : b + 1]), None)


def place_words(offset: int | None) -> str:
    """Where a row lies beside the one that is computed: `_3_before`, `_1_behind`."""
    return f"_{abs(offset)}_{'before' if offset < 0 else 'behind'}" if offset else "_there"


def across(node: Node) -> NotOneStep:
    return NotOneStep(node, f"{node.operator}: what is read of it lies in several of its parts")


# ---------------------------------------------------------------- masks beside shifts


@dataclass(frozen=True, slots=True)
class Half:
    """The rows, or the columns, from `bound` on; or those below it."""

    index: str
    above: bool
    bound: int

    @property
    def others(self) -> Half:
        return replace(self, above=not self.above)

    def holds(self, other: Half) -> bool:
        """Are all of the other's among these?"""
        lies = other.bound >= self.bound if self.above else other.bound <= self.bound
        return (self.index, self.above) == (other.index, other.above) and lies


def settled(node: Node) -> Node:
    """where(r >= k, where(r < k, a, b), c)  ->  where(r >= k, b, c), and b alone where it is 0 below row k, as c is."""
    mask, taken, other = node.inputs
    known = half(mask)
    if known is None:
        return node
    taken, other = under(taken, known), under(other, known.others)
    if is_zero(other) and taken.shape == node.shape and zero_in(taken, known.others):
        return taken
    if is_zero(taken) and other.shape == node.shape and zero_in(other, known):
        return other
    return replace(node, inputs=(mask, taken, other))


def half(mask: Node) -> Half | None:
    """What a mask that compares a number of rows or columns is true for; None of others."""
    name, pair = mask.op.name, mask.inputs
    if name in MIRRORED and pair[0].literal is not None:
        name, pair = MIRRORED[name], pair[::-1]
    if name not in COMPARED or not isinstance(pair[1].literal, int) or (offset := offset_of(pair[0])) is None:
        return None
    above, more = COMPARED[name]
    return Half(counts(pair[0]), above, pair[1].literal + more - offset)


def counts(index: Node) -> str:
    return (index.inputs[0] if index.inputs else index).op.name


def offset_of(index: Node) -> int | None:
    """k of `row + k` and of `col + k`; None of anything else."""
    if index.op.name in INDICES.values():
        return 0
    if index.op.name in ("add", "sub") and index.inputs[0].op.name in INDICES.values():
        literal = index.inputs[1].literal
        if isinstance(literal, int):
            return literal if index.op.name == "add" else -literal
    return None


def under(node: Node, known: Half) -> Node:
    """A value where the row or the column is known to be one of these; the same where that is one for all of them, of
    which no operand would say how many there are."""
    while node.op.name == "where" and (mask := half(node.inputs[0])) is not None:
        found = node.inputs[1] if mask.holds(known) else node.inputs[2] if mask.others.holds(known) else node
        if found is node or found.shape != node.shape:
            break
        node = found
    return node


def zero_in(node: Node, known: Half) -> bool:
    """Is it of rows or columns that a table has not, and so 0, for all of these?"""
    offset = offset_of(node.inputs[1]) if node.op.name == "gather" else None
    return offset is not None and Half(counts(node.inputs[1]), False, -offset).holds(known)


def is_zero(node: Node) -> bool:
    return node.literal is not None and node.literal == 0 and math.copysign(1.0, node.literal) > 0
