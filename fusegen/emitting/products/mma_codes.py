"""Right factors of codes in the words of one dialect: how they are copied, widened, and their sums scaled.

A column's codes of 32 of K belong to four lanes, 8 neighbours in K to each; so do the left factor's, of a row. Which 16
of the 32 an instruction multiplies, and in which order, is free where both factors have it alike: a lane takes its 8
codes apart two at a time, as that is cheapest, and puts the left factor's 8 numbers into the same pairs.

A code becomes a number of the factors' type by its bits, exactly:

    i8    the lower 7 bits behind the exponent of 128 make 128 + those, of which 128 is taken, or 256 of the negative;
          in f16, that has room, the code + 128 behind that of 1024
    i4    behind the exponent of 128, or of 1024 in f16, with the sign's bit turned round: 128 + 8 + the code
    u4    so too, and 128 + the zero is taken of it, which each column has for each group
    f4    exponent and mantissa behind the sign, of which 2^126, or 2^14 in f16, makes the number
    f8    by f32, whose upper half is the bf16
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusegen.emitting.dialect import all_of
from fusegen.emitting.products.mma_words import GemmWords, Own
from fusegen.language.types import DType, bf16, f4e2m1, f8e4m3, f16, i4, i8, u4
from fusegen.planner.products.gemm import CODES_STEP
from fusegen.planner.products.parts import Coding

CODES_A_LANE = 8  # of a step: neighbours in K of one column
WORDS: Mapping[int, str] = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}  # of so many bytes
WORD_BITS = 16  # codes are copied as elements of the ring


@dataclass(frozen=True, slots=True)
class Widening:
    """How codes become pairs. Of two in `source` each, `before` and `pair` make one; `needs`: functions; `mask`: of the
    bits that a code keeps.

    A source is a word that has two codes in it:
        bytes       at bits 0 and 16; what lies behind them is none of theirs
        neighbours  at bits 0 and 8
        nibbles     at bits 0 and 16; likewise
    """

    what: str
    source: Literal["bytes", "neighbours", "nibbles"]
    pair: str
    before: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    mask: str = ""

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Which of a lane's 8 codes meet."""
        return SOURCES[self.source].pairs

    @property
    def name(self) -> str:
        """Of the source."""
        return "nibbles" if self.source == "nibbles" else "bytes"

    @property
    def body(self) -> tuple[str, ...]:
        """What makes four pairs of the 8 codes in `words`."""
        return (
            "#pragma unroll",
            "for (int i = 0; i < 4; ++i) {",
            f"  const unsigned {self.name} = {SOURCES[self.source].of_words};",
            *(f"  {line}" for line in self.before),
            f"  pairs[i] = {self.pair};",
            "}",
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Of a lane's 8 codes in `words`: which two are in source i, and its text."""

    pairs: tuple[tuple[int, int], ...]
    of_words: str


SOURCES: Mapping[str, Source] = {
    # of each word of four bytes the even ones, and the odd ones
    "bytes": Source(((0, 2), (1, 3), (4, 6), (5, 7)), "words[i / 2] >> i % 2 * 8"),
    "neighbours": Source(((0, 1), (2, 3), (4, 5), (6, 7)), "words[i / 2] >> i % 2 * 16"),
    # of a word of 8 nibbles
    "nibbles": Source(((0, 4), (1, 5), (2, 6), (3, 7)), "words[0] >> i * 4"),
}
FOUR_BITS = "nibbles & mask"
NIBBLES, SEVEN_BITS, SIZES, SIZES_OF_HALVES = "0x000f000fu", "0x007f007fu", "0x01c001c0u", "0x0e000e00u"
VALUES = tuple(
    f"const float {name} = f8e4m3_value(static_cast<unsigned char>({code}));"
    for name, code in (("low", "bytes"), ("high", "bytes >> 8"))
)
UPPER_HALVES = "__byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632)"
AS_HALVES = (
    "static_cast<unsigned>(__half_as_ushort(__float2half_rn(high))) << 16 | __half_as_ushort(__float2half_rn(low))"
)
FUSED = ("fused",)
WIDENINGS: Mapping[tuple[DType, DType], Widening] = {
    (i8, bf16): Widening(
        "128 + the lower 7 bits, less 128, or 256 of a negative one",
        "bytes",
        "fused(less, 0xbf80bf80u, above)",
        ("const unsigned above = bytes & mask | 0x43004300u, less = bytes & mask + 0x00010001u | 0x43004300u;",),
        FUSED,
        SEVEN_BITS,
    ),
    (i8, f16): Widening(
        "1024 + 128 + the code, less 1152",
        "bytes",
        "fused(bytes & 0x00ff00ffu ^ 0x64806480u, 0x3c003c00u, 0xe480e480u)",
        needs=FUSED,
    ),
    (i4, bf16): Widening(
        "128 + 8 + the code, less 136",
        "nibbles",
        f"fused({FOUR_BITS} ^ 0x43084308u, 0x3f803f80u, 0xc308c308u)",
        needs=FUSED,
        mask=NIBBLES,
    ),
    (i4, f16): Widening(
        "1024 + 8 + the code, less 1032",
        "nibbles",
        f"fused({FOUR_BITS} ^ 0x64086408u, 0x3c003c00u, 0xe408e408u)",
        needs=FUSED,
        mask=NIBBLES,
    ),
    (u4, bf16): Widening(
        "128 + the code, less 128 + the zero",
        "nibbles",
        f"fused({FOUR_BITS} | 0x43004300u, 0x3f803f80u, zeros)",
        needs=FUSED,
        mask=NIBBLES,
    ),
    (u4, f16): Widening(
        "1024 + the code, less 1024 + the zero",
        "nibbles",
        f"fused({FOUR_BITS} | 0x64006400u, 0x3c003c00u, zeros)",
        needs=FUSED,
        mask=NIBBLES,
    ),
    (f4e2m1, bf16): Widening(
        "exponent and mantissa, times 2^126",
        "nibbles",
        "fused(size | sign, 0x7e807e80u, 0x80008000u)",
        ("const unsigned size = nibbles << 6 & mask, sign = nibbles << 12 & 0x80008000u;",),
        FUSED,
        SIZES,
    ),
    (f4e2m1, f16): Widening(
        "exponent and mantissa, times 2^14",
        "nibbles",
        "fused(size | sign, 0x74007400u, 0x80008000u)",
        ("const unsigned size = nibbles << 9 & mask, sign = nibbles << 12 & 0x80008000u;",),
        FUSED,
        SIZES_OF_HALVES,
    ),
    (f8e4m3, bf16): Widening("by way of f32", "neighbours", UPPER_HALVES, VALUES, ("f8e4m3_value",)),
    (f8e4m3, f16): Widening("by way of f32", "neighbours", AS_HALVES, VALUES, ("f8e4m3_value",)),
}
"""By the type of the codes and of the factors. `fused(a, b, c)` is a * b + c of both halves of a word."""


ZERO_OF: Mapping[DType, tuple[str, str]] = {bf16: ("0xc300c300u", "0x00010001u"), f16: ("0xe400e400u", "0x00010001u")}
"""-(128 + zero), or -(1024 + zero), in both halves of a word: that of 0, and the step from one zero to the next."""


def permutation(pairs: tuple[tuple[int, int], ...]) -> list[str]:
    """What `to` gets of a row's four words, each of which holds two neighbours."""
    names = ("words.x", "words.y", "words.z", "words.w")
    lines = []
    for number, (low, high) in enumerate(pairs):
        if high == low + 1 and low % 2 == 0:
            lines.append(f"to[{number}] = {names[low // 2]};")
            continue
        selector = f"0x{'76' if high % 2 else '54'}{'32' if low % 2 else '10'}"
        lines.append(f"to[{number}] = __byte_perm({names[low // 2]}, {names[high // 2]}, {selector});")
    return lines


class CodesSpeller(GemmWords):
    """What is said of codes in a GemmPlan's text."""

    @property
    def coding(self) -> Coding:
        found = self.plan.coding
        assert found is not None
        return found

    def words_of(self, own: Own) -> int:
        """Elements of the ring that a column's slice of codes fills."""
        return self.tile.k * own.factor.bits // WORD_BITS

    def code_factor(self, own: Own, k_part: str) -> dict[str, Any]:
        """One right factor's share of a slice: 16 bytes at a time, as words of 16 bits. `k_part`: where this part of K
        begins, in slices."""
        plan, f, name = self.plan, own.factor, own.name
        chunk, words = plan.chunk, self.words_of(own)
        beside = words // chunk
        passes = own.extent * beside // plan.slice_k_threads
        jump = plan.slice_k_threads // beside
        thread = self.thread if "%" not in self.thread else "lane"
        first = f"{k_part} * {name}_words + {own.k}" if k_part else own.k
        batch = "".join(f" + {index} * {text}" for index, text in f.batch)
        start = f"{f.pointer}{batch} + (col0 + {own.mn}) * {f.stride}"
        self.functions.add("place")
        at_mn = f"{own.mn} + v * {jump}" if passes > 1 else own.mn
        place = f"{own.at} + place<{beside}>({at_mn}, {own.k})"
        tests = []
        if self.cols_ragged():
            tests.append(f"col0 + {at_mn} < cols")
        if not plan.even:
            tests.append(f"k_at + {own.k} * {WORD_BITS // f.bits} < full_k")
        count = f"{all_of(*tests)} ? {chunk} : 0" if tests else str(chunk)
        if not f.copied:
            return self.code_bytes(own, passes, jump, beside, start, first, place, tests)
        copy = "copy_evict_first" if f.evict_first else "copy_chunk"
        self.functions.add(copy)
        ctype = "const unsigned short*"
        return {
            "name": name,
            "own": own,
            "copied": True,
            "prepared": False,
            "function": copy if f.evict_first else f"{copy}<{chunk}>",
            "passes": passes,
            "declares": [
                f"const int {own.mn} = {thread} / {beside}, {own.k} = {thread} % {beside} * {chunk};",
                f"{ctype} {name}_from = reinterpret_cast<{ctype}>({start}) + {first};  // 16 bits of codes each",
            ],
            "starts": [],
            "place": place,
            "to": f"({place}) * {self.size}",
            "away": "",
            "from": f"{name}_from" + (f" + (v * {jump}) * ({f.stride} / 2)" if passes > 1 else ""),
            "load": "",
            "count": count,
            "advance": f"split_k * {name}_words" if self.tile.split_k > 1 else f"{name}_words",
        }

    def code_bytes(
        self, own: Own, passes: int, jump: int, beside: int, start: str, first: str, place: str, tests: list[str]
    ) -> dict[str, Any]:
        """The same of codes that begin anywhere: byte by byte."""
        name, thread = own.name, self.thread if "%" not in self.thread else "lane"
        self.functions.add("copy_each")
        count = f"{all_of(*tests)} ? 16 : 0" if tests else "16"
        ctype = "const unsigned char*"
        return {
            "name": name,
            "own": own,
            "copied": True,
            "prepared": False,
            "function": "copy_each",
            "passes": passes,
            "declares": [
                f"const int {own.mn} = {thread} / {beside}, {own.k} = {thread} % {beside} * {self.plan.chunk};",
                f"{ctype} {name}_from = reinterpret_cast<{ctype}>({start}) + ({first}) * 2;",
            ],
            "starts": [],
            "place": place,
            "to": f"({place}) * {self.size}",
            "away": "",
            "from": f"{name}_from" + (f" + (v * {jump}) * {own.factor.stride}" if passes > 1 else ""),
            "load": "",
            "count": count,
            "advance": f"{'split_k * ' if self.tile.split_k > 1 else ''}{name}_words * 2",
        }

    def beside_codes(self, found: dict[str, Any]) -> dict[str, Any]:
        """The left factor's share of a slice: element by element where it begins anywhere."""
        if found["copied"]:
            return found
        self.functions.discard("load_chunk")
        self.functions.add("copy_each")
        return {**found, "copied": True, "prepared": False, "function": "copy_each"}

    # ---- the main loop

    def codes(self, sums: list[Mapping[str, Any]], k_text: str) -> Mapping[str, Any]:
        """What parts/products/gemm_codes.j2 prints."""
        plan, tile, coding = self.plan, self.tile, self.coding
        left, *rights = (self.owns[0], *self.owns[len(plan.left) :])
        widening = WIDENINGS[coding.code, plan.dtype]
        self.functions.update(widening.needs)
        self.functions.add("place")
        line = tile.k // plan.chunk
        ring = "k_group * (stages * slice_bytes) + " if tile.slice_k > 1 else ""
        lane_bytes = CODES_A_LANE * coding.code.bits // 8
        step_bytes = CODES_STEP * coding.code.bits // 8
        lanes_a_chunk = 16 // lane_bytes
        within = f" + lane % {lanes_a_chunk} * {lane_bytes}" if lanes_a_chunk > 1 else ""
        scaled = plan.scaled_k
        return {
            "left": left.name,
            "left_lane": f"{ring}place<{line}>(lane / 4, lane % 4 * {plan.chunk}) * {self.size}",
            "rights": [
                {
                    "name": own.name,
                    "lane": f"{ring}({own.at} + place<{self.words_of(own) // plan.chunk}>(lane / 4, "
                    f"lane % 4 / {lanes_a_chunk} * {plan.chunk})) * {self.size}{within}",
                    "line": f"{own.name}_words * {self.size}",
                    "sums": s,
                    "scales": self.held(own),
                }
                for own, s in zip(rights, sums, strict=True)
            ],
            "rows": tile.rows // plan.atom.rows,
            "cols": tile.cols // plan.atom.cols,
            "step_bytes": step_bytes,
            "words": max(1, lane_bytes // 4),
            "lane_bytes": lane_bytes,
            "zeros": coding.code is u4,
            "no_zero": ZERO_OF[plan.dtype],
            "permutation": permutation(widening.pairs),
            "widening": widening,
            "fused": self.spelling.functions.get(f"fused_{plan.dtype}", ()) if "fused" in widening.needs else (),
            "groups": tile.k // scaled,
            "group_steps": scaled // CODES_STEP,
            "k_at": k_text,
            "type": str(coding.code),
            "factor": str(plan.dtype),
        }

    def held(self, own: Own) -> Mapping[str, Any]:
        """What a lane holds of scales: of its two columns of each fragment, for each group of a slice. Those of
        neighbouring groups are loaded together, `width` of them, where they lie at multiples of so many."""
        found = own.factor.coding
        assert found is not None
        scales, zeros, groups = found.scales, found.zeros, self.tile.k // self.plan.scaled_k
        width = math.gcd(scales.vector, groups)
        number, tests = self.group_at("v" if groups > width else "", width)
        at = f"{self.pointers[scales.tensor]} + {self.own_scales(scales)}col * {scales.name}_ld + {number}"
        held = f"{own.name}_scales_next[{'q' if width == 1 else f'q / {width}'}][n][half]"
        if scales.dtype.bytes == 1:  # as one word: of bytes in a vector each is taken out twice
            kind, none = WORDS[width], "0u"
            load = f"*reinterpret_cast<const {kind}*>({at})" if width > 1 else f"({at})[0]"
            code = f"{held} >> q % {width} * 8" if width > 1 else held
            value = self.to_value(scales.dtype, f"static_cast<{self.ctype(scales.dtype)}>({code})")
        else:
            kind = self.vec(scales.dtype, width)
            none, load = f"{kind}{{}}", f"load<{width}>({at})"
            value = self.to_value(scales.dtype, f"{held}.at[{'0' if width == 1 else f'q % {width}'}]")
        zero = ""
        if zeros is not None:
            number, of_zeros = self.group_at("q" if groups > 1 else "", 1)
            row = f"{self.pointers[zeros.tensor]}[{self.own_scales(zeros)}col * {zeros.name}_ld + ({number}) / 2]"
            nibble = f"static_cast<unsigned>({row}) >> ({number}) % 2 * 4 & 15u"
            zero = f"{all_of(*of_zeros)} ? {nibble} : 0u" if of_zeros else nibble
        return {
            "type": kind,
            "width": width,
            "load": f"{all_of(*tests)} ? {load} : {none}" if tests else load,
            "value": f"static_cast<float>({value})" if scales.dtype.kind == "int" else value,
            "zero": zero,
        }

    def group_at(self, index: str, each: int) -> tuple[str, list[str]]:
        """The number of a group of K, and whether there are such a column and such a group: of a slice's the first,
        or that at `index`, which counts `each` at a time."""
        behind = f" + {index}" + (f" * {each}" if each > 1 else "") if index else ""
        tests = ["col < cols"] if self.cols_ragged() else []
        if not self.coding.group:
            return "0", [*tests, *([] if self.plan.even else ["k_at < full_k"])]
        self.sizes.add("scaled_k")
        within = f"k_at{f'{behind} * scaled_k' if behind else ''} < full_k"
        return f"k_at / scaled_k{behind}", [*tests, *([] if self.plan.even else [within])]
