"""What plans of every kind are spelled with: a target's types, conversions and parameters, and a kernel's frame."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusegen.emitting.prelude import SPECIAL_FUNCTIONS, WORD_FUNCTIONS
from fusegen.language.types import DType, b8, bf16, f16, i32
from fusegen.planner.heading import comment_lines
from fusegen.planner.model import Param, Plan, Statement
from fusegen.planner.pieces import CTYPE
from fusegen.targets.base import Spelling

UNROLL = "#pragma unroll"
CONSTANTS = (("INFINITY", "0x7f800000"), ("NAN", "0x7fc00000"))
TESTED = ("round_f16", "round_bf16", *SPECIAL_FUNCTIONS, *WORD_FUNCTIONS)  # functions that expressions call by name


@dataclass(frozen=True, slots=True)
class Words:
    """What a template asks a target for."""

    warp: int
    barrier: str
    unroll: str = UNROLL


class Dialect:
    """The small texts of one target; notes which functions of the prelude a kernel calls."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.functions: set[str] = set()

    def ctype(self, dtype: DType) -> str:
        return self.spelling.ctype[dtype]

    def to_value(self, dtype: DType, text: str) -> str:
        """From the storage type to f32, i32 or bool."""
        if dtype is i32:
            return text
        return f"{text} != 0" if dtype is b8 else self.spelling.to_float[dtype].format(text)

    def to_storage(self, dtype: DType, text: str) -> str:
        if dtype is i32:
            return text
        return f"static_cast<unsigned char>({text})" if dtype is b8 else self.spelling.from_float[dtype].format(text)

    def parameter(self, param: Param) -> str:
        if param.kind == "map":
            return f"const __grid_constant__ CUtensorMap {param.name}"
        if param.kind == "pointer":
            assert param.dtype is not None
            return f"{'' if param.output else 'const '}{self.ctype(param.dtype)}* __restrict__ {param.name}"
        if param.kind == "value":
            assert param.dtype is not None
            return f"{CTYPE[param.dtype]} {param.name}"
        return f"long long {param.name}"

    def statement(self, s: Statement) -> str:
        return f"const {s.ctype} {s.name} = {s.expr};"

    def headers_of(self, used: Iterable[DType]) -> list[str]:
        """The headers that these types need, and those that values are rounded to."""
        wanted = {*used, *(d for d in (f16, bf16) if f"round_{d}" in self.functions)}
        return [header for dtype, header in self.spelling.headers.items() if dtype in wanted]

    def call_those_in(self, text: str) -> None:
        """Note the functions of the prelude that `text` calls by name."""
        self.functions.update(name for name in TESTED if f"{name}(" in text)
        if "MaxSum" in self.functions:
            self.functions.add("exponential")
        self.functions.update(*(s.needs for name, s in SPECIAL_FUNCTIONS.items() if name in self.functions))

    def word_functions(self) -> list[Mapping[str, Any]]:
        """The functions whose bodies the target spells and those made of them, as far as the text calls them."""
        texts = [(name, *said, self.spelling.functions[name]) for name, said in WORD_FUNCTIONS.items()
                 if name in self.functions]  # fmt: skip
        texts += [
            (name, s.what, s.parameters, "float", s.body)
            for name, s in SPECIAL_FUNCTIONS.items()
            if name in self.functions
        ]
        return [dict(zip(("name", "what", "parameters", "result", "body"), text, strict=True)) for text in texts]

    def frame(self, plan: Plan, text: str) -> dict[str, Any]:
        """What stands around every kernel's body; `text`: all expressions, for the constants that they name."""
        conversions = self.spelling.to_float, self.spelling.from_float
        functions = self.word_functions()
        text = " ".join([text, *(line for f in functions for line in f["body"])])
        return {
            "p": plan,
            "t": Words(plan.target.warp, self.spelling.barrier),
            "header": comment_lines(plan),
            "constants": [(name, bits) for name, bits in CONSTANTS if re.search(rf"\b{name}\b", text)],
            "round_trip": {d.name: conversions[0][d].format(conversions[1][d].format("x")) for d in (f16, bf16)},
            "word_functions": functions,
            "function": self.spelling.functions,
            "signature": [self.parameter(p) for p in plan.params],
        }


def choice(tests: Sequence[str], texts: Sequence[str]) -> str:
    """Each test's own text in one expression; the last one needs no test."""
    return " : ".join([*(f"{test} ? {text}" for test, text in zip(tests[:-1], texts[:-1], strict=True)), texts[-1]])


def all_of(*tests: str) -> str:
    """One test that passes where each of `tests` does; empty ones say nothing. What binds less tightly than && is
    bracketed here, and tests are joined nowhere else, so that none of them can lose its neighbours."""
    said = [test for test in tests if test]
    return " && ".join(f"({test})" if len(said) > 1 and offers_choice(test) else test for test in said)


def offers_choice(test: str) -> bool:
    """Has it an `||` or a `?` outside of brackets?"""
    inner = re.compile(r"\([^()]*\)")
    while inner.search(test):
        test = inner.sub("", test)
    return "||" in test or "?" in test
