"""Arguments as an op takes them: numbers alike, masks where masks belong, literals in the type of what they meet."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from fusegen.errors import SpecError
from fusegen.language.graph import OPS, Node, Op, Operator
from fusegen.language.types import DType, b8, f32, fits_i32, fits_u32, i32, u32

Number = int | float
HOLDS: dict[DType, tuple[Callable[[float], bool], str]] = {
    i32: (fits_i32, "-2147483648 to 2147483647"),
    u32: (fits_u32, "0 to 4294967295"),
}
OF_UNSIGNED = frozenset(
    """add sub mul neg square maximum minimum floor_div mod lt le gt ge eq ne where bit_and bit_or bit_xor bit_not
    shift_left shift_right""".split()  # noqa: SIM905
)
"""The ops that have a meaning on u32 itself: that of numpy's uint32, modulo 2^32."""


def f32_literal(value: Number, operator: Operator) -> Node:
    """A number as a literal. Raises SpecError where f32 would make a finite one infinite."""
    try:
        struct.pack("<f", float(value))
    except OverflowError:
        raise SpecError(
            f"the literal {value!r:.40} is beyond f32, which holds magnitudes up to {f32.largest:.8g}\n"
            "  write float('inf') for an infinity, or scale in two steps",
            operator.where,
        ) from None
    return Node(OPS["literal"], (), (), f32, operator, literal=float(value))


def promote(op: Op, values: list[Node], operator: Operator) -> list[Node]:
    """The arguments as the op takes them: numbers alike (f32 wins over whole ones; signed and unsigned don't mix),
    sizes whole where they meet whole ones, booleans only where booleans belong."""
    if op.takes == "any":
        return values
    known = (n.dtype for n in values if n.size is None)
    if op.takes == "int" and (other := next((dtype for dtype in known if dtype not in HOLDS), None)):
        raise SpecError(
            f"{op.name}: found {other} where whole numbers (i32) are wanted; convert with F.cast(x, i32)",
            operator.where,
        )
    masks = values if op.takes == "bool" else values[:1] if op.takes == "where" else []
    numbers = values[len(masks) :]
    if op.name in ("eq", "ne") and all(n.dtype is b8 for n in numbers):
        return values
    for node in masks:
        if node.dtype is not b8:
            raise SpecError(
                f"{operator}: found {node.dtype} where a mask (b8) is wanted; compare first, as in x > 0",
                operator.where,
            )
    for node in numbers:
        if node.dtype is b8:
            raise SpecError(
                f"{operator}: found a mask (b8) where a number is wanted; use F.where(mask, a, b) or F.cast(mask, f32)",
                operator.where,
            )
    told = [n for n in numbers if n.size is None]
    alone = len(told) < len(numbers) and all(n.literal is not None for n in told)  # of numbers a size is f32
    if op.takes == "float" or any(n.dtype is f32 for n in told) or (alone and op.takes != "int"):
        return [*masks, *(to_f32(n, operator) for n in numbers)]
    return [*masks, *alike(op, numbers, operator)]


def alike(op: Op, numbers: list[Node], operator: Operator) -> list[Node]:
    """Whole numbers of one type, which a literal or a size takes on."""
    kinds = {n.dtype for n in numbers if n.literal is None and n.size is None}
    if len(kinds) > 1:
        raise SpecError(
            f"{operator}: found {' and '.join(str(n.dtype) for n in numbers)}; signed and unsigned do not mix\n"
            "  F.cast(x, u32) and F.cast(x, i32) have the same 32 bits; F.cast(x, f32) is the number",
            operator.where,
        )
    kind = next(iter(kinds), i32)
    if kind is u32 and op.name not in OF_UNSIGNED:
        raise SpecError(
            f"{operator}: found u32, which has + - * // % & | ^ ~ << >>, comparisons, F.where, minimum and maximum\n"
            "  F.cast(x, i32) has the same 32 bits, F.cast(x, f32) is the nearest f32",
            operator.where,
        )
    fits, holds = HOLDS[kind]
    for node in numbers:
        if node.literal is not None and not fits(node.literal):
            raise SpecError(
                f"{op.name}: the literal {node.literal!r:.40} is beyond {kind}, which holds {holds}\n"
                "  write it as a float for arithmetic in f32",
                operator.where,
            )
    return [n if n.dtype is kind else replace(n, dtype=kind) for n in numbers]


def to_f32(node: Node, operator: Operator) -> Node:
    if node.dtype is f32:
        return node
    if node.literal is not None:
        return f32_literal(node.literal, operator)
    return Node(OPS["to_f32"], (node,), node.shape, f32, operator)
