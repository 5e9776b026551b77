"""How long attention by wgmma should take: a warpgroup's exponentials run while others multiply.

The constants are of an H100, whose heads of 32 to 256 they predict within 6 %: docs/measurements.md.
"""

from __future__ import annotations

import math

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.attention.cost import (
    OVERLAP_EXPONENT,
    burden,
    cost_of,
    drawing_slots,
    memory_rate,
    memory_us,
    share_needed,
    streamed_us,
    tiles_of,
    traffic,
    weighing_cycles,
)
from fusegen.planner.attention.masks import Mask
from fusegen.planner.attention.parts import AttentionTile
from fusegen.planner.attention.recognition import Recognized
from fusegen.planner.model import Cost
from fusegen.planner.rows.duration import LAUNCH_US
from fusegen.planner.time import overlapped
from fusegen.targets.base import Target

SHARE = 0.80  # of the data sheet's rate, where exponentials cost nothing: heads of 256 reach 0.73
# of an SM for each score, by how many consumers there are: exponentials take 1/16, and what others don't hide is on top
SOFTMAX_CYCLES = {1: 0.118, 2: 0.118, 3: 0.095}
OVERLAP = 3.0  # exponent of products and exponentials
ALONE = 0.7  # of the rate, with one consumer: nothing hides its exponentials
TILE_US = 2.5  # of a block before its first product and behind its last


def estimate(
    graph: Graph, found: Recognized, mask: Mask, target: Target, tile: AttentionTile, room: int, registers: int
) -> Cost:
    """The time of one launch at the graph's sizes, and what bounds it."""
    share = share_needed(graph, found, mask, tile.rows, tile.keys)
    moved = traffic(graph, found, share_needed(graph, found, mask, 1, 1))
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    *others, rows = (size_of(size, graph.sizes) for size in graph.shape[:-1])
    blocks = math.prod(others) * -(-max(1, rows) // tile.rows)
    each_tiles = tiles_of(found, keys, tile) * share  # of a block, on average
    scores = tile.rows * tile.keys * each_tiles
    softmax = SOFTMAX_CYCLES[tile.warps // 4] if found.softmax else weighing_cycles(found, target)
    softmax += drawing_slots(found, target) / target.f32_lanes
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes * target.sms)  # of an SM in a us
    rate = target.product_tflops(found.dtype) * 1e6 / target.sms  # of an SM
    reached = SHARE * burden(tile) / burden(AttentionTile(128, 128, 8, 2, False))
    each = overlapped((2.0 * scores * (depth + width) / (rate * reached), scores * softmax / cycles), OVERLAP)
    if tile.warps == 4:
        each /= ALONE
    if rows <= tile.rows:
        alone = each / each_tiles if each_tiles else 0.0  # of a mask that leaves no key there is no tile
        streamed = streamed_us(graph, found, tile, target.sms, each_tiles, alone, memory_rate(target))
        # an SM has one block at a time: 128k keys of 8 heads took 190 us by 64 blocks, 192 by 128, 197 by 256, and 203
        # by 512 (H100)
        ends = -(-blocks // target.sms) * TILE_US
        return cost_of(found, moved, target, LAUNCH_US / 2 + ends + streamed, room, registers, 1)
    rounds = max(1.0, blocks / target.sms) if share < 1 else max(1, -(-blocks // target.sms))
    time = LAUNCH_US / 2 + overlapped((memory_us(moved, target), rounds * (each + TILE_US)), OVERLAP_EXPONENT)
    return cost_of(found, moved, target, time, room, registers, 1)
