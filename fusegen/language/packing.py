"""Numbers of 4 bits, two to a byte: i4, u4 and f4e2m1 along the last axis, the low nibble first.

An array of them lies in memory as bytes: `w: i4[N, K]` is an operand u8[N, K // 2], whose numbers are what `unpack`
makes of it; an output is what `pack` makes of the numbers returned. Both are written in a chain's own steps, so that
the reference says them in plain numpy.
"""

from __future__ import annotations

from typing import Any

from fusegen.errors import SpecError
from fusegen.language.elementwise import need_traced
from fusegen.language.graph import Kind, Node
from fusegen.language.rearranging import stack, tuple_text
from fusegen.language.trace import Value, apply, caller, current, viewed
from fusegen.language.types import PACKED, DType, TensorType, f4e2m1, i4, i32, shape_text, u8
from fusegen.language.views import View

NIBBLE = 15


def stored_as(type: TensorType) -> TensorType:
    """What lies in memory: bytes where the numbers are of 4 bits. Raises SpecError for rows that bytes don't hold."""
    if not type.dtype.packed:
        return type
    *rows, cols = type.shape
    if isinstance(cols, int) and cols % 2:
        raise SpecError(
            f"{type}: two numbers of {type.dtype} are a byte, and rows of {cols} are no whole number of bytes"
        )
    return TensorType(u8, (*rows, cols // 2))


def need_packed(name: str, dtype: object) -> DType:
    if not isinstance(dtype, DType) or not dtype.packed:
        raise SpecError(f"{name}: {dtype!s} is none of {', '.join(PACKED)}, of which two are a byte", caller())
    return dtype


def unpack(x: Value, dtype: DType) -> Value:
    """Numbers of 4 bits from bytes: u8 [..., N // 2] as `dtype` [..., N], i32 or f32; the low nibble comes first."""
    need_traced("unpack", x)
    need_packed("unpack", dtype)
    if x.dtype is not i32 or not x.shape:
        raise SpecError(
            f"unpack: found {x.dtype}{shape_text(x.shape)}, wanted bytes in rows, as of u8[M, N // 2]", caller()
        )
    rank = len(x.shape)
    with current().operator("unpack"):
        both = stack([apply("bit_and", x, NIBBLE), apply("shift_right", x, 4)])
        whole = View.identity(both.shape).merged(rank - 1, 2)
        codes = viewed(both, whole, f"{{0}}.reshape({tuple_text(whole.shape)})", "unpack")
        if dtype is f4e2m1:
            return apply("f4e2m1_of_code", codes)
        if dtype is i4:
            return apply("sub", apply("bit_xor", codes, 8), 8)
        return codes


def pack(x: Value, dtype: DType) -> Value:
    """Numbers as `dtype`, two to a byte: [..., N] as u8 [..., N // 2], the low nibble first; see F.cast."""
    need_traced("pack", x)
    need_packed("pack", dtype)
    if not x.shape:
        raise SpecError("pack: a scalar has no row", caller())
    with current().operator("pack"):
        return packed(x, dtype)


def packed(x: Value, dtype: DType) -> Value:
    """The bytes of numbers. Where the even ones and the odd ones were put together just before, they are taken as they
    were: one kernel then has both halves of a byte at hand, and reads no row with steps."""
    source = merged(x)
    if source is not None and source.node.op.kind is Kind.JOIN and source.shape[-1] == 2:
        low, high = map(Value, source.node.inputs)
    elif source is not None and merged(source) is not None:
        halves = packed(source, dtype)
        whole = View.identity(halves.shape).merged(len(halves.shape) - 2, 2)
        return viewed(halves, whole, f"{{0}}.reshape({tuple_text(whole.shape)})", "pack")
    else:
        low, high = x[..., 0::2], x[..., 1::2]
    name = "code_of_f4e2m1" if dtype is f4e2m1 else f"to_{dtype}"
    low, high = (apply("bit_and", apply(name, before_rounding(half)), NIBBLE) for half in (low, high))
    return apply("bit_or", low, apply("shift_left", high, 4))


def before_rounding(x: Value) -> Value:
    """What was rounded to f4e2m1 last: its code is the same."""
    return Value(x.node.inputs[0]) if x.node.op.name == "round_f4e2m1" else x


def merged(x: Value) -> Value | None:
    """What x shows with its last two axes as one; None of what is no such view."""
    if x.node.op.kind is not Kind.VIEW:
        return None
    (source,) = x.node.inputs
    rank = len(source.shape)
    if rank != len(x.shape) + 1 or x.node.view != View.identity(source.shape).merged(rank - 2, 2):
        return None
    return Value(source)


def number_of(node: Node, own: TensorType) -> Value:
    """An operand as the spec's body has it."""
    value = Value(node)
    return unpack(value, own.dtype) if own.dtype.packed else value


def returned_as_stored(returned: Any, declared: tuple[TensorType, ...]) -> Any:
    """What is returned, with numbers of 4 bits as the bytes that hold them."""
    values = returned if isinstance(returned, tuple) else (returned,)
    if len(values) != len(declared):
        return returned

    def stored(value: Any, type: TensorType) -> Any:
        fits = type.dtype.packed and isinstance(value, Value) and value.shape == type.shape
        return pack(value, type.dtype) if fits else value

    found = tuple(stored(value, type) for value, type in zip(values, declared, strict=True))
    return found if isinstance(returned, tuple) else found[0]
