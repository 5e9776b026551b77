"""Random chains of several products, row statistics, selections and gathers, as text that a user could have written.

python -m tests.drawn_programs SEED         prints the spec of that seed

All numbers are small whole ones, which every type holds exactly: whatever is fused, cut, stored between kernels or
summed in whichever order, results are those of plain numpy, bit by bit. `F` below is that numpy; no reference that
fusegen generates has a part in it.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusegen.language.spec import Chain

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = {"M": (1, 9, 33), "N": (40, 64, 72), "L": (16, 33, 48), "K": (24, 32, 56), "V": (1, 7, 21)}
MOST = 8  # of a value after each step, which bf16 holds exactly
PICKS = 3
NAME = re.compile(r"\b[itvwx]\d+\b")


@dataclass
class Draft:
    """A spec under construction: `values` by the dim of their columns."""

    random: random.Random
    parameters: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    latest: str = "K"  # the columns of the last value

    def operand(self, stem: str, shape: str) -> str:
        name = f"{stem}{len(self.parameters)}"
        self.parameters[name] = shape
        return name

    def line(self, text: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def keep(self, text: str, width: str) -> None:
        """A new value, brought back to where every type holds it."""
        self.latest = width
        self.values.setdefault(width, []).append(self.line(f"F.minimum(F.maximum({text}, -{MOST}.0), {MOST}.0)"))

    def some(self, width: str) -> str:
        """One of the values of that width; the latest most often, so that chains grow long."""
        found = self.values[width]
        return found[-1] if self.random.random() < 0.7 else self.random.choice(found)

    def drop_unused(self, results: list[str]) -> None:
        """Lines and operands that no result depends on: a spec may have none."""
        needed = set(results)
        for line in reversed(self.lines):
            name, _, text = line.partition(" = ")
            if name in needed:
                needed.update(NAME.findall(text))
        self.lines = [line for line in self.lines if line.partition(" = ")[0] in needed]
        self.parameters = {name: shape for name, shape in self.parameters.items() if name in needed}


def spec_text(seed: int) -> str:
    """The source of one random spec, called `drawn`, over dims M, N, L, K, V."""
    draft = Draft(random.Random(seed))
    rng = draft.random
    draft.values["K"] = [draft.operand("x", "M, K")]
    steps = [product, rng.choice((product, statistic, selection))]
    steps += rng.choices((product, statistic, selection, binary), k=rng.randint(1, 3))
    rng.shuffle(steps)
    for step in steps:
        widths = list(draft.values)
        step(draft, draft.latest if rng.random() < 0.7 else rng.choice(widths))
    for step in rng.choices((looked_up, taken, permuted), k=rng.choice((0, 0, 1, 2))):
        step(draft, draft.latest)
    results, types = [draft.values[draft.latest][-1]], [f"f32[M, {draft.latest}]"]
    if rng.random() < 0.4:
        other = rng.choice(list(draft.values))
        results.append(draft.line(f"F.sum({draft.some(other)})"))
        types.append("f32[M, 1]")
    if rng.random() < 0.4:
        results.append(draft.line(f"F.argmax({draft.some(rng.choice(list(draft.values)))})"))
        types.append("i32[M, 1]")
    draft.drop_unused(results)
    sizes = ", ".join(f"{dim}={rng.choice(choices)}" for dim, choices in SIZES.items() if used(draft, dim))
    declared = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
    kinds = {name: "i32" if name.startswith("i") else "bf16" for name in draft.parameters}
    given = ", ".join(f"{name}: {kinds[name]}[{shape}]" for name, shape in draft.parameters.items())
    body = "\n".join(f"    {line}" for line in draft.lines)
    return (
        "from fusegen import bf16, chain, dims, f32, i32\nfrom fusegen import ops as F\n\n"
        f'M, N, L, K, V = dims("M N L K V")\n\n\n@chain({sizes})\ndef drawn({given}) -> {declared}:\n{body}\n'
        f"    return {', '.join(results)}\n"
    )


def used(draft: Draft, dim: str) -> bool:
    return any(dim in shape.split(", ") for shape in draft.parameters.values())


def product(draft: Draft, width: str) -> None:
    other = draft.random.choice([w for w in "NLK" if w != width])
    draft.keep(f"{draft.some(width)} @ {draft.operand('w', f'{other}, {width}')}.T", other)


def statistic(draft: Draft, width: str) -> None:
    value = draft.some(width)
    text = draft.random.choice(("{0} - F.max({0})", "{0} + F.min({0})", "F.sum({0}) - {0}", "F.relu({0}) * F.max({0})"))
    draft.keep(text.format(value), width)


def selection(draft: Draft, width: str) -> None:
    value = draft.some(width)
    best = f"F.min(F.topk({value}, {PICKS})[0])"
    draft.keep(f"F.where({value} >= {best}, {value}, 0.0)", width)


def binary(draft: Draft, width: str) -> None:
    sign = draft.random.choice("+-*")
    draft.keep(f"{draft.some(width)} {sign} {draft.some(width)}", width)


def looked_up(draft: Draft, width: str) -> None:
    """Rows of a table, by ids that are given or computed."""
    value, table = draft.some(width), draft.operand("t", f"V, {width}")
    ids = draft.random.choice(("{0}", "F.minimum({0}, 3)", "{0} // 2", "F.cast(F.max({1}), i32)"))
    draft.keep(f"{value} - F.gather({table}, {ids.format(draft.operand('i', 'M'), value)})", width)


def taken(draft: Draft, width: str) -> None:
    value, column = draft.some(width), draft.operand("i", draft.random.choice(("M", "M, 1")))
    draft.keep(f"{draft.some(width)} * F.take({value}, {column}, {draft.random.randint(-2, 2)})", width)


def permuted(draft: Draft, width: str) -> None:
    """Rows of what the chain computes."""
    draft.keep(f"{draft.some(width)} + F.gather({draft.some(width)}, {draft.operand('i', 'M')})", width)


def chain_of(seed: int) -> Chain:
    space: dict[str, Any] = {}
    exec(compile(spec_text(seed), f"<drawn {seed}>", "exec"), space)
    found = space["drawn"]
    assert isinstance(found, Chain)
    return found


# ---------------------------------------------------------------- what it means


def topk(x: Array, k: int) -> tuple[Array, Array]:
    """Largest first, ties by column."""
    columns = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, columns, -1), columns


def gather(table: Array, ids: Array) -> Array:
    """By a loop; what is no row is 0."""
    found = [table[int(i)] if 0 <= i < len(table) else np.zeros(table.shape[1]) for i in ids.ravel()]
    return np.array(found).reshape(len(found), table.shape[1])


def take(x: Array, columns: Array, missing: float) -> Array:
    pairs = zip(x, columns.ravel(), strict=True)
    return np.array([[row[int(i)] if 0 <= i < len(row) else missing] for row, i in pairs]).reshape(len(x), 1)


F = SimpleNamespace(
    gather=gather, take=take, cast=lambda x, _: np.trunc(x),
    minimum=np.minimum, maximum=np.maximum, where=np.where, relu=lambda x: np.maximum(x, 0), topk=topk,
    max=lambda x: x.max(-1, keepdims=True), min=lambda x: x.min(-1, keepdims=True),
    sum=lambda x: x.sum(-1, keepdims=True), argmax=lambda x: x.argmax(-1, keepdims=True),
)  # fmt: skip


def meant(seed: int, operands: list[Array]) -> tuple[Array, ...]:
    """The body of the spec, run by numpy on whole numbers of 64 bits (64-bit floats in between)."""
    text = spec_text(seed)
    names = [part.split(":")[0] for part in text.split("def drawn(")[1].split(") ->")[0].split("], ")]
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    given = {name: array.astype(np.float64) for name, array in zip(names, operands, strict=True)}
    space: dict[str, Any] = {"F": F, "i32": None, **given}
    for line in lines[:-1]:
        exec(line, space)
    results = eval(lines[-1].removeprefix("return "), space)
    return results if isinstance(results, tuple) else (results,)


def drawn_operands(chain: Chain, seed: int) -> list[Array]:
    """Whole numbers: rows from -4 to 4, weights of -1, 0 and 1, most of them 0; indices of which some name nothing."""
    rng = np.random.default_rng(seed)
    found = []
    for tensor in chain.graph.inputs:
        shape = [size if isinstance(size, int) else chain.graph.sizes[str(size)] for size in tensor.shape]
        numbers = rng.integers(-4, 5, shape) if tensor.name[0] in "xt" else rng.choice([-1, 0, 0, 0, 1], shape)
        if tensor.name.startswith("i"):
            numbers = rng.choice([-(2**31), -1, *range(30), 2**31 - 1], shape)
        found.append(numbers.astype(tensor.dtype.numpy))
    return found


if __name__ == "__main__":
    print(spec_text(int(sys.argv[1])), end="")
