"""Sizes in C: `2 * dims[dim_N]`, of which one that does not come out even is FG_NONE."""

from __future__ import annotations

import math
from fractions import Fraction

from fusegen.errors import RequestError
from fusegen.language.sizes import Atom, Expr, Floor, Monomial, Size
from fusegen.language.types import Dim


def c_size(size: Size) -> str:
    """The size as an expression of 64 bits over `dims`."""
    if isinstance(size, int):
        return str(size) if abs(size) < 2**31 else f"INT64_C({size})"
    if isinstance(size, Dim):
        return f"dims[dim_{size.name}]"
    below = math.lcm(*(factor.denominator for _, factor in size.terms))
    terms = " + ".join(term(monomial, factor * below) for monomial, factor in size.terms).replace("+ -", "- ")
    return terms if below == 1 else f"fg_exact({terms}, {below})"


def term(monomial: Monomial, factor: Fraction) -> str:
    """One product of a sum. Raises RequestError for what is divided by a dim within it."""
    words = [] if factor == 1 and monomial else [str(factor)]
    for atom, exponent in monomial:
        if exponent < 0:
            raise RequestError(f"the size {Expr(((monomial, factor),))} is divided by a dim, which no export does")
        words += [atom_text(atom)] * exponent
    return " * ".join(words)


def atom_text(atom: Atom) -> str:
    if isinstance(atom, Floor):
        return f"fg_floor({c_size(atom.above)}, {c_size(atom.below)})"
    return c_size(atom)


def quoted(text: str) -> str:
    """A text as a string of C, in ASCII."""
    plain = text.encode("ascii", "replace").decode()
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
