"""How long attention by MFMA should take on CDNA: what a compute unit does in a cycle, by the facts of documents.

A tile of keys keeps the matrix units, the vector units, the LDS and the way to memory busy for as long as each needs
for all blocks that a unit holds. And a block alone is not through a tile before each wave has issued all of it: what is
brought goes to the LDS, scores wait for keys, exponentials for scores, products with values for exponentials; the next
tile's loads take their latency meanwhile. Each of these is a limit of a tile's time. A launch is rounds of as many
blocks as all units hold, beside two limits of its own: what memory gives, and the Infinity Cache.

Facts and their sources: `fusegen.targets.compute_unit`. The constants here are counted in machine code. Tiles were held
against 751 loops, of 11 chains (all keys, causal, windows, ALiBi, tanh, dropout, documents, one token, pages, latent
rows) at up to six depths of 64 to 576, with one block of a unit and with all that it holds, simulated cycle by cycle
(`fusegen.measuring.simulation`): they meet those of gfx90a within 12 % (rms), of gfx942 within 12 %, of gfx950 within
14 %, and within 11 % where keys lie in rows; in pages within 20 %, as the compiler waits for some of these by
themselves. Starts and ends are counted, not simulated. No lanes of these kernels meet in a bank of the LDS, but for
some of wide rows. No AMD GPU was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusegen.language.graph import Graph, Node
from fusegen.language.products import is_computed
from fusegen.language.types import bf16, size_of
from fusegen.planner.attention.masks import Mask
from fusegen.planner.attention.parts import CHUNK, AttentionTile, Matrix
from fusegen.planner.attention.recognition import Recognized, drawn_by_fours, of_row
from fusegen.planner.rows.duration import COPY_SHARE, LAUNCH_US
from fusegen.planner.time import overlapped
from fusegen.planner.traffic import Traffic
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target
from fusegen.targets.compute_unit import PASS_CYCLES, SCALAR_LOAD_CYCLES, ComputeUnit

WAVE = 64
GROUP_ROWS = 16  # of queries, that a wave has
TILE_EXPONENT = 3.5  # of the limits of a tile's time
# Vector instructions of a wave, counted: of a tile; of each score that a lane has, with its scale, its exponential, its
# place in the row's sum; to round it to bf16 in software; of each operation more, as a mask has them, and where waves
# share rows; of each sum, which shrinks; of 16 bytes that are brought; of 16 bytes whose page is asked for
TILE, SCORE, BF16, OPERATION, SHARED_OPERATION, SUM, BROUGHT, PAGE = 27, 4.2, 7.1, 1.15, 4.1, 0.55, 2.5, 11.0
HALF = 0.35  # of a half that is read by itself
SPECIAL = 12.0  # of tanh, and the like,
DRAW = 14.0  # and of random bits
WIDENED_SLOTS = 10.0  # of each number of 8 bits that becomes one of 16 on its way, by hiprtc's code
# Those of a quarter of the rate among them
SLOW_SPECIAL, SLOW_DRAW, SLOW_PAGE = 2, 9.5, 2.5
SPECIAL_FLOPS = 4  # from which on an operation is one of those
SLOW = 4  # turns to issue, that one of these takes
OTHER, OTHER_OF_PRODUCTS = 30, 0.9  # scalar instructions, waits, and pauses between products
EXCHANGED = 2  # of LDS instructions by which lanes find a row's largest
HALF_CYCLES = 2  # of the LDS, for 64 halves that are written or read one by one
# Of a block alone, how much of what its waves issue and store adds up
ISSUED, PRODUCTS, MORE_WAVES, STORED, READ = 0.87, 0.5, 0.2, 3.5, 0.6
SHARED_CYCLES = 1200  # of a tile whose rows several waves share: they meet twice more
# Registers of a thread, of compilers' output: for each of its sums, scores and query's numbers, and of what it fetches
USUAL_REGISTERS, OWN_REGISTERS, FETCHED_REGISTERS = 16, 1.4, 1.7
ROUNDED_REGISTERS = 1.25  # in place of OWN_REGISTERS, where an instruction rounds two to bf16
PAGE_WAITS = 2  # of a tile, at most, for pages and what lies in them: loads come back in their order
LAUNCH_EXPONENT = 4.0  # of the limits of a launch's time
AGAIN = 2.0  # times that a byte is read, from which on the next read finds it in a cache
START_INSTRUCTIONS = 150
END_CYCLES = 0.25  # a sum: to LDS and back, its row's total and conversion, eight instructions or so; a store
LONGEST = 2.0  # tiles of a block over those in the mean, at most, where a mask leaves some out: of a causal one


@dataclass(frozen=True, slots=True)
class Loop:
    """A kernel's loop over tiles of keys, in numbers."""

    rows: int  # of a block
    keys: int  # of a tile
    waves: int  # of a block
    beside: int  # waves that share 16 rows
    depth: int  # numbers of a key, and
    width: int  # of a value, both padded
    held: bool  # queries stay in registers
    together: bool  # values are columns of the keys
    turned: bool  # values are stored with neighbouring keys together
    paged: bool
    instruction: str
    deep: int  # of one instruction
    operations: int  # of a score, but for its scale
    specials: int
    draws: int
    software_bf16: bool
    softmaxed: bool = True

    @property
    def scores(self) -> float:
        """That a lane has of a tile."""
        return GROUP_ROWS * self.keys / (self.beside * WAVE)

    @property
    def products(self) -> float:
        """Matrix instructions of a wave."""
        return self.keys * (self.depth + self.width) / (self.beside * GROUP_ROWS * self.deep)

    @property
    def brought(self) -> tuple[float, float]:
        """Vectors of keys, and of values, that a lane brings of a tile."""
        lanes = self.waves * WAVE * CHUNK
        return -(-self.keys * self.depth // lanes), 0 if self.together else -(-self.keys * self.width // lanes)

    @property
    def halves(self) -> float:
        """Values that a lane reads one by one."""
        return self.keys * self.width / (self.beside * WAVE) if not self.turned else 0.0

    @property
    def bytes(self) -> int:
        """Of a tile."""
        return 2 * self.keys * (self.depth + (0 if self.together else self.width))


def vector_turns(loop: Loop) -> float:
    """To issue of a wave's vector unit in a tile, but for products."""
    keys, values = loop.brought
    operation = OPERATION if loop.turned else SHARED_OPERATION
    own = SCORE if loop.softmaxed else 0.0
    score = own + BF16 * loop.software_bf16 + SPECIAL * loop.specials + DRAW * loop.draws
    slow = loop.softmaxed + SLOW_SPECIAL * loop.specials + SLOW_DRAW * loop.draws
    sums = GROUP_ROWS * loop.width / (loop.beside * WAVE)
    pages = (keys + values) * (PAGE + SLOW * SLOW_PAGE) if loop.paged else 0.0
    return (
        TILE + SLOW + loop.scores * (score + operation * loop.operations + SLOW * slow) + SUM * sums * loop.softmaxed
        + BROUGHT * (keys + values) + HALF * loop.halves + pages
    )  # fmt: skip


def lds_cycles(unit: ComputeUnit, loop: Loop) -> tuple[float, float]:
    """For what a wave stores in a tile, and for what it reads."""
    keys, values = loop.brought
    vector = WAVE * CHUNK * 2 / unit.lds_bytes
    stored = keys * vector + values * (CHUNK * HALF_CYCLES if loop.turned else vector)
    stored += EXCHANGED * WAVE * 4 / unit.lds_bytes
    read = 2 * loop.keys * loop.depth / (loop.beside * unit.lds_read_bytes)
    read += 0 if loop.held else 2 * GROUP_ROWS * loop.depth / unit.lds_read_bytes
    if loop.turned:
        read += 2 * loop.keys * loop.width / unit.lds_read_bytes
    else:
        read += HALF_CYCLES * loop.halves + 2 * GROUP_ROWS * loop.keys / unit.lds_bytes
    return stored, read


def issued_turns(loop: Loop) -> float:
    """To issue of a wave in a tile, but for what products take beyond."""
    keys, values = loop.brought
    read = 2 * loop.keys * (loop.depth / loop.beside + (loop.width if loop.turned else 0)) / (WAVE * CHUNK * 2)
    read += 0 if loop.held else 2 * GROUP_ROWS * loop.depth / (WAVE * CHUNK * 2)
    lds = keys + values * (CHUNK if loop.turned else 1) + read + loop.halves + EXCHANGED
    return vector_turns(loop) + lds + keys + values + (1 + OTHER_OF_PRODUCTS) * loop.products + OTHER


def tile_cycles(unit: ComputeUnit, loop: Loop, held: int, rate: float, latency: int) -> float:
    """Of a compute unit that holds so many blocks, for a tile of each, fed `rate` bytes a cycle."""
    matrix = loop.products * unit.matrix_cycles(loop.instruction)
    vector = (vector_turns(loop) + loop.products) * PASS_CYCLES
    stored, read = (cycles * loop.waves for cycles in lds_cycles(unit, loop))
    memory = loop.bytes / min(rate, unit.l1_bytes)
    once, on_simd = -(-loop.waves // unit.simds), -(-loop.waves * held // unit.simds)
    issued = issued_turns(loop) * PASS_CYCLES * (1 + MORE_WAVES * (once - 1))
    alone = ISSUED * (issued + PRODUCTS * matrix * once) + STORED * stored + READ * read
    alone += 0 if loop.turned else SHARED_CYCLES
    alone += min(loop.brought[0], PAGE_WAITS) * latency if loop.paged else 0.0
    limits = matrix * on_simd, vector * on_simd, (stored + read) * held, memory * held, alone
    return overlapped((*limits, latency + memory + stored), TILE_EXPONENT)


# ---------------------------------------------------------------- loops of chains


def loop_of(
    found: Recognized, unit: ComputeUnit, tile: AttentionTile, atom: Atom, matrices: tuple[Matrix, Matrix, Matrix],
    *, beside: int = 1, together: bool = False,
) -> Loop:  # fmt: skip
    """Of tiles that conditions are tested in. `beside`: waves that share rows."""
    query, key, value = matrices
    computed = [n for n in (*found.score_body, *found.weight_body) if is_computed(n) and not of_row(n)]
    by_fours = drawn_by_fours(found, atom.fragment)
    special = [n for n in computed if n.op.flops >= SPECIAL_FLOPS and n.op.name != "philox"]
    draws = [n for n in computed if n.op.name == "philox"]
    return Loop(
        rows=tile.rows,
        keys=tile.keys,
        waves=tile.warps,
        beside=beside,
        depth=query.padded,
        width=value.padded,
        held=tile.held,
        together=together,
        turned=value.across,
        paged=key.pages is not None,
        instruction=atom.instruction.replace("__builtin_amdgcn", "v"),
        deep=atom.k // atom.instructions,
        operations=max(0, len(computed) - len(special) - len(draws) - bool(found.softmax)),  # the first scales
        specials=len(special),
        draws=sum(1 if n in by_fours else 4 for n in draws),
        software_bf16=found.dtype is bf16 and not unit.rounds_bf16,
        softmaxed=found.softmax is not None,
    )


def settled_operations(found: Recognized, mask: Mask) -> int:
    """Of a score where what the mask settles is known to hold: those that no tile needs but one that an end cuts."""

    def holds(node: Node) -> bool:
        return node in mask.settled or (node.op.name == "logical_and" and all(map(holds, node.inputs)))

    def asked(node: Node) -> Iterable[Node]:
        if node.op.name == "where" and holds(node.inputs[0]):
            return (node.inputs[1],)
        return tuple(n for n in node.inputs if not holds(n))

    body = {n for n in found.score_body if is_computed(n) and not of_row(n)}
    needed, open_ = set[Node](), [found.logits]
    while open_:
        node = open_.pop()
        while node.op.name == "where" and holds(node.inputs[0]):
            node = node.inputs[1]
        if node in body and node not in needed:
            needed.add(node)
            open_ += asked(node)
    return len(body - needed)


def registers_of(unit: ComputeUnit, loop: Loop) -> int:
    """That the compiler is expected to give a thread. hiprtc's own, of 118 kernels, were within 10 % (rms)."""
    sums = GROUP_ROWS * loop.width / (loop.beside * WAVE)
    held = GROUP_ROWS * loop.depth / (2 * WAVE) if loop.held else 8
    fetched = sum(loop.brought) * CHUNK / 2
    own = ROUNDED_REGISTERS if unit.rounds_bf16 else OWN_REGISTERS
    return round(USUAL_REGISTERS + own * (sums + loop.scores + held) + FETCHED_REGISTERS * fetched)


# ---------------------------------------------------------------- launches


def mfma_us(
    graph: Graph, found: Recognized, mask: Mask, target: Target, unit: ComputeUnit, loop: Loop, moved: Traffic,
    share: float, resident: int,
) -> float:  # fmt: skip
    """A launch, `share` of whose tiles of keys are not left out, by units that hold so many blocks at most."""
    *others, rows = (size_of(size, graph.sizes) for size in graph.shape[:-1])
    down = -(-max(1, rows) // loop.rows)
    blocks = max(1, math.prod(others)) * down
    most = -(-size_of(found.keys, graph.sizes) // (loop.keys * max(1, found.parts)))
    tiles = most * share
    places = target.sms * resident
    free = replace(loop, operations=max(0, loop.operations - settled_operations(found, mask)))
    cut = min(1.0, (1 + loop.rows / loop.keys) / max(1.0, tiles)) if free != loop else 1.0
    again = blocks * tiles * loop.bytes / max(1, keys_bytes(found, moved))
    rate = min(unit.l2_bytes, max(1.0, again) * unit.dram_bytes * max(1.0, target.sms / blocks))
    latency = unit.cache_latency if again >= AGAIN else unit.dram_latency

    def of_tile(held: int) -> float:
        one, other = (tile_cycles(unit, each, held, rate, latency) for each in (loop, free))
        return cut * one + (1 - cut) * other

    full, rest = divmod(blocks, places)
    last = -(-rest // target.sms)
    if share < 1 and full:  # short blocks fill the places of those that are through
        cycles = blocks / places * tiles * of_tile(resident)
    else:
        cycles = tiles * ((full * of_tile(resident) if full else 0.0) + (of_tile(last) if last else 0.0))
    longest = min(most, LONGEST * tiles) * of_tile(1)
    start = 2 * unit.dram_latency + SCALAR_LOAD_CYCLES + START_INSTRUCTIONS * PASS_CYCLES
    end = END_CYCLES * loop.rows * loop.width + unit.dram_latency
    hidden = 1 / max(1, (resident if full else last) - 1)  # behind other blocks of the unit
    cycles = max(cycles, longest) + start + end + (start + end) * max(0, full + bool(rest) - 1) * hidden
    memory = moved.ideal / (target.dram_gbs * COPY_SHARE * 1e3)
    filled = fill_share(target, resident, down) * blocks * tiles * loop.bytes
    filled /= unit.cache_bytes * unit.ghz * target.sms * 1e3
    widened = WIDENED_SLOTS * (loop.depth + loop.width) if found.coded else 0.0
    widened += sum(size * steps for _, size, steps in found.widened)
    widening = blocks * tiles * loop.keys * widened * 2 / (target.fp32_tflops * 1e6)
    return LAUNCH_US / 2 + widening + overlapped((cycles / (unit.ghz * 1e3), memory, filled), LAUNCH_EXPONENT)


def keys_bytes(found: Recognized, moved: Traffic) -> float:
    """Of keys and values, each once."""
    return sum(t.ideal for t in moved.tensors if t.tensor in (found.key.name, found.value.name) and not t.output)


def fill_share(target: Target, resident: int, down: int) -> float:
    """Of what a die's blocks read, what its L2 cache takes in: those of one head's rows run at once, on all dies."""
    at_once = max(1, target.sms * resident)
    on_die = max(1, at_once // target.dies)
    return min(on_die, -(-at_once // down)) / on_die
