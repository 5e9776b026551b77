"""Weights that conditions leave out: such conditions come last, where a kernel finds what they spare.

    f(where(c, x, n))  ->  where(c, f(x), f(n))     f of one value and of numbers, with f(n) = 0 or infinite
    where(c, x, 0) * y ->  where(c, x * y, 0)       and so of quotients

as long as c asks for the column's number, as `col <= row` does. So `exp(where(c, z, -inf))`, `sigmoid` of the same, and
`scores * where(c, decay, 0)` are weights of 0 outside of c. The first is exact. The second is, but where 0 * y or 0 / y
is NaN, as of an infinite y: a condition that does not hold hides that. Tiles that are left out make no y, so that every
tile takes it so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fusegen.language.graph import CASTS, Graph, Kind, Node, behind, broadcast
from fusegen.language.ordering import along_row, with_nodes
from fusegen.language.trace import OPS
from fusegen.language.types import b8, f4e2m1, f32, size_of
from fusegen.planner.ranges import ranges

# what references call by name
KNOWN = {"np": np, "erf": math.erf} | {dtype.numpy_name: dtype.numpy for dtype in (*CASTS.values(), f4e2m1)}


@dataclass(frozen=True, slots=True)
class Left:
    """A value that is `value` where `test` holds, and `other` elsewhere."""

    test: Node
    value: Node
    other: float


def conditions_last(graph: Graph, product: Node) -> Graph:
    """The graph whose product has a left factor of where(c, x, 0); the same graph where no condition leaves 0."""
    weights = product.inputs[0]
    finder = Finder(graph)
    found = finder.found(weights)
    if found is None or found.other != 0:
        return graph
    zero = number(0.0, weights)
    last = Node(OPS["where"], (found.test, found.value, zero), weights.shape, f32, weights.operator)
    if weights.op.name == "where" and last.inputs[:2] == weights.inputs[:2]:
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = last if node is weights else node if inputs == node.inputs else replace(node, inputs=inputs)
    changed = with_nodes(graph, made)
    renamed = ((node, inner) for node, inner in finder.renamed.items() if node is not weights)
    names = {inner: name for node, inner in renamed if (name := graph.names.get(node))}
    if weights not in graph.names and "weight" not in graph.names.values():
        names[last] = "weight"
    left = set(changed.nodes)
    return replace(changed, names={node: name for node, name in {**changed.names, **names}.items() if node in left})


class Finder:
    """What conditions leave of a graph's values, each found once. `renamed`: what has the name of a value that had a
    condition."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.ranges = graph, ranges(graph)
        self.known: dict[Node, Left | None] = {}
        self.renamed: dict[Node, Node] = {}

    def found(self, node: Node) -> Left | None:
        if node not in self.known:
            made = self.made(node)
            self.known[node] = made
            if made is not None and self.graph.names.get(made.value) in (None, made.value.op.name):
                self.renamed[node] = made.value
        return self.known[node]

    def made(self, node: Node) -> Left | None:
        name, of = node.op.name, node.inputs
        if node.op.kind is not Kind.MAP:
            return None
        if name == "where":
            return self.chosen(node)
        if of[0].dtype is b8:
            counts = name == "to_f32" and asks_column(of[0])
            return Left(of[0], number(1.0, node), 0.0) if counts else None
        if node.dtype is not f32 or any(a.dtype is not f32 for a in of):
            return None
        left = [self.found(a) for a in of]
        if not any(left):
            return None
        if all(a is not None or self.number_of(b) is not None for a, b in zip(left, of, strict=True)):
            return self.of_numbers(node, left)
        if name in ("mul", "div"):
            return self.scaled(node, left)
        if name in ("add", "sub"):
            return self.added(node, left)
        return None

    def chosen(self, node: Node) -> Left | None:
        """where(c, x, n), of an x that may have a condition of its own; one that asks for no column stays inside."""
        test, x, other = node.inputs
        if other.literal is None or node.dtype is not f32:
            return None
        inner, least = self.found(x), float(other.literal)
        if inner is not None and inner.other != least:
            inner = None
        if not asks_column(test):
            return inner and Left(inner.test, replace(node, inputs=(test, inner.value, other)), least)
        return Left(both(test, inner.test), inner.value, least) if inner else Left(test, x, least)

    def of_numbers(self, node: Node, left: list[Left | None]) -> Left | None:
        """f(where(c, x, n), numbers)."""
        of_one = [each for each in left if each is not None]
        if len(of_one) != 1:
            return None
        numbers = [each.other if each else self.number_of(a) for each, a in zip(left, node.inputs, strict=True)]
        value = result_of(node, numbers)
        if value != 0 and not math.isinf(value):
            return None
        return Left(of_one[0].test, self.with_values(node, left), value)

    def scaled(self, node: Node, left: list[Left | None]) -> Left | None:
        """where(c, x, 0) * y, and what it is divided by."""
        zeros = [each if each and each.other == 0 else None for each in left]
        if node.op.name == "div":
            zeros = [zeros[0], None]
        found = [each for each in zeros if each]
        if not found:
            return None
        test = found[0].test if len(found) == 1 else both(found[0].test, found[1].test)
        return Left(test, self.with_values(node, zeros), 0.0)

    def added(self, node: Node, left: list[Left | None]) -> Left | None:
        """where(c, x, -inf) + y, of a y that is finite."""
        place = 0 if left[0] else 1
        one, other = left[place], node.inputs[1 - place]
        if one is None or not math.isinf(one.other) or not self.ranges[other].finite:
            return None
        sign = -1.0 if place == 1 and node.op.name == "sub" else 1.0
        return Left(one.test, self.with_values(node, [one if i == place else None for i in range(2)]), sign * one.other)

    def with_values(self, node: Node, left: Iterable[Left | None]) -> Node:
        """The same of what is left."""
        inputs = tuple(each.value if each else a for each, a in zip(left, node.inputs, strict=True))
        if node.op.name == "mul":  # a mask of ones
            for one, other in (inputs, inputs[::-1]):
                if one.literal == 1 and other.shape == node.shape:
                    return other
        return replace(node, inputs=inputs)

    def number_of(self, node: Node) -> float | None:
        if node.size is not None:
            return float(size_of(node.size, self.graph.sizes))
        return None if node.literal is None else float(node.literal)


def result_of(node: Node, numbers: Iterable[float | None]) -> float:
    """f(numbers), of the f that a node has, in float64."""
    with np.errstate(all="ignore"):
        return float(eval(node.ref.format(*(f"np.float64('{number}')" for number in numbers)), dict(KNOWN)))


def asks_column(test: Node) -> bool:
    """Does it depend on the column's number?"""
    return along_row(test) and any(node.op.name == "col_index" for node in behind([test]))


def both(a: Node, b: Node) -> Node:
    if a is b:
        return a
    return Node(OPS["logical_and"], (a, b), broadcast(a.shape, b.shape), b8, a.operator)


def number(value: float, of: Node) -> Node:
    return Node(OPS["literal"], (), (), f32, of.operator, literal=value)
