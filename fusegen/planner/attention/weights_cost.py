"""How long written weights should take: products and exponentials twice, and what is written once."""

from __future__ import annotations

import math

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.attention.cost import (
    BEHIND_WGMMA_SHARE,
    EXPONENTIALS,
    MFMA_SHARE,
    MMA_SYNC_SHARE,
    OVERLAP_EXPONENT,
    ROW_VALUE_REGISTERS,
    TILE_US,
    USUAL_REGISTERS,
    burden,
    cost_of,
    memory_us,
    scores_of,
    share_needed,
    tensor_traffic,
)
from fusegen.planner.attention.masks import Mask
from fusegen.planner.attention.parts import AttentionTile, Matrix
from fusegen.planner.attention.recognition import of_row
from fusegen.planner.attention.written import Written, is_by_row
from fusegen.planner.cost import unfused_kernels
from fusegen.planner.model import Cost, Traffic
from fusegen.planner.pieces import arrays
from fusegen.planner.rows.duration import LAUNCH_US, resident_blocks
from fusegen.planner.time import overlapped
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

# cycles of an SM for each score and pass, beside the product, by how many consumers there are: exponentials take 1/16.
# These and PRODUCT_SHARE predict tiles of 1 to 4 consumers on an H200 within 8 %: docs/measurements.md
SOFTMAX_CYCLES = {1: 0.200, 2: 0.120, 3: 0.116, 4: 0.094}
PRODUCT_SHARE = 0.80  # of the data sheet's rate, which products of warpgroups reach
SOFTMAX_OVERLAP = 3.0  # of those two
FEW_KEYS = 24.0  # keys that a tile costs beside its own
# of a block that takes all keys: with a mask, blocks of one group of heads end with a short one, but begin with this
TAIL_SHARE = 0.2
WRITTEN_BYTES = 14  # that an SM writes in a cycle: filling memory takes as long on an H200 as on an H100
BLOCK_US = 2.5  # of a block before its first product and behind its last


def registers_of(tile: AttentionTile, atom: Atom, query: Matrix, key: Matrix, row_values: int) -> int:
    """Registers of one thread: scores, fragments, what is on its way, and so many values of each of its rows."""
    rows = tile.rows // tile.warps
    lanes = atom.fragment.lanes
    held = rows * query.padded // (2 * lanes) if tile.held else 8
    fetched = 0 if key.copied else key.elements // (2 * tile.warps * lanes)
    return USUAL_REGISTERS + rows * tile.keys // lanes + held + fetched + row_values * ROW_VALUE_REGISTERS


def needed(graph: Graph, found: Written, mask: Mask, rows: int, keys: int) -> float:
    """The share of all scores that tiles of so many rows and keys compute."""
    return share_needed(graph, found, mask, rows, keys) if is_by_row(found) else 1.0


def estimate(
    graph: Graph, found: Written, mask: Mask, target: Target, tile: AttentionTile, room: int, registers: int
) -> Cost:
    """The time of one launch at the graph's sizes, and what bounds it, by mma.sync or MFMA."""
    moved = traffic(graph, found, needed(graph, found, mask, 1, 1))
    resident = max(1, resident_blocks(target, tile.warps * target.warp, registers, room))
    blocks = blocks_of(graph, tile)
    keys, depth = (size_of(size, graph.sizes) for size in (found.keys, found.depth))
    padded = -(-keys // tile.keys) * tile.keys
    scores = 2 * blocks * tile.rows * padded * needed(graph, found, mask, tile.rows, tile.keys)
    reached = MFMA_SHARE if target.vendor == "hip" else BEHIND_WGMMA_SHARE if target.wgmma else MMA_SYNC_SHARE
    few = min(1.0, blocks / target.sms) * min(1.0, resident * tile.warps / 8) ** 0.5
    products = 2.0 * scores * depth / (reached * few * burden(tile) * target.product_tflops(found.dtype) * 1e6)
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes)  # of all SMs in a us
    softmax = scores * (1 / EXPONENTIALS + 4 / target.f32_lanes) / cycles / max(few, 1e-9)
    ends = -(-blocks // (target.sms * resident)) * TILE_US * tile.rows / 16
    time = LAUNCH_US / 2 + ends + overlapped((written_us(moved, target, blocks), products, softmax), OVERLAP_EXPONENT)
    return cost_of(found, moved, target, time, room, registers, resident)


def estimate_wgmma(
    graph: Graph, found: Written, mask: Mask, target: Target, tile: AttentionTile, room: int, registers: int
) -> Cost:
    """The same where warpgroups multiply."""
    share = needed(graph, found, mask, tile.rows, tile.keys)
    moved = traffic(graph, found, needed(graph, found, mask, 1, 1))
    keys, depth = (size_of(size, graph.sizes) for size in (found.keys, found.depth))
    blocks = blocks_of(graph, tile)
    scores = 2 * tile.rows * -(-keys // tile.keys) * tile.keys  # of a block that takes all keys
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes * target.sms)  # of an SM in a us
    rate = target.product_tflops(found.dtype) * 1e6 / target.sms * PRODUCT_SHARE  # of an SM
    slower = (1 + FEW_KEYS / tile.keys) / (1 + FEW_KEYS / 128)
    softmax = scores * SOFTMAX_CYCLES[tile.warps // 4] * slower / cycles
    longest = overlapped((2.0 * scores * depth / rate, softmax), SOFTMAX_OVERLAP)
    rounds = blocks / target.sms if share < 1 else -(-blocks // target.sms)
    tail = TAIL_SHARE * longest if share < 1 else 0.0
    multiplied = max(1.0, rounds) * (share * longest + BLOCK_US) + tail
    time = LAUNCH_US / 2 + overlapped((written_us(moved, target, blocks), multiplied), OVERLAP_EXPONENT)
    return cost_of(found, moved, target, time, room, registers, 1)


def written_us(moved: Traffic, target: Target, blocks: int) -> float:
    """As far as memory, and the SMs that so many blocks are on, can write it."""
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes * target.sms)  # of an SM in a us
    return max(memory_us(moved, target), moved.ideal / (WRITTEN_BYTES * cycles * min(max(1, blocks), target.sms)))


def blocks_of(graph: Graph, tile: AttentionTile) -> int:
    *others, rows = (size_of(size, graph.sizes) for size in graph.shape[:-1])
    return math.prod(others) * -(-max(1, rows) // tile.rows)


def traffic(graph: Graph, found: Written, share: float) -> Traffic:
    """Bytes and operations of one launch at the graph's sizes; `share` of the scores are asked for, once."""
    tensors = [tensor_traffic(graph, tensor) for tensor in arrays(graph)]
    ideal = sum(t.ideal for t in tensors)
    count = scores_of(graph, found.scores)
    products = round(2 * count * size_of(found.depth, graph.sizes) * share)
    others = [n for n in {*found.score_body, *found.behind} if not of_row(n)]
    flops = round(count * share * (6 + sum(n.op.flops for n in others)))
    operators = unfused_kernels(graph)
    apart = ideal + count * found.dtype.bytes * 2
    return Traffic(
        tensors=tuple(tensors),
        ideal=ideal,
        moved=ideal,
        unfused=sum(o.moved for o in operators),
        per_element_fused=ideal,
        per_element_unfused=apart,
        flops=products + flops,
        special=round(count * share),
        launches_unfused=len(operators),
        bytes_per_element_fused=ideal / max(1, count),
        bytes_per_element_unfused=apart / max(1, count),
        product_flops=products,
    )
