"""Reverse mode over an op graph: the gradient of each operand from those of the outputs, in the language of specs.

What an op does to a gradient stands in its own entry of the op table, as text such as "d * y": `d` is the gradient of
its result `out`, and x, y, z are its arguments. Besides `F` and INF these texts know a few words:

    whole(d)            d in the full shape: a gradient that is the same all along an axis is of size 1 there
    total(v)            v summed over the axes that the op reduces
    times_others(x, d)  d * the product of all other elements of the row
    back(d), part(d)    d where a view shows its base, and where a join has its argument
    in_rows(v)          v with its leading axes as one axis of rows, for a factor that has none
    at_columns(d)       d at the columns that were chosen, 0 at the others

Gradients stay as small as they can: that of a sum is the same for all it adds up, and has size 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

from fusegen.derivatives.placing import Placed, back, of_rank, part_of, reshaped, together, whole
from fusegen.errors import SpecError
from fusegen.language import ops as F
from fusegen.language.axes import LAST, reduce
from fusegen.language.elementwise import type_of
from fusegen.language.graph import Graph, Kind, Node, plain
from fusegen.language.sizes import Shape, broadcast
from fusegen.language.trace import Trace, Transposed, Value, size_leaf
from fusegen.language.types import DType, bf16, f16, f32
from fusegen.language.views import View

MOST_COLUMNS = 16  # of a selection: each is a step of its own
ARGUMENTS = ("x", "y", "z")


class Reverse:
    """The gradients of a graph's values, from its outputs back to its operands. `wanted`: whose gradients are asked
    for."""

    def __init__(self, graph: Graph, wanted: frozenset[Node], trace: Trace) -> None:
        self.graph = graph
        self.trace = trace
        self.moving = moving(graph, wanted)
        self.summed: dict[Node, Value] = {}
        self.parts: dict[Node, list[Placed]] = {}

    def add(self, node: Node, gradient: Value | Placed) -> None:
        """One more contribution to a value's gradient."""
        if isinstance(gradient, Placed):
            if any(at is not None for at in gradient.at):
                self.parts.setdefault(node, []).append(gradient)
                return
            gradient = gradient.value
        known = self.summed.get(node)
        self.summed[node] = gradient if known is None else known + gradient

    def gradient(self, node: Node) -> Value | None:
        """Of what has been added so far; None where nothing was."""
        if parts := self.parts.pop(node, None):
            self.add(node, Placed(together(node.shape, parts, self.graph.sizes), (None,) * len(node.shape)))
        return self.summed.get(node)

    def run(self) -> None:
        """From the last value to the first. Raises SpecError at an op that has no gradient."""
        for node in reversed(self.graph.nodes):
            if node not in self.moving or node.op.kind is Kind.INPUT:
                continue
            self.trace.at = node.where
            with self.trace.operator(f"{node.operator.name}_backward"):
                gradient = self.gradient(node)
                if gradient is not None:
                    self.note(node, gradient)
                    self.back_through(node, gradient)

    def note(self, node: Node, gradient: Value) -> None:
        """Call a gradient after its value, where that has a name and the gradient none."""
        name = self.graph.names.get(node)
        if name is not None and gradient.node.op.kind is not Kind.INPUT:
            self.trace.names.setdefault(gradient.node, f"d{name}")

    def back_through(self, node: Node, gradient: Value) -> None:
        texts = gradient_texts(node)
        kind = self.graph.factor_types.get(product_behind(node))
        if node.op.kind is Kind.PRODUCT and kind in (f16, bf16) and type_of(gradient) is not kind:
            gradient = F.cast(gradient, kind)  # as products round it, once for both
        if node.op.kind is not Kind.MAP:
            gradient = of_rank(gradient, len(node.shape))
            if len(gradient.shape) < len(node.shape):
                gradient = whole(gradient, node.shape)
        for place, argument in enumerate(node.inputs):
            text = texts[place]
            if argument not in self.moving or text is None:
                continue
            words = Words(node, gradient, place, kind)
            try:
                found = words.read(text)
            except SpecError as error:
                if error.where is not None:
                    raise
                raise SpecError(f"the gradient of {node.operator}: {error}", node.where) from None
            if isinstance(found, Value):
                found = fitted(found, full_shape(node, argument, place), argument.shape)
            self.add(argument, found)


def product_behind(node: Node) -> Node:
    """What a group's vectors were added to; else the node itself."""
    return product_behind(node.inputs[0]) if node.op.kind is Kind.BIAS else node


def moving(graph: Graph, wanted: frozenset[Node]) -> frozenset[Node]:
    """The values that vary with an operand whose gradient is wanted, and not by steps alone."""
    found: set[Node] = set(wanted)
    for node in graph.nodes:
        if node.dtype is f32 and not node.shift and node.op.kind is not Kind.INPUT:
            texts = () if node.op.kind is Kind.PRODUCT and node.scales else node.op.gradients
            if any(a in found and (not texts or texts[min(n, len(texts) - 1)] is not None)
                   for n, a in enumerate(node.inputs)):  # fmt: skip
                found.add(node)
    return frozenset(found)


def gradient_texts(node: Node) -> tuple[str | None, ...]:
    """One for each argument. Raises SpecError for an op that has none."""
    texts = node.op.gradients
    if not texts or (node.op.kind is Kind.PRODUCT and node.scales):
        raise SpecError(
            f"{node.operator} has no gradient here: {reason(node)}\n"
            "  write the chain of gradients yourself and pass it as backward=, or name in of=(...) the operands whose "
            "gradients do not go through it",
            node.where,
        )
    return texts if len(texts) > 1 else texts * len(node.inputs)


REASONS: Mapping[str, str] = {
    "gather": "rows that several indices name add up, and no op adds up rows",
    "matmul_over_groups": "it is the gradient of a grouped product, and has none of its own",
    "scatter": "it writes in an operand's own memory",
    "sorted_values": "what comes from a column goes back there, and no op writes columns",
    "sorted_values_descending": "what comes from a column goes back there, and no op writes columns",
    "scale_group_rows": "no op scales rows by their group's vector but those of a product",
    "cumprod": "it is a quotient by elements that may be 0",
}


def reason(node: Node) -> str:
    name = "cumprod" if node.op.name.startswith("cumprod") else node.op.name
    if node.op.kind is Kind.PRODUCT and node.op.gradients:
        return "its factors are codes with scales"
    return REASONS.get(name, f"the op {node.op.name} has no slope in the op table")


# ---------------------------------------------------------------- the words of the op table


@cache
def compiled(text: str) -> CodeType:
    return compile(text, "<gradients of the op table>", "eval")


class Words:
    """What a text of the op table may name, for one argument of one node."""

    def __init__(self, node: Node, gradient: Value, place: int, kind: DType | None) -> None:
        self.node, self.place, self.kind = node, place, kind
        words: dict[str, Any] = {name: value_of(a) for name, a in zip(ARGUMENTS, node.inputs, strict=False)}
        own: Sequence[Callable[..., Any]] = (
            self.whole, self.total, self.times_others, self.back, self.part, self.in_rows, self.at_columns,
            self.as_multiplied, self.by_groups,
        )  # fmt: skip
        self.known = {**words, **{word.__name__: word for word in own}, "d": gradient, "out": Value(node), "F": F,
                      "INF": F.INF}  # fmt: skip

    def read(self, text: str) -> Value | Placed:
        found: Value | Placed = eval(compiled(text), {"__builtins__": {}}, self.known)
        return found

    def whole(self, value: Value) -> Value:
        return whole(value, self.node.shape)

    def total(self, value: Value) -> Value:
        return reduce("sum", value, self.node.over or LAST)

    def times_others(self, x: Value, gradient: Value) -> Value:
        axes = self.node.over or LAST
        if len(axes) > 1:
            raise SpecError("a product over several axes at once has none\n  take it over one axis after another")
        before = F.cumprod(x, axis=axes[0], exclusive=True)
        return gradient * before * F.cumprod(x, axis=axes[0], exclusive=True, reverse=True)

    def back(self, gradient: Value) -> Placed:
        assert self.node.view is not None
        return back(self.node.view, gradient)

    def part(self, gradient: Value) -> Value:
        return part_of(self.node.parts[self.place], self.whole(gradient))

    def in_rows(self, value: Value) -> Value:
        """[.., M, K] as [M', K] for a factor [K, N]: one product over all rows instead of a sum of products."""
        value = whole(value, self.node.shape if value.node is self.known["d"].node else value.shape)
        rank = len(value.shape)
        flat = len(self.node.inputs[1].shape) == 2 and rank > 2
        flat = flat and self.node.inputs[0].shape[:-1] == self.node.shape[:-1]
        return reshaped(value, View.identity(value.shape).merged(0, rank - 1)) if flat else value

    def as_multiplied(self, value: Value) -> Value:
        """A factor that is computed, as the product rounds it: it is then in memory as other products read it."""
        assert self.kind is not None
        known = isinstance(value, Transposed) or plain(value.node) or type_of(value) is self.kind
        return value if known else F.cast(value, self.kind)

    def by_groups(self, gradient: Value) -> Value:
        """[T, N] summed over each group's rows, [E, N]: a product with ones, as those that weights' gradients are.
        Rows behind all ends have 0 instead, since no step stores what is a constant."""
        ends, kind = Value(self.node.inputs[2]), self.kind if self.kind in (f16, bf16) else bf16
        ones = F.cast(F.where(F.row_index(gradient) < F.max(ends), 1.0, 0.0), kind)
        sums = F.grouped_matmul(ones.mT, gradient if type_of(gradient) is kind else F.cast(gradient, kind), ends)
        return reshaped(sums, View.identity(sums.shape).merged(0, 2))

    def at_columns(self, gradient: Value) -> Value:
        x, columns = self.node.inputs
        own, gradient, count = Value(columns), self.whole(gradient), columns.shape[-1]
        if not isinstance(count, int) or count > MOST_COLUMNS:
            raise SpecError(f"a selection of {count} columns has none; one of a number up to {MOST_COLUMNS} has")
        index, found = F.col_index(Value(x)), None
        for n in range(count):
            here = slice(n, n + 1)
            one = F.where(index == own[..., here], gradient[..., here], 0.0)
            found = one if found is None else found + one
        assert found is not None
        return found


def value_of(node: Node) -> Value:
    """An argument, such that .mT of one that is transposed is what it was."""
    return Transposed(Value(node.inputs[0])) if node.op.kind is Kind.TRANSPOSE else Value(node)


# ---------------------------------------------------------------- shapes


def full_shape(node: Node, argument: Node, place: int) -> Shape:
    """The shape of what a text makes of an argument, before it is summed to the argument's own."""
    if node.op.kind is Kind.MAP:
        return node.shape
    if node.ends:
        return argument.shape
    if node.op.kind is Kind.PRODUCT:
        rows = node.inputs[0].shape[:-1] == node.shape[:-1] and len(node.inputs[1].shape) == 2
        leading = () if place and rows else node.shape[:-2]
        return (*leading, *argument.shape[-2:])
    if node.op.kind is Kind.GATHER or node.op.kind is Kind.SELECT:
        return (*broadcast(node.shape[:-1], argument.shape[:-1]), argument.shape[-1])
    return argument.shape


def fitted(gradient: Value, full: Shape, shape: Shape) -> Value:
    """The gradient of an argument that was broadcast to `full`: summed over what it was repeated along."""
    rank = len(full)
    own = (1,) * (rank - len(shape)) + shape
    repeated = [n - rank for n in range(rank) if own[n] == 1 and full[n] != 1]
    has = {axis: -axis <= len(gradient.shape) and gradient.shape[axis] != 1 for axis in repeated}
    for axis in repeated:
        if not has[axis] and axis == -1:
            gradient = gradient * size_leaf(full[axis])
    rows = [axis for axis in repeated if not has[axis] and axis != -1]
    if rows:  # how many there are is no constant of a kernel
        wanted = [1] * (rank - len(gradient.shape)) + list(gradient.shape)
        for axis in rows:
            wanted[axis] = full[axis]
        gradient = F.broadcast(gradient, tuple(wanted))
    axes = tuple(axis for axis in repeated if has[axis] or axis in rows)
    return reduce("sum", gradient, axes) if axes else gradient
