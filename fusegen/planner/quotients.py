"""Quotients by what a whole row shares are products with its reciprocal, which is made once a row.

    x / y  ->  x * (1 / y)               where y surely is no extreme number
    x / y  ->  (x * s) * (1 / (y * s))   elsewhere; s is 2^-64 where |y| > 2^64, 2^64 where |y| < 2^-64, else 1

A division is some nine instructions, and a special path that is a call. A product with a rounded reciprocal is off by
1.5 ulp, where `/` may be by 2.5. The powers of 2 keep what would not fit out of the reciprocal: 1 / y is infinite where
y is below 2^-128, and loses bits above 2^126, though x / y may be any number. They round nothing: x * s is exact, but
where x / y is no normal number, and infinite only where x / y is. Of y = 0, infinities and NaN it is what x / y is.

A quotient that is rounded to whole numbers or to 8 bits stays, and so does one by a number, but for powers of 2:
conventions of quantization are by exact division, of values by scales, and of the largest by 448.
All else is decided by the quotient's own arguments, and before columns are taken of it: what two kernels compute, or
one for a row and for its chosen column, has the same bits, and may be compared.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusegen.language.graph import FITTED, Graph, Kind, Node
from fusegen.language.ordering import along_row, with_nodes
from fusegen.language.trace import OPS
from fusegen.language.types import b8, bf16, f16, f32
from fusegen.planner.ranges import ranges

LARGE = 2.0**64
WHOLE = frozenset({"floor", "ceil", "trunc", "round", "to_i32", "fmod"})
WIDE = frozenset(name for name, dtype in FITTED.items() if dtype in (f16, bf16))
CHOICES = frozenset({"minimum", "maximum", "abs", "neg", "where"})  # what they give is one of their arguments


def by_reciprocals(graph: Graph) -> Graph:
    """The graph, whose elements are multiplied by reciprocals of rows; the same graph where nothing is to be gained,
    where each operator rounds as torch's does, and beside products of matrices, which hide it."""
    if graph.rounding == "eager" or graph.products or not any(node.op.name == "div" for node in graph.nodes):
        return graph
    exact = rounded_values(graph)
    known = ranges(graph)
    made: dict[Node, Node] = {}
    scales: dict[Node, tuple[Node, Node | None]] = {}
    names: dict[Node, str] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        same = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node.op.name == "div" and node not in exact and is_of_rows(node, graph):
            by = node.inputs[1]
            if by not in scales:
                scales[by] = once, scale = reciprocal(node, inputs[1], known[by].low, known[by].high)
                called = graph.names.get(by) or (graph.tensor_of[by].name if by.op.kind is Kind.INPUT else "divisor")
                names |= {once: f"reciprocal_of_{called}"}
                names |= {scale: f"scale_of_{called}"} if scale is not None else {}
            once, scale = scales[by]
            scaled = inputs[0] if scale is None else replace(node, op=OPS["mul"], inputs=(inputs[0], scale))
            same = replace(node, op=OPS["mul"], inputs=(scaled, once))
        made[node] = same
    if all(made[node] is node for node in graph.nodes):
        return graph
    found = with_nodes(graph, made)
    return replace(found, names={**names, **found.names})


def is_of_rows(node: Node, graph: Graph) -> bool:
    """Is each element of a row divided by the same?"""
    x, y = node.inputs
    whole = along_row(x) and node.shape[-1] == graph.shape[-1] and x.op.kind is not Kind.REDUCE
    return whole and not along_row(y) and y.size is None and (y.literal is None or is_power(y.literal))


def is_power(number: float) -> bool:
    """Of 2: then its reciprocal is exact."""
    return abs(math.frexp(number)[0]) == 0.5


def rounded_values(graph: Graph) -> frozenset[Node]:
    """What is rounded to a whole number or to few bits, as it is or one of two."""
    found: set[Node] = {t.node for t in graph.outputs if t.dtype not in (f32, f16, bf16)}
    for node in reversed(graph.nodes):
        name = node.op.name
        rounds = name in WHOLE or (name in FITTED and name not in WIDE)
        if rounds or (node in found and (name in CHOICES or node.op.kind is Kind.VIEW)):
            found.update(node.inputs)
    return frozenset(found)


def reciprocal(node: Node, y: Node, low: float, high: float) -> tuple[Node, Node | None]:
    """1 / y, of y * s where y may be extreme; and that s."""

    def number(value: float) -> Node:
        return Node(OPS["literal"], (), (), f32, node.operator, literal=value)

    def value(name: str, *inputs: Node) -> Node:
        dtype = b8 if name in ("gt", "lt") else f32
        return Node(OPS[name], inputs, y.shape, dtype, node.operator)

    one = number(1.0)
    if 1 / LARGE <= low <= high <= LARGE or 1 / LARGE <= -high <= -low <= LARGE:
        return value("div", one, y), None
    size = value("abs", y)
    small = value("where", value("lt", size, number(1 / LARGE)), number(LARGE), one)
    scale = value("where", value("gt", size, number(LARGE)), number(1 / LARGE), small)
    return value("div", one, value("mul", y, scale)), scale
