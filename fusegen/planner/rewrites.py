"""Graph -> Graph rewrites, each with its equation. Meaning and names stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fusegen.language.graph import COUNT_ELEMENTS, ROUNDS, Extent, Graph, Kind, Node, behind, broadcast, once_per_graph
from fusegen.language.ordering import MASKED, along_row, order_by_keys, with_nodes
from fusegen.language.sharing import share_common
from fusegen.language.trace import OPS
from fusegen.language.types import DType, b8, bf16, f8e8m0, f32, i32, size_of
from fusegen.planner.quotients import by_reciprocals
from fusegen.planner.ranges import ANY, SMALLEST_NORMAL, ranges


def simplify(graph: Graph) -> Graph:
    """The graph that rules plan: every pass, in order."""
    shared = share_common(graph)
    found = by_reciprocals(shared if shared.selection is None else order_by_keys(shared))
    if shared.selection is not None:
        found = share_common(sink_takes(found))
    if any(node.op.name == "take_at" and node.inputs[0].op.kind is not Kind.INPUT for node in shared.gathers):
        found = share_common(sink_columns(found))
    found = stores_that_round(cheaper_functions(found))
    return found if found is shared else replace(found, origin=shared.written)


def cheaper_functions(graph: Graph) -> Graph:
    """log(1 + x)      ->  log1p(x)
    tanh(log1p(x))  ->  tanh_log1p(x) = (x^2 + 2x) / (x^2 + 2x + 2)
    log(x)          ->  log_of_normal(x)     where x is surely no subnormal number
    pow(x, y)       ->  small_pow(x, y)      where y is at most 4 in magnitude, and no whole number

    Exact, and the first two round less: 1 + x loses what a small x says. The graph as it is, where there is none.
    """
    if not any(node.op.name in ("log", "pow") or is_tanh_log1p(node) for node in graph.nodes):
        return graph
    normal = normal_values(graph)
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node.op.name == "log":
            if (added := added_to_one(inputs[0])) is not None:
                same = replace(node, op=OPS["log1p"], inputs=(added,))
            elif normal[node.inputs[0]]:
                same = replace(node, op=OPS["log_of_normal"], inputs=inputs)
        elif is_tanh_log1p(same):
            same = replace(node, op=OPS["tanh_log1p"], inputs=inputs[0].inputs)
        elif node.op.name == "pow" and is_small(node.inputs[1].literal):
            same = replace(node, op=OPS["small_pow"], inputs=inputs)
        made[node] = same
    return graph if all(made[node] is node for node in graph.nodes) else with_nodes(graph, made)


def stores_that_round(graph: Graph) -> Graph:
    """out = round_T(x), stored as T  ->  out = x, stored as T, whatever view or scatter is between

    Exact: a store rounds to its type as a cast does. The cast stays for whoever else computes with it.
    """
    outputs = tuple(replace(t, node=before_rounding(t.node, t.dtype)) for t in graph.outputs)
    same = all(a.node is b.node for a, b in zip(outputs, graph.outputs, strict=True))
    return graph if same else replace(graph, outputs=outputs)


def before_rounding(node: Node, dtype: DType) -> Node:
    """What is rounded to a type last, in the views that show it or the rows that take it; the value itself where
    nothing is."""
    if node.op.kind in (Kind.VIEW, Kind.SCATTER):
        *others, source = node.inputs
        inner = before_rounding(source, dtype)
        return node if inner is source else replace(node, inputs=(*others, inner))
    return node.inputs[0] if node.op.name == ROUNDS.get(dtype) else node


def is_tanh_log1p(node: Node) -> bool:
    return node.op.name == "tanh" and node.inputs[0].op.name == "log1p"


def is_small(exponent: float | None) -> bool:
    return exponent is not None and abs(exponent) <= 4 and exponent % 1 != 0


def added_to_one(node: Node) -> Node | None:
    """The x of 1 + x."""
    if node.op.name != "add":
        return None
    a, b = node.inputs
    return b if a.literal == 1 else a if b.literal == 1 else None


def normal_values(graph: Graph) -> dict[Node, bool]:
    """Of each value: is it surely no subnormal f32, but 0, or 2^-126 at least, or no finite number?"""
    normal: dict[Node, bool] = {}
    for node in graph.nodes:
        name, of = node.op.name, [normal[a] for a in node.inputs]
        if node.op.kind is Kind.INPUT:
            normal[node] = graph.storage[node] not in (f32, bf16, f8e8m0)
        elif node.literal is not None:
            normal[node] = node.literal == 0 or abs(node.literal) >= SMALLEST_NORMAL
        elif name == "maximum" and any((a.literal or 0) >= SMALLEST_NORMAL for a in node.inputs):
            normal[node] = True
        elif name in ("where", "take"):
            normal[node] = all(of[1:] if name == "where" else of[:1])
        else:
            normal[node] = name in NEVER_SUBNORMAL or (name in CHOICES and all(of))
    return normal


CHOICES = ("abs", "neg", "relu", "maximum", "minimum", "max", "min", "to_f32")
"""Ops whose result is one of their arguments, or its magnitude, or 0."""
NEVER_SUBNORMAL = (
    "exp", "exp2", "sigmoid", "sqrt", "rsqrt", "round_f16", "round_f8e4m3", "round_f8e5m2", "round_f8e4m3fnuz",
    "round_f8e5m2fnuz", "size", "col_index", "row_index", "to_i32", "floor", "ceil",
    "trunc", "round", "sign", "to_unit", "power_of_2_above", "power_of_2_below",
)  # fmt: skip
"""Ops whose result is 0 where it would be smaller, or is large enough whatever their argument is."""


def sink_takes(graph: Graph) -> Graph:
    """take(f(a, b), c)  ->  f(take(a, c), take(b, c))      where the columns c are not -1

    Exact: f works element by element, and what is the same along the row needs no taking. What a row's k picked
    columns need is thus computed for k elements, and its other columns need no memory. A take that is left is of an
    operand (0 where the column is -1), of the key itself (-inf there), which whoever selects holds already, or of what
    no kernel takes columns of.
    """
    if not graph.selections:
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        made[node] = sunk(same) if node.op.name == "take" else same
    return with_nodes(graph, made)


def sunk(node: Node) -> Node:
    """A take as what it takes, computed at the columns; as it is where that is made of other columns too, as products,
    running sums and what a group shares are."""
    x, columns = node.inputs
    key = columns.inputs[0]
    at_columns: dict[Node, Node] = {}
    varying = varying_behind(x, key)
    if any(value.op.kind not in (Kind.INPUT, Kind.LEAF, Kind.MAP) for value in varying - {key}):
        return node
    for value in behind([x], until=key):
        if value not in varying:
            at_columns[value] = value
        elif value.op.name == "col_index":
            at_columns[value] = columns
        elif value.op.name in COUNT_ELEMENTS:
            shape = (*value.shape[:-1], columns.shape[-1])
            at_columns[value] = replace(value, inputs=(columns,), shape=shape, operator=node.operator)
        elif value.op.kind is Kind.INPUT or value is key:
            shape = (*broadcast(value.shape[:-1], columns.shape[:-1]), columns.shape[-1])
            nothing = {f32: 0.0, i32: 0, b8: False}[value.dtype]
            missing = MASKED[value.dtype] if value is key else nothing
            at_columns[value] = replace(node, inputs=(value, columns), shape=shape, missing=missing, dtype=value.dtype)
        else:
            inputs = tuple(at_columns[a] for a in value.inputs)
            shape = broadcast((), ())
            for a in inputs:
                shape = broadcast(shape, a.shape)
            at_columns[value] = replace(value, inputs=inputs, shape=shape, operator=node.operator)
    result = at_columns[x]
    if result.op.name == "take" and repr(result.missing) == repr(node.missing):
        return result
    none = Node(OPS["lt"], (columns, literal(0, i32, node)), columns.shape, b8, node.operator)
    chosen = (none, literal(node.missing, x.dtype, node), result)
    return Node(OPS["where"], chosen, node.shape, x.dtype, node.operator)


def varying_behind(x: Node, key: Node) -> set[Node]:
    """What varies along the row of x and of what x is made of, down to `key` and to what a row shares."""
    found: set[Node] = set()
    left = [x]
    while left:
        value = left.pop()
        if value not in found and along_row(value):
            found.add(value)
            left += () if value is key else value.inputs
    return found


def sink_columns(graph: Graph) -> Graph:
    """take_at(f(a, b), c)  ->  f(take_at(a, c), take_at(b, c))      where the row has a column c

    Exact, as of the columns that a selection chose: what is left is read of operands, at one place a row. What is made
    of a product stays: a column of that is a product of its own.
    """
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        made[node] = at_column(same, graph) if node.op.name == "take_at" else same
    return with_nodes(graph, made)


def at_column(node: Node, graph: Graph) -> Node:
    """What is taken at a column, computed there."""
    x, column = node.inputs
    above = behind([x])
    if x.op.kind is Kind.INPUT or any(value.op.kind is Kind.PRODUCT for value in above):
        return node
    found: dict[Node, Node] = {}
    for value in above:
        if not along_row(value):
            found[value] = value
        elif value.op.name == "col_index":
            found[value] = column
        elif value.op.name in COUNT_ELEMENTS:
            found[value] = replace(value, inputs=(column,), shape=(*value.shape[:-1], 1), operator=node.operator)
        elif value.op.kind is Kind.INPUT:
            shape = (*broadcast(value.shape[:-1], column.shape[:-1]), 1)
            nothing = {f32: 0.0, i32: 0, b8: False}[value.dtype]
            found[value] = replace(node, inputs=(value, column), shape=shape, missing=nothing, dtype=value.dtype)
        else:
            inputs = tuple(found[a] for a in value.inputs)
            shape = broadcast((), ())
            for a in inputs:
                shape = broadcast(shape, a.shape)
            found[value] = replace(value, inputs=inputs, shape=shape, operator=node.operator)
    cols = size_of(x.shape[-1], graph.sizes)
    before = Node(OPS["ge"], (column, literal(0, i32, node)), column.shape, b8, node.operator)
    after = Node(OPS["lt"], (column, literal(cols, i32, node)), column.shape, b8, node.operator)
    known = Node(OPS["logical_and"], (before, after), column.shape, b8, node.operator)
    chosen = (known, found[x], literal(node.missing, x.dtype, node))
    return Node(OPS["where"], chosen, node.shape, x.dtype, node.operator)


def literal(value: float | int | bool | None, dtype: DType, beside: Node) -> Node:
    return Node(OPS["literal"], (), (), dtype, beside.operator, literal=value)


@once_per_graph
def hoist_scales(graph: Graph) -> Graph:
    """(s * A) @ (B * t)  ->  s * (A @ B) * t     where neither s nor t varies along the contracted axis

    and both are surely finite; the same of quotients by what is surely no 0. Lets RMSNorm's 1/rms and a number ride in
    the epilogue. Exact but for rounding: A is rounded to its storage type, and summed, before it is scaled, which the
    plan lists under `rounding`. A scale that may be infinite stays: before the product it makes NaN of what has another
    sign or is 0, behind it an infinity. The graph as it is, where the factors would no longer be of one type.
    """
    return hoist_scales_of(graph, graph.products) if graph.products else graph


def hoist_scales_of(graph: Graph, products: Sequence[Node]) -> Graph:
    """The same of some of the graph's products."""
    rows = Hoister(graph, lambda node: graph.extents[node] is not Extent.ELEMENT)
    columns = Hoister(graph, lambda node: len(node.shape) < 2 or node.shape[-2] == 1)
    made: dict[Node, Node] = {}
    moved: dict[Node, Node] = {}  # what stands for a product now
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node in products:
            (left, row_scales), (right, column_scales) = rows.strip(inputs[0]), columns.strip(inputs[1])
            result = replace(node, inputs=(left, right, *inputs[2:]))
            for op, scale in (*row_scales, *column_scales):
                result = replace(node, op=OPS[op], inputs=(result, scale))
            if result.op.kind is not Kind.PRODUCT:
                made[node] = moved[node] = result
    found = with_nodes(graph, made)
    same = list(found.factor_types.values()) == list(graph.factor_types.values())
    return found if moved and same else graph


Scales = tuple[tuple[str, Node], ...]


class Hoister:
    """Takes the scales out of a factor; a factor of several products is taken apart once."""

    def __init__(self, graph: Graph, constant: Callable[[Node], bool]) -> None:
        self.ranges = ranges(graph)
        self.constant = constant  # along the contracted axis
        self.known: dict[Node, tuple[Node, Scales]] = {}

    def strip(self, node: Node) -> tuple[Node, Scales]:
        """The factor without its scales, and these: the op that applies each, and its value."""
        if node not in self.known:
            inner, scales = self.taken(node)
            self.known[node] = (inner, scales) if inner.shape == node.shape else (node, ())
        return self.known[node]

    def taken(self, node: Node) -> tuple[Node, Scales]:
        if node.op.name not in ("mul", "div"):
            return node, ()
        a, b = node.inputs
        if self.moves(b, node.op.name):
            inner, scales = self.strip(a)
            return inner, (*scales, (node.op.name, b))
        if node.op.name == "mul" and self.moves(a, "mul"):
            inner, scales = self.strip(b)
            return inner, (*scales, ("mul", a))
        (x, first), (y, second) = self.strip(a), self.strip(b) if node.op.name == "mul" else (b, ())
        return (replace(node, inputs=(x, y)), (*first, *second)) if first or second else (node, ())

    def moves(self, scale: Node, op: str) -> bool:
        """Does the product mean the same where it is multiplied, or divided, by `scale` instead of its factor?"""
        found = self.ranges.get(scale, ANY)
        return (found.apart_from_zero if op == "div" else found.finite) and self.constant(scale)
