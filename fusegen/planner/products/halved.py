"""OCP's 8-bit floats where a matrix unit multiplies "fnuz" ones alone, as gfx942's MFMA does: each as its half.

Half of a number of f8e4m3 has the same code in f8e4m3fnuz, since its exponents begin one lower. Three of the 256 codes
are no such numbers: 0x80 is OCP's -0, and becomes 0, since it is the other's NaN; 0x7f and 0xff are OCP's NaN, and
become 0x80. Sums are a quarter of what they stand for, and have the same bits: products lie between 2^-20 and 2^16, far
from the ends of f32. They are multiplied by 4 where they leave their registers, exactly.

f8e5m2 is no such type: where it has infinities, f8e5m2fnuz has numbers.
Sources: "OCP 8-bit Floating Point Specification (OFP8)", 2023, table 1; CDNA 3 ISA, "FP8 and BF8".
"""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.language.types import DType, f8e4m3, f8e4m3fnuz
from fusegen.targets.atoms import Atom, Issuer
from fusegen.targets.base import Target

HALVES: Mapping[DType, DType] = {f8e4m3: f8e4m3fnuz}
"""The type in which half of each number has the number's own code, but for -0 and NaN."""


def units(target: Target, left: DType, right: DType, issuer: Issuer | None = None) -> tuple[Atom, ...]:
    """What multiplies factors of those types, the largest first: as they are, or else MFMA as their halves, to which
    factors get through registers, where their codes are changed."""
    able = [atom for atom in target.atoms if issuer in (None, atom.issuer)]
    found = tuple(a for a in able if (a.factors, a.right_factors) == (left, right))
    halves = HALVES.get(left, left), HALVES.get(right, right)
    return found or tuple(a for a in able if a.kind == "mfma" and (a.factors, a.right_factors) == halves)


def halved(stored: DType, multiplied: DType) -> bool:
    """Is a factor of the type `stored` multiplied as its halves, which are of the type `multiplied`?"""
    return HALVES.get(stored) is multiplied


def halves_text(stored: tuple[DType, DType], atom: Atom) -> str:
    """`factors of f8e4m3 to their halves, of f8e4m3fnuz, and sums by 4: exactly`; empty where none are."""
    pairs = tuple(zip(stored, (atom.factors, atom.right_factors), strict=True))
    found = [pair for pair in pairs if halved(*pair)]
    if not found:
        return ""
    types, others = (", ".join(dict.fromkeys(map(str, kinds))) for kinds in zip(*found, strict=True))
    return f"factors of {types} to their halves, of {others}, and sums by {2 ** len(found)}: exactly"
