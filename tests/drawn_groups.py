"""Random chains that reduce groups of a product's columns and go on with every element, as users could write them.

    python -m tests.drawn_groups SEED                      prints the spec of that seed, and judges it
    python -m tests.drawn_groups FROM-TO [--target NAME]   judges so many, and says what is amiss

All numbers are small whole ones, which bf16 holds exactly: by whichever tiles they are multiplied and reduced, results
are those of plain numpy, bit by bit. `F` below is that numpy; no reference that fusegen generates has a part in it.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np

import fusegen
from fusegen.errors import NoPlan, SpecError
from fusegen.language.spec import Chain

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 8  # of a product


def spec_text(seed: int) -> str:
    """One or two products, an epilogue, one or two reductions of groups, and what is made of all of them."""
    draw = random.Random(seed)
    group, group_count = draw.choice((128, 128, 128, 64, 32)), draw.choice((1, 2, 3))
    right, transposed = draw.choice((("N, K", ".T"), ("K, N", "")))
    parameters, products = ["x: bf16[M, K]"], []
    for number in range(draw.choice((1, 1, 2))):
        parameters.append(f"w{number}: bf16[{right}]")
        products.append(f"(x @ w{number}{transposed})")
    sign = draw.choice("+-*")
    lines = [f"y = F.minimum(F.maximum({f' {sign} '.join(products)}, -{MOST}.0), {MOST}.0)"]
    for name, type_, text in (
        ("b", "bf16[N]", "y + b"), ("q", "bf16[M, N]", "F.maximum(y, q)"), ("c", "f32[M, 1]", "y - c"),
    ):  # fmt: skip
        if draw.random() < 0.35:
            parameters.append(f"{name}: {type_}")
            lines.append(f"y = {text}")
    lines += [f"g = F.groups(y, {group})", f"s = F.{draw.choice(('sum', 'max', 'min'))}(g)"]
    elements = ["g - s", "F.maximum(g, s * 0.5)", "F.where(g >= s, s, g)"]
    kinds = ["e", "es", "s", "esy"]
    if draw.random() < 0.4:
        lines.append(f"t = F.{draw.choice(('sum', 'max'))}(F.minimum(g - s, 4.0))")
        elements, kinds = ["g + t", "F.where(g > t, g, s)", "g - s + t"], [*kinds, "et"]
    made = {
        "e": (f'F.rearrange({draw.choice(elements)}, "m g k -> m (g k)")', "f32[M, N]"),
        "s": ('F.rearrange(s, "m g 1 -> m g")', f"f32[M, N // {group}]"),
        "t": ('F.rearrange(t, "m g 1 -> m g")' if len(lines) > 3 else "", f"f32[M, N // {group}]"),
        "y": ("y", "bf16[M, N]"),
    }
    results = [made[kind] for kind in draw.choice(kinds)]
    types = ", ".join(type_ for _, type_ in results)
    body = "\n".join(f"    {line}" for line in (*lines, f"return {', '.join(text for text, _ in results)}"))
    return (
        "from fusegen import bf16, chain, dims, f32\nfrom fusegen import ops as F\n\n"
        'M, K, N = dims("M K N")\n\n\n'
        f"@chain(M={draw.choice((1, 17, 70))}, K={draw.choice((32, 48, 64, 80))}, N={group * group_count})\n"
        f"def drawn({', '.join(parameters)}) -> {f'tuple[{types}]' if len(results) > 1 else types}:\n{body}\n"
    )


def chain_of(text: str) -> Chain:
    space: dict[str, Any] = {}
    exec(compile(text, "<drawn>", "exec"), space)
    chain: Chain = space["drawn"]
    return chain


def meant(text: str, chain: Chain, operands: list[Array]) -> tuple[Array, ...]:
    """The spec's body in plain numpy."""
    numpy_ops = SimpleNamespace(
        minimum=np.minimum,
        maximum=np.maximum,
        where=np.where,
        groups=lambda x, size: x.reshape(len(x), -1, size),
        sum=lambda x: x.sum(-1, keepdims=True),
        max=lambda x: x.max(-1, keepdims=True),
        min=lambda x: x.min(-1, keepdims=True),
        rearrange=lambda x, _: x.reshape(len(x), -1),
    )
    names = [tensor.name for tensor in chain.graph.inputs]
    body = text[text.index(":\n", text.index("def drawn")) + 2 :]
    space: dict[str, Any] = {"F": numpy_ops}
    exec(f"def drawn({', '.join(names)}):\n{body}", space)
    found = space["drawn"](*(one.astype(np.float64) for one in operands))
    return found if isinstance(found, tuple) else (found,)


def drawn_operands(chain: Chain, seed: int) -> list[Array]:
    rng, sizes = np.random.default_rng(seed), chain.graph.sizes
    shapes = [[sizes[str(n)] if not isinstance(n, int) else n for n in t.shape] for t in chain.graph.inputs]
    pairs = zip(chain.graph.inputs, shapes, strict=True)
    return [rng.integers(-2, 3, shape).astype(tensor.dtype.numpy) for tensor, shape in pairs]


def judged(seed: int, target: str) -> str:
    """`right`, `refused`, or what is wrong."""
    text = spec_text(seed)
    try:
        chain = chain_of(text)
        made = fusegen.compile(chain, target, on="emulator", validate=False)
        given = drawn_operands(chain, seed)
        got = made(*given)
    except (SpecError, NoPlan) as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Exception:
        return f"crash\n{traceback.format_exc()}"
    for one, law in zip(got if isinstance(got, tuple) else (got,), meant(text, chain, given), strict=True):
        if one.shape != law.shape or not np.array_equal(np.asarray(one, np.float64), law):
            return "wrong"
    return "right"


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("seeds", help="a seed, or FROM-TO")
    ask.add_argument("--target", default="cuda:h200")
    said = ask.parse_args()
    first, dash, end = said.seeds.partition("-")
    found: Counter[str] = Counter()
    for seed in range(int(first), int(end) if dash else int(first) + 1):
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
