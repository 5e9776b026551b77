"""A spec under construction: its operands, its lines, its outputs, and what each of them means."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tests.fuzzing.bounded import KINDS, Array, Bounded, Kind, exact
from tests.fuzzing.choosing import Choice
from tests.fuzzing.names import Names

Size = str | int  # a dim's name, or a number in its place
Shape = tuple[Size, ...]
Meaning = Callable[..., Bounded]

NUMBERS = (0, 1, 2, -1, 3, 0.5, -0.25, 1.5, 2.0, 1e-3, -3.0, 0.1, 7, 0.70710678, 100, -0.0, 1.0 / 3)


@dataclass
class Values:
    """What the operands of one call are, and what has been evaluated of them."""

    operands: Sequence[Bounded]
    sizes: Mapping[str, int]
    columns: Array | None = None  # what a selection is taken to have chosen
    known: dict[int, Bounded] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Term:
    """A value of the chain: the text that stands for it, and its meaning."""

    text: str
    kind: Kind
    shape: Shape
    run: Callable[[Values], Bounded]

    @property
    def named(self) -> bool:
        return self.text.isidentifier()

    @property
    def literal(self) -> bool:
        return self.text[0] in "-0123456789"

    @property
    def varies(self) -> bool:
        """Along the row."""
        return bool(self.shape) and self.shape[-1] != 1

    def of(self, values: Values) -> Bounded:
        if id(self) not in values.known:
            values.known[id(self)] = self.run(values)
        return values.known[id(self)]


@dataclass(frozen=True)
class Operand:
    name: str
    dtype: str
    shape: Shape  # empty: a run-time scalar
    special: bool = False  # always holds infinities, NaN and the like

    @property
    def declared(self) -> str:
        sizes = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.name}: {self.dtype}{sizes}"


@dataclass(frozen=True)
class Output:
    term: Term
    dtype: str


class Draft:
    """Draws a chain. `sizes` has every dim's default; `features` names what was drawn that tests ask for."""

    kind: ClassVar[str]
    fixed: ClassVar[frozenset[str]] = frozenset("NKL")  # dims that are compiled in

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{self.kind} {seed}")
        awkward = self.random.random() < 0.25
        self.names = Names(self.random, awkward)
        self.builtins = not awkward  # else an operand may hide what the text would call
        self.sizes: dict[str, int] = {}
        self.operands: list[Operand] = []
        self.lines: list[str] = []
        self.outputs: list[Output] = []
        self.features: set[str] = {"awkward names"} if awkward else set()
        self.choice: Callable[[Values], Choice] | None = None  # of a selection
        self.chosen_at: int | None = None  # the output that holds its columns
        self.ordered = True
        self.build()
        self.prune()

    def build(self) -> None:
        """Draw operands, lines and outputs."""
        raise NotImplementedError

    # ---------------------------------------------------------------- terms

    def operand(self, dtype: str, shape: Sequence[Size], stem: str = "x", special: bool = False) -> Term:
        index, name = len(self.operands), self.names.new(stem)
        self.operands.append(Operand(name, dtype, tuple(shape), special))
        return Term(name, KINDS[dtype], tuple(shape), lambda values: values.operands[index])

    def let(
        self, text: str, kind: Kind, shape: Shape, meaning: Meaning, arguments: Sequence[Term],
        inline: bool | None = None,
    ) -> Term:  # fmt: skip
        """A line of its own, or a text that stands where the value is used."""
        if inline is None:
            inline = len(text) < 70 and self.random.random() < 0.3

        def run(values: Values) -> Bounded:
            return meaning(*(a.of(values) for a in arguments))

        if inline:
            return Term(f"({text})", kind, shape, run)
        name = self.names.new("v")
        self.lines.append(f"{name} = {text}")
        return Term(name, kind, shape, run)

    def number(self, value: float) -> Term:
        text = repr(value)
        if isinstance(value, float) and not math.isfinite(value):
            text = f'float("{value}")' if self.builtins else {"inf": "1e999", "-inf": "-1e999"}.get(text, "(1e999 * 0)")
        return Term(text, "i" if isinstance(value, int) else "f", (), lambda _: exact(value))

    def magnitude(self, text: str) -> str:
        return f"abs({text})" if self.builtins and self.random.random() < 0.5 else f"F.abs({text})"

    # ---------------------------------------------------------------- text

    @property
    def dims(self) -> list[str]:
        used = {str(size) for operand in self.operands for size in operand.shape}
        return [name for name in self.sizes if name in used]

    @property
    def text(self) -> str:
        """The spec, as a user could have written it."""
        types = [f"{out.dtype}[{', '.join(map(str, out.term.shape))}]" for out in self.outputs]
        returned = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
        names, body = self.dims, "\n".join(f"    {line}" for line in self.lines)
        sizes = ", ".join(f"{name}={self.sizes[name]}" for name in names)
        declared = f'{", ".join(names)}{"," * (len(names) == 1)} = dims("{" ".join(names)}")\n' if names else ""
        return (
            "from fusegen import b8, bf16, chain, dims, f16, f32, i32\nfrom fusegen import ops as F\n\n"
            f"{declared}\n\n@chain({sizes})\n"
            f"def fuzz({', '.join(one.declared for one in self.operands)}) -> {returned}:\n"
            f"{body}\n    return {', '.join(out.term.text for out in self.outputs)}\n"
        )

    def prune(self) -> None:
        """Drop lines and operands that no output needs: a spec may have no operand without a use."""
        needed = " ".join(out.term.text for out in self.outputs)
        kept: list[str] = []
        for line in reversed(self.lines):
            name, text = line.split(" = ", 1)
            if any(mentions(needed, one) for one in name.split(", ")):
                kept.append(line)
                needed += " " + text
        self.lines = kept[::-1]
        self.used = [mentions(needed, operand.name) for operand in self.operands]
        self.everything = list(self.operands)
        self.operands = [one for one, used in zip(self.operands, self.used, strict=True) if used]


def mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def joined(*shapes: Shape) -> Shape:
    """The shape that they broadcast to."""
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in axis if size != 1), 1) for axis in zip(*full, strict=True))
