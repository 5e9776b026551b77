"""How long latent attention by wgmma should take: a block's tiles one after another, and what comes before and behind.

The constants are of an H200, where 26 cases of 1 to 256 sequences of 1024 to 32768 keys, with the kernel that brings
parts together, took within 10 % of what is said, but one of 64 parts 16 % more: docs/measured.md, "Latent attention".
"""

from __future__ import annotations

import math

from fusegen.language.graph import Graph
from fusegen.language.types import size_of
from fusegen.planner.attention.cost import cost_of, memory_rate, share_needed, tiles_of
from fusegen.planner.attention.masks import Mask
from fusegen.planner.attention.parts import AttentionTile
from fusegen.planner.attention.recognition import Recognized
from fusegen.planner.attention.wide_cost import traffic_of
from fusegen.planner.model import Cost
from fusegen.planner.rows.duration import LAUNCH_US
from fusegen.targets.base import Target

SHARE = 0.65  # of the data sheet's rate, while blocks go over their tiles: 1.83 us each
BLOCK_US = 5.0  # of a block before its first product and behind its last
# more, where blocks begin with keys of different sequences and not with neighbours: of 16 tiles each, 64 sequences of
# 1024 keys took 48.5 us, and 8 of 8192 by 8 parts 39.7 without the second kernel
SCATTERED_US = 10.0


def estimate(graph: Graph, found: Recognized, mask: Mask, target: Target, tile: AttentionTile, registers: int) -> Cost:
    """The time of one launch at the graph's sizes, and what bounds it. An SM has one block at a time."""
    share = share_needed(graph, found, mask, tile.rows, tile.keys)
    moved = traffic_of(graph, found, share_needed(graph, found, mask, 1, 1), shared=True)
    *others, rows = (size_of(size, graph.sizes) for size in graph.shape[:-1])
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    down = -(-max(1, rows) // tile.rows)
    blocks = max(1, math.prod(others)) * down
    rate = SHARE * target.product_tflops(found.dtype) * 1e6 / target.sms  # of an SM, operations in a us
    tiles = tiles_of(found, keys, tile) * share
    products = tiles * 2.0 * tile.rows * tile.keys * (depth + width) / rate
    size = found.dtype.bytes * tile.keys * depth / down  # blocks of one head's rows find its keys in the L2 cache
    streamed = tiles * size * min(blocks, target.sms) / memory_rate(target)
    rounds = -(-blocks // target.sms)
    written = sum(t.moved for t in moved.tensors if t.output) / memory_rate(target)
    ends = rounds * BLOCK_US + (0.0 if found.parts else SCATTERED_US)
    time = LAUNCH_US / 2 + ends + rounds * max(products, streamed) + written
    return cost_of(found, moved, target, time, 0, registers, 1)
