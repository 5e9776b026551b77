"""What lowering asks of views: where in a join they lie, how they take a matrix, and what their sizes are called."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from fusegen.language.graph import Graph, Kind, Node, Operator, behind
from fusegen.language.reference import PLACES
from fusegen.language.sizes import Expr, Shape, Size, broadcast, size_of, without_number
from fusegen.language.trace import OPS
from fusegen.language.types import i32
from fusegen.language.views import View, made
from fusegen.planner.programs.rows_in_parts import stretch
from fusegen.planner.programs.steps import NotOneStep


def along_row(node: Node, argument: Node) -> Node:
    """A reduction of groups of a row, or a group's value at its places, of an argument with other leading axes."""
    return replace(node, inputs=(argument,), shape=(*argument.shape[:-1], node.shape[-1]))


def spread_over(node: Node, argument: Node) -> Node:
    """A group's value at its places: what is computed of operands alone is so of their values at these places."""
    if argument.op.kind is not Kind.MAP or any(n.op.kind is Kind.GROUP for n in behind((argument,))):
        return along_row(node, argument)
    own, groups = replace(node, operator=argument.operator), argument.shape[-1:]
    inputs = tuple(spread_over(own, a) if a.shape[-1:] == groups else a for a in argument.inputs)
    return replace(argument, inputs=inputs, shape=(*argument.shape[:-1], node.shape[-1]))


def turned(argument: Node, outer: Node, back: View, shape: Shape) -> Node:
    """An argument of an elementwise step as it is before the view `outer`, whose inverse is `back`."""
    if argument.op.kind is Kind.VIEW and argument.view == outer.view and argument.shape == outer.shape:
        return argument.inputs[0]
    if not argument.shape:
        return argument
    own = View.identity(argument.shape).broadcast(shape)
    view = back.of(own)
    return Node(OPS["view"], (argument,), view.shape, argument.dtype, outer.operator, view=view)


def before(outer: Node, arguments: list[Node], shape: Shape, anchored: set[Node]) -> tuple[Node, ...] | None:
    """The arguments of an elementwise step as they are before the view `outer`; None where that is no view of one,
    and where two that depend on reductions would take turns."""
    back = outer.view.inverse() if outer.view is not None else None
    others = [a for a in arguments if a in anchored and (a.view, a.shape) != (outer.view, outer.shape)]
    if back is None or others:
        return None
    try:
        return tuple(turned(a, outer, back, shape) for a in arguments)
    except ValueError:
        return None


def within(view: View, part: View) -> View | None:
    """What a view of a join shows of one of its parts, where it surely shows nothing else."""
    joined = next((b for b in range(len(part.base)) if part.base[b] != part.shape[b : b + 1]), None)
    if joined is None:
        return view if part.base_shape == part.shape else None
    view = axis_by_axis(view)
    if any(len(group) != 1 for group in view.base):
        return None
    stacked = len(part.shape) < len(part.base)
    row, start = view.steps[joined], view.offset[joined] - part.offset[joined]
    reach: list[Size] = [step * (size - 1) for step, size in zip(row, view.shape, strict=True)]
    if any(not isinstance(step, int) for step in row):
        return None
    low, high = start, start
    for step, far in zip(row, reach, strict=True):
        low, high = (low + far, high) if isinstance(step, int) and step < 0 else (low, high + far)
    length: Size = 1 if stacked else part.shape[joined]
    if not (surely(low) and surely(length - 1 - high)):
        return None
    keep = [b for b in range(len(view.base)) if not (stacked and b == joined)]
    offset = [start if b == joined else view.offset[b] for b in keep]
    columns = tuple(tuple(column[b] for b in keep) for column in view.columns)
    return made(view.shape, tuple((size,) for size in part.shape), offset, columns)


def axis_by_axis(view: View) -> View:
    """The same view, where it can be, with no two axes of the base taken as one: by steps that are whole multiples of
    the last one's size, nothing moves along that one."""
    for at, sizes in enumerate(view.base):
        unit = sizes[-1] if len(sizes) > 1 else None
        start, row = view.offset[at], view.steps[at]
        if not isinstance(unit, int) or not isinstance(start, int) or not all(isinstance(s, int) for s in row):
            continue
        if any(isinstance(step, int) and step % unit for step in row):
            continue
        base = (*view.base[:at], sizes[:-1], sizes[-1:], *view.base[at + 1 :])
        offset = (*view.offset[:at], start // unit, start % unit, *view.offset[at + 1 :])
        columns = ((*c[:at], c[at] // unit, 0, *c[at + 1 :]) for c in view.columns)
        return axis_by_axis(made(view.shape, base, offset, tuple(columns)))
    return view


def parts_in(
    node: Node, hoisted: Callable[[Node], Node], anchored: set[Node], sizes: Mapping[str, int]
) -> tuple[View, ...] | None:
    """Of a value that is made of a join, element by element, parts that take one of the join's each; None of any other.
    `hoisted` and `anchored`: those of the lowering, which looks for joins among the latter."""
    shown = View.identity(node.shape)
    while node.op.kind in (Kind.MAP, Kind.VIEW):
        if node.view is not None:
            try:
                shown, node = shown.of(node.view), hoisted(node.inputs[0])
            except ValueError:
                return None
            continue
        same = [hoisted(a) for a in node.inputs if a.shape == node.shape and a in anchored]
        kinds = (Kind.JOIN, Kind.MAP), (Kind.VIEW,)
        found = next((a for wanted in kinds for a in same if a.op.kind in wanted), None)
        if found is None:
            return parts_of_repeated(node, hoisted, anchored) if shown.is_identity else None
        node = found
    return parts_through(shown, node, sizes) if node.op.kind is Kind.JOIN else None


def parts_of_repeated(node: Node, hoisted: Callable[[Node], Node], anchored: set[Node]) -> tuple[View, ...] | None:
    """Of a value that is made of columns side by side which other axes repeat, as cosines are by heads: those columns
    of it."""
    for join in (hoisted(a) for a in node.inputs if a in anchored and a.shape[-1:] == node.shape[-1:]):
        if join.op.kind is Kind.JOIN and all(part == stretch(join.shape, part) for part in join.parts):
            return tuple(stretch(node.shape, part) for part in join.parts)
    return None


def parts_through(shown: View, join: Node, sizes: Mapping[str, int]) -> tuple[View, ...] | None:
    """Parts of what `shown` shows of a join, each of which lies in one of the join's: these themselves, where it shows
    the join as it is, or every second (third ...) column where what is joined takes turns. None of any other."""
    if shown.is_identity:
        return join.parts
    count, last = len(join.parts), len(shown.shape) - 1
    if last < 0 or any(within(shown, part) is not None for part in join.parts):
        return None
    try:
        if size_of(shown.shape[last], sizes) % count:
            return None
        turns = View.identity(shown.shape).split(last, (shown.shape[last] // count, count))
        found = tuple(turns.sliced((..., place)) for place in range(count))
        lie = all(any(within(each.of(shown), part) is not None for part in join.parts) for each in found)
    except ValueError:  # axes that are taken as one, and can't be
        return None
    return found if lie else None


def name_of_view(graph: Graph, node: Node, view: View) -> str:
    """What the author calls this view of an operand, or ""."""
    named = (user for user in graph.users.get(node, ()) if user.view is not None and user in graph.names)
    return next((graph.names[user] for user in named if user.view is not None and user.view.tight() == view), "")


def part_name(whole: str, view: View, sizes: Mapping[str, int]) -> str:
    """A part of an array by where it lies, such as `x_high`, or else `x_part`."""
    return f"{whole.rstrip('_')}_{place_in_words(view, sizes) or 'part'}"


def place_in_words(view: View, sizes: Mapping[str, int]) -> str:
    """Where a part lies along the one axis that it is a part of: `low` and `high` are halves, of that axis or of each
    of the equal stretches that it is seen as; `even` and `odd` every second element; `1_of_4` every fourth from the
    second on; `offset_96` begins there. Empty for others."""
    found = ""
    for base, offset, steps in zip(view.base, view.offset, view.steps, strict=True):
        whole, start = math.prod(size_of(size, sizes) for size in base), size_of(offset, sizes)
        moving = [
            (size_of(step, sizes), size_of(view.shape[axis], sizes)) for axis, step in enumerate(steps) if step != 0
        ]
        (step, count), *outer = sorted(moving) or [(1, 1)]
        if any(low * size != high for (low, size), (high, _) in pairwise([*outer, (whole, 1)])):
            return ""
        period = outer[0][0] if outer else whole  # of which the innermost axis shows a part
        if (start, step * count) == (0, period) and step == 1:
            continue
        halves = moving and 2 * count == period
        if step == 1:
            part = {0: "low", count: "high"}.get(start, "") if halves else "" if outer else f"offset_{start}"
        else:
            part = {0: "even", 1: "odd"}.get(start, "") if halves and step == 2 else ""
            if step > 2 and start < step and step * count == period:
                part = f"{start}_of_{step}"
        if found or not part:
            return ""
        found = part
    return found


def surely(size: Size) -> bool:
    """Is a size at least 0, whatever its dims? They are at least 1."""
    if isinstance(size, int):
        return size >= 0
    whole, number = without_number(size)
    terms = whole.terms if isinstance(whole, Expr) else ()
    return number >= 0 and all(factor > 0 for _, factor in terms)


def lies_across(view: View) -> bool:
    """Of an operand that lies row by row, are the view's columns the ones that are next to each other?"""
    last = len(view.base) - 1
    return view.steps[last][-2] != 0 and view.steps[last][-1] == 0


def size_name(size: Expr) -> str:
    """`D_half` for `D // 2`."""
    text = str(size)
    if half := re.fullmatch(r"([A-Za-z_]\w*) // 2", text):
        return f"{half[1]}_half"
    if twice := re.fullmatch(r"(\d+) \* (\w+)", text):
        return f"{twice[2]}_times_{twice[1]}"
    for symbol, word in (
        (" // ", "_over_"),
        (" * ", "_times_"),
        (" + ", "_plus_"),
        (" - ", "_minus_"),
        ("-", "minus_"),
    ):
        text = text.replace(symbol, word)
    text = re.sub(r"\W", "", text)
    return text if text.isidentifier() else f"size_{text}"


def once(view: View) -> View:
    """A view of matrices without repetitions of them, as of keys for the queries that share them: axes before the last
    two along which nothing moves are of size 1, and there are none of those in front."""
    leading = len(view.shape) - 2
    still = [all(step == 0 for step in column) for column in view.columns[:leading]]
    first = next((j for j, s in enumerate(still) if not s), leading)
    shape = (*(1 if s else n for s, n in zip(still, view.shape, strict=False)), *view.shape[leading:])
    return made(shape[first:], view.base, view.offset, view.columns[first:])


def side(view: View, factor: Node, node: Node, rows: bool) -> View:
    """The view of one factor: its own line through the product's view, K whole; of a grouped product's, which is taken
    whole, all of it."""
    if node.any_ends:
        return View.identity(factor.shape)
    lead = View.identity(factor.shape[:-2]).broadcast(node.shape[:-2])
    lines, mine = len(node.shape) - 2, len(view.shape) - 2
    own = lines if rows else lines + 1
    outer = made(
        view.shape[:mine], tuple((s,) for s in node.shape[:-2]), view.offset[:lines],
        tuple(column[:lines] for column in view.columns[:mine]),
    ).of(lead)  # fmt: skip
    still = (0,) * len(outer.base)

    def column(line: Size, depth: Size, leading: tuple[Size, ...] = still) -> tuple[Size, ...]:
        return (*leading, line, depth) if rows else (*leading, depth, line)

    steps = view.steps[own]
    along = column(steps[-2 if rows else -1], 0)
    depth = column(0, 1)
    leading = [column(step, 0, c) for step, c in zip(steps[:mine], outer.columns, strict=True)]
    last = (view.shape[-2], factor.shape[-1]) if rows else (factor.shape[-2], view.shape[-1])
    base = (*outer.base, *((size,) for size in factor.shape[-2:]))
    columns = (*leading, *((along, depth) if rows else (depth, along)))
    return made((*outer.shape, *last), base, column(view.offset[own], 0, outer.offset), columns)


def across(view: View) -> View:
    """The same with its last two axes swapped."""
    rank = len(view.shape)
    return view.transposed((*range(rank - 2), rank - 1, rank - 2))


def turned_round(node: Node, operator: Operator) -> Node:
    """A factor that a product takes the other way round than it lies."""
    shape = (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return Node(OPS["transpose"], (node,), shape, node.dtype, operator)


# ---------------------------------------------------------------- indices


def number(value: Size, node: Node) -> Node:
    return Node(OPS["literal"], (), (), i32, node.operator, literal=int(value))


def times(index: Node, step: Size) -> Node:
    if step == 1:
        return index
    return Node(OPS["mul"], (index, number(step, index)), index.shape, i32, index.operator)


def plus(total: Node | None, more: Node | None, node: Node) -> Node:
    if total is None or more is None:
        found = total or more
        assert found is not None
        return found
    return Node(OPS["add"], (total, more), broadcast(total.shape, more.shape), i32, node.operator)


def leaf(node: Node, view: View) -> Node:
    """A number as it is; an index as what it is along the view's last axes."""
    if not node.shape or view == View.identity(node.shape).tight():
        return node
    if node.op.name in PLACES:
        raise NotOneStep(node, f"{node.operator}: random numbers are drawn for the places that values have")
    axis = 0  # of [M, 1] or [N], what counts
    rank = len(view.shape)
    steps = {j: step for j, step in enumerate(view.steps[axis]) if step != 0}
    offset = view.offset[axis]
    whole = all(isinstance(step, int) for step in (*steps.values(), offset))
    if not whole or any(j < rank - 2 for j in steps):
        raise NotOneStep(node, f"{node.operator}: a view counts otherwise than along the last two axes")
    total: Node | None = None
    for j, step in steps.items():
        last = j == rank - 1
        op, shape = ("col_index", view.shape[-1:]) if last else ("row_index", (view.shape[j], 1))
        index = Node(OPS[op], (), shape, i32, node.operator)
        total = plus(total, times(index, step), node)
    return plus(total, number(offset, node) if offset != 0 or total is None else None, node)


# ---------------------------------------------------------------- where views are made


ANCHORED = (Kind.REDUCE, Kind.GROUP, Kind.SCAN, Kind.PRODUCT, Kind.SELECT, Kind.JOIN)


def behind_rows(graph: Graph) -> set[Node]:
    """What depends on a reduction, a scan, a product, a selection, a join or a column that is taken: views of it are
    made where it is written."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op.kind in ANCHORED or node.op.name == "take_at" or any(a in found for a in node.inputs):
            found.add(node)
    return found
