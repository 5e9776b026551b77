"""The loop of a compiled kernel, simulated on the compute unit it is for: how it is fed, and by how many blocks.

    simulated(plan, binary).busy["matrix"]    # 0.92: of the cycles of the loop; nothing is measured

What blocks ask for is fed at the rate of the memory, times how often a byte of it is read by all blocks together, up to
a unit's share of its die's L2 cache; what is read again comes with the latency of the Infinity Cache. Units
that have no block leave their share of the memory to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.compiling import Binary, disassemble
from fusegen.errors import RequestError
from fusegen.measuring.lds_banks import cycles_of
from fusegen.measuring.machine_loops import Turn, parsed, turn_of
from fusegen.measuring.simulation import Feed, Simulated, simulate
from fusegen.planner.attention.parts import ScoresPlan
from fusegen.planner.attention.wide import WideAttentionPlan
from fusegen.planner.model import Plan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.targets.compute_unit import ComputeUnit, unit_of
from fusegen.validation.far import extents

AGAIN = 2.0  # times that bytes are read, from which on most of them are in a cache


def simulated(plan: Plan, binary: Binary) -> Simulated:
    """The loop with as many blocks on a compute unit as the launch has for it. Raises RequestError for what can't be
    simulated, which says why, and MissingError where nothing disassembles."""
    loop = found(binary)
    blocks = plan.blocks(*extents(plan, plan.graph.sizes))
    held = min(binary.occupancy.blocks_per_sm, max(1, -(-blocks // binary.target.sms)))
    return of_blocks(plan, binary, loop, held)


@dataclass(frozen=True, slots=True)
class Loop:
    """Of a kernel, what its time is spent in."""

    unit: ComputeUnit
    turn: Turn
    lds: Mapping[int, float]  # cycles of instructions for the LDS, by their places


def found(binary: Binary) -> Loop:
    """Raises as `simulated`."""
    unit = unit_of(binary.target)
    if unit is None:
        raise RequestError(f"{binary.target.arch} is no CDNA, of which alone loops are simulated")
    text = disassemble(binary)
    turn = turn_of(text)
    if turn is None:
        raise RequestError("its code has no loop that multiplies, or moves anything to or from memory")
    return Loop(unit, turn, cycles_of(parsed(text), turn, unit, waves_of(binary)))


def waves_of(binary: Binary) -> int:
    return -(-binary.threads // binary.target.warp)


def of_blocks(plan: Plan, binary: Binary, loop: Loop, held: int) -> Simulated:
    feed = feed_of(plan, loop.unit)
    try:
        return simulate(loop.turn, loop.unit, waves=waves_of(binary), blocks=held, feed=feed, lds=loop.lds)
    except (LookupError, ValueError) as error:
        raise RequestError(str(error.args[0])) from error


def feed_of(plan: Plan, unit: ComputeUnit) -> Feed:
    """Where a launch has fewer blocks than there are units, those that have one share the memory."""
    again = times_read(plan)
    latency = unit.cache_latency if again >= AGAIN else unit.dram_latency
    blocks = max(1, plan.blocks(*extents(plan, plan.graph.sizes)))
    dram = unit.dram_bytes * max(1.0, plan.target.sms / blocks)
    return Feed(min(unit.l2_bytes, max(1.0, again) * dram), latency)


def times_read(plan: Plan) -> float:
    """How often a byte of the factors is read in the mean, by the tiles: of attention, of keys and values, by blocks
    that leave no tile out; once by others."""
    if isinstance(plan, GemmPlan):
        tile = plan.tile
        slices = (tile.rows + tile.cols * plan.products) * plan.k * plan.dtype.bytes
        factors = sum(t.ideal for t in plan.cost.traffic.tensors if not t.output)
        return plan.tiles(*extents(plan, plan.graph.sizes)) * slices / max(1, factors)
    if isinstance(plan, ScoresPlan):
        return keys_read(plan) / max(1, sum(t.ideal for t in plan.cost.traffic.tensors if t.tensor in of_keys(plan)))
    return 1.0


def of_keys(plan: ScoresPlan) -> frozenset[str]:
    """The operands that each block goes over: keys, and values."""
    return frozenset(m.access.tensor for m in (plan.key, getattr(plan, "value", None)) if m is not None)


def keys_read(plan: ScoresPlan) -> int:
    """Bytes of these that all blocks read."""
    brought = (
        [plan.key] if isinstance(plan, WideAttentionPlan) and plan.shared else [plan.key, getattr(plan, "value", None)]
    )
    numbers = sum(m.columns for m in brought if m is not None)
    return plan.blocks(*extents(plan, plan.graph.sizes)) * plan.tiles * plan.tile.keys * numbers * plan.dtype.bytes


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch of tiles whose loops are all that takes time: no start, no end, no other launch."""

    us: float
    loop: Simulated  # with all blocks that a unit holds


def launch_of(plan: GemmPlan | ScoresPlan, binary: Binary) -> Launched:
    """Rounds of as many blocks as all units hold, and a last one of the rest; of attention, of blocks that leave no
    tile of keys out. Raises as `simulated`."""
    loop = found(binary)
    blocks = plan.blocks(*extents(plan, plan.graph.sizes))
    held, units = binary.occupancy.blocks_per_sm, binary.target.sms
    full, rest = divmod(blocks, held * units)
    last = -(-rest // units)
    loops = {n: of_blocks(plan, binary, loop, n) for n in {held if full else last, last or held}}
    cycles = full * loops[held].cycles if full else 0.0
    cycles += loops[last].cycles if last else 0.0
    turns: float = (
        plan.tiles if isinstance(plan, ScoresPlan) else plan.steps * products_of(plan) / max(1, loop.turn.products)
    )
    return Launched(cycles * turns / (loop.unit.ghz * 1e3), loops[held if full else last])


def turns_of(plan: GemmPlan | ScoresPlan, turn: Turn) -> float:
    """Of the loop, that a block goes through."""
    return plan.tiles if isinstance(plan, ScoresPlan) else plan.steps * products_of(plan) / max(1, turn.products)


def products_of(plan: GemmPlan) -> int:
    """Matrix instructions of one wave in a slice."""
    tile, atom = plan.tile, plan.atom
    fragments = tile.warp_rows // atom.rows * (tile.warp_cols // atom.cols) * plan.products
    return fragments * (tile.k // atom.k) * atom.instructions
