"""F.einsum: Einstein's summation where it is products, sums over axes and elementwise steps that there are.

What two operands share and the result has not is summed. Where each of them has axes besides that the result keeps, it
is a matrix product, of axes merged and permuted as views; else values are multiplied element by element, and summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusegen.errors import SpecError
from fusegen.language.axes import reduce
from fusegen.language.elementwise import need_traced
from fusegen.language.rearranging import rearrange
from fusegen.language.trace import Value, caller, composite, product
from fusegen.language.types import Size, shape_text

Letters = str


@composite
def einsum(pattern: str, *operands: Value, precision: str | None = None) -> Value:
    """Of one or two operands, in numpy's notation: `F.einsum("bmk,bnk->bmn", x, w)`, a letter an axis. Of no axes: [1].

    A matrix product, which takes factors as F.matmul does, where both operands have axes that the result keeps beside
    those summed; else products element by element, and sums. No letter stands twice in one operand.
    """
    if precision not in (None, "tf32"):
        raise SpecError(f"einsum: precision={precision!r}; it is None, or 'tf32' for f32 factors", caller())
    terms, out, sizes = letters_of(pattern, operands)
    counted = Counter("".join(terms))
    alone = [
        summed(x, own, "".join(a for a in own if a in out or counted[a] > 1))
        for x, own in zip(operands, terms, strict=True)
    ]
    if len(alone) == 1:
        return ordered(*alone[0], out)
    (left, rows), (right, cols) = alone
    shared = [a for a in rows if a in cols and a not in out]
    if shared and set(rows) - set(cols) and set(cols) - set(rows):
        return multiplied(left, rows, right, cols, out, sizes, precision)
    whole = rows + "".join(a for a in cols if a not in rows)
    z = beside(left, rows, whole) * beside(right, cols, whole)
    return ordered(*summed(z, whole, "".join(a for a in whole if a in out)), out)


def letters_of(pattern: object, operands: Sequence[Value]) -> tuple[list[Letters], Letters, dict[str, Size]]:
    """The letters of each operand and of the result, and the size of each. Raises SpecError."""
    if not isinstance(pattern, str) or pattern.count("->") != 1:
        raise SpecError(f'einsum: {pattern!r} is no pattern; write it as in F.einsum("mk,nk->mn", x, w)', caller())
    left, out = pattern.replace(" ", "").split("->")
    terms = left.split(",")
    if not all(c.isascii() and c.isalpha() for c in "".join(terms) + out):
        raise SpecError(f"einsum: {pattern!r}: every axis is one letter; `...` is not taken", caller())
    if len(terms) != len(operands) or len(terms) > 2:
        said = "it takes one or two; of more, take two at a time" if len(operands) > 2 else f"it says {len(terms)}"
        raise SpecError(f"einsum: {pattern!r} of {len(operands)} operands: {said}", caller())
    for one in (*terms, out):
        if len(set(one)) < len(one):
            raise SpecError(f"einsum: {pattern!r}: a letter stands twice in {one!r}; diagonals are not taken", caller())
    sizes: dict[str, Size] = {}
    for own, x in zip(terms, operands, strict=True):
        need_traced("einsum", x)
        if len(own) != len(x.shape):
            raise SpecError(f"einsum: {pattern!r}: {own!r} names other axes than {shape_text(x.shape)} has", caller())
        for letter, size in zip(own, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise SpecError(f"einsum: {pattern!r}: {letter} is {sizes[letter]} and {size}", caller())
    if odd := sorted(set(out) - set(sizes)):
        raise SpecError(f"einsum: {pattern!r}: no operand has the result's {', '.join(odd)}", caller())
    return terms, out, sizes


def summed(x: Value, own: Letters, kept: Letters) -> tuple[Value, Letters]:
    """x summed over the axes that are not kept, and the letters that are left."""
    gone = tuple(place - len(own) for place, letter in enumerate(own) if letter not in kept)
    if gone:
        still = own[-1:] if not kept else ""  # what has no axes is an array of one element
        x = reduce("sum", x, gone)[tuple(slice(None) if a in kept + still else 0 for a in own)]
    return x, "".join(a for a in own if a in kept)


def ordered(x: Value, own: Letters, out: Letters) -> Value:
    return x if own == out else rearrange(x, f"{' '.join(own)} -> {' '.join(out)}")


def beside(x: Value, own: Letters, whole: Letters) -> Value:
    """x as it meets values that have all of `whole`."""
    inside = "".join(a for a in whole if a in own)
    spread = " ".join(a if a in own else "1" for a in whole).lstrip("1 ")
    return x if inside == own and spread == " ".join(own) else rearrange(x, f"{' '.join(own)} -> {spread}")


def multiplied(
    left: Value, rows: Letters, right: Value, cols: Letters, out: Letters, sizes: dict[str, Size],
    precision: str | None,
) -> Value:  # fmt: skip
    """A matrix product of both, whose axes are brought together as leading ones, rows, columns, and what is summed."""
    lead = [a for a in rows if a in cols and a in out]
    inner = [a for a in rows if a in cols and a not in out]
    own, other = ([a for a in side if a in out and a not in lead] for side in (rows, cols))
    a = brought(left, rows, lead, own, inner)
    b = brought(right, cols, lead, other, inner)
    z = product("matmul_tf32" if precision else "matmul", a, b.mT)
    made, wanted = [*lead, *own, *other], list(out)
    if made == wanted and len(own) == len(other) == 1:
        return z
    spelled = f"{' '.join(lead)} ({' '.join(own)}) ({' '.join(other)}) -> {' '.join(out)}"
    return rearrange(z, spelled, **{letter: sizes[letter] for letter in (*own, *other)})


def brought(x: Value, own: Letters, lead: list[str], lines: list[str], inner: list[str]) -> Value:
    """x as matrices: a row for each element of `lines`, the axes that are summed along it."""
    if [*lead, *lines, *inner] == list(own) and len(lines) == len(inner) == 1:
        return x
    if [*lead, *inner, *lines] == list(own) and len(lines) == len(inner) == 1:
        return x.mT
    return rearrange(x, f"{' '.join(own)} -> {' '.join(lead)} ({' '.join(lines)}) ({' '.join(inner)})")
