"""Random specs with matrix products, as text that a user could have written.

python -m tests.product_chains SEED         prints the spec of that seed
python -m tests.product_chains SEED f32     the same with factors of f32, as tf32
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

from fusegen.language.spec import Chain
from tests.chains import numbered

UNARY = ("F.relu({0})", "F.gelu({0})", "F.silu({0})", "F.tanh({0})", "F.sigmoid({0})", "F.square({0})", "{0} * 0.5")
PROLOGUES = ("F.relu({0})", "F.silu({0})", "{0} + 0.25", "F.square({0}) - {0}", "F.cast({0}, {kind})")


@dataclass
class Draft:
    """A spec under construction. `widths`: dim of the columns -> the values of that many columns."""

    random: random.Random
    kind: str  # of the factors
    batch: str  # "", or "B, " where left factors have a batch axis
    parameters: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def operand(self, stem: str, type: str) -> str:
        name = f"{stem}{len(self.parameters)}"
        self.parameters.append(f"{name}: {type}")
        return name

    def line(self, text: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name


def spec_text(seed: int, kind: str = "") -> str:
    """The source of one random spec, called `fuzz`, over dims B, M, N, L, K; with factors of `kind`, else halves."""
    rng = random.Random(seed)
    half = rng.choice(("f16", "bf16"))
    draft = Draft(rng, kind or half, rng.choice(("", "", "B, ")))
    left = left_factor(draft)
    results = [(output(draft, left, "N"), "N")]
    if rng.random() < 0.25:
        results.append((output(draft, left, "L"), "L"))
    used = [d for d in "BMNLK" if any(d in p.split(":")[1] for p in draft.parameters)]
    sizes = ", ".join(f"{d}={s}" for d, s in (("B", 2), ("M", 5), ("N", 18), ("L", 9), ("K", 21)) if d in used)
    types = [f"{rng.choice((draft.kind, 'f32'))}[{draft.batch}M, {width}]" for _, width in results]
    declared = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
    body = "\n".join(f"    {line}" for line in draft.lines)
    text = (
        "from fusegen import b8, bf16, chain, dims, f16, f32, i32\nfrom fusegen import ops as F\n\n"
        'B, M, N, L, K = dims("B M N L K")\n\n\n'
        f"@chain({sizes})\ndef fuzz({', '.join(draft.parameters)}) -> {declared}:\n{body}\n"
        f"    return {', '.join(value for value, _ in results)}\n"
    )
    return numbered(text, seed)


def left_factor(draft: Draft) -> str:
    """An operand, the view of one, or something computed, once or twice, on the way."""
    rng, kind = draft.random, draft.kind
    choice = rng.random()
    if choice < 0.15:
        return f"{draft.operand('x', f'{kind}[{draft.batch}K, M]')}.mT"
    x = draft.operand("x", f"{kind}[{draft.batch}M, K]")
    if choice < 0.4:
        return x
    if choice < 0.6:
        gain = draft.operand("g", f"{rng.choice((kind, 'f32'))}[K]") if rng.random() < 0.7 else ""
        return draft.line(f"F.rmsnorm({x}{', ' + gain if gain else ''})")
    if choice < 0.75:
        scale = draft.operand("s", f"f32[{draft.batch}M, 1]")
        return draft.line(f"{x} * {scale}")
    if choice < 0.85:
        other = draft.operand("y", f"{kind}[{draft.batch}M, K]")
        return draft.line(f"{x} + {other}")
    return draft.line(rng.choice(PROLOGUES).format(x, kind=kind))


def product(draft: Draft, left: str, width: str) -> str:
    rng, kind = draft.random, draft.kind
    batch = draft.batch if draft.batch and rng.random() < 0.4 else ""
    if rng.random() < 0.5:
        right = f"{draft.operand('w', f'{kind}[{batch}{width}, K]')}.mT"
    else:
        right = draft.operand("w", f"{kind}[{batch}K, {width}]")
    if kind == "f32":
        return draft.line(f'F.matmul({left}, {right}, precision="tf32")')
    return draft.line(f"{left} @ {right}")


def output(draft: Draft, left: str, width: str) -> str:
    """One or two products of that width, and what is made of them."""
    rng, kind = draft.random, draft.kind
    value = product(draft, left, width)
    if rng.random() < 0.4:
        value = draft.line(rng.choice(("F.silu({0}) * {1}", "{0} + {1}", "F.maximum({0}, {1})")).format(
            value, product(draft, left, width)))  # fmt: skip
    for _ in range(rng.randint(0, 4)):
        choice = rng.random()
        if choice < 0.3:
            value = draft.line(rng.choice(UNARY).format(value))
        elif choice < 0.55:
            bias = draft.operand("b", f"{rng.choice((kind, 'f32'))}[{width}]")
            value = draft.line(f"{value} + {bias}")
        elif choice < 0.7:
            value = draft.line(f"{draft.operand('r', f'{kind}[{draft.batch}M, {width}]')} + {value}")
        elif choice < 0.8:
            value = draft.line(f"{value} * {draft.operand('c', f'f32[{draft.batch}M, 1]')}")
        elif choice < 0.87:
            mask = draft.operand("m", f"b8[{draft.batch}M, {width}]")
            value = draft.line(f"F.where({mask}, {value}, -1.0)")
        elif choice < 0.94:
            value = draft.line(f"F.where(F.col_index({value}) <= F.row_index({value}), {value}, 0.0)")
        else:
            value = draft.line(f"{value} * {draft.operand('a', 'f32')}")
    return value


def random_product(seed: int, kind: str = "") -> Chain:
    """The chain of `spec_text(seed, kind)`."""
    module: dict[str, Any] = {"__name__": f"product_fuzz_{seed}"}
    exec(compile(spec_text(seed, kind), f"<product fuzz {seed}>", "exec"), module)
    found: Chain = module["fuzz"]
    return found


if __name__ == "__main__":
    print(spec_text(int(sys.argv[1]), *sys.argv[2:]))
