"""The vocabulary of a signature: dimensions, dtypes, and tensor types such as `f16[M, N]`.

A dtype is one row of `DTYPES`; everything that depends on a dtype (C spellings, tolerances, numpy meaning) is a table
keyed by it, never a branch. Annotations of a spec are values: `f16[M, N]` calls `DType.__getitem__`. For type checkers
the package declares `f16` and the others as `Any`, which may stand in an annotation with anything in its brackets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fusegen.errors import SpecError
from fusegen.language.sizes import Dim as Dim
from fusegen.language.sizes import Expr
from fusegen.language.sizes import Shape as Shape
from fusegen.language.sizes import Size as Size
from fusegen.language.sizes import dims as dims
from fusegen.language.sizes import shape_text as shape_text
from fusegen.language.sizes import size_of as size_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type.

    `numpy` is its numpy meaning (ml_dtypes where numpy has none), `bytes` its size, `epsilon` the unit roundoff
    (half the spacing above 1; 0 for exact types), `tiny` the smallest positive number it holds, `largest` the largest.
    Values of a kernel are f32, i32, u32 or b8; the other types are what lies in memory, and what values are rounded to.
    """

    name: str
    kind: str  # "float", "int" or "bool"
    bytes: int
    numpy_name: str
    epsilon: float = 0.0
    tiny: float = 0.0
    largest: float = 0.0
    least: float = 0.0  # the smallest whole number, or the smallest of a type that has positive numbers alone
    packed: bool = False  # of 4 bits: two are a byte, and no array of a kernel holds them otherwise

    @property
    def positive(self) -> bool:
        """Has it positive floating-point numbers alone?"""
        return self.kind == "float" and self.least > 0

    @property
    def value(self) -> DType:
        """What kernels compute with: f32, i32, u32 or b8."""
        return u32 if self is u32 else {"float": f32, "int": i32, "bool": b8}[self.kind]

    @property
    def bits(self) -> int:
        """Of one element."""
        return 4 if self.packed else 8 * self.bytes

    @property
    def narrow(self) -> bool:
        """Is it a number of 8 bits? What is beyond its range is stored as the nearest number that it has."""
        return self.bytes == 1 and self.kind != "bool"

    @property
    def nearest(self) -> tuple[float, float]:
        """The least and the largest number: what is beyond becomes the nearer of them."""
        return (-self.largest if self.kind == "float" and not self.positive else self.least), self.largest

    def __reduce__(self) -> str:
        """Copies and pickles are the type itself, by its name in this module: types are compared by identity."""
        return self.name

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return numpy_dtype(self.numpy_name)

    def __getitem__(self, sizes: Size | Shape) -> TensorType:
        shape = sizes if isinstance(sizes, tuple) else (sizes,)
        for size in shape:
            wrong_int = isinstance(size, int) and (isinstance(size, bool) or size < 1)
            if isinstance(size, tuple):
                names = ", ".join(map(str, size))
                raise SpecError(
                    f"{self.name}[...]: ({names},) is a tuple of dims; dims() gives one dim for each name\n"
                    f"  write {names}, = dims('{names}') with a comma"
                )
            if not isinstance(size, (Dim, Expr, int)) or wrong_int:
                raise SpecError(
                    f"{self.name}[...]: {size!r} is not a size; use a Dim from dims(), or an integer of at least 1"
                )
        return TensorType(self, shape)

    def __str__(self) -> str:
        return self.name


@cache
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Numpy's dtype of that name, ml_dtypes' own among them. Imported here: declaring a chain needs neither."""
    import ml_dtypes  # names bfloat16
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


f16 = DType("f16", "float", 2, "float16", 2.0**-11, 2.0**-24, 65504.0)
bf16 = DType("bf16", "float", 2, "bfloat16", 2.0**-8, 2.0**-133, 3.3895313892515355e38)
f32 = DType("f32", "float", 4, "float32", 2.0**-24, 2.0**-149, 3.4028234663852886e38)
# 8 bits after "FP8 Formats for Deep Learning" (Micikevicius et al. 2022) and the OCP specification of it; "fnuz" is
# what gfx942 computes with: no infinities, no -0, one NaN, and another bias
f8e4m3 = DType("f8e4m3", "float", 1, "float8_e4m3fn", 2.0**-4, 2.0**-9, 448.0)
f8e5m2 = DType("f8e5m2", "float", 1, "float8_e5m2", 2.0**-3, 2.0**-16, 57344.0)
f8e4m3fnuz = DType("f8e4m3fnuz", "float", 1, "float8_e4m3fnuz", 2.0**-4, 2.0**-10, 240.0)
f8e5m2fnuz = DType("f8e5m2fnuz", "float", 1, "float8_e5m2fnuz", 2.0**-3, 2.0**-17, 57344.0)
# an exponent alone, for scales (OCP Microscaling Formats 1.0, section 5.4.1): 2^-127 to 2^127, and NaN; no 0, no sign
f8e8m0 = DType("f8e8m0", "float", 1, "float8_e8m0fnu", 2.0**-1, 2.0**-127, 2.0**127, 2.0**-127)
i32 = DType("i32", "int", 4, "int32", largest=2.0**31 - 1, least=-(2.0**31))
i64 = DType("i64", "int", 8, "int64", largest=2.0**63 - 1, least=-(2.0**63))  # torch's ids; read as the nearest i32
u32 = DType("u32", "int", 4, "uint32", largest=2.0**32 - 1)  # whole numbers modulo 2^32, of which none is negative
i8 = DType("i8", "int", 1, "int8", largest=127.0, least=-128.0)
u8 = DType("u8", "int", 1, "uint8", largest=255.0)
# of 4 bits; f4e2m1 is OCP Microscaling's: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
f4e2m1 = DType("f4e2m1", "float", 1, "float4_e2m1fn", 2.0**-2, 0.5, 6.0, packed=True)
i4 = DType("i4", "int", 1, "int4", largest=7.0, least=-8.0, packed=True)
u4 = DType("u4", "int", 1, "uint4", largest=15.0, packed=True)
b8 = DType("b8", "bool", 1, "bool", largest=1.0)

tf32 = DType("tf32", "float", 4, "float32", 2.0**-11, 2.0**-136, (2 - 2.0**-10) * 2.0**127)
"""What f32 becomes on its way to tensor cores: no array holds it, and it is none of DTYPES."""

DTYPES: Mapping[str, DType] = {
    d.name: d for d in (f16, bf16, f32, f8e4m3, f8e5m2, f8e4m3fnuz, f8e5m2fnuz, f8e8m0, i32, u32, i64, i8, u8, b8)
}
PACKED: Mapping[str, DType] = {d.name: d for d in (f4e2m1, i4, u4)}
"""Types of 4 bits, which operands and outputs may be declared as: `fusegen.language.packing`."""
F8: tuple[DType, ...] = (f8e4m3, f8e5m2, f8e4m3fnuz, f8e5m2fnuz, f8e8m0)
ALIKE: tuple[tuple[DType, ...], ...] = ((f8e4m3, f8e5m2), (f8e4m3fnuz, f8e5m2fnuz))
"""Types of 8 bits that matrix units multiply with each other as they are."""


def multiply_together(left: DType, right: DType) -> bool:
    """Are products of such factors exact, and taken without either one becoming the other's type?"""
    return left is right or any(left in kinds and right in kinds for kinds in ALIKE)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype and a shape; the empty shape is a run-time scalar (`scale: f32`)."""

    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else str(self.dtype)


LEAST_INT = "(-2147483647 - 1)"
"""The least i32 as C text, which has no literal for it."""


def fits_i32(value: float) -> bool:
    return -(2**31) <= value < 2**31


def fits_u32(value: float) -> bool:
    return 0 <= value < 2**32
