"""Chains of i32, whose values reach the ends of what it holds, and of masks."""

from __future__ import annotations

from tests.fuzzing import arithmetic, rows
from tests.fuzzing.bounded import KINDS, Kind, as_float, exact
from tests.fuzzing.draft import Output, Term, joined
from tests.fuzzing.drawing_choices import Choices

NUMBERS = (0, 1, -1, 2, 7, 255, 16777217, -16777217, 2147483647, -2147483648, 2147483646)
RANGES = ((-1, 1), (16777215, 16777217), (-2147483648, 2147483646), (-16777217, 2147483647), (5, -5))


class Integers(Choices):
    """Every op here is exact: a result that goes through f32 is wrong from 2^24 on."""

    kind = "integers"

    def declare(self) -> None:
        rng = self.random
        self.dtypes = ["i32"]
        self.pool.append(self.operand("i32", self.full, "n"))
        for _ in range(rng.choice((0, 1, 1, 2))):
            self.pool.append(self.operand("i32", self.part(), "n"))
        if rng.random() < 0.5:
            self.pool.append(self.operand("b8", self.part(), "m"))
        if rng.random() < 0.3:
            self.pool.append(self.operand("i32", (), "s"))

    def whole(self, *, varied: bool = False) -> Term:
        found = [t for t in self.pool if t.kind == "i" and (not varied or t.shape[-1:] == ("N",))]
        return self.random.choice(found[-5:] if self.random.random() < 0.6 else found)

    def some(self, *, varied: bool = False) -> Term:
        return self.whole(varied=varied)

    def step(self) -> None:
        rng = self.random
        draws = (self.pair, self.pair, self.extremes, self.clipped, self.reduce, self.where, self.bits, self.recast)
        rng.choice(draws)()

    def other(self) -> Term:
        return self.number(self.random.choice(NUMBERS)) if self.random.random() < 0.3 else self.whole()

    def pair(self) -> None:
        a, b, op = self.whole(), self.other(), self.random.choice("+-*")
        meaning = {"+": arithmetic.add, "-": arithmetic.sub, "*": arithmetic.mul}[op]
        self.push(f"{a.text} {op} {b.text}", "i", joined(a.shape, b.shape), meaning, [a, b])
        self.features.add("wrapping integers")

    def extremes(self) -> None:
        a, b, op = self.whole(), self.other(), self.random.choice(("maximum", "minimum"))
        meaning = arithmetic.maximum if op == "maximum" else arithmetic.minimum
        self.push(f"F.{op}({a.text}, {b.text})", "i", joined(a.shape, b.shape), meaning, [a, b])
        self.features.add("extremes of integers")

    def clipped(self) -> None:
        a, (low, high) = self.whole(), self.random.choice(RANGES)
        self.push(f"F.clip({a.text}, {low}, {high})", "i", a.shape, lambda x: arithmetic.clip(x, low, high), [a])

    def reduce(self) -> Term:
        a, op = self.whole(varied=True), self.random.choice(("max", "min"))
        self.features.add("extremes of a row of integers")
        text = f"F.cast(F.{op}({a.text}), i32)"
        return self.push(text, "i", (*a.shape[:-1], 1), rows.largest if op == "max" else rows.smallest, [a])

    def bits(self) -> None:
        a, b, op = self.whole(), self.other(), self.random.choice("&|^")
        self.push(f"{a.text} {op} {b.text}", "i", joined(a.shape, b.shape), arithmetic.BITS[op], [a, b])
        self.features.add("bits of integers")

    def recast(self) -> None:
        """There and back: by f32, which rounds, or to a mask."""
        a, to = self.whole(), self.random.choice(("f32", "b8"))
        found = self.push(f"F.cast({a.text}, {to})", KINDS[to], a.shape, lambda x: arithmetic.cast(x, to), [a])
        if to == "f32":
            scale = self.random.choice((1.0, 0.5, 3.0, 1e9))
            text = f"F.cast({found.text} * {scale!r}, i32)"
            meaning = lambda x: arithmetic.cast(arithmetic.mul(x, exact(scale)), "i32")  # noqa: E731
            self.push(text, "i", a.shape, meaning, [found])
            self.features.add("integers of floats")

    def score(self) -> Term:
        a, x = self.whole(varied=True), self.pool[0]
        if a.shape[:-1] != self.full[:-1]:
            a = self.let(f"F.maximum({a.text}, {x.text})", "i", joined(a.shape, x.shape), arithmetic.maximum, [a, x])
        return a

    def finish(self) -> None:
        if self.random.random() < 0.4:
            self.features.add("chosen by integers")
            super().finish()
            return
        for term in [t for t in reversed(self.pool) if t.shape and t.named][:3]:
            found = self.spanning(term)
            self.outputs.append(Output(found, self.stored_as(found.kind)))
            if self.random.random() < 0.5:
                break

    def spanning(self, term: Term) -> Term:
        x, shape = self.pool[0], term.shape
        if shape[:-1] == self.full[:-1] and shape[-1] in ("N", 1):
            return term
        shape = joined(shape, x.shape)
        if term.kind == "b":
            return self.let(f"F.where({term.text}, {x.text}, 1)", "i", shape, arithmetic.where,
                            [term, x, self.number(1)], False)  # fmt: skip
        if term.kind == "f":
            return self.let(f"{term.text} + F.cast({x.text}, f32)", "f", shape,
                            lambda a, b: arithmetic.add(a, as_float(b)), [term, x], False)  # fmt: skip
        return self.let(f"{term.text} + {x.text}", "i", shape, arithmetic.add, [term, x], False)

    def stored_as(self, kind: Kind) -> str:
        return {"f": "f32", "i": "i32", "b": "b8"}[kind]
