"""Between which numbers a chain's values surely lie, whatever its operands hold: NaN aside, which stays NaN.

An operand may hold anything, infinities among it. What ops make of that is narrower: a square is at least 0, a mean of
squares plus 1e-6 at least 1e-6, and its reciprocal root at most 1000. Bounds are those of f32 arithmetic: what is too
large for it is infinite, and what is no normal number may be 0. Integers wrap: one that may pass the ends of i32 may be
any. Where it surely does not, C's own + - * will do; beyond, those of ints are undefined, and go by unsigned numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fusegen.language.graph import CASTS, Graph, Node, Tensor, once_per_graph, overflows, shown_by
from fusegen.language.sizes import Dim, Expr, Size
from fusegen.language.types import b8, f32, i8, i32, u8, u32

SMALLEST_NORMAL = 2.0**-126
SHIFTS = ("shift_left", "shift_right")
ARITHMETIC = ("add", "sub", "mul", "neg", "square", *SHIFTS)


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends belong to it."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def apart_from_zero(self) -> bool:
        return self.low > 0 or self.high < 0


ANY = Range()
INTEGERS = Range(-i32.largest - 1, i32.largest)
UNSIGNED = Range(0.0, u32.largest)


@once_per_graph
def ranges(graph: Graph) -> Mapping[Node, Range]:
    found: dict[Node, Range] = {}
    for node in graph.nodes:
        made = range_of(node, [found[a] for a in node.inputs], graph)
        found[node] = in_i32(made) if node.dtype is i32 else in_u32(made) if node.dtype is u32 else in_f32(made)
    return found


def stays_inside(node: Node, graph: Graph) -> bool:
    """Is it arithmetic on i32 whose result surely is one, or a shift by as many bits as an i32 can be shifted by? Or of
    u32, such a shift, or a division by what is not 0?"""
    if node.dtype is u32 and node.op.name in (*SHIFTS, "floor_div", "mod"):
        by = ranges(graph)[node.inputs[1]]
        return by.high < 32 if node.op.name in SHIFTS else by.low > 0
    if node.dtype is not i32 or node.op.name not in ARITHMETIC:
        return False
    of = [ranges(graph)[a] for a in node.inputs]
    if node.op.name in SHIFTS:
        return of[1].low >= 0 and of[1].high < 32
    return inside(range_of(node, of, graph))


def fits(tensor: Tensor, graph: Graph) -> bool:
    """Is what an output gets surely a number of its type, as an integer that was cast to 8 bits is, or what has its
    infinities?"""
    if overflows(tensor.node):
        return CASTS[shown_by(tensor.node).op.name] is tensor.dtype
    found, dtype = ranges(graph)[tensor.node], tensor.dtype
    return dtype.kind == "int" and tensor.node.dtype is i32 and dtype.least <= found.low and found.high <= dtype.largest


def range_of(node: Node, of: list[Range], graph: Graph) -> Range:
    """As if no number were too large."""
    if node.dtype is b8:
        return Range(0.0, 1.0)
    if node.op.name == "literal":
        value = math.nan if node.literal is None else float(node.literal)
        return ANY if math.isnan(value) else Range(value, value)
    if node.size is not None:
        return Range(1.0 if at_least_one(node.size) else -(2.0**63), 2.0**63)
    if node.op.name in ("col_index", "top_columns"):
        return Range(-1.0, max(0, graph.cols - 1))
    if node.dtype is u32 and node.op.name == "bit_and":
        return Range(0.0, min(a.high for a in of))
    if node.op.name in ("mul", "square") and node.inputs[0] is node.inputs[-1]:
        return Range(least_magnitude(of[0]) ** 2, product(of[0], of[0]).high)
    return RANGES[node.op.name](*of) if node.op.name in RANGES else ANY


def at_least_one(size: Size) -> bool:
    """Is that surely so, whatever the dims? A difference, as a number in a chain's body, may be 0 and less."""
    return not isinstance(size, Expr) or all(
        factor >= 1 and all(isinstance(atom, Dim) and exponent > 0 for atom, exponent in monomial)
        for monomial, factor in size.terms
    )


def inside(found: Range) -> bool:
    return INTEGERS.low <= found.low and found.high <= INTEGERS.high


def in_i32(found: Range) -> Range:
    """What is too large for an integer may be any other one."""
    return found if inside(found) else INTEGERS


def in_u32(found: Range) -> Range:
    return found if UNSIGNED.low <= found.low and found.high <= UNSIGNED.high else UNSIGNED


def in_f32(found: Range) -> Range:
    """Ends that f32 has no number for are moved outward."""
    low = -math.inf if found.low < -f32.largest else min(found.low, f32.largest)
    high = math.inf if found.high > f32.largest else max(found.high, -f32.largest)
    if 0 < low < SMALLEST_NORMAL:
        low = 0.0
    if -SMALLEST_NORMAL < high < 0:
        high = 0.0
    return Range(low, high)


def least_magnitude(a: Range) -> float:
    return min(abs(a.low), abs(a.high)) if a.apart_from_zero else 0.0


def corners(a: Range, b: Range, op: Callable[[float, float], float]) -> Range:
    """Of an op that goes up or down in each of its arguments. What has no value at a corner may be anything."""
    values = [op(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return ANY if any(map(math.isnan, values)) else Range(min(values), max(values))


def product(a: Range, b: Range) -> Range:
    return corners(a, b, lambda x, y: x * y if x and y else 0.0)  # 0 * inf is NaN, which is no end


def quotient(a: Range, b: Range) -> Range:
    return corners(a, b, lambda x, y: x / y) if b.apart_from_zero else ANY


def added(a: Range, b: Range) -> Range:
    return Range(sum_of(a.low, b.low, -math.inf), sum_of(a.high, b.high, math.inf))


def sum_of(x: float, y: float, otherwise: float) -> float:
    """Where infinities cancel, the end is `otherwise`."""
    return otherwise if math.isnan(x + y) else x + y


def summed(a: Range) -> Range:
    """A row's sum, of however many."""
    return Range(0.0 if a.low >= 0 else -math.inf, 0.0 if a.high <= 0 else math.inf)


def negative(a: Range) -> Range:
    return Range(-a.high, -a.low)


def root(a: Range) -> Range:
    return Range(math.sqrt(max(0.0, a.low)), math.sqrt(max(0.0, a.high)))


def reciprocal_root(a: Range) -> Range:
    found = root(a)
    return Range(1 / found.high if found.high else 0.0, 1 / found.low if found.low else math.inf)


def exponential(a: Range) -> Range:
    return Range(0.0, math.exp(a.high) if a.high < 89 else math.inf)  # e ** 89 is beyond f32


def common_bits(a: Range, b: Range) -> Range:
    """A number that is not negative has no bit above its highest."""
    above = [x.high for x in (a, b) if x.low >= 0]
    return Range(0.0, min(above)) if above else INTEGERS


def floor_of(x: float) -> float:
    return math.floor(x) if math.isfinite(x) else x


def power_of_2(a: Range) -> Range:
    return Range(0.0, 2.0**a.high if a.high < 128 else math.inf)


def remainder(a: Range, b: Range) -> Range:
    """Between 0 and the divisor."""
    return Range(min(0.0, b.low), max(0.0, b.high))


def between(low: float, high: float) -> Callable[..., Range]:
    return lambda *of: Range(low, high)


RANGES: Mapping[str, Callable[..., Range]] = {
    "add": added,
    "sub": lambda a, b: added(a, negative(b)),
    "mul": product,
    "div": quotient,
    "neg": negative,
    "abs": lambda a: Range(least_magnitude(a), max(abs(a.low), abs(a.high))),
    "maximum": lambda a, b: Range(max(a.low, b.low), max(a.high, b.high)),
    "minimum": lambda a, b: Range(min(a.low, b.low), min(a.high, b.high)),
    "relu": lambda a: Range(max(a.low, 0.0), max(a.high, 0.0)),
    "bit_and": common_bits,
    "where": lambda _, a, b: Range(min(a.low, b.low), max(a.high, b.high)),
    "sqrt": root,
    "rsqrt": reciprocal_root,
    "exp": exponential,
    "exp2": power_of_2,
    **dict.fromkeys(("sin", "cos", "sign"), between(-1.0, 1.0)),
    "floor": lambda a: Range(floor_of(a.low), floor_of(a.high)),
    "mod": remainder,
    "sigmoid": between(0.0, 1.0),
    "tanh": between(-1.0, 1.0),
    "erf": between(-1.0, 1.0),
    "row_index": between(0.0, i32.largest),
    "to_unit": between(0.0, 1.0),
    "to_f32": lambda a: a,
    **{f"to_{dtype}": between(dtype.least, dtype.largest) for dtype in (i8, u8)},
    "sum": summed,
    "max": lambda a: a,
    "min": lambda a: a,
}
"""By the op's name. Of an op that is not here a value may be anything."""
