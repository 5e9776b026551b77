"""The functions of `fusegen.ops` that draw random numbers: the same on every target, plan and launch.

What is drawn for an element follows from the seed, the offset and the element's row-major index in the value that it is
drawn for, by Philox4x32-10: see fusegen.language.philox. Two draws of one chain want two offsets, else they are alike.
"""

from __future__ import annotations

import math
import struct

from fusegen.errors import SpecError
from fusegen.language.elementwise import col_index, cos, index_of, log, need_traced, sqrt, where
from fusegen.language.trace import OPS, Value, apply, caller, composite, current, node_of, python_number
from fusegen.language.types import f32, i32, i64


@composite
def uniform(x: Value, seed: Value | int, offset: Value | int) -> Value:
    """Random numbers in [0, 1) of x's shape, in steps of 2^-24; seed and offset are i32, numbers or traced.

    From one call to the next a generator changes the seed or the offset. Both may be run-time scalars, `seed: i32`, or
    lie on the device, `seed: i32[1]`, where a captured graph reads them anew.
    """
    low, high = index_of_elements("uniform", x)
    return apply("to_unit", philox("uniform", low, high, seed, offset))


@composite
def normal(x: Value, seed: Value | int, offset: Value | int) -> Value:
    """Normal random numbers of mean 0 and variance 1, of x's shape (Box & Muller 1958); see F.uniform.

    Elements 2k and 2k + 1 are the cosine and the sine of one pair of uniform numbers; none is beyond 5.77.
    """
    low, high = index_of_elements("normal", x)
    radius = sqrt(-2.0 * log(1.0 - apply("to_unit", philox("normal", low & -2, high, seed, offset))))
    turn = apply("to_unit", philox("normal", low | 1, high, seed, offset))
    odd = where((low & 1) == 1, 0.25, 0.0)
    angle = 2.0 * math.pi * (turn - odd)  # sin(a) is cos(a - pi / 2), and the difference of turns is exact
    return radius * cos(angle)


@composite
def dropout(x: Value, p: Value | float, seed: Value | int, offset: Value | int) -> Value:
    """x / (1 - p) where F.uniform(x, seed, offset) is p or more, else 0; p is a number or a run-time scalar.

    With p = 0 it is x, with p = 1 it is 0 everywhere, of NaN and infinities too.
    """
    p = python_number(p)
    if not isinstance(p, Value):
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
            raise SpecError(f"dropout: p={p!r}; it is a number from 0 to 1, or a traced f32", caller())
        p = struct.unpack("<f", struct.pack("<f", p))[0]  # as the kernel has it: the reference compares with the same
    elif p.dtype is not f32:
        raise SpecError(f"dropout: found p of {p.dtype}, wanted a number from 0 to 1 or a traced f32", caller())
    low, high = index_of_elements("dropout", x)
    keep = apply("to_unit", philox("dropout", low, high, seed, offset)) >= p
    if not isinstance(p, Value) and p == 1:
        return where(keep, x, 0.0)  # which is nowhere
    return where(keep, x * apply("div", 1.0, apply("sub", 1.0, p)), 0.0)


def philox(name: str, low: Value, high: Value, seed: Value | int, offset: Value | int) -> Value:
    """32 random bits of each element, as i32."""
    return apply("philox", low, high, word(name, "offset", offset), word(name, "seed", seed))


def word(name: str, what: str, value: Value | int) -> Value | int:
    """A seed or an offset: an i32, or a number that 32 bits hold."""
    value = python_number(value)
    if isinstance(value, Value):
        if value.dtype is not i32:
            raise SpecError(f"{name}: found a {what} of {value.dtype}, wanted i32; declare it {what}: i32", caller())
        operand = current().operands.get(value.node)
        if operand is not None and operand.dtype is i64:
            raise SpecError(
                f"{name}: found a {what} of i64, which is read as the nearest i32: large ones would be alike\n"
                f"  declare it {what}: i32[1]",
                caller(),
            )
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**32:
        raise SpecError(f"{name}: {what}={value!r}; it is an i32 value, or a whole number of 32 bits", caller())
    return value if value < 2**31 else value - 2**32


def index_of_elements(name: str, x: Value) -> tuple[Value, Value]:
    """Both words of each element's row-major index in x."""
    need_traced(name, x)
    with current().operator(name) as operator:
        zero = Value(node_of(OPS["philox"], 0, operator))
    if all(size == 1 for size in x.shape):
        return zero, zero
    if all(size == 1 for size in x.shape[:-1]):
        return col_index(x), zero
    kind = "row" if x.shape[-1] == 1 else "element"
    return index_of(f"{kind}_low", x.shape), index_of(f"{kind}_high", x.shape)
