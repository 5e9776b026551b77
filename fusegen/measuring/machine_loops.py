"""The loop of a kernel for CDNA that its time is spent in, read from the disassembly: what `simulate` takes a turn of.

    turn_of(disassemble(binary)).instructions    # in the order in which a wave goes through them

A loop is what lies between a branch back and where it leads to. Of all loops the one with the most matrix instructions
counts, and where none has any the one that moves the most bytes. Within it a turn goes the way on which the most is
done: past a test of exec, which skips what no lane has to do, and at other tests where there are more matrix
instructions and bytes. Of a test's two sides all lanes take the same one. Of two ways to bring the same bytes a turn
takes that with fewer instructions. A loop within is gone through once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Pipe = Literal["matrix", "vector", "scalar", "memory", "LDS", "none"]

LINE = re.compile(r"^\s*([0-9a-f]+)  (\S.*)$")
REGISTERS = re.compile(r"\b([va])(?:(\d+)|\[(\d+):(\d+)\])")
WAIT = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
TARGET = re.compile(r"-> ([0-9a-f]+)$")
LANES = 64
SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_|v_mad_[iu]64_|v_\w+_f64")
"""Of a quarter of the rate: CDNA 3 ISA, and LLVM's SISchedule.td, "WriteTrans32" and "WriteQuarterRate32"."""
MOVES = ("global_", "buffer_", "flat_", "scratch_")
ELSE = ("s_andn2_saveexec", "s_or_saveexec")  # with the lanes for which a test was false
NO_MOVES = ("buffer_wbl2", "buffer_inv", "buffer_gl")
WORDS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b8": 1, "u8": 1, "i8": 1, "ubyte": 1, "sbyte": 1,
         "byte": 1, "b16": 2, "u16": 2, "i16": 2, "ushort": 2, "sshort": 2, "short": 2, "b32": 4, "u32": 4, "i32": 4,
         "f32": 4, "b64": 8, "u64": 8, "f64": 8, "b96": 12, "b128": 16}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction, at its place in bytes from the kernel's start."""

    at: int
    text: str

    @cached_property
    def name(self) -> str:
        return self.text.split(maxsplit=1)[0]

    @cached_property
    def pipe(self) -> Pipe:
        """Which unit takes it; `none` for what a wave does by itself, as waiting."""
        name = self.name
        if name.startswith(("v_mfma", "v_smfmac")):
            return "matrix"
        if name.startswith("v_"):
            return "vector"
        if name.startswith("ds_"):
            return "LDS"
        if name.startswith(MOVES):
            return "none" if name.startswith(NO_MOVES) else "memory"
        waits = ("s_waitcnt", "s_nop", "s_barrier", "s_sleep", "s_setprio", "s_endpgm", "s_sched")
        return "none" if name.startswith(waits) or not name.startswith("s_") else "scalar"

    @cached_property
    def loads_scalars(self) -> bool:
        """From memory, counted by lgkmcnt."""
        return self.name.startswith(("s_load", "s_buffer_load"))

    @cached_property
    def lane_bytes(self) -> int:
        """What one lane moves, to or from memory or the LDS."""
        twice = 2 if re.search(r"_(read|write)2", self.name) else 1
        words = self.name.split("_")
        if "permute" in self.name or "swizzle" in self.name:
            return 4
        return twice * next((WORDS[word] for word in reversed(words) if word in WORDS), 4)

    @cached_property
    def bytes(self) -> int:
        """What a wave moves."""
        return self.lane_bytes * LANES if self.pipe in ("memory", "LDS") else 0

    @property
    def is_banked(self) -> bool:
        """Does it read or write places of the LDS by the lanes' addresses?"""
        return self.name.startswith(("ds_read", "ds_write"))

    @cached_property
    def stores(self) -> bool:
        return "store" in self.name or "write" in self.name

    @cached_property
    def slow(self) -> bool:
        return bool(SLOW.match(self.name))

    @cached_property
    def waits(self) -> Mapping[str, int]:
        """Of a wait, how many operations of each kind may still be on their way."""
        return {kind: int(left) for kind, left in WAIT.findall(self.text)} if self.name == "s_waitcnt" else {}

    @cached_property
    def immediate(self) -> int:
        """Of s_nop, s_sleep and s_setprio."""
        return int(self.text.split()[1], 0)

    @cached_property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """The vector registers of each operand."""
        parts = self.text.split(maxsplit=1)
        return tuple(tuple(named(part)) for part in parts[1].split(", ")) if len(parts) > 1 else ()

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """Registers that a matrix instruction adds to, where it leaves its sums in the same; else none."""
        return self.operands[3] if len(self.operands) > 3 and self.operands[3] == self.operands[0] else ()

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Vector registers."""
        none = not self.operands or self.stores or self.pipe in ("scalar", "none")
        return () if none else self.operands[0]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Vector registers, but for sums that it adds to in their place."""
        read = self.operands if not self.writes else self.operands[1:3] if self.sums else self.operands[1:]
        return tuple(dict.fromkeys(register for operand in read for register in operand))

    @cached_property
    def leads_to(self) -> int | None:
        """Where a branch goes."""
        found = TARGET.search(self.text) if self.name.startswith(("s_branch", "s_cbranch")) else None
        return int(found[1], 16) if found else None


def named(text: str) -> Iterator[str]:
    for kind, one, first, last in REGISTERS.findall(text):
        yield from [kind + one] if one else (f"{kind}{i}" for i in range(int(first), int(last) + 1))


@dataclass(frozen=True, slots=True)
class Turn:
    """One way through a loop, which lies between two places of the code."""

    start: int
    end: int
    instructions: tuple[Instruction, ...] = field(repr=False)

    @property
    def products(self) -> int:
        return sum(each.pipe == "matrix" for each in self.instructions)


def parsed(text: str) -> tuple[Instruction, ...]:
    """Of lines as `compiling.disassemble` makes them for AMD."""
    return tuple(Instruction(int(m[1], 16), m[2]) for m in map(LINE.match, text.splitlines()) if m)


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions without a branch but at their end, by their places in the code; and the blocks that may follow."""

    code: tuple[Instruction, ...]
    next: tuple[int, ...]

    @property
    def weight(self) -> tuple[int, int, int]:
        """Matrix instructions, bytes and instructions."""
        moved = sum(each.bytes for each in self.code)
        return sum(each.pipe == "matrix" for each in self.code), moved, len(self.code)


def blocks_of(code: Sequence[Instruction]) -> dict[int, Block]:
    """By the place of their first instruction."""
    starts = {code[0].at}
    for one, after in zip(code, [*code[1:], None], strict=True):
        if one.leads_to is not None:
            starts |= {one.leads_to} | ({after.at} if after else set())
        elif one.name == "s_endpgm" and after:
            starts.add(after.at)
    runs: dict[int, list[Instruction]] = {}
    for one in code:
        if one.at in starts:
            runs[one.at] = run = []
        run.append(one)
    places = sorted(runs)
    found = {}
    for place, follows in zip(places, [*places[1:], None], strict=True):
        last = runs[place][-1]
        on = [last.leads_to] if last.leads_to in runs else []
        if last.name not in ("s_branch", "s_endpgm") and follows is not None:
            on.insert(0, follows)
        found[place] = Block(tuple(runs[place]), tuple(dict.fromkeys(p for p in on if p is not None)))
    return found


def branches_back(blocks: Mapping[int, Block]) -> set[tuple[int, int]]:
    """Edges to a block that is being gone through, seen from the kernel's start."""
    back: set[tuple[int, int]] = set()
    state: dict[int, bool] = {}  # True: on the way from the start
    first = min(blocks)
    state[first] = True
    stack = [(first, iter(blocks[first].next))]
    while stack:
        place, following = stack[-1]
        for other in following:
            if other not in state:
                state[other] = True
                stack.append((other, iter(blocks[other].next)))
                break
            if state[other]:
                back.add((place, other))
        else:
            state[place] = False
            stack.pop()
    return back


def members(blocks: Mapping[int, Block], header: int, ends: Iterable[int]) -> set[int]:
    """The blocks of a loop: from which its ends are reached without its header."""
    before: dict[int, list[int]] = {}
    for place, block in blocks.items():
        for other in block.next:
            before.setdefault(other, []).append(place)
    found, open_ = {header}, list(ends)
    while open_:
        place = open_.pop()
        if place not in found:
            found.add(place)
            open_ += before.get(place, [])
    return found


def turn_of(text: str) -> Turn | None:
    """One turn of the loop that counts; None where the kernel has no loop that multiplies or moves anything."""
    code = parsed(text)
    if not code:
        return None
    blocks = blocks_of(code)
    back = branches_back(blocks)
    turns = []
    for header in sorted({to for _, to in back}):
        ends = [place for place, to in back if to == header]
        turns.append(busiest(blocks, header, members(blocks, header, ends), back))
    most = max(turns, key=heaviness, default=None)
    return most if most and heaviness(most)[:2] != (0, 0) else None


def heaviness(turn: Turn) -> tuple[int, int, int]:
    """By which turns are compared: matrix instructions, then bytes to and from memory, then few instructions."""
    moved = sum(each.bytes for each in turn.instructions if each.pipe == "memory")
    return turn.products, moved, -len(turn.instructions)


def busiest(blocks: Mapping[int, Block], header: int, inside: set[int], back: set[tuple[int, int]]) -> Turn:
    """The way from a loop's header to its end on which the most is done."""
    best: dict[int, Way | None] = {}
    ways = {place: followed(blocks, place, inside, back) for place in inside}
    ways = ways | one_sided(blocks, ways)
    order: list[int] = []
    seen: set[int] = set()
    stack: list[tuple[int, bool]] = [(header, False)]
    while stack:  # behind all that follow it
        place, done = stack.pop()
        if done:
            order.append(place)
        elif place not in seen:
            seen.add(place)
            stack.append((place, True))
            stack += [(p, False) for p in ways[place]]
    for place in order:
        found = [way for way in (best[p] for p in ways[place]) if way]
        if (place, header) in back:
            found.append(Way(0, 0, 0, ()))
        rest = found[0] if found else None
        for other in found[1:]:
            rest = rest if rest and better(blocks, rest, other) else other
        best[place] = rest.behind(place, blocks[place]) if rest else None
    whole = best[header]
    path = whole.path if whole else (header,)
    code = tuple(one for place in path for one in blocks[place].code)
    return Turn(min(inside), max(blocks[p].code[-1].at for p in inside), code)


@dataclass(frozen=True, slots=True)
class Way:
    """Blocks that follow each other to a loop's end, and what is in them."""

    products: int
    moved: int
    instructions: int
    path: tuple[int, ...]

    def behind(self, place: int, block: Block) -> Way:
        products, moved, instructions = block.weight
        return Way(self.products + products, self.moved + moved, self.instructions + instructions, (place, *self.path))


def better(blocks: Mapping[int, Block], one: Way, other: Way) -> bool:
    """Is more done on the one than on the other? Where both do as much: the longer one, whose tests are those that are
    needed; but where each moves bytes to or from memory before they meet, the shorter one. Those are two ways to bring
    the same, with a test of each load and without, and only few turns need the tests."""
    if (one.products, one.moved) != (other.products, other.moved):
        return (one.products, one.moved) > (other.products, other.moved)
    shared = set(one.path) & set(other.path)  # what follows where they have met
    both = all(
        any(each.pipe == "memory" for place in way.path if place not in shared for each in blocks[place].code)
        for way in (one, other)
    )
    return (one.instructions <= other.instructions) == both


def followed(blocks: Mapping[int, Block], place: int, inside: set[int], back: set[tuple[int, int]]) -> list[int]:
    """The blocks of a loop that a turn may go to from one: past a test of exec, which skips what no lane has to do."""
    block = blocks[place]
    ways = [p for p in block.next if p in inside and (place, p) not in back]
    name = block.code[-1].name
    skipped = block.code[-1].leads_to if name == "s_cbranch_execz" else None
    if name == "s_cbranch_execnz":
        skipped = next((p for p in block.next if p != block.code[-1].leads_to), None)
    return [p for p in ways if p != skipped] or ways


def one_sided(blocks: Mapping[int, Block], ways: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Where lanes do one thing or another, by one test, all of a wave's do the same, that which moves more: the blocks
    that a turn goes to from the test, and from the start of the other side."""
    found: dict[int, list[int]] = {}
    for place, block in blocks.items():
        test, other = block.code[-1], block.code[-1].leads_to
        if test.name != "s_cbranch_execz" or other is None or place not in ways or other not in ways:
            continue
        start, last = blocks[other].code[0], blocks[other].code[-1]
        if not start.name.startswith(ELSE) or last.name != "s_cbranch_execz":
            continue
        behind = [p for p in blocks[other].next if p == last.leads_to]
        first = within(blocks, [p for p in block.next if p != other], [other])
        second = within(blocks, [p for p in blocks[other].next if p not in behind], behind)
        found.update({other: behind} if first > second else {place: [other]})
    return found


def within(blocks: Mapping[int, Block], starts: Iterable[int], ends: Sequence[int]) -> tuple[int, int]:
    """Matrix instructions and bytes of all blocks that are gone through before one of `ends` is reached."""
    seen: set[int] = set()
    open_ = list(starts)
    while open_:
        place = open_.pop()
        if place not in ends and place not in seen:
            seen.add(place)
            open_ += blocks[place].next
    weights = [blocks[place].weight for place in seen]
    return sum(w[0] for w in weights), sum(w[1] for w in weights)
