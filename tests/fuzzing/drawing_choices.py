"""Chains that end in a selection, ordered or not; terms of a row beside what is chosen by may be no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.fuzzing import arithmetic, choosing, rows
from tests.fuzzing.bounded import Bounded
from tests.fuzzing.choosing import Choice
from tests.fuzzing.draft import Output, Shape, Term, Values, joined
from tests.fuzzing.drawing_rows import Rows

COUNTS = (1, 2, 3, 5, 8, 16, 17, 50, 64, 100, 128, 256, 500)
MOST = 1024  # columns that a chain may choose


class Choices(Rows):
    kind = "choices"
    scans = False  # beside a choice they are kernels of their own

    def finish(self) -> None:
        score = self.score()
        if score.shape[:-1] != self.full[:-1]:
            super().finish()
            return
        if self.random.random() < 0.15:
            best = self.let(f"F.argmax({score.text})", "i", (*self.full[:-1], 1),
                            lambda a: choosing.columns(choosing.chosen(a, 1)), [score], False)  # fmt: skip
            self.choice = lambda values: choosing.chosen(score.of(values), 1)
            self.outputs, self.chosen_at = [Output(best, "i32")], 0
            self.features.add("argmax")
            return
        self.select(score)

    def score(self) -> Term:
        rng = self.random
        a = self.some(varied=True)
        if a.shape[:-1] != self.full[:-1] or a.kind != "f":
            x = self.pool[0]
            a = self.let(f"{a.text} + {x.text}", "f", joined(a.shape, x.shape), arithmetic.add, [a, x])
        if rng.random() < 0.35:
            a = self.biased(a)
        how = rng.choice(("raw", "raw", "softmax", "softmax", "log_softmax", "sigmoid", "mask"))
        self.features.add(f"chosen by {how}")
        if how == "raw":
            return a
        if how == "mask":
            mask, lowest = self.mask(), self.number(-math.inf)
            text = f"F.where({mask.text}, {a.text}, {lowest.text})"
            a = self.let(text, "f", joined(mask.shape, a.shape), arithmetic.where, [mask, a, lowest], False)
            if rng.random() < 0.4:
                return a
            how = "softmax"
        meaning = {"softmax": rows.softmax, "log_softmax": rows.log_softmax, "sigmoid": arithmetic.sigmoid}[how]
        return self.let(f"F.{how}({a.text})", "f", a.shape, meaning, [a])

    def biased(self, a: Term) -> Term:
        """With a term of the row or of the column, which may be infinite or NaN."""
        rng = self.random
        shape = rng.choice(([self.full[-2], 1] if len(self.full) > 1 else [1], ["N"]))
        term = self.operand("f32", shape, "m", special=rng.random() < 0.7)
        self.features.add("special terms of a row" if shape[-1] == 1 else "special terms of a column")
        return self.let(f"{a.text} + {term.text}", "f", joined(a.shape, term.shape), arithmetic.add, [a, term])

    def count(self) -> int:
        cols = self.sizes["N"]
        return min(self.random.choice((*COUNTS, cols, cols)), cols, MOST)

    def select(self, score: Term) -> None:
        """The best, their columns, what else is taken at those, and what is made of the best."""
        rng, k = self.random, self.count()
        self.ordered = rng.random() < 0.8
        self.features.add("in order" if self.ordered else "in any order")
        best, columns = self.names.new("p"), self.names.new("c")
        self.lines.append(f"{best}, {columns} = F.topk({score.text}, {k}{'' if self.ordered else ', sorted=False'})")
        shape = (*self.full[:-1], k)

        def choice(values: Values) -> Choice:
            """By the score, or what came: a selection in any order is judged at the columns that it has."""
            found = choosing.chosen(score.of(values), k)
            return found if values.columns is None else choosing.given(found, values.columns)

        self.choice = choice

        def best_of(values: Values) -> Bounded:
            return choosing.best(score.of(values), choice(values))

        def columns_of(values: Values) -> Bounded:
            return choosing.columns(choice(values))

        picked = Term(best, score.kind, shape, best_of)
        self.outputs = [Output(picked, self.stored())]
        if score.kind == "i":
            whole = self.let(f"F.cast({best}, i32)", "i", shape, lambda a: a, [picked], False)
            self.outputs = [Output(whole, "i32")]
        if not self.ordered or rng.random() < 0.85:
            self.chosen_at = len(self.outputs)
            self.outputs.append(Output(Term(columns, "i", shape, columns_of), "i32"))
        if rng.random() < 0.3:
            self.take(columns, shape, choice)
        if self.ordered and score.kind == "f" and rng.random() < 0.3:
            self.outputs[0] = Output(self.behind(picked), self.outputs[0].dtype)

    def take(self, columns: str, shape: Shape, choice: Callable[[Values], Choice]) -> None:
        """Another value at the columns chosen."""
        other = self.some(varied=True)
        name = self.names.new("t")
        self.lines.append(f"{name} = F.take({other.text}, {columns})")

        def meaning(values: Values) -> Bounded:
            return choosing.taken(other.of(values), choice(values), 0, same=False)

        self.outputs.append(Output(Term(name, other.kind, shape, meaning), self.stored_as(other.kind)))
        self.features.add("take")

    def behind(self, values: Term) -> Term:
        if self.random.random() < 0.6:
            text = f"{values.text} / F.sum({values.text})"
            return self.let(text, "f", values.shape, lambda a: arithmetic.div(a, rows.total(a)), [values], False)
        return self.let(f"F.softmax({values.text})", "f", values.shape, rows.softmax, [values], False)
