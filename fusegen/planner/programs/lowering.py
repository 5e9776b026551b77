"""A chain with views and computed sizes becomes the graph of one kernel, and a view for each of its tensors.

    step = lowered(graph)
    step.graph      # whole tensors and plain dims only, as every rule takes it
    step.bounds     # each of its tensors is a tensor of `graph` through a view

A view of an operand becomes another tensor of the kernel, which lies in the same memory. Elementwise steps are taken of
what is viewed, so that a view of what they compute becomes views of what they compute it from. A join that is returned
becomes one tensor for each of its parts. Of what a reduction or a product gives, views that keep every element are made
where it is written: the output's tensor is bound to the inverse view.

What is none of that raises NotOneStep, which names the value that has to be in memory first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from fusegen.language.codes import codes_of, in_one_kernel
from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.graph import behind as nodes_behind
from fusegen.language.group_sorting import ends_text
from fusegen.language.naming import hides_frame
from fusegen.language.one_kernel import obstacle
from fusegen.language.sizes import Dim, Expr, Shape, Size, broadcast, dims_in, shape_text, size_of
from fusegen.language.trace import OPS
from fusegen.language.types import TensorType
from fusegen.language.views import View, made
from fusegen.planner.attention.codes import widens_codes
from fusegen.planner.attention.recognition import is_attention
from fusegen.planner.programs.axes_as_rows import axes_as_rows
from fusegen.planner.programs.by_turns import by_turns
from fusegen.planner.programs.coded_factors import made_of_codes
from fusegen.planner.programs.cutting import made_of_arrays
from fusegen.planner.programs.grouping import groups_in_rows
from fusegen.planner.programs.pages import Paged, paged_in
from fusegen.planner.programs.rows_in_parts import rows_in_parts
from fusegen.planner.programs.seen import (
    across,
    along_row,
    before,
    behind_rows,
    leaf,
    lies_across,
    name_of_view,
    once,
    part_name,
    parts_in,
    side,
    size_name,
    spread_over,
    turned_round,
    within,
)
from fusegen.planner.programs.shifts import Shifts, may_shift, settled, shifts
from fusegen.planner.programs.steps import Bound, Lowered, NotOneStep, whole


def step_for(graph: Graph) -> Lowered:
    """The step that computes a piece of a chain. Raises NotOneStep."""
    return lowered(graph) if graph.viewed or axes_as_rows(graph) is not graph else whole(graph)


def lowered(graph: Graph) -> Lowered:
    """The step that computes `graph`; of reductions over several of the last axes by rows of these, where there are
    such. Raises NotOneStep."""
    if (rows := axes_as_rows(graph)) is not graph:
        with suppress(NotOneStep):
            return as_it_is(rows, of_rows=True)
    if (parts := rows_in_parts(graph)) is not graph:
        with suppress(NotOneStep):
            found = as_it_is(parts)
            if obstacle(found.graph) is None:
                return found
    if (parts := by_turns(graph)) is not graph:
        with suppress(NotOneStep):
            return as_it_is(parts)
    return as_it_is(groups_in_rows(graph))


def as_it_is(graph: Graph, of_rows: bool = False) -> Lowered:
    """The step that computes these values; `of_rows`, where arrays were made rows of several axes. Raises NotOneStep.

    A view of elementwise steps is made of what they read. Where that is none of an operand, as of one value a group
    beside the group's elements, or counts along other axes than a row's, it is made where they are written. Where one
    result is several side by side, others of its shape are taken in the same parts. What is read of a join across its
    parts is read in rows that are counted, and so is what reads an operand in several of its rows.
    """
    shifted = Lowering(graph, of_rows=of_rows, shifted=True) if may_shift(graph) else None
    try:
        found = Lowering(graph, of_rows=of_rows).result()
    except NotOneStep as error:
        for again in (Lowering(graph, set(made_of_arrays(graph)), of_rows=of_rows),
                      Lowering(graph, in_place=True, of_rows=of_rows), shifted):  # fmt: skip
            with suppress(NotOneStep):
                if again:
                    return again.result()
        raise error from None
    if found.shapes > 1 and shifted and shifts(graph):
        with suppress(NotOneStep):
            if (other := shifted.result()).shapes < found.shapes:
                return other
    with suppress(NotOneStep):
        other = Lowering(graph, alike=True, of_rows=of_rows).result() if found.shapes > 1 else found
        return other if other.shapes < found.shapes else found
    return found


class Lowering:
    """The nodes of the step while it is made."""

    def __init__(
        self, graph: Graph, anchored: set[Node] | None = None, alike: bool = False, in_place: bool = False,
        of_rows: bool = False, shifted: bool = False,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.of_rows = of_rows  # do operands keep their names, whose axes are one?
        self.alike = alike  # are results of one shape written in the same parts?
        self.in_place = in_place  # are views that are results made where they are written?
        self.shifts = Shifts(self) if shifted else None  # are joins read across their parts?
        self.made: dict[tuple[Node, View, bool], Node] = {}
        self.inputs: dict[tuple[str, View, int], Tensor] = {}
        self.looked_up: dict[tuple[Node, View], dict[Node, int]] = {}  # the indices of an operand's rows, in turn
        self.names, self.dims = dict[Node, str](), dict[Size, Dim]()
        self.taken = {t.name for t in (*graph.inputs, *graph.outputs)} | set(graph.sizes)
        self.anchored = behind_rows(graph) if anchored is None else anchored
        self.arrays = made_of_arrays(graph)
        self.attention = is_attention(graph)
        self.paged: dict[Node, Node] = {}  # rows of pages, by their tables
        self.outside: dict[Node, Node] = {}

    def result(self) -> Lowered:
        outputs, writes = list[Tensor](), list[Bound]()
        for tensor in self.graph.outputs:
            if tensor.node.op.name == "scatter":
                for written, bound in self.scattered(tensor):
                    outputs.append(written)
                    writes.append(bound)
                continue
            parts = self.parts_of(tensor.node)
            for node, shown, place, named in parts:
                name = tensor.name if len(parts) == 1 else self.name_of_part(tensor.name, place, named)
                value = self.row(node, shown, shown.shape)
                place = self.written_as(value, place, node)
                outputs.append(Tensor(name, TensorType(tensor.dtype, value.shape), value))
                writes.append(Bound(name, tensor.name, place))
        order = {t.name: place for place, t in enumerate(self.graph.inputs)}
        used = set(nodes_behind(t.node for t in outputs))  # a row may have been looked at that was not as it is wanted
        read = [item for item in self.inputs.items() if item[1].node in used]
        arrays = sorted(read, key=lambda item: order[item[0][0]])
        reads = [Bound(t.name, base, view) for (base, view, _), t in arrays if t.shape]
        return self.plainly(tuple(t for _, t in arrays), tuple(outputs), (*reads, *writes))

    # ---------------------------------------------------------------- outputs

    def parts_of(self, value: Node) -> list[tuple[Node, View, View, str]]:
        """A result as it is written, in one or several parts: see `written`."""
        whole = View.identity(value.shape)
        as_it_is = [(value, whole, whole, "")]
        found = as_it_is if self.in_place else list(self.written(self.hoisted(value), whole, whole))
        if not self.alike or len(found) > 1:
            return found
        for tensor in self.graph.outputs:
            other = tensor.node.inputs[-1] if tensor.node.op.kind is Kind.SCATTER else tensor.node
            if other.shape == value.shape:
                places = [place for *_, place, _ in self.written(self.hoisted(other), whole, whole)]
                if len(places) > 1:
                    return [part for place in places for part in self.written(self.hoisted(value), place, place)]
        return found

    def scattered(self, tensor: Tensor) -> Iterator[tuple[Tensor, Bound]]:
        """Rows of an array that an index names: each part of their values, the index and the array as it sees them."""
        _, index, values = tensor.node.inputs
        parts, whole = self.parts_of(values), View.identity(values.shape)
        if any(len(group) != 1 for *_, place, _ in parts for group in place.base):  # seen otherwise than they lie
            parts = [(values, whole, whole, "")]
        for node, seen, place, named in parts:
            name = tensor.name if len(parts) == 1 else self.name_of_part(tensor.name, place, named)
            value = self.row(node, seen, seen.shape)
            place = self.written_as(value, place, node)
            found, shown, row = self.at_index(tensor.node, place, index, values.shape, tensor.shape)
            if broadcast(found.shape, row) != value.shape:
                raise NotOneStep(values, f"{tensor.node.operator}: one value goes to several places")
            put = replace(tensor.node, op=OPS["put"], inputs=(found, value), shape=value.shape)
            yield Tensor(name, TensorType(tensor.dtype, shown.shape), put), Bound(name, tensor.name, shown)

    def written_as(self, value: Node, place: View, node: Node) -> View:
        """The place of a value that may lack leading axes of one element. Raises NotOneStep where it lacks others."""
        missing = len(place.shape) - len(value.shape)
        found = place.sliced((0,) * missing) if missing > 0 and set(place.shape[:missing]) == {1} else place
        if found.shape != value.shape:
            source = node
            while source.op.kind is Kind.VIEW:
                source = source.inputs[0]
            raise NotOneStep(source, f"{source.operator}: its results are written more than once")
        return found

    def written(self, node: Node, shown: View, place: View) -> Iterator[tuple[Node, View, View, str]]:
        """Values that together are what `shown` shows of `node`, which is to lie at `place`: of each its node, what is
        shown of it, its own place, and its name."""
        if shown.is_identity and node.op.kind is Kind.JOIN:
            for argument, part in zip(node.inputs, node.parts, strict=True):
                yield from self.written(self.hoisted(argument), View.identity(argument.shape), part.of(place))
            return
        if shown.is_identity and node.view is not None and (back := node.view.inverse()) is not None:
            source = node.inputs[0]
            try:
                inner = back.of(place)
            except ValueError:  # it is written as it is read
                inner = None
            if inner is not None:
                yield from self.written(self.hoisted(source), View.identity(source.shape), inner)
                return
        alone = shown.is_identity and not self.shifts
        parts = parts_in(node, self.hoisted, self.anchored, self.graph.sizes) if alone else None
        if parts is not None:
            for part in parts:
                yield from self.written(node, part, part.of(place))
            return
        yield node, shown, place, self.graph.names.get(node, "")

    def hoisted(self, node: Node) -> Node:
        """A value whose elementwise steps behind views of reductions and products come before these views: they are
        then views of what is returned. `sum(x)[..., 0] + y` is `(sum(x) + y[..., None])[..., 0]`."""
        if node in self.outside:
            return self.outside[node]
        found = node
        if node.op.kind is Kind.MAP and node in self.anchored:
            arguments = [self.hoisted(a) for a in node.inputs]
            outer = next(
                (a for a in arguments if a.op.kind is Kind.VIEW and a in self.anchored and a.shape == node.shape), None
            )
            inner = before(outer, arguments, node.shape, self.anchored) if outer is not None else None
            if outer is not None and inner is not None:
                source = outer.inputs[0]
                self.anchored |= {a for a in inner if a.op.kind is Kind.VIEW and a.inputs[0] in self.anchored}
                value = replace(node, inputs=inner, shape=source.shape)
                found = replace(outer, inputs=(value,), operator=node.operator)
                self.anchored |= {value, found}
                if node in self.graph.names:
                    self.names[value] = self.graph.names[node]
            elif any(a is not b for a, b in zip(arguments, node.inputs, strict=True)):
                found = replace(node, inputs=tuple(arguments))
                self.anchored |= {found}
        self.outside[node] = found
        return found

    # ---------------------------------------------------------------- values, through views

    def seen(self, node: Node, view: View, full: bool = False) -> Node:
        """The step's node for what `view` shows of a value: without axes that only repeat, unless `full`."""
        whole = node.op.kind is Kind.INPUT and view.is_identity
        view = view if full or whole else view.tight()
        key = (node, view, full)
        if key not in self.made:
            found = self.look(node, view, full)
            self.made[key] = found
            name = self.names.get(node) or self.graph.names.get(node)
            if name and found.op.kind is not Kind.INPUT:
                self.names.setdefault(found, name)
        return self.made[key]

    def look(self, node: Node, view: View, full: bool) -> Node:
        kind = node.op.kind
        if kind is Kind.INPUT:
            return self.operand(node, view)
        if kind is Kind.LEAF:
            return leaf(node, view)
        if kind is Kind.VIEW:
            assert node.view is not None
            return self.seen(node.inputs[0], self.composed(view, node.view, node), full)
        if kind is Kind.JOIN:
            return self.part(node, view, full)
        if kind is Kind.MAP:
            return self.elementwise(node, view, full)
        if kind in (Kind.GROUP, Kind.SPREAD):
            return self.of_groups(node, view)
        if kind is Kind.BIAS and not view.is_identity:
            raise NotOneStep(node, f"{node.operator}: a view takes the rows and columns of a product otherwise")
        if kind is Kind.BIAS:
            return replace(node, inputs=tuple(self.seen(a, View.identity(a.shape)) for a in node.inputs))
        if node.over:
            return self.columns(node, view)
        if kind is Kind.REDUCE:
            argument = self.row(node.inputs[0], self.rows_of(node, view), node.inputs[0].shape[-1:])
            return replace(node, inputs=(argument,), shape=(*argument.shape[:-1], 1))
        if kind in (Kind.SCAN, Kind.ORDER):
            return self.scan(node, view)
        if kind is Kind.SELECT:
            return self.selection(node, view)
        if kind is Kind.GATHER:
            return self.rows_at(node, view) if node.op.name == "gather" else self.take_at(node, view)
        if kind is Kind.TRANSPOSE:
            return self.transposed(node, view)
        if kind is Kind.SCATTER:
            raise NotOneStep(node, f"{node.operator}: its array is read once all of its new rows are written")
        return self.matmul(node, view)

    def scan(self, node: Node, view: View) -> Node:
        """Running sums of rows, or slots by groups, whose number is a constant: seen as a whole."""
        self.need_whole(node, view, "runs along rows")
        source = node.inputs[0]
        argument = self.row(source, View.identity(source.shape), source.shape[-1:])
        others = [self.seen(a, View.identity(a.shape)) for a in node.inputs[1:]]
        if node.op.name == "group_ends":
            return replace(node, inputs=(argument,), text=ends_text(size_of(node.shape[-1], self.graph.sizes)))
        return replace(node, inputs=(argument, *others), shape=argument.shape)

    def need_whole(self, node: Node, view: View, what: str) -> None:
        if view not in ((whole := View.identity(node.shape)), whole.tight()):
            raise NotOneStep(node, f"{node.operator}: a view of what {what}")

    def columns(self, node: Node, view: View) -> Node:
        """A reduction over rows, which is seen as a whole."""
        self.need_whole(node, view, "is reduced over rows")
        source = node.inputs[0]
        return replace(node, inputs=(self.seen(source, View.identity(source.shape), full=True),))

    def of_groups(self, node: Node, view: View) -> Node:
        """A reduction of groups of a row, or a group's value at its places: seen as a whole."""
        self.need_whole(node, view, "is reduced by groups of a row")
        whole, spread = View.identity((source := node.inputs[0]).shape), node.op.kind is Kind.SPREAD
        argument = self.row(source, whole, source.shape[-1:] if spread else source.shape)
        return spread_over(node, argument) if spread else along_row(node, argument)

    def composed(self, view: View, other: View, node: Node) -> View:
        try:
            return view.of(other)
        except ValueError as error:
            raise NotOneStep(node, f"{node.operator}: {error}") from None

    def operand(self, node: Node, view: View, turn: int = 0, whole: bool = False, named: str = "") -> Node:
        """What a view shows of an operand, which goes by its own name where that is all of it (`whole`); another tensor
        in each turn that its rows are looked up, `named` so."""
        tensor = self.graph.tensor_of[node]
        if tensor.shape and not view.shape:  # one element is an array still
            view = view.sliced(None)
        key = (tensor.name, view, turn)
        if key not in self.inputs:
            if named:
                name = self.free(named)
            elif whole or view.is_identity or self.whole_by(view, node):
                claimed = turn or any(other.name == tensor.name for other in self.inputs.values())
                name = self.free(tensor.name) if claimed else tensor.name
            else:
                name = self.free(name_of_view(self.graph, node, view) or part_name(tensor.name, view, self.graph.sizes))
            operator = Operator(min((n.operator.index for n in self.graph.nodes), default=0) - 1, name, node.where)
            own = Node(OPS["input"], (), view.shape, node.dtype, operator)
            self.inputs[key] = Tensor(name, TensorType(tensor.dtype, view.shape), own)
        return self.inputs[key].node

    def whole_by(self, view: View, node: Node) -> bool:
        """Is an operand seen through views alone that only add axes of one element, this one first? Or, of rows of
        several axes, as one row alone?"""
        users = self.graph.users.get(node, ())
        if self.of_rows and all(u.view == view for u in users):
            return view.inverse() is not None
        seen = any(name == self.graph.tensor_of[node].name for name, *_ in self.inputs)
        return not seen and all(u.view is not None and u.view.adds_axes for u in users) and view.adds_axes

    def name_of_part(self, whole: str, place: View, named: str) -> str:
        """Of a part of a result, which its author may have named."""
        own = named if named != whole else ""
        return self.free(own or part_name(whole, place, self.graph.sizes), output=True)

    def free(self, wanted: str, output: bool = False) -> str:
        name, number = wanted, 2
        while name in self.taken or (output and hides_frame(name)):
            name, number = f"{wanted}_{number}", number + 1
        self.taken.add(name)
        return name

    def elementwise(self, node: Node, view: View, full: bool) -> Node:
        arguments: list[Node] = []
        arrays = [a for a in node.inputs if a.shape and a.op.kind is not Kind.LEAF]
        spans = next((a for a in arrays if a.shape == node.shape), arrays[0] if arrays else None)
        for argument in node.inputs:
            own = View.identity(argument.shape).broadcast(node.shape)
            reads = full and argument is spans  # one that need not be repeated to span what is computed
            try:
                arguments.append(self.seen(argument, self.composed(view, own, node), reads))
            except NotOneStep as error:
                if error.node in self.arrays or node not in self.arrays:
                    raise
                raise NotOneStep(node, str(error)) from None  # an index alone is nothing to keep
            full = full and not reads
        shape: Shape = ()
        for made_one in arguments:
            shape = broadcast(shape, made_one.shape)
        found = replace(node, inputs=tuple(arguments), shape=shape)
        return settled(found) if self.shifts and node.op.name == "where" else found

    def part(self, node: Node, view: View, full: bool) -> Node:
        """A view of a join that lies in one of its parts."""
        for argument, part in zip(node.inputs, node.parts, strict=True):
            inner = within(view, part)
            if inner is not None:
                return self.seen(argument, inner, full)
        if self.shifts:
            return self.shifts.join(node, view)
        raise NotOneStep(node, f"{node.operator}: what is read of it lies in several of its parts")

    # ---------------------------------------------------------------- rows and matrices

    def rows_of(self, node: Node, view: View) -> View:
        """The view of a reduction's or a selection's rows that a view of its results asks for."""
        source = node.inputs[0].shape
        if view.shape and view.shape[-1] != 1 and node.op.kind is Kind.REDUCE:
            raise NotOneStep(node, f"{node.operator}: its results lie along the last axis of {shape_text(view.shape)}")
        if any(len(group) != 1 for group in view.base):
            raise NotOneStep(node, f"{node.operator}: a view takes rows and results as one axis")
        rank = len(source)
        leading = view.columns[:-1] if view.shape else ()
        columns = (*((*column[: rank - 1], 0) for column in leading), (*(0,) * (rank - 1), 1))
        shape = (*view.shape[:-1], source[-1])
        return made(shape, tuple((size,) for size in source), (*view.offset[: rank - 1], 0), columns)

    def row(self, node: Node, view: View, wanted: Shape) -> Node:
        """What a view shows of a value, whose last axes are needed whole."""
        found = self.seen(node, view)
        same = found.shape[-len(wanted) :] == wanted and len(found.shape) >= len(wanted)
        return found if same or not wanted else self.seen(node, view, full=True)

    def selection(self, node: Node, view: View) -> Node:
        k = node.shape[-1]
        last = len(node.shape) - 1
        whole = view.shape[-1:] == (k,) and view.columns[-1] == tuple(int(b == last) for b in range(len(view.base)))
        if k != 1 and (not whole or any(view.steps[last][:-1])):
            raise NotOneStep(node, f"{node.operator}: a view of the columns that were chosen")
        rows = self.rows_of(node, view)
        source = self.row(node.inputs[0], rows, rows.shape[-1:])
        arguments = (source, *(self.seen(a, view) for a in node.inputs[1:]))
        leading = source.shape[:-1]
        for other in arguments[1:]:
            leading = broadcast(leading, other.shape[:-1])
        return replace(node, inputs=arguments, shape=(*leading, k))

    def rows_at(self, node: Node, view: View) -> Node:
        """A view of rows that an index names: a view of the index, and one of the table's rows."""
        table, index = node.inputs
        found, shown, shape = self.at_index(node, view, index, node.shape, table.shape)
        source = table
        while (step := source.view) is not None:
            source, shown = source.inputs[0], self.composed(shown, step, node)
        if source.op.kind is not Kind.INPUT:
            raise NotOneStep(table, f"{node.operator} reads rows that an index names, of a value that is computed")
        return replace(node, inputs=(self.table(source, shown, found), found), shape=broadcast(found.shape, shape))

    def table(self, source: Node, shown: View, index: Node, named: str = "") -> Node:
        """An operand as a table of rows: for each index another tensor."""
        turns = self.looked_up.setdefault((source, shown), {})
        return self.operand(source, shown, turns.setdefault(index, len(turns)), named=named)

    def pages(self, of: Paged) -> Node:
        """Rows of pages, as attention reads its keys and values."""
        node, index = of.node, of.node.inputs[1]
        own = self.composed(of.named, View.identity(index.shape).broadcast(node.shape), node)
        found = self.seen(index, own, full=True)
        turns = self.looked_up.setdefault((of.table, of.shown), {})
        whole = len(self.graph.users[of.table]) == 1 and of.shown.shape[-1] == of.table.shape[-1]
        source = self.operand(of.table, of.shown, turns.setdefault(found, len(turns)), whole)
        rows = replace(node, op=OPS["paged_rows"], inputs=(source, found), shape=of.shape)
        return self.paged.setdefault(source, rows)

    def at_index(
        self, node: Node, view: View, index: Node, rows: Shape, table: Shape
    ) -> tuple[Node, View, Shape]:  # fmt: skip
        """What a view of the `rows` at an index is of the index and of the table; and the shape of one row of it."""
        rest = len(table) - 1
        lead = len(rows) - rest
        along = [any(step != 0 for step in column[lead:]) for column in view.columns]
        both = any(own and any(step != 0 for step in c[:lead]) for own, c in zip(along, view.columns, strict=True))
        if both or any(len(group) != 1 for group in view.base):
            raise NotOneStep(node, f"{node.operator}: a view takes a table's rows and columns together")
        found = self.seen(index, self.composed(view, View.identity(index.shape).broadcast(rows), node))
        first = along.index(True) if True in along else len(along)
        shape = tuple(size if own else 1 for size, own in zip(view.shape[first:], along[first:], strict=True))
        columns = ((1, *(0,) * rest), *((0, *column[lead:]) for column in view.columns[first:]))
        base = tuple((size,) for size in table)
        return found, made((table[0], *shape), base, (0, *view.offset[lead:]), columns), shape

    def take_at(self, node: Node, view: View) -> Node:
        """One column of each row that a view of the results asks for."""
        x, column = node.inputs
        if view.shape[-1:] not in ((), (1,)) or any(len(group) != 1 for group in view.base):
            raise NotOneStep(node, f"{node.operator}: its results lie along the last axis of {shape_text(view.shape)}")
        rank, cols = len(node.shape), x.shape[-1]
        whole = (*node.shape[:-1], cols)
        columns = (*((*c[: rank - 1], 0) for c in view.columns[:-1]), (*(0,) * (rank - 1), 1))
        offset = (*view.offset[: rank - 1], 0)
        rows = made((*view.shape[:-1], cols), tuple((size,) for size in whole), offset, columns)
        source = self.row(x, self.composed(rows, View.identity(x.shape).broadcast(whole), node), (cols,))
        found = self.seen(column, self.composed(view, View.identity(column.shape).broadcast(node.shape), node))
        return replace(node, inputs=(source, found), shape=(*broadcast(source.shape[:-1], found.shape[:-1]), 1))

    def transposed(self, node: Node, view: View) -> Node:
        """An operand whose matrices a product takes the other way round."""
        rank = len(node.shape)
        swap = (*range(rank - 2), rank - 1, rank - 2)
        source = across(self.composed(view, View.identity(node.inputs[0].shape).transposed(swap), node))
        pages = paged_in(node.inputs[0], source) if self.attention else None
        inner = self.pages(pages) if pages else self.seen(node.inputs[0], source, full=True)
        return replace(node, inputs=(inner,), shape=view.shape)

    def matmul(self, node: Node, view: View) -> Node:
        """A product of which a view takes rows and columns apart."""
        rank, mine = len(node.shape), len(view.shape)
        if missing := (1,) * (2 - mine):
            view = made(
                (*missing, *view.shape), view.base, view.offset, ((0,) * len(view.base),) * (2 - mine) + view.columns
            )
            mine = 2
        apart = all(  # axes before the last two may take any of both factors' lines, as heads in a weight's columns
            view.steps[b][j] == 0 or b - rank == j - mine for b in range(len(view.base)) for j in (mine - 2, mine - 1)
        )
        if not apart or any(len(group) != 1 for group in view.base) or (node.inputs[2:] and not view.is_identity):
            raise NotOneStep(node, f"{node.operator}: a view takes the rows and columns of a product otherwise")
        left, right = node.factors
        made_left = self.factor(left, side(view, left, node, rows=True), node)
        shown, may_be = side(view, right, node, rows=False), len(right.shape) == 2 or node.ends is not None
        codes = codes_of(right) if may_be and shown.is_identity else None
        made_right = in_one_kernel(codes, node, self.seen) if codes else self.factor(right, shown, node)
        leading = node.shape[:-2] if node.any_ends else broadcast(made_left.shape[:-2], made_right.shape[:-2])
        shape = (*leading, made_left.shape[-2], made_right.shape[-1])
        scales = (self.factor(a, View.identity(a.shape), node) for a in node.scales)
        ends = [self.seen(a, View.identity(a.shape)) for a in node.inputs[2:] if a is node.any_ends]
        return replace(node, inputs=(made_left, made_right, *ends, *scales), shape=shape)

    def factor(self, node: Node, view: View, of: Node) -> Node:
        if self.attention and widens_codes(self.graph, node):
            found = made_of_codes(self, node, view, of)
            if found is not None:
                return found
        if self.attention and (pages := paged_in(node, view)) is not None:
            return self.pages(pages)
        if self.attention and (pages := paged_in(node, across(view))) is not None:
            return turned_round(self.pages(pages), of.operator)
        source, shown = node, view
        while (step := source.view) is not None:
            source, shown = source.inputs[0], self.composed(shown, step, node)
        if source.op.kind is Kind.INPUT and lies_across(shown):
            return turned_round(self.operand(source, across(once(shown))), of.operator)
        return self.row(node, view, view.shape[-2:])

    # ---------------------------------------------------------------- plain dims

    def plainly(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], bounds: tuple[Bound, ...]) -> Lowered:
        """The graph with a dim for each computed size, which has a name of its own."""
        nodes = Graph(self.graph.name, self.graph.doc, self.graph.where, inputs, outputs, {}, self.graph.sizes).nodes
        table: dict[Node, Node] = {}
        for tensor in inputs:
            table[tensor.node] = replace(tensor.node, shape=self.plain(tensor.node.shape))
        for node in nodes:
            if node in table:
                continue
            size = self.plain((node.size,))[0] if node.size is not None else None
            arguments = tuple(table[a] for a in node.inputs)
            table[node] = replace(node, inputs=arguments, shape=self.plain(node.shape), size=size)

        def tensor_of(tensor: Tensor) -> Tensor:
            return Tensor(tensor.name, TensorType(tensor.dtype, self.plain(tensor.shape)), table[tensor.node])

        paged = {t.name for t in inputs if t.node in self.paged}  # by their own names, in another order of axes
        own_inputs, own_outputs = tuple(map(tensor_of, inputs)), tuple(map(tensor_of, outputs))
        named = {dim.name: size for size, dim in self.dims.items()}
        shapes = [t.shape for t in (*own_inputs, *own_outputs)]
        shapes += [n.shape if n.size is None else (*n.shape, n.size) for n in table.values()]
        dims = dims_in(tuple(size for shape in shapes for size in shape))
        sizes: dict[str, Size] = {dim.name: named.get(dim.name, dim) for dim in dims}
        step = Graph(
            name=self.graph.name,
            doc=self.graph.doc,
            where=self.graph.where,
            inputs=own_inputs,
            outputs=own_outputs,
            names={table[n]: name for n, name in self.names.items() if n in table},
            sizes={name: size_of(size, self.graph.sizes) for name, size in sizes.items()},
            body=self.graph.body,
            shown={b.tensor: b.view.text(b.base) for b in bounds if b.tensor != b.base or b.tensor in paged},
        )
        return Lowered(step, bounds, sizes)

    def plain(self, shape: Shape) -> Shape:
        return tuple(self.dim(size) if isinstance(size, Expr) else size for size in shape)

    def dim(self, size: Expr) -> Dim:
        if size not in self.dims:
            self.dims[size] = Dim(self.free(size_name(size)))
        return self.dims[size]
