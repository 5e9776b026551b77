"""What instructions for the LDS take, by the addresses that a kernel's machine code makes: lanes that meet in a bank.

    cycles_of(code, turn, unit, waves=4)    # {0x1470: 8.0, ...}: of each of the turn's instructions, by its place

An address is followed back through the code that made it, to the thread's number. What is the same for all lanes and
not known, as a kernel's argument, only moves all of them on where it is added, which changes no bank's load; where
something else is done with it, or an address was loaded from memory, nothing is said of the instruction. All lanes take
part, and a register has the value of the first turn.

Lanes of a wave are served in groups, each in as many cycles as most different words lie in one bank. Which lanes are a
group: of 16 bytes on CDNA 2 and 3, ROCm's blog, "Avoiding LDS Bank Conflicts on AMD GPUs Using CK-Tile Framework"; on
CDNA 4, HazyResearch's measurements of an MI355X, "HipKittens", analysis/paper_experiments/phases. Of 8 bytes that are
read on CDNA 2 and 3, and of less everywhere, groups are taken to be neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusegen.measuring.machine_loops import LANES, Instruction, Turn, named
from fusegen.targets.compute_unit import ComputeUnit

Lanes = NDArray[np.int64]
MOST_STEPS = 400  # of instructions that one address is followed back through
WORD_BYTES = 4
INTERLEAVED = ((0, 20), (4, 16), (8, 28), (12, 24))  # first lanes of the fours that 16 bytes are read of together
OPERAND = re.compile(r"^(?:([vsa])(?:(\d+)|\[(\d+):\d+\])|(-?(?:0x[0-9a-f]+|\d+))|(vcc))$")
TRANSPOSED = "_tr_"  # in names of reads that no lane's address alone says the banks of
TWICE = re.compile(r"_(read|write)2")
TABLE = re.compile(r"bitop3:(0x[0-9a-f]+|\d+)$")
SCALARS = re.compile(r"s(?:(\d+)|\[(\d+):(\d+)\])$")
COMPARE = re.compile(r"cmp_(eq|ne|lt|le|gt|ge)_([iu])32$")
COMPARED: Mapping[str, Callable[[Lanes, Lanes], NDArray[np.bool_]]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """Of a register in all lanes of all waves; of a `moved` one less what is the same for all of them and not known."""

    lanes: Lanes  # (waves, 64)
    moved: bool = False

    @property
    def uniform(self) -> bool:
        return bool((self.lanes == self.lanes[:, :1]).all())


class Unknown(Exception):
    """An address that nothing can be said of."""


def wrapped(lanes: Lanes) -> Lanes:
    return lanes & 0xFFFFFFFF


ADDING: Mapping[str, Callable[..., Lanes]] = {  # what a part that moves all lanes goes through
    "mov_b32": lambda a: a,
    "accvgpr_read_b32": lambda a: a,
    "accvgpr_write_b32": lambda a: a,
    "movk_i32": lambda a: a,
    "add_u32": lambda a, b: a + b,
    "add_i32": lambda a, b: a + b,
    "addk_i32": lambda a, b: a + b,
    "sub_u32": lambda a, b: a - b,
    "sub_i32": lambda a, b: a - b,
    "subrev_u32": lambda a, b: b - a,
    "add3_u32": lambda a, b, c: a + b + c,
    "lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "lshlrev_b32": lambda a, b: b << (a & 31),
    "lshl_b32": lambda a, b: a << (b & 31),
    "lshl1_add_u32": lambda a, b: (a << 1) + b,
    "lshl2_add_u32": lambda a, b: (a << 2) + b,
    "lshl3_add_u32": lambda a, b: (a << 3) + b,
    "lshl4_add_u32": lambda a, b: (a << 4) + b,
    "mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "mul_i32_i24": lambda a, b: a * b,
    "mul_lo_u32": lambda a, b: a * b,
    "mul_i32": lambda a, b: a * b,
    "mulk_i32": lambda a, b: a * b,
    "mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "mad_i32_i24": lambda a, b, c: a * b + c,
}
# Which of their sources are multiplied, or shifted by the second one: one of two factors may be moved, and no shift;
# then the other one is the same for all lanes.
SHIFTS = {"lshl_add_u32": (0, 1), "add_lshl_u32": (0, 2), "lshlrev_b32": (1, 0), "lshl_b32": (0, 1)}
FACTORS: Mapping[str, tuple[int, int]] = SHIFTS | {stem: (0, 1) for stem in ADDING if stem.startswith(("mul", "mad"))}
OTHERS: Mapping[str, Callable[..., Lanes]] = {
    "and_b32": lambda a, b: a & b,
    "or_b32": lambda a, b: a | b,
    "xor_b32": lambda a, b: a ^ b,
    "not_b32": lambda a: ~a,
    "or3_b32": lambda a, b, c: a | b | c,
    "xad_u32": lambda a, b, c: (a ^ b) + c,
    "and_or_b32": lambda a, b, c: a & b | c,
    "lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "lshrrev_b32": lambda a, b: b >> (a & 31),
    "lshr_b32": lambda a, b: a >> (b & 31),
    "lshrrev_b16": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "lshlrev_b16": lambda a, b: b << (a & 15) & 0xFFFF,
    "ashrrev_i32": lambda a, b: signed(b) >> (a & 31),
    "ashr_i32": lambda a, b: signed(a) >> (b & 31),
    "bfe_u32": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
    "bfi_b32": lambda a, b, c: a & b | ~a & c,
    "bitop3": lambda a, b, c, table: by_table(a, b, c, table),
    "min_u32": np.minimum,
    "max_u32": np.maximum,
    "min_i32": lambda a, b: np.minimum(signed(a), signed(b)),
    "max_i32": lambda a, b: np.maximum(signed(a), signed(b)),
}


SOURCES = {"readfirstlane_b32": 1, "mbcnt_lo_u32_b32": 2, "mbcnt_hi_u32_b32": 2, "bitop3_b32": 3, "cndmask_b32": 3}
BELOW: Mapping[str, Callable[[Lanes], Lanes]] = {  # lanes below one's own, of either half
    "mbcnt_lo_u32_b32": lambda lane: np.minimum(lane, LANES // 2),
    "mbcnt_hi_u32_b32": lambda lane: np.maximum(lane - LANES // 2, 0),
}


def signed(lanes: Lanes) -> Lanes:
    return (wrapped(lanes) ^ 0x80000000) - 0x80000000


class Addresses:
    """Registers of a kernel, followed back from a turn of its loop."""

    def __init__(self, code: Sequence[Instruction], turn: Turn, waves: int) -> None:
        before = [one for one in code if one.at < turn.start]
        self.trace = [*before, *turn.instructions]  # a wave's way to the end of its first turn
        self.place = {one.at: len(before) + i for i, one in enumerate(turn.instructions)}
        self.thread = np.arange(waves * LANES, dtype=np.int64).reshape(waves, LANES)
        self.written = [tuple(writes(one)) for one in self.trace]
        self.steps = 0

    def of(self, one: Instruction) -> Lanes:
        """Of an instruction for the LDS, in bytes, less what is the same for all lanes. Raises Unknown."""
        parts = operands(one)
        self.steps = 0
        return self.register(parts[0] if one.stores else parts[1], self.place[one.at]).lanes

    def register(self, text: str, place: int) -> Value:
        """What an operand holds before the instruction at that place."""
        found = OPERAND.match(text)
        if not found:
            raise Unknown(text)
        kind, single, first, number, mask = found.groups()
        if number is not None:
            return self.all(int(number, 0) & 0xFFFFFFFF)
        name = mask or kind + (single or first)
        for earlier in range(place - 1, -1, -1):
            if name in self.written[earlier]:
                return self.result(self.trace[earlier], earlier, name)
        if name == "v0":
            return Value(self.thread)
        if kind == "s":  # an argument, or a block's number
            return Value(np.zeros_like(self.thread), moved=True)
        raise Unknown(name)

    def all(self, number: int) -> Value:
        return Value(np.full_like(self.thread, number))

    def result(self, one: Instruction, place: int, name: str) -> Value:
        """What an instruction leaves in a register."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Unknown("made of too much")
        stem = re.sub(r"_e(32|64)$", "", one.name[2:])
        parts = operands(one)
        if one.name == "s_bfe_u32":  # how far, and from the 16th bit on how many bits
            by = number_of(parts[2])
            return combined("bfe_u32", [self.register(parts[1], place), self.all(by & 31), self.all(by >> 16)])
        sources = [self.register(part, place) for part in self.read_by(stem, parts)]
        if stem in ADDING or stem in OTHERS:
            return combined(stem, sources)
        if stem == "readfirstlane_b32":
            (given,) = sources
            return Value(np.broadcast_to(given.lanes[:, :1], self.thread.shape).copy(), given.moved)
        if stem in BELOW and parts[1] == "-1":
            return combined("add_u32", [Value(BELOW[stem](self.thread % LANES)), sources[1]])
        if stem == "bitop3_b32" and (table := TABLE.search(one.text)):
            return combined("bitop3", sources, int(table[1], 0))
        if compare := COMPARE.match(stem):
            return compared(compare[1], compare[2], sources)
        if stem == "cndmask_b32":
            return selected(sources)
        if one.name.startswith("s_"):  # the same for all lanes, whatever it is
            return Value(np.zeros_like(self.thread), moved=True)
        raise Unknown(one.text)

    def read_by(self, stem: str, parts: Sequence[str]) -> Sequence[str]:
        """The operands that count of those that are known here; none of others."""
        if stem in ("addk_i32", "mulk_i32"):
            return parts
        count = SOURCES.get(stem, 2 if COMPARE.match(stem) else 0)
        return parts[1 : 1 + count] if count else parts[1:] if stem in ADDING or stem in OTHERS else ()


def compared(how: str, kind: str, sources: Sequence[Value]) -> Value:
    """1 in lanes for which it holds."""
    if any(each.moved for each in sources):
        raise Unknown("a comparison with what is not known")
    one, other = (signed(each.lanes) if kind == "i" else each.lanes for each in sources)
    return Value(COMPARED[how](one, other).astype(np.int64))


def selected(sources: Sequence[Value]) -> Value:
    """The second where the third is 1, else the first."""
    no, yes, which = sources
    if which.moved or no.moved != yes.moved:
        raise Unknown("a choice by what is not known")
    return Value(np.where(which.lanes != 0, yes.lanes, no.lanes), no.moved)


def by_table(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    """Bit by bit, what a table of 8 bits has for three."""
    found = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            found |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return found


def combined(stem: str, given: Sequence[Value], *more: int) -> Value:
    """Raises Unknown where what is not known does more than move all lanes."""
    moved = any(value.moved for value in given)
    if stem in ADDING:
        if moved and (by := FACTORS.get(stem)):
            one, other = (given[i] for i in by)
            if stem in SHIFTS and (other.moved or not other.uniform):
                raise Unknown(stem)
            if (other.moved and not (one.uniform and not one.moved)) or (one.moved and not other.uniform):
                raise Unknown(stem)
        return Value(wrapped(ADDING[stem](*(value.lanes for value in given))), moved)
    if moved and not all(value.uniform for value in given):
        raise Unknown(stem)
    return Value(wrapped(OTHERS[stem](*(value.lanes for value in given), *more)), moved)


def number_of(text: str) -> int:
    """Raises Unknown for a register."""
    found = OPERAND.match(text)
    if not found or not found[4]:
        raise Unknown(text)
    return int(found[4], 0)


def operands(one: Instruction) -> list[str]:
    parts = one.text.split(maxsplit=1)
    return [part.split()[0] for part in parts[1].split(", ")] if len(parts) > 1 else []


def writes(one: Instruction) -> list[str]:
    """Registers, vector and scalar."""
    if one.stores or one.pipe == "none" or one.leads_to is not None or one.name.startswith("s_cmp"):
        return []
    found: list[str] = []
    for part in operands(one)[: 2 if "_co_" in one.name else 1]:  # a carry is a second result
        scalars = SCALARS.match(part)
        if scalars:
            low, high = scalars[1] or scalars[2], scalars[1] or scalars[3]
            found += [f"s{i}" for i in range(int(low), int(high) + 1)]
        found += list(named(part)) if not scalars else []
        found += ["vcc"] if part.startswith("vcc") else []
    return found


def groups_of(one: Instruction, unit: ComputeUnit) -> tuple[list[list[int]], int]:
    """Which lanes are served together, and by how many banks."""
    nbytes = one.lane_bytes // accesses(one)
    wide = unit.lds_read_bytes > unit.lds_bytes and not one.stores  # CDNA 4
    fours = [
        [*range(half + a, half + a + 4), *range(half + b, half + b + 4)] for half in (0, 32) for a, b in INTERLEAVED
    ]
    if nbytes == 16 and wide:
        return [fours[i] + fours[j] for i, j in ((0, 3), (1, 2), (4, 7), (5, 6))], 64
    if nbytes > 8 and not one.stores:
        return fours, 32
    lanes = 8 if nbytes > 8 else 16 if nbytes == 8 and not wide else 32
    return [list(range(first, first + lanes)) for first in range(0, LANES, lanes)], 64 if wide else 32


def accesses(one: Instruction) -> int:
    """Of each lane: some instructions read or write at two offsets."""
    return 2 if TWICE.search(one.name) else 1


def served(addresses: Lanes, nbytes: int, groups: Sequence[Sequence[int]], banks: int) -> float:
    """Cycles of one access of a wave, the mean over waves."""
    first = addresses // WORD_BYTES
    words = np.stack([first + i for i in range(max(1, nbytes // WORD_BYTES))], axis=-1)
    total = 0
    for wave in words:
        for group in groups:
            different = np.unique(wave[list(group)])
            total += int(np.bincount(different % banks).max())
    return total / len(words)


def cycles_of(code: Sequence[Instruction], turn: Turn, unit: ComputeUnit, waves: int) -> dict[int, float]:
    """Of a block of so many waves, by the instruction's place. Those are left out whose addresses are not known."""
    addresses, found = Addresses(code, turn, waves), {}
    for one in turn.instructions:
        if not one.is_banked or TRANSPOSED in one.name:
            continue
        try:
            lanes = addresses.of(one)
        except Unknown:
            continue
        times = accesses(one)
        found[one.at] = times * served(lanes, one.lane_bytes // times, *groups_of(one, unit))
    return found
