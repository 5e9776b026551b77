"""The words of kernels whose keys are one word with their columns, which a network sorts: see planner/ways.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.selections.choice import Choice
from fusegen.language.types import DType, bf16, f16, f32
from fusegen.planner.ways import Packed

MASKED: Mapping[DType, str] = {f16: "0x03ffffffu", bf16: "0x007fffffu", f32: "0x007fffffffffffffull"}
BF16_PAIR = ("return __float_as_uint(first) >> 16 | (__float_as_uint(second) & 0xffff0000u);",)
BF16_AT = (
    "const unsigned flips = static_cast<unsigned>(static_cast<int>(~entry) >> 31) | 0x80000000u;",
    "return __uint_as_float((entry ^ flips) & 0xffff0000u);",
)
F32_AT = (
    "const unsigned order = static_cast<unsigned>(entry >> 32);",
    "return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);",
)


class WordsChoice(Choice):
    """Of one plan whose Selection has a Packed."""

    def __init__(self, parts: Speller) -> None:
        super().__init__(parts)
        assert isinstance(self.selection.way, Packed)
        self.way = self.selection.way
        self.frame.uses_vec = self.frame.uses_vec or self.way.group > 1

    def spelled_pass(self) -> None:
        """None: templates ask for its body alone."""

    def said(self) -> Mapping[str, Any]:
        way, tile, functions = self.way, self.plan.tile, self.spelling.functions
        lanes, best, stored = tile.threads_per_row, way.sorted, way.stored
        keys = self.keys()
        pairs = keys["elements"] if way.wide else -(-keys["elements"] // 2)
        odd = keys["elements"] % 2 == 1
        shuffled = self.spelling.shuffle_xor.format
        guard = self.lanes_guard()
        top = self.spelling.shuffle.format("picks[0]", 0, lanes) if lanes > 1 else "picks[0]"
        return {
            **keys,
            "pairs": pairs,
            "odd": odd,
            "second_key": f"q * 2 + 1 < {keys['elements']} ? keys[q * 2 + 1] : 0.0f" if odd else "keys[q * 2 + 1]",
            "first_there": "there[q * 2]" if guard else "true",
            "second_there": self.second_there(guard, keys["elements"]),
            "last_place": self.last_place(pairs),
            "places": self.places(),
            "first_place": self.last_place(pairs) - (lanes - 1) * tile.vector,
            "row_step": lanes * tile.vector,
            "own_places": f"({lanes - 1} - lane) * {tile.vector}" if tile.vector > 1 else f"{lanes - 1} - lane",
            "masked": MASKED[stored],
            "stored": stored.name,
            "entry": "unsigned long long" if way.wide else "unsigned",
            "place_bits": "0xffffffffu" if way.wide else "0xffffu",
            "orders_of": functions.get(f"orders_{stored.name}", ()),
            "pair_of": BF16_PAIR if stored is bf16 else functions["key_pair_f16"],
            "key_lines": {bf16: BF16_AT, f32: F32_AT}.get(stored) or self.f16_at(),
            "larger_pair": functions.get(f"larger_pair_{stored.name}", ()),
            "meet": functions["meet"],
            "row_pairs": self.plan.cols // 2,
            "parted": way.parted(lanes),
            "own": way.own(lanes),
            "merging": 0 if lanes == (2 if way.parted(lanes) else 1) else lanes // (2 if way.parted(lanes) else 1),
            "from_partner": shuffled("best[q]", "step"),
            "from_other_half": shuffled(f"best[{best - 1} - q]", lanes // 2),
            "half_from_other": shuffled(f"half[{best // 2 - 1} - q]", lanes // 2),
            "top_pick": top,
            "team_names_col": self.names_col(guard),
            "lanes_guard": guard,
            "lanes_body": self.parts.elements.body(replace(self.last, reductions=(), stores=()), loads_first=True),
        }

    def names_col(self, guard: str) -> bool:
        return bool(guard) or self.frame.guard_names_col() or self.parts.elements.names_col(self.last)

    def f16_at(self) -> tuple[str, ...]:
        """The body of the function that has an entry's key."""
        return (
            "const unsigned order = entry >> 16;",
            "const unsigned short bits = static_cast<unsigned short>(order ^ (order & 0x8000u ? 0x8000u : 0xffffu));",
            f"{self.spelling.ctype[f16]} key;",
            "memcpy(&key, &bits, sizeof(key));",
            f"return {self.spelling.to_value[f16].format('key')};",
        )

    def second_there(self, guard: str, elements: int) -> str:
        there = "there[q * 2 + 1]" if guard else "true"
        if elements % 2 == 0:
            return there
        return f"q * 2 + 1 < {elements} && {there}" if guard else f"q * 2 + 1 < {elements}"

    def last_place(self, pairs: int) -> int:
        """As many places as the lanes have, each for two keys a pair; the row's own where groups are chosen."""
        if self.way.group > 1:
            return self.plan.cols - 1
        return (1 if self.way.wide else 2) * pairs * self.plan.tile.threads_per_row - 1

    def places(self) -> str:
        """Of a pair of the first lane's, less what is added for each lane behind it."""
        vector, lanes = self.plan.tile.vector, self.plan.tile.threads_per_row
        if self.way.wide:
            col = "q" if lanes == 1 else f"(q / {vector} * row_step + q % {vector})" if vector > 1 else "q * row_step"
            return f"{'first_place' if lanes > 1 else 'last_place'} - {col}"
        if lanes == 1:
            return "(last_place - q * 2) * 0x10001u - 0x10000u"
        if vector == 1:
            return f"(first_place - q * 2 * row_step) * 0x10001u - {lanes << 16:#x}u"
        return f"(first_place - (q * 2 / {vector} * row_step + q * 2 % {vector})) * 0x10001u - 0x10000u"

    @property
    def makes_keys(self) -> bool:
        return False

    @property
    def names_infinite(self) -> bool:
        return False
