"""What plans of every kind are spelled with: a target's types, conversions and parameters, and a kernel's frame."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusegen.emitting.prelude import SPECIAL_FUNCTIONS, WORD_FUNCTIONS
from fusegen.language.types import LEAST_INT, DType, b8, bf16, f16, f32, i32, u32
from fusegen.planner.heading import comment_lines
from fusegen.planner.model import Access, Argument, Number, Param, Plan, Statement, Until, Value
from fusegen.planner.parts import Store
from fusegen.planner.pieces import digits
from fusegen.targets.base import FITTING, Spelling

UNROLL = "#pragma unroll"
VALUE_TYPES: Mapping[DType, str] = {f32: "float", i32: "int", u32: "unsigned", b8: "bool"}
ZEROS: Mapping[DType, str] = {f32: "0.0f", i32: "0", u32: "0u", b8: "false"}
UNSIGNED_SIGNS = {"shift_left": "<<", "shift_right": ">>", "floor_div": "/", "mod": "%"}  # where nothing can go wrong
CONSTANTS = (("INFINITY", "0x7f800000"), ("NAN", "0x7fc00000"))
CALLED = ("round_f16", "round_bf16", *SPECIAL_FUNCTIONS, *WORD_FUNCTIONS)  # functions that texts of tables call by name


@dataclass(frozen=True, slots=True)
class Words:
    """What a template asks a target for."""

    warp: int
    barrier: str
    unroll: str = UNROLL


class Dialect:
    """The small texts of one target; notes which functions of the prelude a kernel calls, and the constants it names.

    What is spelled is noted then: nobody looks for names in a finished text.
    """

    has_group = ""  # of grouped products, the kernel's name of whether the rows at hand are of a group

    def __init__(
        self, spelling: Spelling, row_number: str = "row", widens: bool = False, element_number: str = ""
    ) -> None:
        self.spelling = spelling
        self.row_number = row_number  # of the row at hand, along the shape's last axis but one
        self.element_number = element_number  # the index of the element of a column, in 64 bits
        self.widens = widens  # a bf16 becomes f32 by its bits
        self.functions: set[str] = set()
        self.constants: set[str] = set()

    def ctype(self, dtype: DType) -> str:
        return self.spelling.ctype[dtype]

    def to_value(self, dtype: DType, text: str) -> str:
        """From the storage type to f32, i32, u32 or bool."""
        if dtype is bf16 and self.widens:
            self.functions.add("widened")
            return f"widened({text})"
        return self.noted(self.spelling.to_value[dtype]).format(text)

    def to_storage(self, dtype: DType, text: str) -> str:
        return self.noted(self.spelling.to_storage[dtype]).format(text)

    def stored(self, store: Store) -> str:
        """What a store writes, in the type of its tensor."""
        if store.fits:
            return self.noted(FITTING[store.access.dtype]).format(store.value)
        return self.to_storage(store.access.dtype, store.value)

    def parameter(self, param: Param) -> str:
        if param.kind == "map":
            return f"const __grid_constant__ CUtensorMap {param.name}"
        if param.kind in ("pointer", "address"):
            assert param.dtype is not None
            alone = "" if param.shared else " __restrict__"  # the compiler may take it that nothing else is there
            return f"{'' if param.output else 'const '}{self.ctype(param.dtype)}*{alone} {param.name}"
        if param.kind == "value":
            assert param.dtype is not None
            return f"{VALUE_TYPES[param.dtype]} {param.name}"
        return f"long long {param.name}"

    # ---- values

    def noted(self, text: str) -> str:
        """A text of one of fusegen's own tables, whose functions and constants are noted."""
        functions, constants = named_in(text)
        self.functions |= functions
        self.constants |= constants
        return text

    def argument(self, arg: Argument) -> str:
        """By its name, or written out."""
        if isinstance(arg, Value):
            return arg.name
        return self.noted(number_text(arg))

    def expression(self, s: Statement, col: str) -> str:
        """What a statement computes; `col` is the column of the element at hand. Of ints it is spelled as plainly as of
        floats where nothing can go wrong."""
        if s.access is not None:
            return self.table_value(s, s.access)
        if s.op.name == "col_index":
            return col
        if s.op.name == "row_index":
            return f"static_cast<int>({self.row_number})"
        if s.op.name in ("row_low", "row_high"):
            return word_of(s.op.name, "row")
        if s.op.name in ("element_low", "element_high"):
            return word_of(s.op.name, self.element_number.format(self.argument(s.args[0]) if s.args else col))
        if s.exact and s.dtype is u32:
            return f"{self.argument(s.args[0])} {UNSIGNED_SIGNS[s.op.name]} {self.argument(s.args[1])}"
        usual = (s.op.ref, s.op.expr)
        _, text = s.op.forms.get(s.args[-1].dtype, usual) if s.args and not s.exact else usual
        return self.noted(text).format(*map(self.argument, s.args))

    def table_value(self, s: Statement, access: Access) -> str:
        """One value of a table, which an index names; nothing is read for one that names none."""
        table, (index,) = access.gathered, map(self.argument, s.args)
        assert table is not None
        assert s.missing is not None
        row = f"{access.name}_row" if access.walked else f"{access.name}_ptr"
        found = self.to_value(access.dtype, f"{row}[{index} * {table.stride}]")
        return f"{index} >= 0 && {index} < {table.count} ? {found} : {self.argument(s.missing)}"

    def define(self, name: str, dtype: DType, text: str) -> str:
        return f"const {VALUE_TYPES[dtype]} {name} = {text};"

    def statement(self, s: Statement, col: str = "col + j") -> str:
        return self.define(s.name, s.dtype, self.expression(s, col))

    def statements(self, body: Iterable[Statement], col: str = "col + j") -> list[str]:
        return [self.statement(s, col) for s in body]

    def within_limit(self, col: str, until: Until | None) -> str:
        """The test whether a column is needed; empty where all are."""
        return f"{col} {until.sign} {self.argument(until.bound)}" if until else ""

    def headers_of(self, used: Iterable[DType]) -> list[str]:
        """The headers that these types need, and those that values are rounded to."""
        wanted = {*used, *(d for d in (f16, bf16) if f"round_{d}" in self.functions)}
        return [header for dtype, header in self.spelling.headers.items() if dtype in wanted]

    def word_functions(self) -> list[Mapping[str, Any]]:
        """The functions whose bodies the target spells and those made of them, as far as the kernel calls them."""
        if "MaxSum" in self.functions:
            self.functions.add("exponential")
            self.constants.add("INFINITY")
        self.functions.update(*(s.needs for name, s in SPECIAL_FUNCTIONS.items() if name in self.functions))
        texts = [(name, *said, self.spelling.functions[name]) for name, said in WORD_FUNCTIONS.items()
                 if name in self.functions]  # fmt: skip
        texts += [
            (name, s.what, s.parameters, s.result, self.spelling.functions.get(name, s.body))
            for name, s in SPECIAL_FUNCTIONS.items()
            if name in self.functions
        ]
        return [dict(zip(("name", "what", "parameters", "result", "body"), text, strict=True)) for text in texts]

    def round_trip(self, dtype: DType) -> tuple[str, ...]:
        """The body of a function that rounds x."""
        there_and_back = self.spelling.to_value[dtype].format(self.spelling.to_storage[dtype].format("x"))
        return self.spelling.functions.get(f"round_{dtype.name}", (f"return {there_and_back};",))

    def frame(self, plan: Plan) -> dict[str, Any]:
        """What stands around every kernel's body, once all of that is spelled."""
        functions = self.word_functions()
        for line in (line for f in functions for line in f["body"]):
            self.constants |= named_in(line)[1]
        return {
            "p": plan,
            "t": Words(plan.target.warp, self.spelling.barrier),
            "header": comment_lines(plan),
            "constants": [(name, bits) for name, bits in CONSTANTS if name in self.constants],
            "round_trip": {d.name: self.round_trip(d) for d in (f16, bf16)},
            "word_functions": functions,
            "function": self.spelling.functions,
            "signature": [self.parameter(p) for p in plan.params],
        }


def asks(lines: Iterable[str], *names: str) -> bool:
    """Does a line name one of these? A local that not every body needs, as a row's number, is declared where it is
    named: a plan's bodies say so in their own words, and this finds the words once they are spelled."""
    wanted = frozenset(names)
    return any(wanted.intersection(re.findall(r"\w+", line)) for line in lines)


@cache
def named_in(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """The functions of the prelude that a text of a table calls, and the constants that it names."""
    words = frozenset(re.findall(r"\w+", text))
    return frozenset(name for name in CALLED if f"{name}(" in text), words.intersection(name for name, _ in CONSTANTS)


def word_of(name: str, index: str) -> str:
    """The half of an index of 64 bits that an op asks for."""
    return f"static_cast<int>({index})" if name.endswith("_low") else f"static_cast<int>(({index}) >> 32)"


def number_text(number: Number) -> str:
    """A literal or size in C; bracketed when negative, so that an expression may put any operator before it."""
    value = number.value
    if number.dtype is b8:
        return "true" if value else "false"
    if number.dtype is u32:
        return f"{value}u"
    if number.dtype is i32:
        if value == -(2**31):  # which C has no literal for
            return LEAST_INT
        return str(value) if value >= 0 else f"({value})"
    return float_text(float(value))


def float_text(value: float) -> str:
    """An f32 literal."""
    if math.isnan(value):
        return "NAN"
    text = digits(value)
    if text.endswith("inf"):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    if "e" not in text and "." not in text:
        text += ".0"
    return f"{text}f" if not math.copysign(1.0, value) < 0 else f"({text}f)"


def choice(tests: Sequence[str], texts: Sequence[str]) -> str:
    """Each test's own text in one expression; the last one needs no test, nor do those before it that say the same."""
    same = len(texts) - 1
    while same > 0 and texts[same - 1] == texts[-1]:
        same -= 1
    tests, texts = tests[: same + 1], texts[: same + 1]
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
