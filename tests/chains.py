"""Random specs, as text that a user could have written: the source of property tests of graphs, plans and references.

`python -m tests.chains SEED` prints the spec of that seed. What runs kernels of random chains is `tests.fuzzing`.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from fusegen.language.spec import Chain

UNARY = (
    "exp", "log", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "relu", "silu", "gelu", "square", "abs", "neg",
)  # fmt: skip
BOUNDED = {"exp": "F.exp(F.clip({0}, -5.0, 5.0))", "log": "F.log(abs({0}) + 0.5)", "sqrt": "F.sqrt(abs({0}))",
           "rsqrt": "F.rsqrt(F.square({0}) + 0.25)"}  # fmt: skip
BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / (abs({1}) + 0.5)", "F.maximum({0}, {1})", "F.minimum({0}, {1})")
REDUCE = ("sum", "mean", "max", "min", "var")
ROWWISE = ("softmax", "log_softmax", "rmsnorm", "layernorm")
K = 5  # columns that a chain with a selection keeps
COMPARE = ("<", "<=", ">", ">=", "!=")


@dataclass
class Draft:
    """A spec under construction: its parameters, its lines, and the values it has so far by how they vary."""

    random: random.Random
    rank: int
    parameters: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    element: list[str] = field(default_factory=list)  # floats that vary by column
    row: list[str] = field(default_factory=list)  # floats, one a row
    masks: list[str] = field(default_factory=list)

    def take(self, pool: list[str]) -> str:
        return self.random.choice(pool[-4:] if self.random.random() < 0.7 else pool)

    def add(self, pool: list[str], text: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        pool.append(name)
        return name


def spec_text(seed: int, select: bool = False) -> str:
    """The source of one random spec, called `fuzz`, over dims B, M, N; with `select`, one that ends in a selection."""
    rng = random.Random(seed)
    draft = Draft(rng, rank=rng.choice((1, 2, 2, 2, 3)))
    declare(draft)
    reductions = rng.choice((0, 1, 1, 2, 3)) if draft.rank > 1 or rng.random() < 0.5 else 0
    for _ in range(rng.randint(2, 7)):
        step(draft)
    for _ in range(reductions):
        reduce(draft)
        for _ in range(rng.randint(0, 3)):
            step(draft)
    if reductions and (other := random.Random(f"{seed} shared")).random() < 0.4:
        share(draft, other)
    return numbered(finish(draft, select), seed)


def numbered(text: str, seed: int) -> str:
    """The same spec, or one whose leading axis B is a number."""
    if random.Random(f"{seed} numbered").random() < 0.7:
        return text
    return re.sub(r"\[B\b", "[2", text).replace("B=2, ", "")


def full(draft: Draft) -> str:
    return {1: "N", 2: "M, N", 3: "B, M, N"}[draft.rank]


def declare(draft: Draft) -> None:
    rng = draft.random
    floats = ("f16", "bf16", "f32")
    home = rng.choice(floats)
    kinds: list[tuple[str, str, list[str]]] = []
    for _ in range(rng.randint(1, 3)):
        kinds.append(("x", f"{home if rng.random() < 0.8 else rng.choice(floats)}[{full(draft)}]", draft.element))
    if draft.rank > 1:
        if rng.random() < 0.5:
            kinds.append(("g", f"{rng.choice((home, 'f32'))}[N]", draft.element))
        if rng.random() < 0.3:
            shape = full(draft).rsplit(", ", 1)[0] + ", 1"
            kinds.append(("r", f"f32[{shape}]", draft.row))
        if rng.random() < 0.3:
            kinds.append(("m", f"b8[{rng.choice((full(draft), 'N', 'M, N'))}]", draft.masks))
        if rng.random() < 0.2:
            kinds.append(("k", f"i32[{full(draft)}]", draft.element))
        if draft.rank == 3 and rng.random() < 0.4:
            kinds.append(
                ("w", f"{home}[{rng.choice(('B, 1, N', 'M, N', '1, M, N', 'B, 1, 1', 'M, 1'))}]", draft.element)
            )
    if rng.random() < 0.3:
        kinds.append(("a", "f32", draft.row))
    for index, (stem, type, pool) in enumerate(kinds):
        name = f"{stem}{index}"
        draft.parameters.append(f"{name}: {type}")
        pool.append(name)


def step(draft: Draft) -> None:
    rng = draft.random
    choice = rng.random()
    if choice < 0.35:
        name = rng.choice(UNARY)
        draft.add(draft.element, BOUNDED.get(name, f"F.{name}({{0}})").format(draft.take(draft.element)))
    elif choice < 0.75:
        other = draft.take(draft.row if draft.row and rng.random() < 0.3 else draft.element)
        if rng.random() < 0.2:
            other = repr(round(rng.uniform(-2, 2), 3))
        draft.add(draft.element, rng.choice(BINARY).format(draft.take(draft.element), other))
    elif choice < 0.85:
        draft.add(draft.masks, f"{draft.take(draft.element)} {rng.choice(COMPARE)} {round(rng.uniform(-1, 1), 2)!r}")
    elif draft.masks:
        a, b = draft.take(draft.element), draft.take(draft.element)
        draft.add(draft.element, f"F.where({draft.take(draft.masks)}, {a}, {b})")
    elif draft.rank > 1 and rng.random() < 0.5:
        a = draft.take(draft.element)
        draft.add(
            draft.masks, f"F.col_index({draft.element[0]}) <= F.row_index({draft.element[0]}) + {rng.randint(0, 3)}"
        )
        draft.add(draft.element, f"F.where({draft.take(draft.masks)}, {a}, 0.25)")
    else:
        kind = rng.choice(("f16", "bf16"))
        draft.add(draft.element, f"F.cast({draft.take(draft.element)}, {kind})")


def reduce(draft: Draft) -> None:
    rng = draft.random
    anchored = f"{draft.take(draft.element)} + {draft.element[0]} * 0.0"  # of the whole shape, whatever was taken
    if rng.random() < 0.5:
        draft.add(draft.element, f"F.{rng.choice(ROWWISE)}({anchored})")
    else:
        result = draft.add(draft.row, f"F.{rng.choice(REDUCE)}({anchored})")
        draft.add(draft.element, f"{draft.take(draft.element)} * 0.5 + {result} * 0.125")


def share(draft: Draft, rng: random.Random) -> None:
    """Two of three that share a maximum, a mean, or the deviations from it: a pass can merge one pair of reductions."""
    whole = draft.add([], f"{draft.element[-1]} + {draft.element[0]} * 0.0")
    top = draft.add([], f"F.max({whole})")
    centered = draft.add([], f"{whole} - F.mean({whole})")
    squares = draft.add([], f"{centered} * {centered}")
    first, second = rng.choice((
        (f"F.log(F.sum(F.exp({whole} - {top}))) + {top}", f"F.softmax({whole})"),
        (f"F.mean({squares})", f"F.layernorm({whole})"),
        (f"F.var({squares}) / (F.square(F.mean({squares})) + 1.0)", centered),
    ))  # fmt: skip
    draft.add(draft.row, first)
    draft.add(draft.element, f"{second} * 0.5 + {draft.row[-1]} * 0.125")


def live_names(draft: Draft, result: str) -> set[str]:
    """Every name that `result` is made from: operands outside it would be unused, which a spec may not have."""
    alive = {result}
    for line in reversed(draft.lines):
        name, text = line.split(" = ", 1)
        if name in alive:
            alive.update(re.findall(r"\b[a-z]\d+\b", text))
    return alive


def finish(draft: Draft, select: bool) -> str:
    rng = draft.random
    result = draft.element[-1]
    alive = live_names(draft, result)
    rest = [name for name in (p.split(":")[0] for p in draft.parameters) if name not in alive]
    for name in rest:
        if name in draft.masks:
            result = draft.add(draft.element, f"F.where({name}, {result}, 0.0)")
        elif name != result:
            result = draft.add(draft.element, f"{result} + {name}")
    result = draft.add(draft.element, f"{result} + {draft.element[0]} * 0.0")
    outputs = [(result, f"{rng.choice(('f16', 'bf16', 'f32'))}[{full(draft)}]")]
    rows = [v for v in draft.row if v.startswith("v")]
    if rows and rng.random() < 0.3:
        shape = full(draft).rsplit("N", 1)[0] + "1"
        outputs.append((f"{rng.choice(rows)} + F.max({draft.element[0]}) * 0.0", f"f32[{shape}]"))
    if select:
        outputs[0] = chosen(draft, result)
        outputs.append(("columns", f"i32[{full(draft).replace('N', str(K))}]"))
    dims = [d for d in ("B", "M", "N") if any(d in text for text in (*draft.parameters, outputs[0][1]))]
    returned = ", ".join(value for value, _ in outputs)
    declared = outputs[0][1] if len(outputs) == 1 else f"tuple[{', '.join(t for _, t in outputs)}]"
    sizes = ", ".join(f"{d}={s}" for d, s in (("B", 2), ("M", 3), ("N", 20)) if d in dims)
    body = "\n".join(f"    {line}" for line in draft.lines)
    return (
        "from fusegen import b8, bf16, chain, dims, f16, f32, i32\nfrom fusegen import ops as F\n\n"
        'B, M, N = dims("B M N")\n\n\n'
        f"@chain({sizes})\ndef fuzz({', '.join(draft.parameters)}) -> {declared}:\n{body}\n    return {returned}\n"
    )


def chosen(draft: Draft, result: str) -> tuple[str, str]:
    """Lines that choose K columns by `result`, masked or under a softmax, and do something with what they hold; and the
    output that comes of it."""
    rng = draft.random
    if rng.random() < 0.5:
        keep = rng.choice([f"{result} < 1.0", f"F.col_index({result}) > 2"])
        result = draft.add(draft.element, f"F.where({keep}, {result}, -float('inf'))")
    steps = ("{0}", "{0}", "F.softmax({0})", "F.log_softmax({0} * 0.5)", "F.sigmoid({0}) / F.max(F.exp({0}))")
    key = draft.add(draft.element, rng.choice(steps).format(result))
    ordered = ", sorted=False" if rng.random() < 0.2 else ""
    draft.lines.append(f"best, columns = F.topk({key}, {K}{ordered})")
    value = "best"
    if rng.random() < 0.4:
        value = draft.add([], f"{value} + F.take({draft.take(draft.element)} + {draft.element[0]} * 0.0, columns)")
    if rng.random() < 0.4:
        value = draft.add([], rng.choice(("{0} / (F.sum({0}) + 3.0)", "F.softmax({0})", "{0} * 0.5")).format(value))
    return value, f"{rng.choice(('bf16', 'f32'))}[{full(draft).replace('N', str(K))}]"


def random_chain(seed: int, select: bool = False) -> Chain:
    """The chain of `spec_text(seed, select)`."""
    module: dict[str, Any] = {"__name__": f"fuzz_{seed}"}
    exec(compile(spec_text(seed, select), f"fuzz_{seed}.py", "exec"), module)
    chain: Chain = module["fuzz"]
    return chain


if __name__ == "__main__":
    print(spec_text(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
