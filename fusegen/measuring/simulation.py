"""A compute unit of CDNA that goes through a kernel's loop, cycle by cycle: a simulation, no measurement.

    simulate(turn_of(disassemble(binary)), unit_of(MI300X), waves=4, blocks=2, feed=Feed(53.9, 458))

Each SIMD has a turn every four cycles, in which each of its waves issues at most one instruction and each pipe takes at
most one, the oldest wave's of those of the highest priority first. Pipes: the vector units and the matrix unit of a
SIMD, the scalar unit, the LDS, and the way to memory, which answers after a stated latency, at a stated rate. Waves
wait by s_waitcnt, s_barrier and s_nop, and for sums that are not ready.

What is left out: instruction fetch beyond the cycles of a taken branch, address translation, and the memory's own
queues: latency is that of an idle GPU. Conflicts in banks of the LDS are in it where they are given
(`fusegen.measuring.lds_banks` counts them by address). So what is simulated is about the least that such a loop takes,
and loops compare by it better than they are foretold.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusegen.measuring.machine_loops import LANES, Instruction, Turn
from fusegen.targets.compute_unit import PASS_CYCLES, RESULT_PASSES, SCALAR_LOAD_CYCLES, ComputeUnit

WARM_TURNS = 3  # which are not counted: the first loads come late
COUNTED_TURNS = 8
SLOW_CYCLES = 16  # of a quarter-rate instruction
BRANCH_CYCLES = 16  # until a wave goes on at another place: assumed
QUEUE_CYCLES = 64  # of work for the LDS or for memory that waves may have issued ahead: assumed
MOST_LDS = 15  # operations of a wave on their way: lgkmcnt has four bits,
MOST_MEMORY = 63  # and vmcnt six
PIPES = ("matrix", "vector", "scalar", "LDS", "memory")
WIDE_BYTES = 8  # that a lane reads at once where the LDS gives the most
NONE: Mapping[int, float] = {}
STUCK_CYCLES = 1_000_000
WAITING = {  # what a wave waits for, in words
    "vmcnt": "loads from memory",
    "lgkmcnt": "the LDS",
    "scalars": "scalar loads",
    "barrier": "other waves at a barrier",
    "matrix": "the matrix unit",
    "sums": "sums of the matrix unit",
    "vector": "the vector unit",
    "scalar": "the scalar unit",
    "LDS": "a place in the LDS's queue",
    "memory": "a place in memory's queue",
    "pause": "s_nop, s_sleep and branches",
}


@dataclass(frozen=True, slots=True)
class Feed:
    """How a compute unit is fed: bytes a cycle, and cycles from a load to its data."""

    bytes: float
    latency: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of it."""

    start: int  # the loop's place in the code, in bytes,
    end: int
    instructions: int  # of a turn of one wave
    products: int
    waves: int  # of the compute unit,
    blocks: int  # in so many blocks
    cycles: float  # of a turn of all waves
    busy: Mapping[str, float]  # share that each pipe is, the mean over SIMDs
    waiting: Mapping[str, float]  # share of a wave's time, the most first
    feed_bytes: float  # a cycle,
    feed_latency: int  # and the cycles of the latency
    conflicts: float = 0.0  # share of the LDS's cycles in which lanes wait for others that meet them in a bank
    not_followed: int = 0  # instructions for the LDS whose addresses are not known, taken to be without conflicts

    @property
    def bound(self) -> str:
        """The busiest pipe."""
        return max(self.busy, key=lambda pipe: self.busy[pipe])


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction as the simulation takes it."""

    pipe: str
    cycles: int  # that it holds its pipe; of waves' own, how long they pause
    vector_cycles: int  # of a matrix instruction
    bytes: int
    sums: tuple[str, ...]
    others: tuple[str, ...]  # vector registers that have to be ready
    writes: tuple[str, ...]
    waits: Mapping[str, int]
    pause: int  # before the wave's next instruction
    barrier: bool
    priority: int | None
    scalar_load: bool


@dataclass(slots=True)
class Wave:
    block: int
    simd: int
    place: int = 0
    ready: int = 0  # cycle from which it may issue
    held: bool = False  # at a barrier
    priority: int = 0
    memory: deque[int] = field(default_factory=deque)  # when what is on its way arrives, in order
    lds: deque[tuple[int, bool]] = field(default_factory=deque)  # likewise; scalar loads are True
    sums: dict[str, int] = field(default_factory=dict)  # when a register's sums are there for more


def steps_of(turn: Turn, unit: ComputeUnit, lds: Mapping[int, float] = NONE) -> tuple[Step, ...]:
    """`lds`: cycles of instructions for the LDS, by their places, where they are known. Raises LookupError for a matrix
    instruction whose passes are not known."""
    code = turn.instructions
    steps = (step(one, code[(i + 1) % len(code)], unit) for i, one in enumerate(code))
    return tuple(
        replace(each, cycles=max(1, round(lds[one.at]))) if one.at in lds else each
        for one, each in zip(code, steps, strict=True)
    )


def step(one: Instruction, after: Instruction, unit: ComputeUnit) -> Step:
    """`after`: what the wave does next, which tells whether a branch is taken."""
    name = one.name
    vector = pause = 0
    cycles = PASS_CYCLES
    if one.pipe == "matrix":
        cycles, vector = unit.matrix_cycles(name), unit.vector_cycles(name)
    elif one.pipe == "vector" and one.slow:
        cycles = SLOW_CYCLES
    elif one.pipe == "LDS":
        wide = one.lane_bytes >= WIDE_BYTES and one.name.startswith("ds_read")
        cycles = math.ceil(max(one.bytes, 4 * LANES) / (unit.lds_read_bytes if wide else unit.lds_bytes))
    elif one.pipe == "memory":
        cycles = max(PASS_CYCLES, math.ceil(one.bytes / unit.l1_bytes))
    elif name == "s_nop":
        pause = one.immediate * PASS_CYCLES
    elif name == "s_sleep":
        pause = one.immediate * 64
    if one.leads_to == after.at:
        pause = BRANCH_CYCLES - PASS_CYCLES
    others = tuple(dict.fromkeys((*one.reads, *(() if one.sums else one.writes))))
    return Step(
        one.pipe, cycles, vector, one.bytes, one.sums, others, one.writes, one.waits, pause, name == "s_barrier",
        one.immediate if name == "s_setprio" else None, one.loads_scalars,
    )  # fmt: skip


def simulate(
    turn: Turn, unit: ComputeUnit, *, waves: int, blocks: int, feed: Feed, lds: Mapping[int, float] | None = None
) -> Simulated:
    """Turns of `blocks` blocks of `waves` waves each on one compute unit. `lds`: as `steps_of`; without it nothing is
    said of conflicts. Raises LookupError as `steps_of`, and ValueError for a loop that never ends, as one with a
    barrier that only some waves come to."""
    steps, free = steps_of(turn, unit, lds or NONE), steps_of(turn, unit)
    taken, least = (sum(each.cycles for each in of if each.pipe == "LDS") for of in (steps, free))
    unknown = sum(one.is_banked and one.at not in (lds or NONE) for one in turn.instructions) if lds is not None else 0
    machine = Machine(steps, unit, feed, [Wave(i // waves, i % unit.simds) for i in range(waves * blocks)])
    machine.run(WARM_TURNS)
    before, start = machine.counted(), machine.cycle
    machine.run(WARM_TURNS + COUNTED_TURNS)
    used, waited = (after - earlier for after, earlier in zip(machine.counted(), before, strict=True))
    passed, running = machine.cycle - start, waves * blocks
    waiting = {WAITING[why]: cycles / (passed * running) for why, cycles in waited.most_common()}
    places = {"LDS": 1, "memory": 1}
    return Simulated(
        turn.start, turn.end, len(steps), turn.products, running, blocks, passed / COUNTED_TURNS,
        {pipe: used[pipe] / (passed * places.get(pipe, unit.simds)) for pipe in PIPES},
        waiting, feed.bytes, feed.latency, max(0, taken - least) / max(1, taken), unknown,
    )  # fmt: skip


class Machine:
    """One compute unit with its waves."""

    def __init__(self, steps: Sequence[Step], unit: ComputeUnit, feed: Feed, waves: list[Wave]) -> None:
        self.steps, self.unit, self.feed, self.waves = steps, unit, feed, waves
        self.of_simd = [[wave for wave in waves if wave.simd == simd] for simd in range(unit.simds)]
        self.free = {pipe: [0] * unit.simds for pipe in ("matrix", "vector", "scalar")}
        self.lds_free = self.l1_free = 0
        self.feed_free = 0.0
        self.arrived: Counter[int] = Counter()
        self.in_block = Counter(wave.block for wave in waves)
        self.used: Counter[str] = Counter()  # cycles of each pipe,
        self.waited: Counter[str] = Counter()  # and of waves that wait
        self.cycle = self.issued = 0

    def counted(self) -> tuple[Counter[str], Counter[str]]:
        return self.used.copy(), self.waited.copy()

    def run(self, turns: int) -> None:
        """Until so many turns of all waves are over, whichever wave's."""
        until = turns * len(self.waves) * len(self.steps)
        idle = self.cycle
        while self.issued < until:
            taken: set[str] = set()
            of_simd = self.of_simd[self.cycle % self.unit.simds]
            for wave in sorted(of_simd, key=lambda wave: -wave.priority):  # stable: the oldest first
                if not wave.held and wave.ready <= self.cycle and self.issue(wave, self.cycle, taken):
                    idle = self.cycle
            self.cycle += 1
            if self.cycle - idle > STUCK_CYCLES:
                raise ValueError("a wave waits for ever: the turn that was found is not what all waves go through")

    def issue(self, wave: Wave, cycle: int, taken: set[str]) -> bool:
        """One instruction of a wave, if nothing holds it."""
        step = self.steps[wave.place]
        if reason := self.obstacle(wave, step, cycle, taken):
            self.waited[reason] += PASS_CYCLES
            return False
        taken.add(step.pipe)
        self.issued += 1
        self.waited["pause"] += step.pause
        wave.ready = cycle + PASS_CYCLES + step.pause
        wave.place = (wave.place + 1) % len(self.steps)
        self.take(wave, step, cycle)
        if step.priority is not None:
            wave.priority = step.priority
        if step.barrier:
            self.arrive(wave, cycle)
        return True

    def obstacle(self, wave: Wave, step: Step, cycle: int, taken: set[str]) -> str:
        """Why it can't be issued now; empty where it can."""
        for kind, left in step.waits.items():
            if kind == "vmcnt" and len(wave.memory) > left and wave.memory[-left - 1] > cycle:
                return kind
            if kind == "lgkmcnt" and len(wave.lds) > left and wave.lds[-left - 1][0] > cycle:
                return "scalars" if wave.lds[-left - 1][1] else kind
        if wave.sums:
            results = RESULT_PASSES * PASS_CYCLES
            if any(wave.sums.get(register, 0) > cycle for register in step.sums):
                return "sums"
            if any(register in wave.sums and wave.sums[register] + results > cycle for register in step.others):
                return "sums"
        pipe = step.pipe
        if pipe in taken and pipe != "none":
            return pipe
        if pipe == "matrix" and self.free["vector"][wave.simd] > cycle:
            return "vector"
        if pipe in self.free and self.free[pipe][wave.simd] > cycle:
            return pipe
        if pipe == "LDS" and (self.lds_free - cycle >= QUEUE_CYCLES or outstanding(wave.lds, cycle) >= MOST_LDS):
            return pipe
        if pipe == "memory" and (self.l1_free - cycle >= QUEUE_CYCLES or flying(wave.memory, cycle) >= MOST_MEMORY):
            return pipe
        return ""

    def take(self, wave: Wave, step: Step, cycle: int) -> None:
        """What the instruction does to its pipe, and when its result is there."""
        if step.pipe == "matrix":
            self.free["matrix"][wave.simd] = cycle + step.cycles
            self.free["vector"][wave.simd] = cycle + step.vector_cycles
            self.used["vector"] += step.vector_cycles
            wave.sums.update(dict.fromkeys(step.writes, cycle + step.cycles))
        elif step.pipe in self.free:
            self.free[step.pipe][wave.simd] = cycle + step.cycles
            if step.scalar_load:
                wave.lds.append((cycle + SCALAR_LOAD_CYCLES, True))
        elif step.pipe == "LDS":
            self.lds_free = max(self.lds_free, cycle) + step.cycles
            wave.lds.append((self.lds_free + self.unit.lds_latency, False))
        elif step.pipe == "memory":
            self.l1_free = max(self.l1_free, cycle) + step.cycles
            self.feed_free = max(self.feed_free, cycle) + step.bytes / self.feed.bytes
            there = math.ceil(max(self.l1_free, self.feed_free)) + self.feed.latency
            wave.memory.append(max(there, wave.memory[-1] if wave.memory else 0))
        if step.pipe != "none":
            self.used[step.pipe] += max(step.cycles, round(step.bytes / self.feed.bytes) * (step.pipe == "memory"))
        for kind, left in step.waits.items():  # what has arrived
            pending: deque[Any] = wave.memory if kind == "vmcnt" else wave.lds
            while len(pending) > left:
                pending.popleft()

    def arrive(self, wave: Wave, cycle: int) -> None:
        """Where it is the last one of its block, all go on."""
        self.arrived[wave.block] += 1
        wave.held = True
        if self.arrived[wave.block] == self.in_block[wave.block]:
            self.arrived[wave.block] = 0
            for other in self.waves:
                if other.block == wave.block:
                    self.waited["barrier"] += max(0, cycle + PASS_CYCLES - other.ready)
                    other.ready, other.held = cycle + PASS_CYCLES, False


def flying(pending: deque[int], cycle: int) -> int:
    return sum(there > cycle for there in pending)


def outstanding(pending: deque[tuple[int, bool]], cycle: int) -> int:
    return sum(there > cycle for there, _ in pending)
