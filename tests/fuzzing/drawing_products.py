"""Chains of matrix products on one left factor, with what stands before and behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from tests.fuzzing import arithmetic, rows
from tests.fuzzing.bounded import Bounded, any_of, exact
from tests.fuzzing.draft import Draft, Meaning, Output, Shape, Term
from tests.fuzzing.products import product, turned

SMALL = (
    1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 70, 96, 127, 128, 130, 136, 200, 257,
)  # fmt: skip
BIG = (64, 72, 96, 128, 136, 192, 200, 256, 264, 320)  # that tensor copies take


@dataclass(frozen=True)
class Left:
    """A left factor: as the chain has it, what of it is rounded and multiplied, and the scale of its rows that comes
    behind the product, as README says of RMSNorm's. The largest of a row or its mean needs a kernel before the
    product's, which may scale the rows as well: then either place of the scale is right."""

    term: Term
    multiplied: Term
    behind: Term | None = None
    computed: bool = False
    kernel_before: bool = False


def unnamed(meaning: Meaning, arguments: Sequence[Term]) -> Term:
    """A value that the chain does not spell."""
    return Term("", "f", (), lambda values: meaning(*(a.of(values) for a in arguments)))


class Products(Draft):
    kind = "products"
    extents: ClassVar[tuple[int, ...]] = SMALL
    most_work = 1_500_000  # multiplications

    def build(self) -> None:
        rng = self.random
        rank = rng.choice((0, 0, 0, 1, 1, 2))
        self.batch = ("B", "H")[2 - rank :] if rank else ()
        self.sizes = {**{name: rng.choice((1, 2, 3)) for name in self.batch}}
        self.sizes |= {name: rng.choice(self.extents) for name in "MNK"}
        while math.prod(self.sizes.values()) > self.most_work:
            big = max(self.sizes, key=lambda name: self.sizes[name])
            self.sizes[big] //= 2
        self.stored = rng.choice(("f16", "bf16", "bf16", "f32"))
        self.tf32 = self.stored == "f32"
        self.features |= {f"products of {self.stored}", "products of batches" if rank else "products"}
        left = self.left()
        widths = ["N"] if rng.random() < 0.8 else ["N", "L"]
        if "L" in widths:
            self.sizes["L"] = rng.choice(self.extents)
            self.features.add("products side by side")
        pair = rng.random() < 0.35
        for width in widths:
            term = self.one(left, width)
            if pair:
                term = self.paired(term, self.one(left, width))
            for _ in range(rng.choice((0, 1, 1, 2, 3, 4))):
                term = self.epilogue(term, width)
            self.outputs.append(Output(term, rng.choice((self.stored, self.stored, "f32", "bf16"))))
        if len(widths) == 1 and rng.random() < 0.15:
            first = self.outputs[0].term
            double = lambda a: arithmetic.mul(a, exact(2.0))  # noqa: E731
            self.outputs.append(
                Output(self.let(f"{first.text} * 2.0", "f", first.shape, double, [first], False), "f32")
            )

    # ---------------------------------------------------------------- factors

    def left(self) -> Left:
        rng, batch = self.random, self.batch
        drawn = rng.random()
        if drawn < 0.15:
            x = self.operand(self.stored, (*batch, "K", "M"))
            view = "mT" if batch or rng.random() < 0.5 else "T"
            self.features.add("a left factor transposed")
            across = Term(f"{x.text}.{view}", "f", (*batch, "M", "K"), lambda values: turned(x.of(values)))
            return Left(across, across)
        x = self.operand(self.stored, (*batch, "M", "K"))
        found = Left(x, x)
        if drawn < 0.45:
            return found
        self.features.add("a left factor computed")
        for _ in range(rng.choice((1, 1, 2, 3))):
            found = self.prologue(found)
        return found

    def prologue(self, left: Left) -> Left:
        rng, batch, a = self.random, self.batch, left.term
        step = rng.choice(("rmsnorm",) * 3 + ("gain",) * 3 + ("bias",) * 2 + ("scale",) * 3 + ("unary",) * 3
                          + ("mask",) * 2 + ("sum",) * 2 + ("softmax", "layernorm"))  # fmt: skip
        if step == "rmsnorm":
            return self.normalized(left)
        if step == "gain":
            return self.times(left, self.operand(self.vector(), ["K"], "g"))
        if step == "scale":
            scale = self.operand("f32", [*batch, "M", 1], "s", special=rng.random() < 0.2)
            self.features.add("special scales of rows" if self.operands[-1].special else "scales of rows")
            return self.times(left, scale)
        term = self.other(step, a)
        # behind a step an RMSNorm's scale is a number of the row, which the sums of a second one need first
        before = left.kernel_before or left.behind is not None or step in ("softmax", "layernorm")
        return Left(term, term, computed=True, kernel_before=before)

    def normalized(self, left: Left) -> Left:
        """RMSNorm: its scale is behind the product, its gain before. Of a second one both may be before it, where a
        kernel of its own stores the factor."""
        a = left.term
        gain = self.operand(self.vector(), ["K"], "g") if self.random.random() < 0.7 else None
        text = f"F.rmsnorm({a.text}{', ' + gain.text if gain else ''})"
        term = self.let(text, "f", a.shape, lambda x, g=None: rows.rmsnorm(x, g, 1e-6), [a, gain] if gain else [a])
        if left.behind:
            return Left(term, term, computed=True)
        scale = unnamed(lambda x: rows.rms_scale(x, 1e-6), [a])
        if gain is None:
            return replace(left, term=term, behind=scale)
        multiplied = unnamed(arithmetic.mul, [left.multiplied, gain])
        return Left(term, multiplied, scale, computed=True, kernel_before=left.kernel_before)

    def times(self, left: Left, other: Term) -> Left:
        """An operand may be infinite, and so stays before the product."""
        term = self.let(f"{left.term.text} * {other.text}", "f", left.term.shape, arithmetic.mul, [left.term, other])
        multiplied = unnamed(arithmetic.mul, [left.multiplied, other]) if left.behind else term
        return Left(term, multiplied, left.behind, computed=True, kernel_before=left.kernel_before)

    def other(self, step: str, a: Term) -> Term:
        rng, batch = self.random, self.batch
        if step == "bias":
            vector = self.operand(self.vector(), ["K"], "g")
            return self.let(f"{a.text} + {vector.text}", "f", a.shape, arithmetic.add, [a, vector])
        if step == "unary":
            op = rng.choice(("relu", "silu", "gelu", "tanh", "sigmoid"))
            return self.let(f"F.{op}({a.text})", "f", a.shape, arithmetic.UNARY[op], [a])
        if step == "mask":
            mask, nothing = (
                self.operand("b8", [*batch, "M", "K"] if rng.random() < 0.5 else ["K"], "m"),
                self.number(0.0),
            )
            text = f"F.where({mask.text}, {a.text}, 0.0)"
            return self.let(text, "f", a.shape, arithmetic.where, [mask, a, nothing])
        if step == "sum":
            other = self.operand(self.stored, [*batch, "M", "K"], "y")
            return self.let(f"{a.text} + {other.text}", "f", a.shape, arithmetic.add, [a, other])
        if step == "softmax":
            return self.let(f"F.softmax({a.text})", "f", a.shape, rows.softmax, [a])
        gain = self.operand(self.stored, ["K"], "g")
        return self.let(f"F.layernorm({a.text}, {gain.text})", "f", a.shape,
                        lambda x, g: rows.layernorm(x, g, None, 1e-5), [a, gain])  # fmt: skip

    def vector(self) -> str:
        return self.random.choice((self.stored, "f32"))

    def one(self, left: Left, width: str) -> Term:
        """A product of the left factor with an operand, or with a transposed one."""
        rng = self.random
        batch = self.batch if self.batch and rng.random() < 0.5 else ()
        across = rng.random() < 0.5
        w = self.operand(self.stored, (*batch, width, "K") if across else (*batch, "K", width), "w")
        right = f"{w.text}.{'mT' if batch else 'T'}" if across else w.text
        factor = left.term.text
        text = f'F.matmul({factor}, {right}, precision="tf32")' if self.tf32 else f"{factor} @ {right}"

        def meaning(a: Bounded, b: Bounded, scale: Bounded | None = None, whole: Bounded | None = None) -> Bounded:
            b = turned(b) if across else b
            found = product(a, b, self.stored, computed=left.computed, tf32=self.tf32)
            found = found if scale is None else arithmetic.mul(found, scale)
            return (
                found if whole is None else any_of(found, product(whole, b, self.stored, computed=True, tf32=self.tf32))
            )

        terms = [left.multiplied, w, *([left.behind] if left.behind else [])]
        if left.behind and left.kernel_before:
            terms.append(left.term)
        return self.let(text, "f", (*self.batch, "M", width), meaning, terms)

    # ---------------------------------------------------------------- behind them

    def paired(self, a: Term, b: Term) -> Term:
        how = self.random.choice(("silu", "+", "*", "maximum"))
        self.features.add("a pair of products")
        if how == "silu":
            gate = lambda x, y: arithmetic.mul(arithmetic.silu(x), y)  # noqa: E731
            return self.let(f"F.silu({a.text}) * {b.text}", "f", a.shape, gate, [a, b])
        if how == "maximum":
            return self.let(f"F.maximum({a.text}, {b.text})", "f", a.shape, arithmetic.maximum, [a, b])
        return self.let(
            f"{a.text} {how} {b.text}", "f", a.shape, {"+": arithmetic.add, "*": arithmetic.mul}[how], [a, b]
        )

    def epilogue(self, a: Term, width: str) -> Term:
        rng, batch, shape = self.random, self.batch, a.shape
        step = rng.choice(("unary", "bias", "bias", "residual", "scale", "mask", "causal", "scalar", "clip"))
        if step == "unary":
            op = rng.choice(("relu", "gelu", "gelu_none", "silu", "tanh", "sigmoid", "square", "abs"))
            text = f'F.gelu({a.text}, approximate="none")' if op == "gelu_none" else f"F.{op}({a.text})"
            return self.let(text, "f", shape, arithmetic.UNARY[op], [a])
        if step == "bias":
            bias = self.operand(self.vector(), [width], "b")
            return self.let(f"{a.text} + {bias.text}", "f", shape, arithmetic.add, [a, bias])
        if step == "residual":
            residual = self.operand(self.vector(), [*batch, "M", width], "r")
            return self.let(f"{residual.text} + {a.text}", "f", shape, arithmetic.add, [residual, a])
        if step == "scale":
            scale = self.operand("f32", [*batch, "M", 1], "c")
            return self.let(f"{a.text} * {scale.text}", "f", shape, arithmetic.mul, [a, scale])
        if step == "mask":
            mask = self.operand("b8", [*batch, "M", width], "m")
            terms = [mask, a, self.number(-1.0)]
            return self.let(f"F.where({mask.text}, {a.text}, -1.0)", "f", shape, arithmetic.where, terms)
        if step == "causal":
            return self.below(a, shape)
        if step == "scalar":
            scalar = self.operand("f32", [], "a")
            return self.let(f"{a.text} * {scalar.text}", "f", shape, arithmetic.mul, [a, scalar])
        scale = self.operand("f32", [width], "d")
        return self.let(f"F.clip({a.text} * {scale.text}, -3.0, 30)", "f", shape,
                        lambda x, s: arithmetic.clip(arithmetic.mul(x, s), -3.0, 30), [a, scale])  # fmt: skip

    def below(self, a: Term, shape: Shape) -> Term:
        """Zeros above the diagonal."""
        named = a if a.named else self.let(a.text, "f", shape, lambda x: x, [a], False)

        def meaning(x: Bounded) -> Bounded:
            keep = rows.below_diagonal(x)
            return Bounded("f", np.where(keep, x.value, 0.0), np.where(keep, x.error, 0.0))

        text = f"F.where(F.col_index({named.text}) <= F.row_index({named.text}), {named.text}, 0.0)"
        return self.let(text, "f", shape, meaning, [named])


class LargeProducts(Products):
    """Of sizes that tensor copies take."""

    kind = "large products"
    extents = BIG
    most_work = 12_000_000
