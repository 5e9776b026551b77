"""How long products by MFMA should take on CDNA: what a compute unit does in a cycle, by the facts of documents.

A slice of K keeps the matrix units, the vector units, the LDS and the way to memory busy for as long as each needs for
all blocks that a unit holds; and no block is through a slice before its own waits are over: for the loads of the next
one, and for what it stores in LDS to be read back. Each of these is a limit of the slice's time. A launch is rounds of
as many blocks as all units hold, each with a start and an end, beside two limits of its own: what memory gives, and
what the Infinity Cache gives to the dies' L2 caches, each of which fills with its own blocks' factors.

Facts and their sources: `fusegen.targets.compute_unit`. The constants here are counted in machine code. Slices were
held against 805 loops, of 5 chains with bf16 and i8 at 5 sizes, with as many blocks as a unit may hold, simulated cycle
by cycle (`fusegen.measuring.simulation`). They meet those of gfx942 within 7 % (rms), of gfx90a within 9 %, of gfx950
within 27 %, since some loops there wait for a load by itself. Starts and ends are counted, not simulated. No AMD GPU
was measured.
"""

from __future__ import annotations

import math

from fusegen.language.types import bf16, f32
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.products.gemm import tile_elements
from fusegen.planner.products.halved import halved
from fusegen.planner.products.product_work import ProductWork
from fusegen.planner.rows.duration import COPY_SHARE, LAUNCH_US
from fusegen.planner.time import overlapped
from fusegen.targets.base import Target
from fusegen.targets.compute_unit import PASS_CYCLES, SCALAR_LOAD_CYCLES, ComputeUnit

SLICE_EXPONENT = 6.0  # of the limits of a slice's time,
LAUNCH_EXPONENT = 4.0  # and of a launch's
HANDED_CYCLES = 170  # from a wave's last product to its next one through LDS: a store, a barrier, a load
# Vector instructions of a wave in a slice, counted: of the loop; of 16 bytes of the left factor, whose rows are tested;
# of the right one; where it is turned; where the left one is computed (RMSNorm); where f32 is rounded to xf32; where
# numbers become their halves.
LOOP, LEFT, RIGHT, TURNED, COMPUTED, ROUNDED, HALVED = 4, 5.5, 1.0, 6.5, 25, 35, 39
SCALED = 1.0  # a sum of a slice, that is scaled and added
BF16 = 46  # more to round 16 bytes of bf16 in software
AGAIN = 2.0  # times that a byte is read, from which on the next read finds it in a cache
START_INSTRUCTIONS = 100
END_CYCLES = 0.25  # a sum: to LDS and back, bias and conversion, eight instructions or so; a store


def mfma_us(target: Target, unit: ComputeUnit, work: ProductWork, blocks: int, resident: int, nbytes: int) -> float:
    """A launch of tiles or streams; `nbytes` counted once, with sums that are stored."""
    tile = work.tile
    slices = -(-work.k // (tile.k * tile.split_k))
    full, rest = divmod(blocks, target.sms * resident)
    last = -(-rest // target.sms)
    cycles = slices * (full * slice_cycles(target, unit, work, blocks, resident) if full else 0.0)
    cycles += slices * (slice_cycles(target, unit, work, blocks, last) if last else 0.0)
    start = unit.dram_latency + SCALAR_LOAD_CYCLES + START_INSTRUCTIONS * PASS_CYCLES
    end = END_CYCLES * tile.rows * tile.cols * work.products * tile.slice_k + unit.dram_latency
    hidden = 1 / max(1, (resident if full else last) - 1)  # behind other blocks of the unit
    cycles += start + end + (start + end) * max(0, full + bool(rest) - 1) * hidden
    memory = nbytes / (target.dram_gbs * COPY_SHARE * 1e3)
    filled = read_bytes(work) * blocks * fill_share(target, work, max(1, resident)) / (
        unit.cache_bytes * unit.ghz * target.sms * 1e3
    )  # fmt: skip
    return LAUNCH_US / 2 + overlapped((cycles / (unit.ghz * 1e3), memory, filled), LAUNCH_EXPONENT)


def slice_cycles(target: Target, unit: ComputeUnit, work: ProductWork, blocks: int, held: int) -> float:
    """Of a compute unit that holds so many blocks, for a slice of each of their slice-K groups."""
    tile = work.tile
    waves = tile.warps * tile.slice_k
    matrix, beside = wave_cycles(unit, work)
    vector = vector_instructions(target, unit, work) * PASS_CYCLES
    lds = lds_cycles(unit, work)
    rate, latency = feed(target, unit, work, blocks)
    each = read_bytes(work) / slices_of(work)
    memory = max(each / rate, each / unit.l1_bytes)
    on_simd = -(-waves * held // unit.simds)
    alone = max(
        latency + memory / waves + vector,
        -(-waves // unit.simds) * matrix + vector + HANDED_CYCLES,
    )
    limits = matrix * on_simd, (vector + beside) * on_simd, lds * held, memory * held, alone
    return overlapped(limits, SLICE_EXPONENT)


def slices_of(work: ProductWork) -> float:
    return work.k / (work.tile.k * work.tile.split_k)


def read_bytes(work: ProductWork) -> float:
    """That a block reads of both factors in all."""
    return tile_elements(work.tile, work.products, work.share) * work.dtype.bytes * work.k / work.tile.k


def wave_cycles(unit: ComputeUnit, work: ProductWork) -> tuple[float, float]:
    """For which a wave's products of one slice hold its SIMD's matrix unit, and the vector unit."""
    tile, atom = work.tile, work.atom
    name = atom.instruction.replace("__builtin_amdgcn", "v")
    products = tile.warp_rows // atom.rows * (tile.warp_cols * work.products // atom.cols)
    count = products * (tile.k // atom.k) * atom.instructions
    return count * unit.matrix_cycles(name), count * unit.vector_cycles(name)


def vector_instructions(target: Target, unit: ComputeUnit, work: ProductWork) -> float:
    """Of a wave in a slice, but for its products."""
    tile = work.tile
    chunk = VECTOR_BYTES // work.dtype.bytes
    threads = tile.warps * target.warp
    left = tile.rows * tile.k / chunk / threads
    right = tile.cols * work.products * tile.k / chunk / threads
    rounded = ROUNDED * (left + right) if work.dtype is f32 and not target.multiplies_f32 else 0.0
    changed = HALVED * (left + right) if halved(work.dtype, work.atom.factors) else 0.0
    brought = right * (RIGHT if work.along else TURNED)
    computed = COMPUTED + BF16 * (work.dtype is bf16 and not unit.rounds_bf16) if work.prepared else 0.0
    return LOOP + left * (LEFT + computed) + brought + rounded + changed + SCALED * work.unscaled


def lds_cycles(unit: ComputeUnit, work: ProductWork) -> float:
    """Of a block's slices: stored once, and read by every wave."""
    tile = work.tile
    stored = tile_elements(tile, work.products) * work.dtype.bytes
    read = tile.warps * (tile.warp_rows + tile.warp_cols * work.products) * tile.k * work.dtype.bytes
    return tile.slice_k * (stored / unit.lds_bytes + read / unit.lds_read_bytes)


def feed(target: Target, unit: ComputeUnit, work: ProductWork, blocks: int) -> tuple[float, int]:
    """Bytes a cycle that a unit gets, and cycles to the first: memory's share, which units without a block leave to the
    others, times how often a byte is read, up to what the L2 cache gives."""
    down = max(1.0, blocks / max(1, work.across))
    tile = work.tile
    once = (down * tile.rows + work.across * tile.cols * work.products * work.share) * work.k * work.dtype.bytes
    again = max(1.0, blocks * read_bytes(work) / once)
    rate = min(unit.l2_bytes, again * unit.dram_bytes * max(1.0, target.sms / blocks))
    return rate, unit.cache_latency if again >= AGAIN else unit.dram_latency


def fill_share(target: Target, work: ProductWork, resident: int) -> float:
    """Of what a die's blocks read, what its L2 cache takes in: those that run at once are `group` tiles high."""
    tile = work.tile
    at_once = max(1, target.sms // target.dies * resident)
    down = min(tile.group, at_once)
    across = math.ceil(at_once / down)
    cols = tile.cols * work.products
    return min(1.0, (down * tile.rows + across * cols) / (at_once * (tile.rows + cols)))
