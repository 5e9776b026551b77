"""Graph -> Graph rewrites of derived gradients, each with its equation: what a person would not have written goes.

Only what was derived is rewritten; values of the forward chain stay as its author has them. Equations hold for real
numbers: sums are taken in another order, and a gradient that a mask has made 0 stays 0 whatever it is multiplied by, as
1 / 0 in a row that is masked as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, broadcast
from fusegen.language.ordering import with_nodes
from fusegen.language.sharing import share_common
from fusegen.language.trace import OPS
from fusegen.language.types import Shape, f32
from fusegen.language.views import View

MOST_ROUNDS = 32  # each takes at least one op away, or moves one outwards


def tidied(graph: Graph, first: int) -> Graph:
    """The graph with less of what operator number `first` and later ones made."""
    for _ in range(MOST_ROUNDS):
        found = once(share_common(graph), first)
        if found.nodes == graph.nodes:
            break
        graph = found
    return share_common(rounded_once(graph, first))


def rounded_once(graph: Graph, first: int) -> Graph:
    """x, round(x)  ->  round(x), round(x)     of a gradient that a product has rounded: so it is stored once."""
    rounds = {n.inputs[0]: n for n in graph.nodes if n.op.name in ("round_f16", "round_bf16")}
    returned = {t.node for t in graph.outputs}
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        found = rounds.get(node)
        if found is not None and min(node.operator.index, found.operator.index) >= first and node not in returned:
            same = replace(found, inputs=(same,), operator=node.operator)
        elif node in rounds.values() and made[node.inputs[0]].op is node.op:
            same = made[node.inputs[0]]
        made[node] = same
    return with_nodes(graph, made)


def once(graph: Graph, first: int) -> Graph:
    made: dict[Node, Node] = {}
    sums = {n.inputs[0]: n for n in graph.nodes if n.op.name == "sum" and not n.over}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        made[node] = same if node.operator.index < first else Rewriting(same, sums, first).result()
    return with_nodes(graph, made)


def number(node: Node) -> float | None:
    """The number that a literal of f32 is."""
    return node.literal if isinstance(node.literal, float) else None


def is_zero(node: Node) -> bool:
    """0, or 0 * x, which is 0 of another shape."""
    return number(node) == 0.0 or (node.op.name == "mul" and number(node.inputs[0]) == 0.0)


class Rewriting:
    """One node, as the simplest of the rules below have it. `sums`: sums of rows that there are already; `first`: the
    first operator that was derived."""

    def __init__(self, node: Node, sums: dict[Node, Node], first: int) -> None:
        self.node = node
        self.sums = sums
        self.first = first

    def result(self) -> Node:
        rule: Callable[[], Node | None] | None = getattr(self, f"of_{self.node.op.name}", None)
        found = rule() if rule is not None and self.node.dtype is f32 else None
        return self.node if found is None or found.shape != self.node.shape else found

    # ------------------------------------------------------------ making nodes

    def make(self, name: str, *inputs: Node) -> Node:
        shape = shape_of(inputs)
        return Node(OPS[name], inputs, shape, f32, self.node.operator)

    def literal(self, value: float) -> Node:
        return Node(OPS["literal"], (), (), f32, self.node.operator, literal=value)

    def row_sum(self, x: Node) -> Node:
        return replace(self.node, inputs=(x,), shape=(*x.shape[:-1], 1))

    # ------------------------------------------------------------ the rules

    def of_add(self) -> Node | None:
        """x + 0 -> x;  a + -b -> a - b;  -a + b -> b - a;  a + a -> 2 * a;  (a + b) + b -> a + 2 * b"""
        a, b = self.node.inputs
        if is_zero(a):
            return b
        if is_zero(b):
            return a
        if b.op.name == "neg":
            return self.make("sub", a, b.inputs[0])
        if a.op.name == "neg":
            return self.make("sub", b, a.inputs[0])
        if a is b:
            return self.make("mul", self.literal(2.0), a)
        if a.op.name == "add" and b in a.inputs:
            other = a.inputs[1] if a.inputs[0] is b else a.inputs[0]
            return self.make("add", other, self.make("mul", self.literal(2.0), b))
        return None

    def of_sub(self) -> Node | None:
        """x - 0 -> x;  0 - x -> -x;  a - -b -> a + b"""
        a, b = self.node.inputs
        if is_zero(b):
            return a
        if is_zero(a):
            return self.make("neg", b)
        if b.op.name == "neg":
            return self.make("add", a, b.inputs[0])
        one, other = number(a), number(b)
        return self.literal(one - other) if one is not None and other is not None else None

    def of_neg(self) -> Node | None:
        """--x -> x;  -(a - b) -> b - a;  -(c * x) -> (-c) * x;  -where(m, a, 0) -> where(m, -a, 0)"""
        (x,) = self.node.inputs
        if x.op.name == "neg":
            return x.inputs[0]
        if (value := number(x)) is not None:
            return self.literal(-value)
        if x.op.name == "sub":
            return self.make("sub", *reversed(x.inputs))
        if x.op.name == "mul" and (value := number(x.inputs[0])) is not None:
            return self.make("mul", self.literal(-value), x.inputs[1])
        return self.masked(x, lambda kept: self.make("neg", kept))

    def of_mul(self) -> Node | None:
        """1 * x -> x;  0 * x -> 0;  c * (d * x) -> (c d) * x;  (-a) * b -> -(a * b);  (a / b) * b -> a
        where(m, a, 0) * b -> where(m, a * b, 0)"""
        a, b = self.node.inputs
        if number(b) is not None and number(a) is None:
            a, b = b, a
        value = number(a)
        if value == 1.0:
            return b
        if value == -1.0:
            return self.make("neg", b)
        if value is not None and (other := number(b)) is not None:
            return self.literal(value * other)
        if value is not None and b.op.name == "mul" and (other := number(b.inputs[0])) is not None:
            return self.make("mul", self.literal(value * other), b.inputs[1])
        for x, y in ((a, b), (b, a)):
            if x.op.name == "neg":
                return self.make("neg", self.make("mul", x.inputs[0], y))
            if x.op.name == "div" and x.inputs[1] is y and number(x.inputs[0]) is None:
                return x.inputs[0]
            if (found := self.masked(x, lambda kept, y=y: self.make("mul", kept, y))) is not None:  # type: ignore[misc]
                return found
            inner = number(x.inputs[0]) if x.op.name == "mul" else None
            if inner is not None and number(y) is None:  # numbers go outwards, where they meet
                return self.make("mul", x.inputs[0], self.make("mul", x.inputs[1], y))
        return self.node if self.node.inputs == (a, b) else self.make("mul", a, b)

    def of_div(self) -> Node | None:
        """x / 1 -> x;  (-a) / b -> -(a / b);  (c * a) / b -> c * (a / b);  where(m, a, 0) / b -> where(m, a / b, 0)"""
        a, b = self.node.inputs
        if number(b) == 1.0:
            return a
        if a.op.name == "neg":
            return self.make("neg", self.make("div", a.inputs[0], b))
        if a.op.name == "mul" and number(a.inputs[0]) is not None and number(b) is None:
            return self.make("mul", a.inputs[0], self.make("div", a.inputs[1], b))
        return self.masked(a, lambda kept: self.make("div", kept, b))

    def of_pow(self) -> Node | None:
        """x ** 1 -> x;  x ** 2 -> x * x"""
        x, exponent = self.node.inputs
        value = number(exponent)
        if value == 0.0:
            return self.literal(1.0)
        return x if value == 1.0 else self.make("square", x) if value == 2.0 else None

    def of_where(self) -> Node | None:
        """where(m, 0, 0) -> 0;  where(m, where(m, a, 0), 0) -> where(m, a, 0)"""
        mask, a, b = self.node.inputs
        if is_zero(a) and is_zero(b):
            return self.literal(0.0)
        if a.op.name == "where" and a.inputs[0] is mask:
            return replace(self.node, inputs=(mask, a.inputs[1], b))
        if b.op.name == "where" and b.inputs[0] is mask:
            return replace(self.node, inputs=(mask, a, b.inputs[2]))
        return None

    def of_sum(self) -> Node | None:
        """sum(-x) -> -sum(x);  sum(s * x) -> s * sum(x), s one value a row;  sum(x - sum(x) / N) -> 0
        sum(a + b) -> sum(a) + sum(b) where one of them is 0, or there already, or both are sums of what is no sum"""
        (x,) = self.node.inputs
        if self.node.over or x.shape[-1] == 1:
            return None
        found = self.sum_of(x)
        if found is not None:
            return found
        if x.op.name not in ("add", "sub") or any(a.shape[-1:] != x.shape[-1:] for a in x.inputs):
            return None
        if any(a.shape != x.shape for a in x.inputs):
            return None
        sums = [self.sum_of(a) for a in x.inputs]
        if any(one is not None and (is_zero(one) or self.is_known(one)) for one in sums):
            own = [self.row_sum(a) if one is None else one for a, one in zip(x.inputs, sums, strict=True)]
            return self.make(x.op.name, *own)
        return None

    def of_view(self) -> Node | None:
        """(a @ b).mT -> b.mT @ a.mT"""
        (x,) = self.node.inputs
        if not is_swap(self.node) or x.op.name not in ("matmul", "matmul_tf32", "matmul_over_groups"):
            return None
        a, b = x.factors
        factors = (self.swapped(b), self.swapped(a))
        inputs = (*factors, *x.inputs[2:])
        return replace(x, inputs=inputs, shape=self.node.shape, operator=self.node.operator)

    def swapped(self, x: Node) -> Node:
        """x with its last two axes swapped, as a factor takes it."""
        if x.op.kind is Kind.TRANSPOSE or is_swap(x):
            return x.inputs[0]
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        if x.op.kind is Kind.INPUT:
            return Node(OPS["transpose"], (x,), shape, x.dtype, self.node.operator)
        view = View.identity(x.shape).transposed((*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))
        text = "np.swapaxes({0}, -1, -2)"
        return Node(OPS["view"], (x,), shape, x.dtype, self.node.operator, view=view, text=text)

    def is_known(self, node: Node) -> bool:
        """Is every sum of a row in it there already?"""
        return all(n.inputs[0] in self.sums for n in reductions_of(node))

    def sum_of(self, x: Node) -> Node | None:
        """The sum of a row as something simpler than that."""
        name = x.op.name
        known = self.sums.get(x)
        if known is not None and known is not self.node and known.operator.index <= self.node.operator.index:
            return known
        if name == "neg":
            return self.make("neg", self.row_sum(x.inputs[0]))
        if name == "sub" and is_mean_of(x.inputs[1], x.inputs[0]):
            return self.literal(0.0)
        if name not in ("mul", "div"):
            return None
        a, b = x.inputs
        if b.shape[-1:] in ((), (1,)) and a.shape == x.shape:
            inner = self.sum_of(a)
            if inner is not None and is_zero(inner):
                return inner
            return self.make(name, self.row_sum(a) if inner is None else inner, b)
        if name == "mul" and a.shape[-1:] in ((), (1,)) and b.shape == x.shape:
            inner = self.sum_of(b)
            if inner is not None and is_zero(inner):
                return inner
            return self.make(name, a, self.row_sum(b) if inner is None else inner)
        if name == "mul":  # (r * u) * v, r one value a row
            for y, z in ((a, b), (b, a)):
                if y.op.name in ("mul", "div") and y.shape == x.shape:
                    u, r = y.inputs
                    if y.op.name == "mul" and u.shape[-1:] in ((), (1,)):
                        u, r = r, u
                    if r.shape[-1:] in ((), (1,)) and u.shape == y.shape:
                        return self.make(y.op.name, self.row_sum(self.make("mul", u, z)), r)
        return None

    def masked(self, x: Node, make: Callable[[Node], Node]) -> Node | None:
        """`make` of where(m, a, 0), as where(m, make(a), 0): of a gradient of this shape that a mask has made 0."""
        if x.op.name != "where" or x.operator.index < self.first or x.shape != self.node.shape:
            return None
        mask, a, b = x.inputs
        if is_zero(b):
            inputs = (mask, make(a), b)
        elif is_zero(a):
            inputs = (mask, a, make(b))
        else:
            return None
        return replace(self.node, op=OPS["where"], inputs=inputs, shape=shape_of(inputs))


def shape_of(nodes: Iterable[Node]) -> Shape:
    shape: Shape = ()
    for node in nodes:
        shape = broadcast(shape, node.shape)
    return shape


def is_swap(node: Node) -> bool:
    """Is it a value with its last two axes swapped?"""
    if node.op.kind is not Kind.VIEW or len(node.shape) < 2 or node.view is None:
        return False
    rank = len(node.shape)
    if len(node.inputs[0].shape) != rank:
        return False
    return node.view == View.identity(node.inputs[0].shape).transposed((*range(rank - 2), rank - 1, rank - 2))


def is_mean_of(node: Node, x: Node) -> bool:
    """sum(x) / N, N the number of x's columns."""
    if node.op.name != "div":
        return False
    total, count = node.inputs
    whole = total.op.name == "sum" and not total.over and total.inputs[0] is x
    return whole and (count.size == x.shape[-1] or number(count) == x.shape[-1])


def reductions_of(node: Node) -> Iterator[Node]:
    """The sums of rows that a value, one for each row, is made of by products and quotients."""
    stack = [node]
    while stack:
        one = stack.pop()
        if one.op.name == "sum":
            yield one
        elif one.op.name in ("mul", "div", "neg"):
            stack += [a for a in one.inputs if a.op.kind in (Kind.MAP, Kind.REDUCE)]
