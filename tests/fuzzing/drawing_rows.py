"""Chains over rows: elementwise ops, reductions, composites, masks, casts, and up to three outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.fuzzing import arithmetic, rows
from tests.fuzzing.bounded import KINDS, Bounded, Kind, as_float, exact
from tests.fuzzing.draft import NUMBERS, Draft, Meaning, Output, Shape, Size, Term, joined

WIDTHS = (
    1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 24, 31, 32, 33, 37, 48, 61, 64, 65, 96, 100, 127, 128, 129, 160, 191, 250,
    255, 256, 257, 264, 384, 500, 511, 512, 513, 577, 777, 1000, 1009, 1021, 1023, 1024, 1025, 1536, 2000, 2047, 2048,
    2049, 2056, 3001, 4095, 4096, 4097, 5000, 8191, 8192, 8193, 10007, 16384, 20000, 33000,
)  # fmt: skip
EXPONENTS = (0.5, 1, 2, 3, 4, -1, 1.5, -0.5, -2, 5, 0, 2.7, 3.0, 1 / 3, 0.75, 7)
FLOATS = ("f16", "bf16", "f32")


class Rows(Draft):
    kind = "rows"
    most_elements = 30_000
    scans = True

    # ---------------------------------------------------------------- the whole

    def build(self) -> None:
        self.draw_sizes()
        self.pool: list[Term] = []
        self.declare()
        for _ in range(self.random.randint(1, 9)):
            self.step()
        self.finish()

    def draw_sizes(self) -> None:
        rng = self.random
        rank = rng.choice((0, 1, 1, 1, 2, 2, 3, 4))
        names = ["B", "H", "S", "M"][4 - rank :]
        width, count = rng.choice(WIDTHS), 1
        most = self.most_elements if rng.random() < 0.9 else 2 * self.most_elements
        for name in names:
            size = rng.choice((1, 1, 2, 3, 4, 5, 7, 9, 17, 33) if rank < 3 else (1, 1, 2, 3, 5))
            while count * size * width > most and size > 1:
                size //= 2
            self.sizes[name], count = size, count * size
        self.sizes["N"] = width
        axes: list[Size] = [self.sizes[n] if rng.random() < 0.12 and self.sizes[n] > 1 else n for n in names]
        if axes and width < 65 and rng.random() < 0.06:
            axes[-1] = "N"
            self.features.add("a square of one dim")
        self.full: Shape = (*axes, "N")
        self.features |= {f"{rank} leading axes", "a number for a dim" if any(isinstance(a, int) for a in axes) else ""}
        self.features |= {"one column"} if width == 1 else {"ragged rows"} if width % 8 else set()
        self.dtypes = rng.choice((["f16"], ["bf16"], ["f32"], ["f32", "f16"], ["bf16", "f32"], list(FLOATS)))

    def declare(self) -> None:
        rng = self.random
        self.pool.append(self.operand(self.stored(), self.full))
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
            self.pool.append(self.operand(self.stored(), self.part()))
        if rng.random() < 0.3:
            self.pool.append(self.operand("b8", self.part(), "m"))
        if rng.random() < 0.2:
            self.pool.append(self.operand("i32", self.part(), "n"))
        if rng.random() < 0.25:
            self.pool.append(self.operand(rng.choice(("f32", "f32", "i32")), (), "s"))

    def step(self) -> None:
        draws: Sequence[tuple[float, Callable[[], object]]] = (
            (0.28, self.binary), (0.5, self.unary), (0.62, self.reduce), (0.74, self.composite), (0.84, self.where),
            (0.9, self.casts), (0.95, self.indices), (1.0, self.power),
        )  # fmt: skip
        drawn = self.random.random()
        next(draw for upto, draw in draws if drawn < upto)()

    def finish(self) -> None:
        """One to three outputs, the latest values first; each of them spans the rows."""
        rng = self.random
        wanted = rng.choice((1, 1, 1, 2, 2, 3))
        for term in [t for t in reversed(self.pool) if t.shape and t.named][:8]:
            if len(self.outputs) == wanted:
                break
            if term is self.pool[0] and rng.random() < 0.8:
                continue
            term = self.spanning(term)
            self.outputs.append(Output(term, self.stored_as(term.kind)))
        if not self.outputs:
            x = self.pool[0]
            term = self.let(f"{x.text} + 1", "f", x.shape, lambda a: arithmetic.add(a, exact(1)), [x], False)
            self.outputs.append(Output(term, self.stored()))
        self.features.add(f"{len(self.outputs)} outputs")

    def spanning(self, term: Term) -> Term:
        """The term, or something of it that has the chain's whole shape, or one value a row."""
        x, shape = self.pool[0], term.shape
        if shape[:-1] == self.full[:-1] and shape[-1] in ("N", 1):
            return term
        shape = joined(shape, x.shape)
        if term.kind == "f":
            return self.let(f"{term.text} + {x.text}", "f", shape, arithmetic.add, [term, x], False)
        if term.kind == "i":
            return self.let(f"{term.text} * {x.text}", "f", shape, arithmetic.mul, [term, x], False)
        one = self.number(1.0)
        return self.let(f"F.where({term.text}, {x.text}, 1.0)", "f", shape, arithmetic.where, [term, x, one], False)

    # ---------------------------------------------------------------- what is taken

    def stored(self) -> str:
        return self.random.choice(self.dtypes)

    def stored_as(self, kind: Kind) -> str:
        """A type that an output of that kind is stored in."""
        if kind != "f":
            return "i32" if kind == "i" else "b8"
        return self.stored() if self.random.random() < 0.8 else self.random.choice(FLOATS)

    def part(self) -> Shape:
        """A shape that broadcasts to the full one."""
        rng = self.random
        sizes = list(self.full)
        if rng.random() < 0.35:
            sizes = sizes[rng.randrange(len(sizes)) :]
        sizes = [1 if rng.random() < 0.3 and i < len(sizes) - 1 else size for i, size in enumerate(sizes)]
        sizes[-1] = "N" if rng.random() < 0.75 else 1
        return tuple(sizes)

    def some(self, *, varied: bool = False) -> Term:
        """A number of the pool, mostly a late one and a float."""
        found = [t for t in self.pool if t.kind != "b" and (not varied or t.shape[-1:] == ("N",))]
        if self.random.random() < 0.6:
            found = found[-5:]
        floats = [t for t in found if t.kind == "f"] or found
        return self.random.choice(floats if self.random.random() < 0.85 else found)

    def mask(self) -> Term:
        masks = [t for t in self.pool if t.kind == "b"]
        if not masks or self.random.random() < 0.5:
            return self.compare()
        return self.random.choice(masks[-3:])

    def push(self, *arguments: Any, **options: Any) -> Term:
        term = self.let(*arguments, **options)
        self.pool.append(term)
        return term

    def positive(self, term: Term, least: float) -> Term:
        text = f"{self.magnitude(term.text)} + {least}"
        return self.let(text, "f", term.shape, lambda a: arithmetic.add(arithmetic.absolute(a), exact(least)), [term])

    # ---------------------------------------------------------------- steps

    def binary(self) -> None:
        rng = self.random
        a = self.some()
        b = self.number(rng.choice(NUMBERS)) if rng.random() < 0.25 else self.some()
        if rng.random() < 0.3:
            a, b = b, a
        op = rng.choice(("+", "+", "-", "*", "*", "/", "maximum", "minimum"))
        kind: Kind = "i" if a.kind == b.kind == "i" else "f"
        if op == "/":
            if b.kind == "f" and b.shape and rng.random() < 0.7:
                b = self.positive(b, 0.5)
            self.push(f"{a.text} / {b.text}", "f", joined(a.shape, b.shape), arithmetic.div, [a, b])
        elif op in "+-*":
            meaning = {"+": arithmetic.add, "-": arithmetic.sub, "*": arithmetic.mul}[op]
            self.push(f"{a.text} {op} {b.text}", kind, joined(a.shape, b.shape), meaning, [a, b])
        else:
            meaning = arithmetic.maximum if op == "maximum" else arithmetic.minimum
            self.push(f"F.{op}({a.text}, {b.text})", kind, joined(a.shape, b.shape), meaning, [a, b])

    def unary(self) -> None:
        rng = self.random
        a, op = self.some(), rng.choice(list(arithmetic.UNARY))
        if op in ("log", "log2", "sqrt", "rsqrt") and rng.random() < 0.75:
            a = self.positive(a, 0.125)
        if op == "log1p" and rng.random() < 0.7:
            a = self.let(f"F.abs({a.text})", "f", a.shape, arithmetic.absolute, [a])
        if op in ("exp", "exp2", "expm1") and rng.random() < 0.75:
            a = self.let(
                f"F.clip({a.text}, -6, 5.5)",
                "f",
                a.shape,
                lambda x: arithmetic.clip(as_float(x), -6, 5.5),
                [a],
            )
        if a.kind == "i" and op in ("neg", "square"):
            meaning: Meaning = (
                (lambda x: arithmetic.sub(exact(0), x)) if op == "neg" else (lambda x: arithmetic.mul(x, x))
            )
            self.push(f"-{a.text}" if op == "neg" else f"F.square({a.text})", "i", a.shape, meaning, [a])
            return
        a = self.floating(a)
        texts = {
            "gelu_none": f'F.gelu({a.text}, approximate="none")', "neg": f"-{a.text}", "abs": self.magnitude(a.text),
        }  # fmt: skip
        self.push(texts.get(op, f"F.{op}({a.text})"), "f", a.shape, arithmetic.UNARY[op], [a])

    def floating(self, a: Term) -> Term:
        """As f32, by a cast where it is i32."""
        if a.kind != "i":
            return a
        return self.let(f"F.cast({a.text}, f32)", "f", a.shape, as_float, [a])

    def power(self) -> None:
        rng = self.random
        a, exponent = self.some(), rng.choice(EXPONENTS)
        if exponent != int(exponent) or exponent < 0:
            a = self.positive(a, 0.25)
        whole = a.kind == "i" and exponent in (1, 2, 3, 4)

        def meaning(x: Bounded) -> Bounded:
            if exponent == 1:
                return x
            if exponent == 0.5:
                return arithmetic.sqrt(x)
            if not whole:
                return arithmetic.power(x, exponent)
            result = x
            for _ in range(int(exponent) - 1):
                result = arithmetic.mul(result, x)
            return result

        text = rng.choice((f"{a.text} ** {exponent!r}", f"F.pow({a.text}, {exponent!r})"))
        self.push(text, "i" if whole else "f", a.shape, meaning, [a])

    def reduce(self) -> Term:
        op = self.random.choice(list(rows.REDUCE))
        a = self.floating(self.some(varied=True))
        # by numbers of its own: what else a seed draws stays as it is
        if self.scans and random.Random(f"scan {self.seed} {len(self.pool)}").random() < 0.25:
            self.features.add("running sums")
            return self.push(f"F.cumsum({a.text})", "f", a.shape, rows.running_sum, [a])
        return self.push(f"F.{op}({a.text})", "f", (*a.shape[:-1], 1), rows.REDUCE[op], [a])

    def composite(self) -> None:
        rng = self.random
        op = rng.choice(("softmax", "log_softmax", "layernorm", "rmsnorm", "clip", "causal"))
        a = self.some(varied=True)
        if op == "clip":
            self.clip(a)
        elif op == "causal":
            self.causal(self.floating(a))
        elif op in ("softmax", "log_softmax"):
            a = self.floating(a)
            self.push(f"F.{op}({a.text})", "f", a.shape, rows.softmax if op == "softmax" else rows.log_softmax, [a])
        else:
            self.norm(op, self.floating(a))

    def norm(self, op: str, a: Term) -> None:
        rng = self.random
        gamma = self.operand(self.stored(), ["N"], "g") if rng.random() < 0.6 else None
        if op == "rmsnorm":
            eps = rng.choice((1e-6, 1e-5, 0.25))
            text = f"F.rmsnorm({a.text}{', ' + gamma.text if gamma else ''}, eps={eps})"
            terms = [a, gamma] if gamma else [a]
            self.push(text, "f", a.shape, lambda x, g=None: rows.rmsnorm(x, g, eps), terms)
            return
        beta = self.operand(self.stored(), ["N"], "b") if rng.random() < 0.4 else None
        eps = rng.choice((1e-5, 1e-5, 1e-3, 0.5))
        text = (
            f"F.layernorm({a.text}"
            + (f", gamma={gamma.text}" if gamma else "")
            + (f", beta={beta.text}" if beta else "")
        )
        text += f", eps={eps})" if eps != 1e-5 or rng.random() < 0.5 else ")"

        def meaning(x: Bounded, *more: Bounded) -> Bounded:
            return rows.layernorm(x, more[0] if gamma else None, more[-1] if beta else None, eps)

        self.push(text, "f", a.shape, meaning, [t for t in (a, gamma, beta) if t])

    def clip(self, a: Term) -> None:
        low, high = self.random.choice(((-1, 1), (0.0, 6.0), (-0.5, 0.25), (2, -2), (0, 0)))
        kind: Kind = "i" if a.kind == "i" and isinstance(low, int) and isinstance(high, int) else "f"
        self.push(f"F.clip({a.text}, {low}, {high})", kind, a.shape, lambda x: arithmetic.clip(x, low, high), [a])

    def causal(self, a: Term) -> None:
        rng = self.random
        if len(a.shape) < 2 or a.shape[-2] == 1:
            return
        offset = rng.choice((0, 0, 1, -1, 3))
        text = f"F.causal({a.text}, {offset})" if offset else f"F.causal({a.text})"
        term = self.push(text, "f", a.shape, lambda x: rows.causal(x, offset), [a])
        self.features.add("causal")
        if rng.random() < 0.6:
            self.push(f"F.softmax({term.text})", "f", term.shape, rows.softmax, [term])

    def compare(self) -> Term:
        rng = self.random
        a = self.some()
        b = self.number(rng.choice((0, 0.0, 0.5, -1, 2))) if rng.random() < 0.4 else self.some()
        if rng.random() < 0.15 and len(self.full) >= 2:
            a, b = self.column(), self.row()
        op = rng.choice(list(arithmetic.COMPARE))
        shape = joined(a.shape, b.shape)
        return self.push(f"{a.text} {op} {b.text}", "b", shape, arithmetic.COMPARE[op], [a, b], inline=False)

    def column(self) -> Term:
        x = self.pool[0]
        return self.let(f"F.col_index({x.text})", "i", ("N",), rows.columns, [x])

    def row(self) -> Term:
        x = self.pool[0]
        return self.let(f"F.row_index({x.text})", "i", (self.full[-2], 1), rows.row_indices, [x])

    def where(self) -> None:
        rng = self.random
        mask = self.mask()
        if rng.random() < 0.4:
            op = rng.choice(("&", "|", "^", "~"))
            if op == "~":
                mask = self.push(f"~{mask.text}", "b", mask.shape, arithmetic.inverse, [mask])
            else:
                other = self.mask()
                shape = joined(mask.shape, other.shape)
                mask = self.push(f"{mask.text} {op} {other.text}", "b", shape, arithmetic.MASKS[op], [mask, other])
        a = self.some()
        b = self.number(rng.choice((0.0, -1, -math.inf, 1.0, 0, math.nan))) if rng.random() < 0.5 else self.some()
        if rng.random() < 0.4:
            a, b = b, a
        kind: Kind = "i" if a.kind == b.kind == "i" else "f"
        shape = joined(mask.shape, a.shape, b.shape)
        self.push(f"F.where({mask.text}, {a.text}, {b.text})", kind, shape, arithmetic.where, [mask, a, b])

    def casts(self) -> None:
        rng = self.random
        to = rng.choice(("f16", "bf16", "bf16", "f32", "i32", "b8"))
        a = rng.choice([t for t in self.pool if t.shape][-5:])
        self.push(f"F.cast({a.text}, {to})", KINDS[to], a.shape, lambda x: arithmetic.cast(x, to), [a])

    def indices(self) -> None:
        rng = self.random
        if len(self.full) >= 2 and rng.random() < 0.4:
            self.pool.append(self.row())
        elif rng.random() < 0.7:
            self.pool.append(self.column())
        else:
            a, cols = self.some(), Bounded("f", np.float64(self.sizes["N"]))
            self.push(f"{a.text} * F.size(N)", "f", a.shape, lambda x: arithmetic.mul(as_float(x), cols), [a])
        self.random_numbers()

    def random_numbers(self) -> None:
        """Of the chain's whole shape, from the first operand's; drawn apart: nothing else is drawn otherwise."""
        rng, x = random.Random(f"{len(self.pool)} {self.sizes}"), self.pool[0]
        if rng.random() < 0.6:
            return
        seed, offset = rng.choice((0, 1, -5, 2**31 - 1)), rng.choice((0, 3))
        self.features.add("random numbers")
        if x.kind == "f" and rng.random() < 0.5:
            text, draw = f"F.dropout({x.text}, 0.5, {seed}, {offset})", rows.dropout
        else:
            text, draw = f"F.uniform({x.text}, {seed}, {offset})", rows.uniform
        self.pool.append(self.let(text, "f", x.shape, lambda a: draw(a, seed, offset), [x], False))


class Outputs(Rows):
    """Two and three outputs of different types, stored in different passes: of an element, of a row, of both."""

    kind = "outputs"

    def draw_sizes(self) -> None:
        super().draw_sizes()
        if self.random.random() < 0.7 and self.sizes["N"] % 2 == 0 and "N" not in self.full[:-1]:
            self.sizes["N"] += 1
            self.features.add("ragged rows")

    def finish(self) -> None:
        rng = self.random
        source = self.floating(self.spanning(self.some(varied=True)))
        if not source.varies:
            source = self.spanning(self.pool[0])
        op, last = rng.choice(list(rows.REDUCE)), rng.choice(("softmax", "rmsnorm"))
        twice: Meaning = lambda a: arithmetic.mul(a, exact(2.0))  # noqa: E731
        norm: Meaning = rows.softmax if last == "softmax" else lambda a: rows.rmsnorm(a, None, 1e-6)
        shape = source.shape
        reduced = self.let(f"F.{op}({source.text})", "f", (*shape[:-1], 1), rows.REDUCE[op], [source])
        behind = self.let(f"{source.text} - {reduced.text}", "f", shape, arithmetic.sub, [source, reduced], False)
        double = self.let(f"{source.text} * 2.0", "f", shape, twice, [source], False)
        third = self.let(f"F.{last}({behind.text})", "f", shape, norm, [behind], False)
        rest = [double, third, self.spanning(reduced) if reduced.named else double]
        picked = [behind, *rng.sample(list(dict.fromkeys(rest)), rng.choice((1, 2)))]
        rng.shuffle(picked)
        types = rng.sample(FLOATS, len(FLOATS))
        self.outputs = [Output(term, dtype) for term, dtype in zip(picked, types, strict=False)]
        self.features |= {f"{len(picked)} outputs", "outputs of different types"}
