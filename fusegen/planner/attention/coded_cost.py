"""How long attention should take whose keys and values become numbers of 16 bits on their way: blocks of few warps.

A tile's numbers go through registers, are widened there, and are stored: an SM gets through so many of them in a cycle,
however many blocks it has, and a block waits for its loads, its barriers and its exponentials in turn. Measured on an
H200 (8 heads of keys, 4 queries each, 128 numbers in f8e4m3), us, said and took:

    sequences x keys   tile, parts       said   took
    1 x 8192           16 x 32, 32       16.0   18.4
    8 x 8192           16 x 32, 4        76.1   77.8
    8 x 8192           16 x 32, 16       46.1   52.2
    8 x 8192           16 x 64, 8        53.9   60.4
    8 x 32768          16 x 32, 16       162    167
    64 x 8192          16 x 32, 2        317    317
    64 x 8192          16 x 64, 2        379    363

What is made of codes before they are rounded, as where each key has a scale, takes instructions besides. These are
counted: no such kernel was measured.
"""

from __future__ import annotations

import math

from fusegen.language.graph import Graph
from fusegen.language.types import f32, size_of
from fusegen.planner.attention.cost import FIRST_US, memory_us, tiles_of
from fusegen.planner.attention.parts import AttentionTile
from fusegen.planner.attention.recognition import Recognized
from fusegen.planner.model import Traffic
from fusegen.planner.rows.duration import LAUNCH_US
from fusegen.planner.time import overlapped
from fusegen.targets.base import Target

CODES_A_CYCLE = {32: 13.5, 64: 11.3}  # of an SM, by a tile's keys, where two become two numbers by few instructions
SCALED_SLOTS = 0.5  # of a number beside its own steps: its part of the load of what it meets, and by way of f32
LANES = 128  # of an SM, that go on in a cycle
BY_EACH = 0.45  # of that, where each is widened by its own: 620 us in place of 320 (H200)
MORE_ROWS = 1.4  # of tiles of 32 rows: each warp of both halves reads all of the tile again
WAIT_CYCLES, KEY_CYCLES = 990.0, 34.0  # of a tile whose block is alone, and for each of its keys
WAIT_EXPONENT = 4.0


def coded_us(
    graph: Graph, found: Recognized, target: Target, tile: AttentionTile, moved: Traffic, share: float, resident: int
) -> float:
    """A launch, `share` of whose tiles of keys are not left out, by SMs that hold so many blocks at most."""
    *others, rows = (size_of(size, graph.sizes) for size in graph.shape[:-1])
    keys, depth, width = (size_of(size, graph.sizes) for size in (found.keys, found.depth, found.width))
    blocks = max(1, math.prod(others)) * -(-max(1, rows) // tile.rows)
    cycles = target.fp32_tflops * 1e6 / (2 * target.f32_lanes * target.sms)  # of an SM in a us
    pairs = all(
        f"{f32 if steps else found.dtype}_pair_of_{tensor.dtype}" in target.spelling.functions
        for tensor, _, steps in found.widened
    )
    rate = CODES_A_CYCLE[tile.keys] * (1.0 if pairs else BY_EACH) / (1.0 if tile.rows == 16 else MORE_ROWS)
    together = max(1.0, min(resident, blocks / target.sms))
    slots = sum(size * (steps + SCALED_SLOTS) for _, size, steps in found.widened if steps)
    through = together * tile.keys * ((depth + width) / rate + slots / LANES)
    each = overlapped((WAIT_CYCLES + KEY_CYCLES * tile.keys, through), WAIT_EXPONENT) / cycles
    rounds = max(1.0, blocks / (target.sms * together))
    streamed = rounds * tiles_of(found, keys, tile) * share * each
    return LAUNCH_US / 2 + FIRST_US + max(streamed, memory_us(moved, target))
