"""How long attention of long rows should take: what passes through shared memory bounds it, beside the products.

Measured, on an H200, is what all of this reaches; rates of products are data sheets', and the shares of them that other
attention by the same instructions reaches.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.attention.coded_cost import coded_us
from fusegen.planner.attention.cost import (
    APART,
    BEHIND_WGMMA_SHARE,
    COPIED_SHARE,
    FIRST_US,
    MFMA_SHARE,
    MMA_SYNC_SHARE,
    cost_of,
    memory_rate,
    share_needed,
    tiles_of,
    traffic,
)
from fusegen.planner.attention.masks import Mask
from fusegen.planner.attention.mfma_cost import loop_of, mfma_us
from fusegen.planner.attention.mfma_cost import registers_of as mfma_registers
from fusegen.planner.attention.parts import AttentionTile, Matrix
from fusegen.planner.attention.recognition import Recognized
from fusegen.planner.attention.wide import GROUP_ROWS, beside
from fusegen.planner.model import Cost, Traffic
from fusegen.planner.rows.duration import LAUNCH_US, resident_blocks
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target
from fusegen.targets.compute_unit import unit_of

SHARED_BYTES_A_CYCLE = 128  # of an SM
# Of the rate of a tile: 64 sequences of 8192 latent rows for 128 heads took 799 us, 8 of 32768 400 and of 8192 112, by
# tiles of 32 rows and 32 keys, where all of it would be 487, 255 and 77 (H200). Other tiles were not measured.
REACHED = 0.6
ELEMENT_CYCLES = 4  # of 64 lanes that read a half each, from 32 banks, of which two lines meet in one
WAIT_CYCLES = 1500  # of a tile whose block is alone: three barriers, and the exponentials between them


def estimate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, tile: AttentionTile, atom: Atom,
    matrices: tuple[Matrix, Matrix, Matrix], room: int, registers: int, shared: bool,
) -> Cost:  # fmt: skip
    """The time of one launch at the graph's sizes, and what bounds it. Blocks that an SM has at the same time wait for
    one another's barriers; those of one head's rows find its keys in the L2 cache."""
    share = share_needed(graph, found, mask, tile.rows, tile.keys)
    moved = traffic_of(graph, found, share_needed(graph, found, mask, 1, 1), shared)
    if (unit := unit_of(target)) is not None:
        loop = loop_of(found, unit, tile, atom, matrices, beside=beside(tile), together=shared)
        registers = mfma_registers(unit, loop)
    resident = max(1, resident_blocks(target, tile.warps * target.warp, registers, room))
    if unit is not None:
        time = mfma_us(graph, found, mask, target, unit, loop, moved, share, resident)
        return cost_of(found, moved, target, time, room, registers, resident)
    if found.coded:
        time = coded_us(graph, found, target, tile, moved, share, resident)
        return cost_of(found, moved, target, time, room, registers, resident)
    *others, rows = (size_of(size, graph.sizes) for size in graph.shape[:-1])
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    down = -(-max(1, rows) // tile.rows)
    blocks = max(1, math.prod(others)) * down
    together = min(resident, -(-blocks // target.sms))
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes * target.sms)  # of an SM in a us
    reached = MFMA_SHARE if target.vendor == "hip" else BEHIND_WGMMA_SHARE if target.wgmma else MMA_SYNC_SHARE
    products = (
        2.0
        * tile.rows
        * tile.keys
        * (depth + width)
        * target.sms
        / (reached * target.product_tflops(found.dtype) * 1e6)
    )
    busy = max(products, shared_cycles(tile, depth, width, target) / cycles)
    each = max(busy * together, busy + WAIT_CYCLES / cycles) / (together * REACHED)  # of a tile
    size = found.dtype.bytes * tile.keys * (depth + (0 if shared else width)) / down
    tiles = tiles_of(found, keys, tile) * share + tile.rows / tile.keys  # queries come as a part of a tile does
    streamed = tiles * size * min(blocks, target.sms * together) / (COPIED_SHARE * memory_rate(target))
    rounds = -(-blocks // (target.sms * together))
    time = LAUNCH_US / 2 + FIRST_US + (rounds + APART) * max(tiles * each * together, streamed)
    return cost_of(found, moved, target, time, room, registers, resident)


def shared_cycles(tile: AttentionTile, depth: int, width: int, target: Target) -> float:
    """Cycles in which an SM reads a tile of keys, queries, weights and values out of shared memory: each warp its own
    16 rows, its keys, and its columns."""
    keys, columns = tile.keys / beside(tile), width / beside(tile)
    first = 2 * depth * (keys + (0 if tile.held else GROUP_ROWS)) / SHARED_BYTES_A_CYCLE
    weights = 2 * GROUP_ROWS * tile.keys / SHARED_BYTES_A_CYCLE
    values = 2 * tile.keys * columns / SHARED_BYTES_A_CYCLE
    if not target.async_copies:  # element by element, of lines that are keys
        values = tile.keys * columns / target.warp * ELEMENT_CYCLES
    return tile.warps * (first + weights + values)


def traffic_of(graph: Graph, found: Recognized, share: float, shared: bool) -> Traffic:
    """Values that are columns of the keys are read with these."""
    moved = traffic(graph, found, share)
    if not shared or found.value is found.key:
        return moved
    tensors = tuple(
        replace(t, ideal=0, moved=0) if t.tensor == found.value.name and not t.output else t for t in moved.tensors
    )
    ideal = sum(t.ideal for t in tensors)
    return replace(moved, tensors=tensors, ideal=ideal, moved=ideal, per_element_fused=ideal)
