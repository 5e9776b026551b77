"""Sizes: dims, and what is computed from them, such as `2 * N`, `H * D`, `D // 2` and `N - 1`.

    Size = int | Dim | Expr

Equal sizes compare equal, however they were written: `D - D // 2` is `D // 2`. For that, `//` of a product is exact:
`D // 2` is half of D, and D has to be even wherever it is a size. `//` of a sum rounds down: `(N + 127) // 128` counts
blocks of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Number
from typing import Any, NoReturn

from fusegen.errors import SpecError

as_number: ContextVar[Callable[[Size], Any] | None] = ContextVar("fusegen_as_number", default=None)
"""While a spec's body runs, what makes a traced value of a size: `0.5 * D` is one."""


class _Arithmetic:
    """What a Dim and an Expr can do: + - * // with sizes; with other numbers, in a spec's body, a traced value."""

    __slots__ = ()
    __array_ufunc__ = None  # numpy scalars hand over to what stands below

    def __add__(self, other: Any) -> Any:
        return _combined("+", _added, self, other)

    def __radd__(self, other: Any) -> Any:
        return _combined("+", _added, other, self)

    def __sub__(self, other: Any) -> Any:
        return _combined("-", _subtracted, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _combined("-", _subtracted, other, self)

    def __mul__(self, other: Any) -> Any:
        return _combined("*", _multiplied, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _combined("*", _multiplied, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _combined("//", _divided, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _combined("//", _divided, other, self)

    def __neg__(self) -> Any:
        return _multiplied(-1, self)  # type: ignore[arg-type]

    def __truediv__(self, other: Any) -> Any:
        return _combined("/", None, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _combined("/", None, other, self)

    def __pow__(self, other: Any) -> Any:
        if isinstance(other, Integral) and not isinstance(other, bool) and int(other) >= 0:
            power: Size = 1
            for _ in range(int(other)):
                power = _multiplied(power, self)  # type: ignore[arg-type]
            return power
        return _combined("**", None, self, other)

    def __rpow__(self, other: Any) -> Any:
        return _combined("**", None, other, self)

    def _unknown(self, *_: object) -> NoReturn:
        raise SpecError(
            f"the size {self} is no known number while a chain is traced: a chain is traced once for all sizes\n"
            "  give every size by its name; F.where(condition, a, b) chooses between values"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _unknown
    __bool__ = _unknown

    def _no_float(self, *_: object) -> NoReturn:
        raise SpecError(
            f"the size {self} is no Python number while a chain is traced\n"
            f"  in arithmetic with values it is its number; functions of fusegen.ops take it too, as in F.sqrt({self})"
        )

    __float__ = __int__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _no_float


@dataclass(frozen=True, slots=True)
class Dim(_Arithmetic):
    """A named size. Two dims are the same when their names are. `groups`: of rows that are ragged, how many groups of
    them grouped products take (`ragged`)."""

    name: str
    groups: Dim | int | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Floor:
    """A sum over a size, rounded down: what `//` is where it need not come out even."""

    above: Size
    below: Size

    def __str__(self) -> str:
        above, below = (str(s) if isinstance(s, (int, Dim)) else f"({s})" for s in (self.above, self.below))
        return f"{above} // {below}"


Atom = Dim | Floor
Monomial = tuple[tuple[Atom, int], ...]
"""Atoms with their exponents, in the order of their texts: ((Dim('D'), 1), (Dim('H'), 1)) is D * H."""


@dataclass(frozen=True, slots=True)
class Expr(_Arithmetic):
    """A size computed from dims, in its normal form: a sum of products, each with its factor, none of them 0.

    What is only a number or only a dim is an int or a Dim, never an Expr.
    """

    terms: tuple[tuple[Monomial, Fraction], ...]

    def __str__(self) -> str:
        texts = [_term_text(monomial, abs(factor)) for monomial, factor in self.terms]
        signs = ["-" if factor < 0 else "+" for _, factor in self.terms]
        first = f"-{texts[0]}" if signs[0] == "-" else texts[0]
        return " ".join([first, *(f"{sign} {text}" for sign, text in zip(signs[1:], texts[1:], strict=True))])

    def __repr__(self) -> str:
        return f"<size {self}>"


Size = int | Dim | Expr
Shape = tuple[Size, ...]
Terms = dict[Monomial, Fraction]


def _term_text(monomial: Monomial, factor: Fraction) -> str:
    """`3 * D // 2`; read as Python, it is the same size."""
    above = [str(factor.numerator)] if factor.numerator != 1 else []
    below = [str(factor.denominator)] if factor.denominator != 1 else []
    for atom, exponent in monomial:
        text = f"({atom})" if isinstance(atom, Floor) else str(atom)
        (above if exponent > 0 else below).extend([text] * abs(exponent))
    top = " * ".join(above) or "1"
    if len(below) > 1:
        return f"{top} // ({' * '.join(below)})"
    if top[0] == "(" and len(above) == 1 and not below:
        return top[1:-1]
    return f"{top} // {below[0]}" if below else top


def _combined(symbol: str, made: Callable[[Size, Size], Size] | None, left: Any, right: Any) -> Any:
    """`left symbol right`, one of which is a size: a size where both are, a traced value with other numbers."""
    sides = [int(s) if isinstance(s, Integral) and not isinstance(s, bool) else s for s in (left, right)]
    if made and all(isinstance(s, (int, Dim, Expr)) and not isinstance(s, bool) for s in sides):
        return made(*sides)
    if not all(isinstance(s, (Number, Dim, Expr)) for s in sides):
        return NotImplemented  # a traced value says it better
    number = as_number.get()
    if number is None:
        raise SpecError(
            f"{left} {symbol} {right}: sizes are whole numbers, computed with + - * and //\n"
            "  in the body of a chain, a size is a number as well"
        )
    one, other = (number(s) if isinstance(s, (Dim, Expr)) else s for s in (left, right))
    return {"+": _plus, "-": _minus, "*": _times, "/": _over, "//": _over_down, "**": _to_the}[symbol](one, other)


def _plus(a: Any, b: Any) -> Any:
    return a + b


def _minus(a: Any, b: Any) -> Any:
    return a - b


def _times(a: Any, b: Any) -> Any:
    return a * b


def _over(a: Any, b: Any) -> Any:
    return a / b


def _over_down(a: Any, b: Any) -> Any:
    return a // b


def _to_the(a: Any, b: Any) -> Any:
    return a**b


# ---------------------------------------------------------------- the normal form


def _terms(size: Size) -> Terms:
    if isinstance(size, Expr):
        return dict(size.terms)
    if isinstance(size, Dim):
        return {((size, 1),): Fraction(1)}
    return {(): Fraction(size)} if size else {}


def _size(terms: Terms) -> Size:
    """The size with these terms: the largest products first, a number last."""
    kept = {monomial: factor for monomial, factor in terms.items() if factor}
    if not kept:
        return 0
    if len(kept) == 1:
        ((monomial, factor),) = kept.items()
        if not monomial and factor.denominator == 1:
            return int(factor)
        if factor == 1 and len(monomial) == 1 and monomial[0][1] == 1 and isinstance(monomial[0][0], Dim):
            return monomial[0][0]

    def place(term: tuple[Monomial, Fraction]) -> tuple[int, str]:
        return -sum(abs(exponent) for _, exponent in term[0]), _term_text(term[0], Fraction(1))

    return Expr(tuple(sorted(kept.items(), key=place)))


def _added(a: Size, b: Size) -> Size:
    if a == 0 or b == 0:  # of views' steps, most are
        return b if a == 0 else a
    terms = _terms(a)
    for monomial, factor in _terms(b).items():
        terms[monomial] = terms.get(monomial, Fraction(0)) + factor
    return _size(terms)


def _subtracted(a: Size, b: Size) -> Size:
    return _added(a, _multiplied(-1, b))


def _multiplied(a: Size, b: Size) -> Size:
    if a == 1 or b == 1:
        return b if a == 1 else a
    terms: Terms = {}
    for one, factor in _terms(a).items():
        for other, by in _terms(b).items():
            monomial = _product(one, other)
            terms[monomial] = terms.get(monomial, Fraction(0)) + factor * by
    return _size(terms)


def _product(one: Monomial, other: Monomial, sign: int = 1) -> Monomial:
    exponents = dict(one)
    for atom, exponent in other:
        exponents[atom] = exponents.get(atom, 0) + sign * exponent
    return tuple(sorted(((a, e) for a, e in exponents.items() if e), key=lambda pair: str(pair[0])))


def _divided(a: Size, b: Size) -> Size:
    """a // b: exact where a and b are products, or every part of a is a multiple of b; else rounded down."""
    below = _terms(b)
    if not below:
        raise SpecError(f"{a} // {b}: a size can't be divided by 0")
    if a == b:
        return 1
    if b == 1:  # whatever parts of a are halves: it is a size
        return a
    above = _terms(a)
    if len(below) == 1:
        ((by, factor),) = below.items()
        quotient = {_product(monomial, by, -1): value / factor for monomial, value in above.items()}
        if len(above) <= 1 or all(map(_whole, quotient, quotient.values())):
            return _size(quotient)
    return _size({((Floor(a, b), 1),): Fraction(1)})


def evenly(a: Size, b: Size) -> Size:
    """a // b of what has to come out even, as an axis that is split does: of a sum too, `N // 2 - 1` of N - 2."""
    below = _terms(b)
    if len(below) != 1 or len(_terms(a)) < 2:
        return _divided(a, b)
    ((by, factor),) = below.items()
    return _size({_product(monomial, by, -1): value / factor for monomial, value in _terms(a).items()})


def _whole(monomial: Monomial, factor: Fraction) -> bool:
    return factor.denominator == 1 and all(exponent > 0 for _, exponent in monomial)


# ---------------------------------------------------------------- what others ask


def dims(names: str) -> tuple[Dim, ...]:
    """`M, N = dims("M N")`. Raises SpecError for a name that is not an identifier or appears twice."""
    if not isinstance(names, str):
        raise SpecError(f"dims: {names!r} is no text; write names in one text, as in dims('M N')")
    found = names.replace(",", " ").split()
    if not found:
        raise SpecError("dims: there is no name in it; write names apart, as in dims('M N')")
    for name in found:
        if not name.isidentifier():
            raise SpecError(f"dims: {name!r} is not a name; write names apart, as in dims('M N')")
    if len(set(found)) < len(found):
        raise SpecError(f"dims: a name appears twice in {names!r}")
    return tuple(Dim(name) for name in found)


def ragged(name: str, groups: Dim | int) -> Dim:
    """A dim whose rows lie in so many groups, one behind the other, as experts' tokens: `T = ragged("T", groups=E)`.

    Where each group ends is an i32 operand [groups], or computed: `F.grouped_matmul(x, w, ends)` takes x [T, K], and
    refuses ends of another number of groups where an operand is declared so. In all else it is the dim of that name.
    Raises SpecError.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"ragged: {name!r:.80} is not a name; write it as in ragged('T', groups=E)")
    if isinstance(groups, bool) or not isinstance(groups, Dim | int) or (isinstance(groups, int) and groups < 1):
        raise SpecError(f"ragged: found groups {groups!r:.80}; wanted a dim, or a number from 1 on")
    return Dim(name, groups)


def dims_in(size: Size | Shape) -> Iterator[Dim]:
    """The dims that a size or a shape is made of, as often as they stand there."""
    if isinstance(size, tuple):
        for one in size:
            yield from dims_in(one)
    elif isinstance(size, Dim):
        yield size
    elif isinstance(size, Expr):
        for monomial, _ in size.terms:
            for atom, _ in monomial:
                yield from (atom,) if isinstance(atom, Dim) else dims_in((atom.above, atom.below))


def unit_of(sizes: Iterable[Size], name: str) -> int:
    """A number whose multiples, as the dim's size, leave these sizes whole: 128 of `N // 128`."""
    terms = (term for size in sizes if isinstance(size, Expr) for term in size.terms)
    return math.lcm(*(factor.denominator for monomial, factor in terms if (Dim(name), 1) in monomial))


def size_of(size: Size, sizes: Mapping[str, int]) -> int:
    """The number behind a size. Raises SpecError where it does not come out even: `D // 2` of an odd D."""
    if isinstance(size, int):
        return size
    if isinstance(size, Dim):
        return sizes[size.name]
    total = Fraction(0)
    for monomial, factor in size.terms:
        for atom, exponent in monomial:
            base = (
                sizes[atom.name]
                if isinstance(atom, Dim)
                else _floor(size_of(atom.above, sizes), size_of(atom.below, sizes), size, sizes)
            )
            if not base and exponent < 0:
                raise uneven(size, sizes)
            factor *= Fraction(base) ** exponent
        total += factor
    if total.denominator != 1:
        raise uneven(size, sizes)
    return int(total)


def _floor(above: int, below: int, size: Size, sizes: Mapping[str, int]) -> int:
    if not below:
        raise uneven(size, sizes)
    return above // below


def replaced(size: Size, table: Mapping[str, Size]) -> Size:
    """The size with others in place of its dims of those names: H * S * 2 for N * 2, where N is H * S."""
    if isinstance(size, int):
        return size
    if isinstance(size, Dim):
        return table.get(size.name, size)
    total: Size = 0
    for monomial, factor in size.terms:
        above: Size = factor.numerator
        below: Size = factor.denominator
        for atom, exponent in monomial:
            base = (
                table.get(atom.name, atom)
                if isinstance(atom, Dim)
                else replaced(atom.above, table) // replaced(atom.below, table)
            )
            for _ in range(abs(exponent)):
                above, below = (above * base, below) if exponent > 0 else (above, below * base)
        total = total + above // below
    return total


def uneven(size: Size, sizes: Mapping[str, int]) -> SpecError:
    return SpecError(f"the size {size} does not come out even at {at_text(size, sizes)}")


def at_text(size: Size | Shape, sizes: Mapping[str, int]) -> str:
    """`D=65, H=8`: the dims that a size is made of, as they are."""
    return ", ".join(f"{name}={sizes[name]}" for name in dict.fromkeys(d.name for d in dims_in(size)))


def shape_text(shape: Shape) -> str:
    """`[M, 2 * N]`, the way shapes are written everywhere."""
    return f"[{', '.join(map(str, shape))}]"


def leading_sign(size: Size) -> int | None:
    """The sign that a size has where its dims are large: 1 or -1, and 1 for 0; None where that depends on which."""
    if isinstance(size, int):
        return -1 if size < 0 else 1
    terms = _terms(size)
    degree = max(map(_degree, terms))
    signs = {factor > 0 for monomial, factor in terms.items() if _degree(monomial) == degree}
    return None if len(signs) > 1 else 1 if signs.pop() else -1


def _degree(monomial: Monomial) -> int:
    return sum(exponent for _, exponent in monomial)


def without_number(size: Size) -> tuple[Size, int]:
    """A sum's part that depends on dims, and the number that is added to it."""
    terms = _terms(size)
    number = terms.pop((), Fraction(0))
    return _size(terms), int(number)


def solved(size: Size, name: str, whole: Size) -> Size | None:
    """What the dim of that name is where `size` is `whole`: of `2 * N`, half of it. None where it doesn't follow."""
    terms = {monomial: factor for monomial, factor in _terms(size).items() if _depends(monomial, name)}
    if len(terms) != 1 or sum(d.name == name for d in dims_in(size)) != 1:
        return None
    ((monomial, factor),) = terms.items()
    if dict(monomial).get(Dim(name)) != 1:
        return None
    by = tuple((atom, exponent) for atom, exponent in monomial if atom != Dim(name))
    rest = _subtracted(whole, _subtracted(size, _size(terms)))
    return _size({_product(other, by, -1): value / factor for other, value in _terms(rest).items()})


def _depends(monomial: Monomial, name: str) -> bool:
    return any(d.name == name for d in dims_in(_size({monomial: Fraction(1)})))


def broadcast(a: Shape, b: Shape) -> Shape:
    """The numpy broadcast of two symbolic shapes; ValueError names the two sizes that differ."""
    rank = max(len(a), len(b))
    left: Shape = (1,) * (rank - len(a)) + a
    right: Shape = (1,) * (rank - len(b)) + b
    shape: list[Size] = []
    for one, other in zip(left, right, strict=True):
        if one != other and one != 1 and other != 1:
            raise ValueError(f"{one} and {other}")
        shape.append(other if one == 1 else one)
    return tuple(shape)


def measured(axes: Iterable[tuple[Size, int]]) -> dict[str, int]:
    """The dims that sizes and their numbers tell: plain ones first, then those that follow from `2 * N`."""
    pairs = list(axes)
    found = {size.name: number for size, number in pairs if isinstance(size, Dim)}
    for size, number in pairs:
        unknown = {dim.name for dim in dims_in(size) if dim.name not in found}
        if len(unknown) == 1:
            name = unknown.pop()
            told = solved(size, name, number)
            if told is not None:
                found[name] = size_of(told, found)
    return found
