"""A struct in shared memory, declared once: its lines in the kernel, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TYPE_BYTES = {"int": 4, "unsigned": 4, "float": 4, "Entry": 8}  # of one element, and what it is aligned to
ROUND_BYTES = 16  # bytes that shared memory is counted in


@dataclass(frozen=True, slots=True)
class Count:
    """A number, and how the kernel spells it: 257 is `bins + 1`."""

    text: str
    number: int

    def __add__(self, other: Count | int) -> Count:
        return Count(f"{self} + {other}", int(self) + int(other))

    def __mul__(self, other: Count) -> Count:
        return Count(f"{self} * {other}", int(self) * int(other))

    def __int__(self) -> int:
        return self.number

    def __str__(self) -> str:
        return self.text


Extents = tuple[Count | int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A line of a struct: values or arrays of one type, and a comment on them."""

    ctype: str
    arrays: tuple[tuple[str, Extents], ...]
    comment: str

    @property
    def bytes(self) -> int:
        total = 0
        for _, extents in self.arrays:
            size = TYPE_BYTES[self.ctype]
            for extent in extents:
                size *= int(extent)
            total += size
        return total

    def __str__(self) -> str:
        names = (name + "".join(f"[{extent}]" for extent in extents) for name, extents in self.arrays)
        return f"{self.ctype} {', '.join(names)};{f'  // {self.comment}' if self.comment else ''}"


def member(ctype: str, comment: str = "", **arrays: Extents) -> Member:
    """`unsigned counts[2][warps];` is member("unsigned", counts=(2, warps)); a value alone has no extents."""
    return Member(ctype, tuple(arrays.items()), comment)


@dataclass(frozen=True, slots=True)
class Struct:
    """Members in the order of the declaration."""

    name: str
    members: tuple[Member, ...]
    aligned: bool = True  # to 16 bytes, by its own declaration

    @property
    def bytes(self) -> int:
        """As the compiler lays it out, in whole 16 bytes."""
        at = 0
        for found in self.members:
            at = -(-at // TYPE_BYTES[found.ctype]) * TYPE_BYTES[found.ctype] + found.bytes
        return -(-at // ROUND_BYTES) * ROUND_BYTES

    def lines(self) -> Iterator[str]:
        """Its declaration."""
        yield f"struct {f'alignas({ROUND_BYTES}) ' if self.aligned else ''}{self.name} {{"
        for found in self.members:
            yield f"  {found}"
        yield "};"
