"""Random chains of operands of 8 and 4 bits, casts, reductions, products and quantize, as users could write them.

    python -m tests.drawn_narrow SEED                      prints the spec of that seed, and judges it
    python -m tests.drawn_narrow FROM-TO [--target NAME]   judges so many, and says what is amiss

A draft keeps, of each value, the largest it can be and the power of 2 that it is a multiple of, and takes only steps
whose results f32 holds exactly. So results are those of numpy in float64, code by code; scales and what they scale are
made by f32 operation for operation. `F` below is that numpy; no reference that fusegen generates has a part in it.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

import fusegen
from fusegen.errors import NoPlan, SpecError
from fusegen.language.spec import Chain
from fusegen.language.types import size_of
from tests import grouped

Array = np.ndarray[Any, np.dtype[Any]]
TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")
EXACT = 2.0**23  # of a value, in the power of 2 that it is a multiple of
FLOATS: dict[str, tuple[Any, float, float]] = {  # numpy's type, the largest number, the smallest one
    "f8e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 2.0**-9),
    "f8e5m2": (ml_dtypes.float8_e5m2, 57344.0, 2.0**-16),
    "f8e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240.0, 2.0**-10),
    "f8e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, 57344.0, 2.0**-17),
}
WHOLE: dict[str, tuple[Any, float, float]] = {"i8": (np.int8, -128.0, 127.0), "u8": (np.uint8, 0.0, 255.0)}
PACKED: dict[str, tuple[float, float]] = {"i4": (-8.0, 7.0), "u4": (0.0, 15.0), "f4e2m1": (-6.0, 6.0)}
OF_CODE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of f4e2m1
HALVES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
RULES = ("inverse", "vllm", "deepseek", "te")


@dataclass(frozen=True)
class Drawn:
    """A value: its text, what bounds it, and its shape."""

    text: str
    most: float
    grid: float
    whole: bool = False
    shape: str = "M, N"


class Draft:
    """A chain's parameters, lines and values so far."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.parameters: list[str] = []
        self.lines: list[str] = []
        self.values: list[Drawn] = []
        self.results: list[tuple[str, str]] = []  # text and type
        self.sizes = {"M": self.draw.choice((1, 3, 17, 40)), "N": self.draw.choice((128, 256, 384, 512, 96, 200))}
        self.blocks = self.sizes["N"] % 128 == 0

    def operand(self) -> Drawn:
        draw, name = self.draw, f"x{len(self.parameters)}"
        kind = draw.choice((*FLOATS, *WHOLE, "i8", "f8e4m3", *HALVES, *PACKED))
        if kind in PACKED:
            self.parameters.append(f"{name}: {kind}[M, N]")
            whole = kind != "f4e2m1"
            return Drawn(name, max(map(abs, PACKED[kind])), 1.0 if whole else 0.5, whole)
        shape = draw.choice(("M, N", "M, N", "M, N", "N", "M, 1")) if self.parameters else "M, N"
        wide = kind in FLOATS and draw.random() < 0.25
        self.parameters.append(f"{name}{'_wide' if wide else ''}: {kind}[{shape}]")
        if wide:
            return Drawn(f"{name}_wide", FLOATS[kind][1], FLOATS[kind][2], shape=shape)
        return Drawn(name, 7.0 if kind in WHOLE else 1.75, 1.0 if kind in WHOLE else 0.25, kind in WHOLE, shape)

    def product(self) -> Drawn:
        kind = self.draw.choice(("i8", "f8e4m3", "f8e5m2"))
        k = self.draw.choice((64, 128, 160))
        self.sizes["K"] = k
        self.parameters += [f"a: {kind}[M, K]", f"b: {kind}[N, K]"]
        whole = kind == "i8"
        most, grid = k * (49.0 if whole else 1.75**2), 1.0 if whole else 0.0625
        if self.draw.random() < 0.5:
            return Drawn("(a @ b.T)", most, grid, whole)
        return self.of_groups(kind, Drawn("", most, grid, whole))

    def of_groups(self, kind: str, bounds: Drawn) -> Drawn:
        """A product of each group of rows: as it is, by a scale of each group's columns, or by scales of blocks."""
        self.sizes["E"] = self.draw.choice((1, 2, 5))
        self.parameters[-1:] = [f"b: {kind}[E, N, K]", "ends: i32[E]"]
        how = self.draw.choice(("", "columns", "columns", "blocks", "blocks"))
        if how == "columns":
            self.parameters.append("s: f32[E, N]")
            text = "F.grouped_matmul(a, b.mT, ends, scale=s)"
            return Drawn(text, bounds.most * 1.75, bounds.grid * 0.25)
        if how == "blocks" and kind != "i8" and self.sizes["K"] == 128 and self.blocks:
            self.parameters += ["s: f32[M, K // 128]", "t: f32[E, N // 128, K // 128]"]
            text = "F.grouped_matmul(F.dequantize(a, s), F.dequantize(b, t).mT, ends)"
            return Drawn(text, bounds.most * 1.75**2, bounds.grid * 0.0625)
        return replace(bounds, text="F.grouped_matmul(a, b.mT, ends)")

    def named(self, value: Drawn) -> Drawn:
        name = f"y{len(self.lines)}"
        self.lines.append(f"{name} = {value.text}")
        return Drawn(name, value.most, value.grid, value.whole, value.shape)

    def step(self) -> Drawn | None:
        """One more value, if f32 holds it exactly."""
        kind = self.draw.choice(("two", "two", "two", "one", "cast", "cast", "reduce"))
        made = {"two": self.of_two, "one": self.of_one, "cast": self.cast, "reduce": self.reduced}[kind]()
        return self.named(made) if made.most / made.grid < EXACT else None

    def of_two(self) -> Drawn:
        a, b = self.chosen(), self.chosen()
        op = self.draw.choice(("+", "-", "*", "minimum", "maximum", "where"))
        shape = a.shape if a.shape == b.shape else "M, N"
        whole, grid, most = a.whole and b.whole, min(a.grid, b.grid), max(a.most, b.most)
        if op == "*":
            return Drawn(f"{a.text} * {b.text}", a.most * b.most, a.grid * b.grid, whole, shape)
        if op in "+-":
            return Drawn(f"{a.text} {op} {b.text}", a.most + b.most, grid, whole, shape)
        if op == "where":
            return Drawn(f"F.where({a.text} > {b.text}, {b.text}, {a.text})", most, grid, whole, shape)
        return Drawn(f"F.{op}({a.text}, {b.text})", most, grid, whole, shape)

    def of_one(self) -> Drawn:
        a = self.chosen()
        text, by = self.draw.choice((("-{}", 1.0), ("F.abs({})", 1.0), ("F.relu({})", 1.0), ("{} * 0.5", 0.5)))
        return Drawn(text.format(a.text), a.most * by, a.grid * by, a.whole and by == 1.0, a.shape)

    def cast(self) -> Drawn:
        a, to = self.chosen(), self.draw.choice((*FLOATS, *WHOLE, *HALVES, "i32"))
        text = f"F.cast({a.text}, {to})"
        if to in WHOLE:
            return Drawn(text, min(a.most, WHOLE[to][2] + 1), 1.0, True, a.shape)
        if to == "i32":
            return Drawn(text, a.most, max(1.0, a.grid), True, a.shape)
        if to in HALVES:
            return Drawn(
                text, a.most * 1.01 if a.most < 60000 else EXACT, a.grid if a.most < 60000 else 1.0, False, a.shape
            )
        _, most, grid = FLOATS[to]
        # of 4 bits and fewer: a multiple of the grid still, or of the type's smallest number
        return Drawn(text, min(a.most * 1.13, most), max(a.grid, grid), False, a.shape)

    def reduced(self) -> Drawn:
        a = self.chosen("M, N")
        op = self.draw.choice(("max", "min", "sum"))
        return Drawn(f"F.{op}({a.text})", a.most * (self.sizes["N"] if op == "sum" else 1), a.grid, a.whole, "M, 1")

    def quantized(self) -> None:
        """Values and scales as results; the values go on where f32 still holds what comes of them."""
        draw = self.draw
        a = self.chosen("M, N")
        to, rule = draw.choice(("f8e4m3", "f8e4m3", "f8e5m2", "i8", "f8e4m3fnuz")), draw.choice(RULES)
        per = draw.choice(("row", "row", "block")) if self.blocks else "row"
        words = f', per="{per}", rule="{rule}"'
        if draw.random() < 0.5:
            words += f", powers={draw.random() < 0.5}"
        if per == "row" and draw.random() < 0.3:
            words += f", scale_ub={draw.choice((0.5, 3.0, 100.0))}"
        number = len(self.lines)
        self.lines.append(f"q{number}, s{number} = F.quantize({a.text}, {to}{words})")
        self.results.append((f"q{number}", f"{to}[M, N]"))
        self.results.append((f"s{number}", "f32[M, N // 128]" if per == "block" else "f32[M, 1]"))
        if draw.random() < 0.3:
            self.results.append((f"F.dequantize(q{number}, s{number})", "f32[M, N]"))
        if to in WHOLE:
            self.values.append(Drawn(f"q{number}", 128.0, 1.0, True))
        elif FLOATS[to][1] / FLOATS[to][2] < EXACT:
            self.values.append(Drawn(f"q{number}", FLOATS[to][1], FLOATS[to][2]))

    def chosen(self, shape: str = "") -> Drawn:
        """Often one of the last."""
        found = [value for value in self.values if not shape or value.shape == shape]
        return self.draw.choice(found[-2:] if self.draw.random() < 0.6 else found)

    def result(self, a: Drawn) -> None:
        whole = (*WHOLE, "i32", "i32", "f32")
        to = self.draw.choice(whole if a.whole else (*FLOATS, *WHOLE, *HALVES, "f32", "f32"))
        if a.shape == "M, N" and self.draw.random() < 0.2:
            self.results.append((a.text, f"{self.draw.choice((*PACKED,))}[M, N]"))
            return
        meets = a.whole == (to in WHOLE or to == "i32")
        self.results.append((a.text if meets else f"F.cast({a.text}, {to})", f"{to}[{a.shape}]"))

    def unused(self) -> list[Drawn]:
        """Values that no line and no result has, and operands are among them."""
        texts = [*self.lines, *(f"= {text}" for text, _ in self.results)]
        words = Counter(word for text in texts for word in re.findall(r"\w+", text.partition("= ")[2]))
        return [value for value in self.values if not words[value.text]]


def spec_text(seed: int) -> str:
    draft = Draft(seed)
    draw = draft.draw
    multiplied = draw.random() < 0.2
    if multiplied:
        draft.values.append(draft.named(draft.product()))
    for _ in range(draw.choice((1, 2, 3)) - multiplied):
        draft.values.append(draft.operand())
    for number in range(draw.choice((2, 3, 5, 7))):
        if number == 1 and draw.random() < 0.6:
            draft.quantized()
        if (value := draft.step()) is not None:
            draft.values.append(value)
    if draw.random() < 0.3:
        draft.quantized()
    for value in draft.unused() or draft.values[-1:]:
        draft.result(value)
    types = ", ".join(type_ for _, type_ in draft.results)
    body = "\n".join(f"    {line}" for line in (*draft.lines, f"return {', '.join(text for text, _ in draft.results)}"))
    several = "tuple[{}]" if len(draft.results) > 1 else "{}"
    sizes = ", ".join(f"{name}={size}" for name, size in draft.sizes.items())
    return (
        "from fusegen import bf16, chain, dims, f4e2m1, f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f16, f32, i4, i8, i32\n"
        "from fusegen import u4, u8\n"
        'from fusegen import ops as F\n\nM, K, N, E = dims("M K N E")\n\n\n'
        f"@chain({sizes})\n"
        f"def drawn({', '.join(draft.parameters)}) -> {several.format(types)}:\n{body}\n"
    )


def chain_of(text: str) -> Chain:
    space: dict[str, Any] = {}
    exec(compile(text, "<drawn>", "exec"), space)
    chain: Chain = space["drawn"]
    return chain


# ---- the same in numpy


def stored(x: Array, to: str) -> Array:
    """What a number becomes that is stored as, or cast to, that type; in float64."""
    x = np.asarray(x, np.float64)
    if to in WHOLE or to == "i32":
        least, most = WHOLE[to][1:] if to in WHOLE else (-(2.0**31), 2.0**31 - 1)
        near = np.rint(x) if to in WHOLE else np.trunc(x)
        whole: Array = np.where(np.isnan(x), 0.0, np.clip(near, least, most))
        return whole
    if to in ("i4", "u4"):
        few: Array = np.where(np.isnan(x), 0.0, np.clip(np.rint(x), *PACKED[to]))
        return few
    if to == "f4e2m1":
        near_4: Array = np.clip(x, -6.0, 6.0).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
        return np.where(np.isnan(x), 6.0, near_4)
    if to in FLOATS:
        dtype, most, _ = FLOATS[to]
        coded: Array = np.clip(x, -most, most).astype(np.float32).astype(dtype).astype(np.float64)
        return coded
    return x.astype(np.float32).astype(HALVES.get(to, np.float32)).astype(np.float64)


def power_above(x: Array) -> Array:
    """The least power of 2 from x on, within those of normal f32; the largest of NaN."""
    wide = np.nan_to_num(x.astype(np.float64), nan=2.0**127, posinf=2.0**127)
    mantissa, exponent = np.frexp(np.clip(wide, 2.0**-126, 2.0**127))
    found: Array = np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(np.float32)
    return found


def quantized(
    x: Array,
    to: str,
    per: str = "row",
    rule: str = "inverse",
    powers: bool | None = None,
    scale_ub: float | None = None,
) -> tuple[Array, Array]:
    """docs/narrow.md, "Rules", in f32."""
    f32 = np.float32
    limit = f32(127.0 if to == "i8" else FLOATS[to][1])
    shown = x.astype(f32).reshape(len(x), -1, 128) if per == "block" else x.astype(f32)
    top = np.abs(shown).max(-1, keepdims=True)
    if scale_ub is not None:
        top = np.minimum(top, f32(scale_ub))
    least = {"te": 0.0, "deepseek": 1e-4, "vllm": 1e-10 if per == "block" else 1e-12}.get(rule, 1e-12)
    top = np.maximum(top, f32(least))
    if rule == "te":
        up = np.minimum(limit / top, np.finfo(f32).max)
        up = np.where((top > 0) & (top < np.inf), up, f32(1))
        if powers is not False:
            up = (up.view(np.uint32) & np.uint32(0xFF800000)).view(f32)
        values, scale = shown * up, f32(1) / up
    else:
        scale = top / limit
        if powers and rule == "vllm":
            scale = np.where(scale < np.inf, power_above(np.maximum(scale, f32(1e-10))), scale)
        elif powers:
            scale = power_above(scale)
        values = shown / scale if rule == "vllm" else shown * (f32(1) / scale)
    codes = stored(values, to).reshape(x.shape)
    return codes, (scale[..., 0] if per == "block" else scale).astype(np.float64)


def dequantized(x: Array, scale: Array) -> Array:
    wide = np.repeat(scale, x.shape[-1] // scale.shape[-1], -1)
    if x.ndim == 3:  # of blocks of two axes
        wide = np.repeat(wide, x.shape[-2] // scale.shape[-2], -2)
    return (x.astype(np.float32) * wide.astype(np.float32)).astype(np.float64)


def grouped_matmul(x: Array, w: Array, ends: Array, scale: Array | None = None) -> Array:
    return grouped.by_definition(x, w if scale is None else w * scale[:, None], ends)


NUMPY = SimpleNamespace(
    grouped_matmul=grouped_matmul,
    minimum=np.minimum,
    maximum=np.maximum,
    where=np.where,
    abs=np.abs,
    relu=lambda x: np.maximum(x, 0.0),
    cast=stored,
    sum=lambda x: x.sum(-1, keepdims=True),
    max=lambda x: x.max(-1, keepdims=True),
    min=lambda x: x.min(-1, keepdims=True),
    quantize=quantized,
    dequantize=dequantized,
)


def types_of(text: str) -> list[str]:
    """Of the results, as they are declared."""
    said = text[text.index("-> ") : text.index(":\n", text.index("-> "))]
    return [name for name in re.findall(r"(\w+)\[", said) if name != "tuple"]


def unpacked(x: Array, kind: str) -> Array:
    """Numbers as float64; of 4 bits the low nibble of each byte comes first."""
    if kind not in PACKED:
        return x.astype(np.float64)
    codes = np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1)
    if kind == "f4e2m1":
        return np.asarray(OF_CODE[codes])
    return codes.astype(np.float64) - (16.0 * (codes > 7) if kind == "i4" else 0.0)


@np.errstate(all="ignore")
def meant(text: str, chain: Chain, operands: list[Array]) -> tuple[Array, ...]:
    """The spec's body in plain numpy, and each result as its type holds it."""
    head = text[text.index("def drawn") :]
    names = [tensor.name for tensor in chain.graph.inputs]
    body = head[head.index(":\n") + 2 :]
    types = types_of(text)
    space: dict[str, Any] = {"F": NUMPY, **{name: name for name in (*FLOATS, *WHOLE, *HALVES, "i32", "f32")}}
    exec(f"def drawn({', '.join(names)}):\n{body}", space)
    declared = dict(re.findall(r"(\w+): (\w+)\[", head[: head.index("->")]))
    found = space["drawn"](*(unpacked(one, declared[name]) for name, one in zip(names, operands, strict=True)))
    found = found if isinstance(found, tuple) else (found,)
    return tuple(stored(one, to) for one, to in zip(found, types, strict=True))


def drawn_operands(chain: Chain, seed: int) -> list[Array]:
    """Small multiples of a quarter, or whole numbers; of `wide` operands any code."""
    rng, sizes = np.random.default_rng(seed), chain.graph.sizes
    made: list[Array] = []
    for tensor in chain.graph.inputs:
        shape = [size_of(n, sizes) for n in tensor.shape]
        name = str(tensor.dtype)
        if name == "i32":  # where groups end: as they should or not
            ends = rng.integers(-2, sizes["M"] + 3, shape).astype(np.int32)
            made.append(np.sort(ends) if rng.random() < 0.7 else ends)
        elif name != "f32" and str(tensor.shape[-1]) not in ("N", "K", "1"):  # bytes of two numbers
            made.append(rng.integers(0, 256, shape, dtype=np.uint8))
        elif tensor.name.endswith("_wide"):
            made.append(rng.integers(0, 256, shape).astype(np.uint8).view(tensor.dtype.numpy))
        elif name in WHOLE:
            made.append(rng.integers(0 if name == "u8" else -7, 8, shape).astype(tensor.dtype.numpy))
        else:
            made.append((rng.integers(-7, 8, shape) / 4).astype(tensor.dtype.numpy))
    return made


def judged(seed: int, target: str) -> str:
    """`right`, `refused`, or what is wrong."""
    text = spec_text(seed)
    try:
        chain = chain_of(text)
        made = fusegen.compile(chain, target or TARGETS[seed % len(TARGETS)], on="emulator", validate=False)
        given = drawn_operands(chain, seed)
        got = made(*given)
    except (SpecError, NoPlan) as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Exception:
        return f"crash\n{traceback.format_exc()}"
    laws = meant(text, chain, given)
    several = got if isinstance(got, tuple) else (got,)
    for number, (one, law, kind) in enumerate(zip(several, laws, types_of(text), strict=True)):
        found = unpacked(np.asarray(one), kind)
        law = np.broadcast_to(law, found.shape)
        if not np.array_equal(found, law, equal_nan=True):
            at = tuple(np.argwhere(~((found == law) | (np.isnan(found) & np.isnan(law))))[0])
            return f"wrong: result {number} is {found[at]!r} at {tuple(map(int, at))}, and is to be {law[at]!r}"
    return "right"


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("seeds", help="a seed, or FROM-TO")
    ask.add_argument("--target", default="", help=f"by turns {', '.join(TARGETS)}")
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
