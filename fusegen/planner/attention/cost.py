"""How long attention should take: bytes, products, and exponentials; what candidates are ranked by.

Rates of mma.sync and MFMA are shares of data sheets, as published kernels of this structure reach them: not measured.
Those of wgmma are in wgmma_cost.
"""

from __future__ import annotations

import math

import numpy as np

from fusegen.language.graph import Graph, Node, Tensor
from fusegen.language.types import size_of
from fusegen.planner.attention.masks import End, Least, Mask, Sum
from fusegen.planner.attention.mfma_cost import loop_of, mfma_us
from fusegen.planner.attention.mfma_cost import registers_of as mfma_registers
from fusegen.planner.attention.parts import AttentionTile, Matrix
from fusegen.planner.attention.recognition import Recognized, Scored, computed_elements, drawn_by_fours, of_row
from fusegen.planner.cost import gathered_bytes, unfused_kernels
from fusegen.planner.model import Cost, TensorTraffic, Traffic
from fusegen.planner.pieces import arrays, bytes_of
from fusegen.planner.rows.duration import COPY_SHARE, LAUNCH_US, resident_blocks
from fusegen.planner.time import overlapped
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target
from fusegen.targets.compute_unit import unit_of

MMA_SYNC_SHARE = 0.60  # of the data sheet's rate: FlashAttention-2 reaches 190 of 312 TFLOP/s on an A100 (Dao 2023)
BEHIND_WGMMA_SHARE = 0.36  # where that rate takes warpgroups: 350 of 989 on an H100 (Shah et al. 2024)
MFMA_SHARE = 0.3  # predicted, not measured
EXPONENTIALS = 16  # of an SM in a cycle (CUDA C++ Programming Guide, throughput of native arithmetic)
SPECIAL_FLOPS = 4  # from which on an operation asks for an exponential or the like, and for two from twice as many
ROW_VALUE_REGISTERS = 4  # of two rows, and of what is made of them on the way
TILE_US = 0.15  # of a block before its first product and behind its last, for every 16 rows
COPIED_SHARE = 0.92  # of what memory gives, by cp.async: 64 heads of 32k keys took 388 us, by tensor copies 369 (H100)
APART = 0.1  # of a block's time, which others wait for
FIRST_US = 2.5  # of a block whose keys come from memory, before its first product and behind its last
OVERLAP_EXPONENT = 4.0
# of a score, four of which share a call of Philox, products of 64 bits among them: 32 heads of 4096 queries, 4096 keys
# and 128 numbers, causal, took 554 us, and without dropout 224 (H200)
DRAWN_SLOTS = 48
USUAL_REGISTERS = 52  # addresses, loop counters, what the compiler holds ahead: 128 x 128 x 128 takes 242 to 250


def registers_of(tile: AttentionTile, atom: Atom, query: Matrix, key: Matrix, value: Matrix, row_values: int) -> int:
    """Registers of one thread: sums of the result, scores, their halves, fragments, what is on its way, and so many
    values of each of its rows."""
    rows = tile.rows // tile.warps
    lanes = atom.fragment.lanes
    sums = rows * value.padded // lanes
    scores = rows * tile.keys // lanes
    held = rows * query.padded // (2 * lanes) if tile.held else 8
    if atom.repeated:  # lanes that share a row have the same of it
        held *= lanes // atom.rows
    threads = tile.warps * lanes
    fetched = sum(m.held(threads) for m in (key, value) if not m.copied and tile.ahead)
    return USUAL_REGISTERS + sums + scores + scores // 2 + held + fetched + row_values * ROW_VALUE_REGISTERS


def estimate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, tile: AttentionTile, atom: Atom,
    matrices: tuple[Matrix, Matrix, Matrix], room: int, registers: int,
) -> Cost:  # fmt: skip
    """The time of one launch at the graph's sizes, and what bounds it."""
    share = share_needed(graph, found, mask, tile.rows, tile.keys)
    moved = traffic(graph, found, share_needed(graph, found, mask, 1, 1))
    threads = tile.warps * target.warp
    if (unit := unit_of(target)) is not None:
        loop = loop_of(found, unit, tile, atom, matrices)
        registers = mfma_registers(unit, loop)
    resident = max(1, resident_blocks(target, threads, registers, room))
    if unit is not None:
        time = mfma_us(graph, found, mask, target, unit, loop, moved, share, resident)
        return cost_of(found, moved, target, time, room, registers, resident)
    blocks = -(-max(1, graph.rows) // tile.rows)
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    padded = tiles_of(found, keys, tile) * tile.keys
    scores = blocks * tile.rows * padded * share
    reached = MFMA_SHARE if target.vendor == "hip" else BEHIND_WGMMA_SHARE if target.wgmma else MMA_SYNC_SHARE
    few = min(1.0, blocks / target.sms) * min(1.0, resident * tile.warps / 8) ** 0.5
    rate = reached * few * burden(tile) * target.product_tflops(found.dtype) * 1e6
    products = 2.0 * scores * (depth + width) / rate
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes)  # of all SMs in a us
    each = 1 / EXPONENTIALS + 4 / target.f32_lanes if found.softmax else weighing_cycles(found, target)
    each += drawing_slots(found, target) / target.f32_lanes
    softmax = scores * each / cycles / max(few, 1e-9)
    places = target.sms * resident
    if size_of(graph.shape[-2], graph.sizes) <= tile.rows:
        one = (tile.warps / 8) ** 0.5 * reached * burden(tile) * target.product_tflops(found.dtype) * 1e6 / target.sms
        alone = 2.0 * tile.rows * tile.keys * (depth + width) / one
        streamed = streamed_us(
            graph, found, tile, places, padded / tile.keys * share, alone, COPIED_SHARE * memory_rate(target)
        )
        return cost_of(found, moved, target, LAUNCH_US / 2 + FIRST_US + streamed, room, registers, resident)
    waves = -(-blocks // places)
    ends = waves * TILE_US * tile.rows / 16
    time = LAUNCH_US / 2 + ends + overlapped((memory_us(moved, target), products, softmax), OVERLAP_EXPONENT)
    return cost_of(found, moved, target, time, room, registers, resident)


def weighing_cycles(found: Recognized, target: Target) -> float:
    """Of an SM, for what a weight is made of without a softmax: instructions, and exponentials and the like."""
    steps = [n.op for n in computed_elements(found.score_body) if n.op.name != "philox"]
    special = sum(1 + (op.flops > 2 * SPECIAL_FLOPS) for op in steps if op.flops >= SPECIAL_FLOPS)
    return special / EXPONENTIALS + (1 + sum(op.slots for op in steps)) / target.f32_lanes


def drawing_slots(found: Recognized, target: Target) -> float:
    """Instructions for the random numbers of each score: calls of Philox, one of four scores or of each."""
    draws = [n for n in (*found.score_body, *found.weight_body) if n.op.name == "philox"]
    by_fours = drawn_by_fours(found, target.chained[0].fragment) if draws else ()
    return sum(DRAWN_SLOTS if n in by_fours else 4 * DRAWN_SLOTS for n in draws)


def tiles_of(found: Recognized, keys: int, tile: AttentionTile) -> int:
    """Tiles of keys that a block goes over."""
    return -(-keys // (tile.keys * max(1, found.parts)))


def streamed_us(
    graph: Graph, found: Recognized, tile: AttentionTile, slots: int, tiles: float, alone_us: float, rate: float
) -> float:
    """The time of blocks of which each has keys of its own, `slots` of them at once, each `tiles` of keys: of those
    that run together each takes as long as one alone, or its share of `rate`, what memory gives in a us. So a last
    round of few blocks may take as long as a whole one; and blocks of one round don't end together.

    On an H100, 128k keys of 8 heads of 128 took 231 us by 136 blocks, four more than there are SMs, and 195 by 256; 32k
    keys of 64 heads 406 us by 64 blocks, 387 by 192 and 369 by 512."""
    blocks = max(1, math.prod(size_of(size, graph.sizes) for size in graph.shape[:-2]))
    depth, width = (size_of(size, graph.sizes) for size in (found.depth, found.width))
    size = found.dtype.bytes * tile.keys * (depth + width)
    more = tile.rows * depth / (tile.keys * (depth + width))  # queries come as a part of a tile does

    def together(count: int) -> float:
        return (tiles + more) * max(alone_us, count * size / rate) if count else 0.0

    whole, rest = divmod(blocks, slots)
    return whole * together(slots) + together(rest) + APART * together(min(blocks, slots))


def memory_us(moved: Traffic, target: Target) -> float:
    return moved.ideal / memory_rate(target)


def memory_rate(target: Target) -> float:
    """Bytes in a us, as a plain copy reaches it."""
    return target.dram_gbs * COPY_SHARE * 1e3


def cost_of(
    found: Scored, moved: Traffic, target: Target, time_us: float, room: int, registers: int, resident: int
) -> Cost:
    """With the floor of what is moved; `room`: bytes of shared memory of each of so many resident blocks of an SM."""
    memory = moved.ideal / (target.dram_gbs * 1e3)
    products = moved.product_flops / (target.product_tflops(found.dtype) * 1e6)
    return Cost(
        traffic=moved,
        floor_us=max(memory, products),
        time_us=time_us,
        bound="memory" if memory >= products else "compute",
        in_flight_bytes=resident * room,
        registers=min(registers, target.registers_per_thread),
        blocks_per_sm=resident,
    )


def burden(tile: AttentionTile) -> float:
    """Of the best rate, what a tile's shape leaves: keys are loaded for few rows, and rows are reduced for few keys."""
    return 1 / (1 + 16 / tile.rows + 8 / tile.keys)


def share_needed(graph: Graph, found: Scored, mask: Mask, rows: int, keys: int) -> float:
    """The share of all scores that tiles of so many rows and keys compute, at the graph's sizes, as far as the rows'
    numbers say it: row operands may hold anything."""
    count, columns = size_of(graph.shape[-2], graph.sizes), size_of(found.keys, graph.sizes)
    if count == 0:
        return 1.0
    at = np.arange(count, dtype=np.int64)
    tiles = np.minimum(np.arange(0, count, rows)[:, None] + np.arange(rows), count - 1)
    first, end = (value_of(e, at) for e in (mask.needed.first, mask.needed.end))
    low = np.zeros(count) if first is None else np.clip(first, 0, columns)
    high = np.full(count, columns) if end is None else np.clip(end, 0, columns)
    taken = np.ceil(high[tiles].max(-1) / keys) - np.floor(low[tiles].min(-1) / keys)
    return float(np.maximum(taken, 0).sum() * keys * rows / (len(tiles) * rows * -(-columns // keys) * keys))


def value_of(end: End | None, rows: np.ndarray) -> np.ndarray | None:
    """An end of each row; None where it depends on more than the row's number."""
    if end is None:
        return None
    if isinstance(end, Sum):
        if any(node.op.name != "row_index" for node, _ in end.terms):
            return None
        found = np.full(rows.shape, end.plus)
        for _, times in end.terms:
            found = found + times * rows
        return found
    inner = [value for e in end.of if (value := value_of(e, rows)) is not None]
    if not inner or (len(inner) < len(end.of) and not isinstance(end, Least)):
        return None
    return np.asarray((np.minimum if isinstance(end, Least) else np.maximum).reduce(inner))


def traffic(graph: Graph, found: Recognized, share: float) -> Traffic:
    """Bytes and operations of one launch at the graph's sizes; `share` of the scores are asked for."""
    tensors = [tensor_traffic(graph, tensor) for tensor in arrays(graph)]
    ideal = sum(t.ideal for t in tensors)
    count = scores_of(graph, found.scores)
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    products = round(2 * count * (depth + width) * share)
    others = [n for n in found.score_body if not of_row(n)]
    softmax = 6 if found.softmax else 0
    flops = round(count * share * (softmax + sum(n.op.flops for n in others)))
    special = 1 if found.softmax else sum(n.op.flops >= SPECIAL_FLOPS for n in others)
    operators = unfused_kernels(graph)
    apart = ideal + count * found.dtype.bytes * 4
    elements = max(1, graph.rows * keys)
    return Traffic(
        tensors=tuple(tensors),
        ideal=ideal,
        moved=ideal,
        unfused=sum(o.moved for o in operators),
        per_element_fused=ideal,
        per_element_unfused=apart,
        flops=products + flops,
        special=round(count * share * special),
        launches_unfused=len(operators),
        bytes_per_element_fused=ideal / elements,
        bytes_per_element_unfused=apart / elements,
        product_flops=products,
    )


def tensor_traffic(graph: Graph, tensor: Tensor) -> TensorTraffic:
    own = min(bytes_of(graph, tensor), gathered_bytes(graph, tensor.node, bytes_of(graph, tensor)))
    return TensorTraffic(tensor.name, any(tensor is t for t in graph.outputs), own, own, own)


def scores_of(graph: Graph, node: Node) -> int:
    return math.prod(size_of(size, graph.sizes) for size in node.shape)
