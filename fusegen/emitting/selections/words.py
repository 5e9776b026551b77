"""The words of kernels whose keys are one word with their columns, which a network sorts: see planner/ways.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from fusegen.emitting.rows.frame import scaled
from fusegen.emitting.rows.spelling import Speller
from fusegen.emitting.selections.choice import Choice
from fusegen.language.types import DType, bf16, f16, f32
from fusegen.planner.ways import Packed

MASKED: Mapping[DType, str] = {f16: "0x03ffffffu", bf16: "0x007fffffu", f32: "0x007fffffu"}
FEW_AT_ONCE = "#pragma unroll 4"  # loads on their way, where a loop over all would be long
ORDER_OF = (
    "const unsigned bits = __float_as_uint(key + 0.0f);",
    "if (key != key) return 0xffffffffu;",
    "return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);",
)
BF16_PAIR = ("return __float_as_uint(first) >> 16 | (__float_as_uint(second) & 0xffff0000u);",)
BF16_AT = (
    "const unsigned flips = static_cast<unsigned>(static_cast<int>(~entry) >> 31) | 0x80000000u;",
    "return __uint_as_float((entry ^ flips) & 0xffff0000u);",
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
        pairs = keys["elements"] if self.way.clipped else -(-keys["elements"] // 2)
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
            "place_bits": self.place_bits(pairs),
            "shared": way.group > 1 or way.clipped,
            "picks_type": "Entry" if way.clipped else "const Entry",
            **(self.again(self.last_place(pairs).bit_length()) if way.clipped else {}),
            "orders_of": functions.get(f"orders_{stored.name}", ()),
            "pair_of": BF16_PAIR if stored is bf16 else functions["key_pair_f16"],
            "key_lines": BF16_AT if stored is bf16 else self.f16_at(),
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

    def place_bits(self, pairs: int) -> str:
        """Those of an entry in which its column is."""
        if self.way.clipped:
            return f"{(1 << self.last_place(pairs).bit_length()) - 1:#x}u"
        return "0xffffu"

    def again(self, bits: int) -> Mapping[str, Any]:
        """Of words that clip their keys by so many bits: what tells whether others are the best, and finds them."""
        tile, k, warp = self.plan.tile, self.selection.k, self.plan.target.warp
        shuffle, partner = self.spelling.shuffle.format, self.spelling.shuffle_xor.format
        lanes, own = tile.threads_per_row, min(k, self.way.own(tile.threads_per_row))
        lane, place = divmod(k - 1, own)
        owners = lane + 1
        firsts = f"{sum(1 << first for first in range(0, warp, lanes)):#x}{'ull' if warp > 32 else 'u'}"
        rank = "lane" if own == 1 else f"lane * {own} + q"
        alike = [f"alike(picks[q], {self.neighbour(own, way)})" for way in (-1, 1)] if owners * own > 1 else []
        return {
            "bits": bits,
            "order_of": self.spelling.functions.get("order_f32", ORDER_OF),
            "own_col": self.own_col(),
            "kept_key": self.kept_key(),
            "lanes": self.spelling.lanes,
            "ballot": self.spelling.functions["ballot"][0],
            "own_picks": own,
            "owners": owners,
            "last_key": shuffle(f"own_keys[{place}]", lane, lanes) if lanes > 1 else f"own_keys[{place}]",
            "missed_partner": partner("missed", "step"),
            "most_partner": partner("most", "step"),
            "has_rank": f"{rank} < {k} && " if lanes * own > k else "",
            "next_key": shuffle("own_keys[0]", f"(lane + 1) % {lanes}", lanes),
            "has_next": f"(lane + 1) * {own} < {k}" if own > 1 else f"lane + 1 < {k}",
            "pick_before": shuffle(f"picks[{own - 1}]", f"(lane + {lanes - 1}) % {lanes}", lanes),
            "pick_behind": shuffle("picks[0]", f"(lane + 1) % {lanes}", lanes),
            "is_tied": " || ".join([*alike, f"{rank if lanes > 1 else 'q'} == {k - 1}"]),
            "owns_tied": f"tied[q] >> owner & {firsts}" if owners > 1 else f"tied[q] & {firsts}",
            "word_there": shuffle("picks[q]", "owner" if owners > 1 else "0", lanes) if lanes > 1 else "picks[q]",
            "first_own": "lane" if lanes > 1 else "0",
            "few_at_once": FEW_AT_ONCE,
        }

    def neighbour(self, own: int, way: Literal[-1, 1]) -> str:
        """The word of the rank before or behind a lane's own q-th."""
        end, other = ("0", "before") if way < 0 else (f"{own - 1}", "behind")
        if self.plan.tile.threads_per_row == 1:
            other = "picks[q]" if own == 1 else f"picks[{own - 1 if way < 0 else 0}]"
        if own == 1:
            return other
        return f"q {'>' if way < 0 else '<'} {end} ? picks[q {'-' if way < 0 else '+'} 1] : {other}"

    def kept_key(self) -> str:
        """What is above no key stands for one that is not in the row."""
        place = self.keys()["key_place"] or "0"
        return f"there[{place}] ? keys[{place}] : -INFINITY" if self.lanes_guard() else f"keys[{place}]"

    def own_col(self) -> str:
        """The column of element j of the lane's vector v."""
        tile, lanes = self.plan.tile, self.plan.tile.threads_per_row
        number = "v" if tile.per_thread > 1 else ""
        if lanes > 1:
            number = f"v * {lanes} + lane" if number else "lane"
        return " + ".join(filter(None, (number and scaled(number, tile.vector), "j" * (tile.vector > 1)))) or "0"

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
        return (1 if self.way.clipped else 2) * pairs * self.plan.tile.threads_per_row - 1

    def places(self) -> str:
        """Of a pair of the first lane's, less what is added for each lane behind it."""
        vector, lanes = self.plan.tile.vector, self.plan.tile.threads_per_row
        if self.way.clipped:
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
