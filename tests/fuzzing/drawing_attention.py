"""Attention: two products, mostly with a softmax between them, with masks, biases and whatever stands around them."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np

from tests.fuzzing import arithmetic
from tests.fuzzing.bounded import EPS, INF, TINY, Array, Bounded, settled, size_of
from tests.fuzzing.draft import Draft, Meaning, Output, Term
from tests.fuzzing.products import product, turned
from tests.fuzzing.rows import uniform

QUERIES = (1, 2, 3, 7, 16, 17, 33, 40, 64, 65, 70)
KEYS = (1, 2, 5, 8, 31, 32, 33, 63, 64, 65, 90, 128, 130)
DEPTHS = (8, 16, 24, 32, 40, 64, 72)
ROUNDING = {"f16": 2.0**-11, "bf16": 2.0**-8}  # of weights, half a unit in the last place
SMALLEST = {"f16": 2.0**-25, "bf16": TINY}  # half of the smallest number, or what f32 may flush


class Attention(Draft):
    kind = "attention"
    fixed: ClassVar[frozenset[str]] = frozenset("STDE")

    def build(self) -> None:
        rng = self.random
        rank = rng.choice((0, 1, 1, 2, 2))
        self.batch = ("B", "H")[2 - rank :] if rank else ()
        self.sizes = {name: rng.choice((1, 2, 3)) for name in self.batch}
        self.sizes |= {"S": rng.choice(QUERIES), "T": rng.choice(KEYS), "D": rng.choice(DEPTHS)}
        self.sizes["E"] = self.sizes["D"] if rng.random() < 0.5 else rng.choice(DEPTHS)
        self.stored = rng.choice(("f16", "bf16", "bf16"))
        shared = ("1", *self.batch[1:]) if self.batch and rng.random() < 0.3 else self.batch
        lead = tuple(1 if size == "1" else size for size in shared)
        self.features |= {
            "attention",
            f"attention of {self.stored}",
            *(["shared keys"] if shared != self.batch else []),
        }
        q = self.operand(self.stored, (*self.batch, "S", "D"), "q")
        k = self.operand(self.stored, (*lead, "T", "D"), "k")
        v = self.operand(self.stored, (*lead, "T", "E"), "v")
        scale = rng.choice((0.25, 0.125, 1.0, 0.1))

        def scores(a: Bounded, b: Bounded) -> Bounded:
            found = product(a, turned(b), self.stored, computed=False, tf32=False)
            return arithmetic.mul(found, Bounded("f", np.float64(np.float32(scale))))

        turn = "mT" if len(k.shape) > 2 or rng.random() < 0.5 else "T"
        term = self.let(f"{q.text} @ {k.text}.{turn} * {scale}", "f", (*self.batch, "S", "T"), scores, [q, k], False)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            term = self.changed(term)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            term = self.masked(term)
        weights, meaning = self.weights_of(term)
        out = self.let(f"{weights} @ {v.text}", "f", (*self.batch, "S", "E"), meaning, [term, v], False)
        if rng.random() < 0.3:
            gate = self.operand(self.stored, (*self.batch, "S", "E"), "g")
            out = self.let(f"{out.text} * {gate.text}", "f", out.shape, arithmetic.mul, [out, gate])
        self.outputs.append(Output(out, rng.choice((self.stored, "f32"))))

    def weights_of(self, a: Term) -> tuple[str, Meaning]:
        """softmax(a), or half of its weights, doubled, or what is made of each score by itself; drawn apart: nothing
        else is drawn otherwise."""
        if (apart := random.Random(f"plain {self.sizes}")).random() < 0.25:
            return self.plain_weights(a, apart)
        rng = random.Random(f"{self.sizes}")
        if rng.random() < 0.7:
            return f"F.softmax({a.text})", self.attended
        seed, offset = rng.choice((0, 1, -5, 2**31 - 1)), rng.choice((0, 3))
        self.features.add("attention with dropout")

        def meaning(s: Bounded, v: Bounded) -> Bounded:
            return self.attended(s, v, 2.0 * (uniform(s, seed, offset).value >= 0.5))

        return f"F.dropout(F.softmax({a.text}), 0.5, {seed}, {offset})", meaning

    def plain_weights(self, a: Term, rng: random.Random) -> tuple[str, Meaning]:
        """Weights that are 0 of -inf, some of them times a mask."""
        steps = rng.choice((("sigmoid",), ("relu",), ("relu", "square")))
        masked = rng.random() < 0.4
        self.features.add(f"attention by {' and '.join(steps)}{', masked' if masked else ''}")
        text = a.text
        for name in steps:
            text = f"F.{name}({text})"
        if masked:
            text = f"{text} * F.where(F.col_index({a.text}) <= F.row_index({a.text}) + 3, 0.5, 0.0)"

        def meaning(s: Bounded, v: Bounded) -> Bounded:
            weights = s
            for name in steps:
                weights = arithmetic.UNARY[name](weights)
            lost: Array = np.zeros((), bool)
            if masked:
                rows, cols = s.value.shape[-2:]
                seen = np.arange(cols)[None] <= np.arange(rows)[:, None] + 3
                unsure = ~seen & ~np.isfinite(weights.value)  # it may be hidden
                lost = np.asarray(unsure.any(-1, keepdims=True))
                value, error = (np.where(seen, 0.5 * part, 0.0) for part in (weights.value, weights.error))
                weights = Bounded("f", value, error)
            found = product(weights, v, self.stored, computed=True, tf32=False)
            small = ~(size_of(weights.value) > weights.error + 4 * SMALLEST[self.stored])
            hidden = np.matmul(small.astype(float), (~np.isfinite(v.value)).astype(float)) > 0
            return Bounded("f", found.value, np.where(lost | hidden, INF, found.error))

        return f"({text})", meaning

    def changed(self, a: Term) -> Term:
        """A bias, a soft cap or a scale between the scores and the softmax."""
        rng = self.random
        step = rng.choice(("bias", "vector", "cap", "scale"))
        if step == "cap":
            return self.let(f"F.tanh({a.text})", "f", a.shape, arithmetic.UNARY["tanh"], [a], False)
        if step == "scale":
            scale = self.operand("f32", [], "a")
            return self.let(f"{a.text} * {scale.text}", "f", a.shape, arithmetic.mul, [a, scale], False)
        shape = a.shape if step == "bias" and rng.random() < 0.5 else ("S", "T") if step == "bias" else ("T",)
        bias = self.operand(rng.choice((self.stored, "f32")), shape, "b")
        return self.let(f"{a.text} + {bias.text}", "f", a.shape, arithmetic.add, [a, bias], False)

    def masked(self, a: Term) -> Term:
        """A condition on rows and columns, or a mask in memory."""
        rng = self.random
        row, col = f"F.row_index({a.text})", f"F.col_index({a.text})"
        offset, window, chunk = rng.choice((0, 3, -2, 40)), rng.choice((1, 5, 40)), rng.choice((3, 16, 50))
        how = rng.choice(("causal", "window", "window", "chunk", "prefix", "memory"))
        self.features.add(f"attention to a {how}")
        if how == "memory":
            mask = self.operand("b8", ("T",) if rng.random() < 0.5 else (*self.batch, "S", "T"), "m")
            text = f"F.where({mask.text}, {a.text}, -1e999)"
            nothing = Bounded("f", np.float64(-INF))
            return self.let(text, "f", a.shape, lambda m, x: arithmetic.where(m, x, nothing), [mask, a], False)
        texts = {
            "causal": f"{col} <= {row} + {offset}",
            "window": f"({col} <= {row} + {offset}) & ({col} > {row} - {window})",
            "chunk": f"{col} // {chunk} == {row} // {chunk}",
            "prefix": f"({col} <= {row}) | ({col} < {window})",
        }

        def meaning(x: Bounded) -> Bounded:
            r, c = np.arange(x.value.shape[-2])[:, None], np.arange(x.value.shape[-1])[None]
            keep = {
                "causal": c <= r + offset,
                "window": (c <= r + offset) & (c > r - window),
                "chunk": c // chunk == r // chunk,
                "prefix": (c <= r) | (c < window),
            }[how]
            return Bounded("f", np.where(keep, x.value, -INF), np.where(keep, x.error, 0.0))

        return self.let(f"F.where({texts[how]}, {a.text}, -1e999)", "f", a.shape, meaning, [a], False)

    def attended(self, s: Bounded, v: Bounded, kept: Array | float = 1.0) -> Bounded:
        """(softmax(s) * kept) @ v. Logits are off by their errors, and by rounding of their own size; so is the row's
        pivot. The weights are rounded to the type of the factors, in which small ones may be 0, and sums of f32 are
        rescaled as often as a maximum grows."""
        with np.errstate(all="ignore"):
            top = s.value.max(-1, keepdims=True)
            pivot = np.where(top == -INF, 0.0, top)
            e = np.exp(s.value - pivot)
            total = e.sum(-1, keepdims=True)
            p = kept * np.where(total == 0, 0.0, e / np.where(total == 0, 1.0, total))
            off = np.where(np.isfinite(s.value), s.error, 0.0)
            most = off.max(-1, keepdims=True)
            size = size_of(s.value) + size_of(pivot)
            moved = np.expm1(np.minimum(2 * (off + most), 80.0)) + 16 * EPS * (size + size.max(-1, keepdims=True) + 8)
            keys = s.value.shape[-1]
            relative = (1 + moved) * (1 + ROUNDING[self.stored]) - 1 + 4 * EPS * (keys + 64)
            whole = size_of(v.value)
            least = SMALLEST[self.stored] * np.maximum(kept, np.ones_like(p))  # dropout's factor comes behind rounding
            error = np.matmul(p * relative, whole) + np.matmul(least, whole)
            error = error + np.matmul((p == 0) & (s.value > -INF), whole) * 2.0**-100
            value = np.matmul(p, v.value)
        lost = np.isinf(s.error).any(-1, keepdims=True) | (moved > 1e3).any(-1, keepdims=True)
        vanishing = np.minimum(p, e) < max(2.0**-100, 4 * SMALLEST[self.stored])
        hidden = np.matmul(vanishing.astype(float), (~np.isfinite(v.value)).astype(float)) > 0
        empty = (top == -INF) & np.isfinite(v.value).all(-2, keepdims=True)
        error = np.where(lost | hidden, INF, np.where(empty, 0.0, error))
        return settled(value, np.where(np.isnan(top), 0.0, error))
