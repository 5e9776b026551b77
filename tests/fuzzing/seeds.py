"""What a seed stands for: its chain, its target, and the call that is judged."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tests.fuzzing.bounded import Array, Bounded, exact
from tests.fuzzing.choosing import Choice
from tests.fuzzing.draft import Draft, Operand, Values
from tests.fuzzing.drawing_attention import Attention
from tests.fuzzing.drawing_choices import Choices
from tests.fuzzing.drawing_integers import Integers
from tests.fuzzing.drawing_products import LargeProducts, Products
from tests.fuzzing.drawing_rows import Outputs, Rows
from tests.fuzzing.operands import Fill, Laid, content, draw_fill, known, lay, sized

TARGETS = ("cuda:sm_80", "cuda:h200", "cuda:b200", "hip:mi300x", "hip:gfx90a", "hip:gfx950", "hip:gfx1100")
# by the seed, modulo their number
ORDER: tuple[type[Draft], ...] = (
    Rows, Choices, Products, Rows, Integers, Rows, Choices, Outputs, Products, Rows, LargeProducts, Attention,
    Choices, Integers, Products, Outputs,
)  # fmt: skip
ROW_KINDS = (Rows, Outputs, Choices, Integers)
OF_MATRICES = ("products", "large products", "attention")  # whose operands may lie either way round


@dataclass(frozen=True)
class Case:
    """One seed. `sizes` are those of the call; the chain's own are what is compiled and validated."""

    seed: int
    draft: Draft
    target: str
    sizes: Mapping[str, int]
    fills: tuple[Fill, ...]  # of every operand drawn, whether an output needs it or not
    outs: tuple[Fill, ...] | None  # of what is passed as out=

    @property
    def rowwise(self) -> bool:
        return isinstance(self.draft, ROW_KINDS)

    @property
    def laid(self) -> bool:
        """Whether anything lies otherwise than plainly."""
        return any(fill.layout != "plain" for fill in (*self.fills, *(self.outs or ())))

    @property
    def features(self) -> set[str]:
        used = [fill for fill, needed in zip(self.fills, self.draft.used, strict=True) if needed]
        laid = {f"operand {fill.layout}" for fill in used}
        found = self.draft.features | {self.target, self.draft.kind, *laid}
        if any(fill.special for fill in used):
            found.add("special values")
        if any(fill.style == "ends" for fill in used):
            found.add("ends of i32")
        if self.outs is not None:
            found |= {"out=", *(f"out {fill.layout}" for fill in self.outs)}
        if any(self.sizes[name] != size for name, size in self.draft.sizes.items()):
            found.add("another batch")
        if 0 in self.sizes.values():
            found.add("no rows")
        return found - {""}


def bound(sizes: dict[str, int], draft: Draft) -> None:
    """Make the batch of a call no larger than those that are drawn for chains."""
    most = max(math.prod(draft.sizes.values()), Rows.most_elements)
    for name in sizes:
        if math.prod(sizes.values()) > most and name not in draft.fixed:
            sizes[name] = min(sizes[name], draft.sizes[name])


@dataclass(frozen=True)
class Call:
    """The operands of a case: as arrays and numbers, laid out and plain, and as what they mean."""

    laid: tuple[Laid | float, ...]
    plain: tuple[Array | float, ...]
    meant: tuple[Bounded, ...]

    @property
    def operands(self) -> list[Array | float]:
        return [one.array if isinstance(one, Laid) else one for one in self.laid]


def case(seed: int) -> Case:
    drawn = ORDER[seed % len(ORDER)]
    draft = drawn(seed)
    rng = random.Random(f"call {seed}")
    target = rng.choice(TARGETS)
    if drawn is LargeProducts and rng.random() < 0.6:
        target = "cuda:h200"
    sizes = dict(draft.sizes)
    if rng.random() < 0.5:
        for name in sizes:
            if name not in draft.fixed and rng.random() < 0.6:
                sizes[name] = rng.choice((0, *range(1, 8), *range(1, 8)))
    bound(sizes, draft)
    special = rng.random() < 0.3

    def drawn_fill(operand: Operand, out: bool = False) -> Fill:
        shape = sized(operand.shape, sizes)
        return draw_fill(rng, operand, shape, extreme=draft.kind == "integers", special=special,
                         matrices=draft.kind in OF_MATRICES and len(shape) >= 2 and not out, out=out)  # fmt: skip

    fills = tuple(drawn_fill(operand) for operand in draft.everything)
    outs = None
    if rng.random() < 0.4:
        outs = tuple(drawn_fill(Operand("out", out.dtype, out.term.shape), out=True) for out in draft.outputs)
    return Case(seed, draft, target, sizes, fills, outs)


def call_of(one: Case) -> Call:
    """The case's operands. Values come of numpy's generator of 64 bits, one for each operand."""
    laid: list[Laid | float] = []
    plain: list[Array | float] = []
    meant: list[Bounded] = []
    pairs = zip(one.draft.everything, one.fills, one.draft.used, strict=True)
    for index, (operand, fill, used) in enumerate(pairs):
        rng = np.random.Generator(np.random.PCG64([one.seed, index]))
        values = content(rng, operand, sized(operand.shape, one.sizes), fill)
        if not operand.shape:
            number = int(values) if operand.dtype == "i32" else float(values)
            meant.append(exact(number))
            if used:
                laid.append(number)
                plain.append(number)
            continue
        meant.append(known(values, operand.dtype))
        if used:
            laid.append(lay(values, fill))
            plain.append(lay(values, replace(fill, layout="plain")).array)
    return Call(tuple(laid), tuple(plain), tuple(meant))


@dataclass(frozen=True)
class Meaning:
    """What a call's outputs have to be, and what a selection has to choose."""

    outputs: list[Bounded]
    choice: Choice | None


def meaning(one: Case, call: Call, columns: Array | None = None) -> Meaning:
    """What is meant; or, of a selection in any order, what is meant at the `columns` that came."""
    values = Values(call.meant, one.sizes, columns)
    with np.errstate(all="ignore"):
        choice = one.draft.choice(values) if one.draft.choice else None
        return Meaning([out.term.of(values) for out in one.draft.outputs], choice)
