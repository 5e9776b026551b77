"""Random chains with views, axes, joins, gathers, scatters and sorts, as text that a user could have written.

    python -m tests.drawn_views SEED                      prints the spec of that seed, and judges it
    python -m tests.drawn_views FROM-TO [--target NAME]   judges so many, and says what is amiss

All numbers are small whole ones, which f32 holds exactly: whatever is fused, cut or stored between kernels, results are
those of plain numpy, bit by bit. `F` below is that numpy; no reference that fusegen generates has a part in it.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import fusegen
from fusegen.errors import NoPlan, SpecError
from fusegen.language.spec import Chain

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int | str, ...]  # "M" is the dim of rows
MOST = 8  # of a value after each step
PLACES = 23  # rows of tables and of arrays that are written to
NAME = re.compile(r"\b[itvxo]\d+\b")
WIDTHS = (2, 6, 12, 16, 24, 30, 48, 64)


@dataclass
class Draft:
    """A spec under construction: its operands' types, its lines, and the shape of each value."""

    random: random.Random
    parameters: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Shape] = field(default_factory=dict)
    written: list[tuple[str, Shape]] = field(default_factory=list)

    def operand(self, stem: str, dtype: str, shape: Shape) -> str:
        name = f"{stem}{len(self.parameters)}"
        self.parameters[name] = f"{dtype}[{', '.join(map(str, shape))}]"
        return name

    def line(self, text: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def view(self, text: str, shape: Shape) -> str:
        name = self.line(text)
        self.values[name] = shape
        return name

    def keep(self, text: str, shape: Shape) -> str:
        """A new value, brought back to where sums of it are exact."""
        return self.view(f"F.minimum(F.maximum({text}, -{MOST}.0), {MOST}.0)", shape)

    def some(self, *ranks: int) -> str:
        """One of the values, the latest most often, so that chains grow long."""
        found = [name for name, shape in self.values.items() if not ranks or len(shape) in ranks]
        return found[-1] if self.random.random() < 0.6 else self.random.choice(found)


def last(shape: Shape) -> int:
    assert isinstance(shape[-1], int)
    return shape[-1]


def spec_text(seed: int) -> str:
    """The source of one random spec, called `drawn`, over the dim M."""
    rng = random.Random(seed)
    draft = Draft(rng)
    width = rng.choice(WIDTHS)
    for shape in rng.choice(((("M", width),), (("M", 3, width), ("M", width)), (("M", width), ("M", 1)))):
        draft.values[draft.operand("x", rng.choice(("f32", "bf16")), shape)] = shape
    for _ in range(rng.randint(2, 7)):
        rng.choice(STEPS)(draft)
    results = [draft.some()]
    if rng.random() < 0.4:
        results.append(draft.some())
    results = [name for name in dict.fromkeys(results) if name.startswith("v")]
    if not results:
        value = draft.some()
        results.append(draft.keep(f"{value} + 1.0", draft.values[value]))
    types = {name: draft.values[name] for name in results}
    if rng.random() < 0.3:
        rows = [name for name, shape in draft.values.items() if len(shape) > 1 and shape[0] == "M"]
        if rows:
            value = rng.choice(rows)
            whole: Shape = (PLACES, *draft.values[value][1:])
            target = draft.operand("o", "f32", whole)
            ids = draft.operand("s", rng.choice(("i32", "i64")), ("M",))
            name = draft.line(f"F.scatter({target}, {ids}, {value})")
            types[name] = whole
    return finished(draft, types)


def finished(draft: Draft, types: dict[str, Shape]) -> str:
    needed = set(types)
    for line in reversed(draft.lines):
        name, _, text = line.partition(" = ")
        if name in needed:
            needed.update(re.findall(r"\b[a-z]\d+\b", text))
    lines = [line for line in draft.lines if line.partition(" = ")[0] in needed]
    parameters = {name: type for name, type in draft.parameters.items() if name in needed}
    declared = [f"f32[{', '.join(map(str, shape))}]" for shape in types.values()]
    given = ", ".join(f"{name}: {type}" for name, type in parameters.items())
    body = "\n".join(f"    {line}" for line in lines)
    sizes = "M=5" if "M" in given + str(declared) else ""
    result = declared[0] if len(declared) == 1 else f"tuple[{', '.join(declared)}]"
    return (
        "from fusegen import bf16, chain, dims, f32, i32, i64\nfrom fusegen import ops as F\n\n"
        f'(M,) = dims("M")\n\n\n@chain({sizes})\ndef drawn({given}) -> {result}:\n{body}\n'
        f"    return {', '.join(types)}\n"
    )


# ---------------------------------------------------------------- steps


def unary(draft: Draft) -> None:
    value = draft.some()
    text = draft.random.choice(
        ("F.relu({0})", "-{0}", "{0} + 1.0", "abs({0})", "F.where({0} > 1.0, {0}, 2.0)", "F.square({0})")
    )
    draft.keep(text.format(value), draft.values[value])


def binary(draft: Draft) -> None:
    """Of two values that broadcast."""
    one = draft.some()
    shape = draft.values[one]
    fits = [name for name, own in draft.values.items() if broadcasts(own, shape)]
    draft.keep(f"{one} {draft.random.choice('+-*')} {draft.random.choice(fits)}", shape)


def broadcasts(own: Shape, shape: Shape) -> bool:
    tail = shape[len(shape) - len(own) :]
    return len(own) <= len(shape) and all(a in (1, b) for a, b in zip(own, tail, strict=True))


def sliced(draft: Draft) -> None:
    value = draft.some()
    shape, rng = draft.values[value], draft.random
    if len(shape) < 2 or last(shape) < 2:
        return
    width = last(shape)
    first = rng.randrange(width - 1)
    end = rng.randrange(first + 1, width + 1)
    ways = [(f"[..., {first}:{end}]", (*shape[:-1], end - first)), ("[..., ::-1]", shape)]
    ways.append(("[..., ::2]", (*shape[:-1], (width + 1) // 2)))
    if len(shape) == 3 and isinstance(shape[1], int):
        at = rng.randrange(shape[1])
        ways += [(f"[:, {at}]", (shape[0], width)), (f"[:, {at}:]", (shape[0], shape[1] - at, width))]
    key, found = rng.choice(ways)
    draft.view(f"{value}{key}", found)


def axes(draft: Draft) -> None:
    value = draft.some(2, 3)
    shape = draft.values[value]
    ways: list[tuple[str, Shape]] = []
    if len(shape) == 2:
        ways.append((f"{value}[:, None]", (shape[0], 1, shape[1])))
        for heads in (2, 3):
            if last(shape) % heads == 0 and last(shape) > heads:
                ways.append(
                    (f'F.rearrange({value}, "m (h d) -> m h d", h={heads})', (shape[0], heads, last(shape) // heads))
                )
    elif isinstance(shape[1], int):
        ways.append((f'F.rearrange({value}, "m h d -> m (h d)")', (shape[0], shape[1] * last(shape))))
        ways.append((f'F.rearrange({value}, "m h d -> m d h")', (shape[0], shape[2], shape[1])))
    if ways:
        draft.view(*draft.random.choice(ways))


def joined(draft: Draft) -> None:
    value = draft.some()
    shape, rng = draft.values[value], draft.random
    if len(shape) < 2 or last(shape) < 2:
        return
    same = [name for name, own in draft.values.items() if own == shape]
    ways: list[tuple[str, Shape]] = [
        (f"F.concat([{value}, {rng.choice(same)}])", (*shape[:-1], 2 * last(shape))),
        (f"F.roll({value}, {rng.randrange(1, last(shape))})", shape),
        (f"F.flip({value})", shape),
    ]
    if last(shape) % 2 == 0:
        low = draft.line(f"F.split({value}, 2)[0]")
        high = draft.line(f"F.split({value}, 2)[1]")
        ways.append((f"F.concat([{high} - {low}, {low} * 2.0])", shape))
    draft.keep(*rng.choice(ways))


def reduced(draft: Draft) -> None:
    value = draft.some()
    shape, rng = draft.values[value], draft.random
    name = rng.choice(("sum", "max", "min"))
    ways: list[tuple[str, Shape]] = []
    if len(shape) > 1:
        ways += [
            (f"F.{name}({value}, axis={axis})", (*shape[:axis], 1, *shape[axis + 1 :]))
            for axis in range(len(shape))
            if shape[axis] != 1
        ]
        if all(size != 1 for size in shape):
            ways.append((f"F.{name}({value}, axis=None)", (1,) * len(shape)))
    if ways:
        draft.keep(*rng.choice(ways))


def along(draft: Draft) -> None:
    value = draft.some()
    shape, rng = draft.values[value], draft.random
    if len(shape) < 2 or last(shape) < 2:
        return
    k = rng.randrange(1, last(shape) + 1)
    text = rng.choice((
        "F.cumsum({0})", "F.cumsum({0}, exclusive=True, reverse=True)", "F.sort({0})[0]",
        "F.sort({0}, descending=True)[0]", f"F.where(F.top_k({{0}}, {k}), {{0}}, 0.0)",
        "F.where(F.col_index({0}) < 3, {0}, 1.0)",
    ))  # fmt: skip
    draft.keep(text.format(value), shape)


def looked_up(draft: Draft) -> None:
    value = draft.some(2, 3)
    shape = draft.values[value]
    if shape[0] != "M" or last(shape) == 1:
        return
    table = draft.operand("t", "f32", (PLACES, *shape[1:]))
    ids = draft.operand("i", draft.random.choice(("i32", "i64")), ("M",))
    draft.keep(f"{value} + F.gather({table}, {ids})", shape)


def taken(draft: Draft) -> None:
    value = draft.some(2)
    shape = draft.values[value]
    if shape[0] != "M" or last(shape) == 1:
        return
    draft.keep(f"F.take({value}, {draft.operand('i', 'i32', ('M',))}, {draft.random.randint(-2, 2)})", ("M", 1))


STEPS = (
    unary,
    unary,
    binary,
    binary,
    sliced,
    sliced,
    axes,
    axes,
    joined,
    joined,
    reduced,
    reduced,
    along,
    looked_up,
    taken,
)


# ---------------------------------------------------------------- what it means


def rearrange(x: Array, pattern: str, h: int = 1) -> Array:
    if pattern == "m (h d) -> m h d":
        return x.reshape(x.shape[0], h, -1)
    return x.reshape(x.shape[0], -1) if pattern.endswith("(h d)") else x.transpose(0, 2, 1)


def gather(table: Array, ids: Array) -> Array:
    """By a loop; what is no row is 0."""
    return np.array([table[int(i)] if 0 <= i < len(table) else np.zeros(table.shape[1:]) for i in ids])


def scatter(out: Array, ids: Array, rows: Array) -> Array:
    found = np.array(out)
    for i, row in zip(ids, rows, strict=True):
        if 0 <= i < len(out):
            found[int(i)] = row
    return found


def take(x: Array, columns: Array, missing: float) -> Array:
    return np.array([[row[int(i)] if 0 <= i < len(row) else missing] for row, i in zip(x, columns, strict=True)])


def cumsum(x: Array, exclusive: bool = False, reverse: bool = False) -> Array:
    x = x[..., ::-1] if reverse else x
    found = np.cumsum(x, -1) - (x if exclusive else 0)
    return found[..., ::-1] if reverse else found


def sort(x: Array, descending: bool = False) -> tuple[Array, None]:
    return (-np.sort(-x, -1) if descending else np.sort(x, -1)), None


def top_k(x: Array, k: int) -> Any:
    return x >= np.sort(x, -1)[..., [-k]]


def over(function: Any) -> Any:
    return lambda x, axis: function(x, axis=axis, keepdims=True)


F = SimpleNamespace(
    gather=gather, scatter=scatter, take=take, rearrange=rearrange, cumsum=cumsum, sort=sort, top_k=top_k,
    minimum=np.minimum, maximum=np.maximum, where=np.where, relu=lambda x: np.maximum(x, 0), square=np.square,
    sum=over(np.sum), max=over(np.max), min=over(np.min), split=lambda x, parts: np.split(x, parts, -1),
    concat=lambda parts: np.concatenate(parts, -1), roll=lambda x, by: np.roll(x, by, -1),
    flip=lambda x: x[..., ::-1], col_index=lambda x: np.arange(x.shape[-1]),
)  # fmt: skip


def names_of(text: str) -> list[str]:
    return re.findall(r"(\w+): \w+\[", text.split("def drawn(")[1].split(") ->")[0])


def meant(text: str, operands: list[Array]) -> tuple[Array, ...]:
    """The body of the spec, run by numpy on 64-bit floats."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    given = zip(names_of(text), operands, strict=True)
    space: dict[str, Any] = {"F": F, **{name: np.asarray(array, np.float64) for name, array in given}}
    for line in lines[:-1]:
        exec(line, space)
    results = eval(lines[-1].removeprefix("return "), space)
    return results if isinstance(results, tuple) else (results,)


def chain_of(text: str, seed: int) -> Chain:
    space: dict[str, Any] = {}
    exec(compile(text, f"<drawn {seed}>", "exec"), space)
    found = space["drawn"]
    assert isinstance(found, Chain)
    return found


def drawn_operands(chain: Chain, seed: int, rows: int) -> list[Array]:
    """Whole numbers from -4 to 4; indices of which some name nothing, and places each another one."""
    rng = np.random.default_rng(seed)
    found = []
    for tensor in chain.graph.inputs:
        shape = [size if isinstance(size, int) else rows for size in tensor.shape]
        numbers = rng.integers(-4, 5, shape)
        if tensor.name.startswith("i"):
            numbers = rng.choice([-(2**31), -1, *range(30), 2**31 - 1], shape)
        if tensor.name.startswith("s"):
            numbers = np.where(rng.random(rows) < 0.3, -1, rng.permutation(max(PLACES, rows))[:rows])
        found.append(numbers.astype(tensor.dtype.numpy))
    return found


def judged(seed: int, target: str = "cuda:h200") -> str:
    """`right`, `refused`, or what is wrong."""
    text = spec_text(seed)
    try:
        made = fusegen.compile(chain_of(text, seed), target, on="emulator", validate=False)
    except (SpecError, NoPlan) as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Exception:
        return f"crash\n{traceback.format_exc()}"
    for rows in (5, 1, 18):
        given = drawn_operands(chain_of(text, seed), seed, rows)
        wanted = meant(text, [np.array(one) for one in given])
        try:
            got = made(*given)
        except Exception:
            return f"crash with {rows} rows\n{traceback.format_exc()}"
        for one, law in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
            if one.shape != law.shape or not np.array_equal(np.asarray(one, np.float64), law):
                return f"wrong with {rows} rows"
    return "right"


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("seeds", help="a seed, or FROM-TO")
    ask.add_argument("--target", default="cuda:h200")
    said = ask.parse_args()
    first, dash, end = said.seeds.partition("-")
    seeds = range(int(first), int(end)) if dash else range(int(first), int(first) + 1)
    found: Counter[str] = Counter()
    for seed in seeds:
        verdict = judged(seed, said.target)
        kind = verdict.split()[0].rstrip(":")
        found[kind] += 1
        if not dash:
            print(spec_text(seed))
        if not dash or kind not in ("right", "refused"):
            print(f"{seed}: {verdict}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(found.items())))
    return int(any(kind not in ("right", "refused") for kind in found))


if __name__ == "__main__":
    sys.exit(main())
