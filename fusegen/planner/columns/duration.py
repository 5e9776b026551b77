"""How long a plan that reduces columns should take, and what it moves.

Its limits are those of rows (planner/rows/duration.py), whose measured constants stand here too: bytes at the rate of a
copy, by how many of them lie side by side in a row of the tile; instructions; and waiting, which is turns of loads one
after another, and blocks that find no room at first. What is in flight bounds the rate of the bytes as well: memory
answers after `LOAD_US`, so an SM moves no more in that time than its threads have asked for. None of it was measured on
kernels that only reduce.

What running sums cost was fitted to 246 candidates of 16 chains and shapes on one H200 (torch 2.11, cold L2, medians of
15, 2026-11-30). There the tile chosen among those measured takes 5 % more than the best of them in the mean and 21 % at
worst, and times are predicted to 15 % (rms of the logarithm), of those within 1.3 of the best to 12 %. Left out of this
are rows of one sector that lie side by side, 1 x 1000000 x 8 f32: it took 718 us at best and 749 by the tile chosen,
which is estimated at 313, since an SM moved some 12 GB/s of them; one shape is too little to say why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusegen.language.graph import Extent, Graph, Kind
from fusegen.language.types import size_of
from fusegen.planner.columns.plan import ColumnPass, ColumnTile
from fusegen.planner.cost import unfused_kernels
from fusegen.planner.model import Cost
from fusegen.planner.pieces import WORD_BYTES, arrays, bytes_of
from fusegen.planner.rows.duration import (
    APART_BYTES,
    CLUSTER_US,
    CLUSTERED_FACTOR,
    COPY_SHARE,
    FILLED_SHARE,
    GATHERING_US,
    ISSUE_FACTOR,
    LAUNCH_US,
    LOAD_US,
    MOVE_SLOTS,
    OVERLAP_EXPONENT,
    RATE_SHARE_BY_BYTES,
    REDUCTION_US,
    SLOT_CYCLES,
    SM_GBS,
    WHOLE_BYTES,
    resident_blocks,
)
from fusegen.planner.time import floor_us, overlapped
from fusegen.planner.traffic import TensorTraffic, Traffic
from fusegen.targets.base import Target

SECTOR_BYTES = 32  # bytes of memory that come together
ADDRESS_SLOTS = 6.0  # instructions of a row's address and test, for each operand
FRAME_REGISTERS = 24  # of a thread, beside its loads and sums
SHARED_US = 0.02  # of one step of bringing parts together in shared memory
RUNNING_SLOTS = 1.4  # of an element of a running sum: both its additions, and the choice of rows that are there
LANE_SLOTS = 2.1  # of each step through a warp's lanes, for each column of a thread
# Of each group's part that a thread adds, for each of its columns: 8 x 4096 x 1024 bf16 took 58.4 us by 128 threads of
# 4 groups and 88.4 by 512 of 16.
GROUP_SLOTS = 5.4
RUNNING_US = 2.6  # more for a launch of them: 32 x 512 x 64 bf16 took 6.9 to 9 us, which move 4 MB
# More than `GATHERING_US` asks, since what clusters tell in each turn is in it: 1 x 4096 x 1024 bf16 took 13.3 us by
# clusters of 2, by those of 4 and 8 16.4 and 17.2.
RUNNING_GATHERING_US = 1.4
# What one SM moves of each sector of a tile's row, up to `SM_GBS`: 8 x 4096 x 1024 f32 took 99.8 us by rows of 32 B,
# 73.2 by those of 256.
SECTOR_GBS = 41.0
# Threads that wait for each other in each turn hide less of one limit behind another than `OVERLAP_EXPONENT` says.
RUNNING_EXPONENT = 2.3


def column_traffic(graph: Graph, passes: tuple[ColumnPass, ...]) -> Traffic:
    """Bytes and operations of one launch at the graph's sizes: what several passes read comes from memory each time."""
    reads: dict[str, int] = {}
    for one in passes:
        for load in (*one.loads, *one.row_loads):
            reads[load.access.tensor] = reads.get(load.access.tensor, 0) + 1
    tensors = []
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        size, times = bytes_of(graph, tensor), 1 if output else reads.get(tensor.name, 1)
        tensors.append(TensorTraffic(tensor.name, output, size, size * times, size, times))
    unfused = unfused_kernels(graph)
    elements = graph.rows * graph.cols
    flops = special = 0
    for node in graph.nodes:
        own = node.inputs[0] if node.op.kind is Kind.REDUCE else node
        if graph.extents[own] is Extent.LAUNCH:
            continue
        count = math.prod(size_of(size, graph.sizes) for size in own.shape)
        flops += node.op.flops * count
        special += count if node.op.flops >= 4 else 0
    ideal, apart = sum(t.ideal for t in tensors), sum(o.moved for o in unfused)
    return Traffic(
        tensors=tuple(tensors),
        ideal=ideal,
        moved=sum(t.moved for t in tensors),
        unfused=apart,
        per_element_fused=ideal,
        per_element_unfused=apart,
        flops=flops,
        special=special,
        launches_unfused=len(unfused),
        bytes_per_element_fused=ideal / max(1, elements),
        bytes_per_element_unfused=apart / max(1, elements),
    )


@dataclass(frozen=True, slots=True)
class Demands:
    """What passes ask of a thread and of memory at a vector's width: the same for every tile of that width."""

    registers: tuple[tuple[float, float], ...]  # of each pass: for each row in flight, and beside them
    widest: int  # bytes of an element, of the widest stream
    row: float  # bytes of an element, all streams of a pass together
    rate_share: float  # of the copy rate, by what one instruction moves
    element: float  # instructions of an element
    reductions: int
    passes: int
    reducing: int  # passes that reduce
    running: int  # running sums

    @staticmethod
    def of(passes: tuple[ColumnPass, ...], vector: int) -> Demands:
        streams = [load.access for one in passes for load in one.loads]
        streams += [store.access for one in passes for store in one.stores]
        total = sum(access.dtype.bytes for access in streams)
        moved = sum(access.dtype.bytes * RATE_SHARE_BY_BYTES[min(16, access.vector_bytes)] for access in streams)
        element = sum(
            MOVE_SLOTS * (len(one.loads) + len(one.stores))
            + sum(s.op.issued for s in (*one.body, *one.running_body))
            + len(one.reductions)
            + RUNNING_SLOTS * len(one.scans)
            + ADDRESS_SLOTS * (len(one.loads) + len(one.row_loads) + len(one.stores)) / vector
            for one in passes
        )
        return Demands(
            registers=tuple(registers_of_pass(one, vector) for one in passes),
            widest=max((access.dtype.bytes for access in streams), default=4),
            row=total / max(1, len(passes)),
            rate_share=moved / total if total else 1.0,
            element=element,
            reductions=sum(len(one.reductions) for one in passes),
            passes=len(passes),
            reducing=sum(bool(one.reductions) for one in passes),
            running=sum(len(one.scans) for one in passes),
        )


def registers_of_pass(one: ColumnPass, vector: int) -> tuple[float, float]:
    """Of a thread: what the loads of a row in flight wait in, and its sums, vectors and addresses. A pass with running
    sums holds those of each row, and the next turn's rows; this turn's too where they are used behind the sums."""
    waiting = len(one.row_loads) + sum(max(1.0, vector * w.access.dtype.bytes / WORD_BYTES) for w in one.loads)
    if one.scans:
        waiting *= 2.0 if one.running_body else 1.5
    if one.running_body or not one.scans:
        waiting += sum(max(1.0, vector * way.access.dtype.bytes / WORD_BYTES) for way in one.stores)
    beside = sum(vector * load.access.dtype.bytes / WORD_BYTES for load in one.column_loads)
    waiting += vector * len(one.scans)
    beside += 4 * vector * len(one.scans)
    return waiting, beside + vector * len(one.reductions) + 4 * (len(one.loads) + len(one.row_loads))


def registers_of(tile: ColumnTile, demands: Demands) -> int:
    """Of a thread, in the pass that needs most."""
    most = max((tile.turn * row + beside for row, beside in demands.registers), default=0.0)
    told = 2 * tile.vector * demands.running if tile.cluster > 1 else 0
    return math.ceil(FRAME_REGISTERS + most + told)


def column_cost(
    graph: Graph, target: Target, tile: ColumnTile, demands: Demands, shared: int, moved: Traffic, kept: int
) -> Cost:
    """`shared`: bytes of a block's shared memory; `kept`: results of each column."""
    registers = registers_of(tile, demands)
    resident = max(1, resident_blocks(target, tile.threads, registers, shared))
    col_tiles = -(-graph.cols // tile.cols)
    blocks = kept * col_tiles * tile.cluster
    sms = target.sms * FILLED_SHARE.get(tile.cluster, 1.0)
    busy = min(blocks, sms)  # SMs with a block, or more
    beside = min(resident, max(1.0, blocks / sms))  # blocks of one of them
    rows = graph.rows // max(1, kept)
    turns = math.ceil(rows / tile.rows_in_turn)
    taken = min(rows, tile.turn * math.ceil(rows / tile.row_step / max(1, turns))) if turns else 0
    in_flight = busy * beside * tile.threads * tile.vector * demands.row * min(tile.turn, taken)
    side_by_side = tile.cols * demands.widest
    rate = target.dram_gbs * COPY_SHARE * 1e3 * width_share(demands, side_by_side)
    of_sm = min(SM_GBS, SECTOR_GBS * side_by_side / SECTOR_BYTES) if demands.running else SM_GBS
    rate = min(rate, busy * of_sm * 1e3, in_flight / LOAD_US if in_flight else rate)
    memory_us = moved.moved / rate * (CLUSTERED_FACTOR if tile.cluster > 1 else 1.0)
    groups = tile.groups(target.warp)
    exchange = LANE_SLOTS * math.log2(tile.rows_of_warp(target.warp)) + GROUP_SLOTS * (groups if groups > 1 else 0)
    demands = replace(demands, element=demands.element + demands.running * exchange / tile.turn)
    elements = graph.rows * col_tiles * tile.cols
    per_us = target.fp32_tflops * 1e6 / 2 * min(1.0, blocks / target.sms)
    issue_us = ISSUE_FACTOR * elements * demands.element / per_us
    steps = tile.rows * math.ceil(tile.cols / tile.threads) + tile.cluster * math.ceil(tile.cols / tile.threads)
    alone_us = demands.passes * LOAD_US * turns
    alone_us += demands.element * turns * tile.turn * tile.vector * SLOT_CYCLES * target.sms * target.f32_lanes / (
        target.fp32_tflops * 1e6 / 2
    )  # fmt: skip
    alone_us += demands.reductions * (REDUCTION_US + SHARED_US * steps)
    if tile.cluster > 1:
        gathering_us = RUNNING_GATHERING_US if demands.running else GATHERING_US
        alone_us += gathering_us * math.log2(tile.cluster) + CLUSTER_US * demands.reducing
    waiting_us = max(1.0, blocks / sms / resident) * alone_us
    begun_us, exponent = (RUNNING_US, RUNNING_EXPONENT) if demands.running else (0.0, OVERLAP_EXPONENT)
    return Cost(
        traffic=moved,
        floor_us=floor_us(target, moved),
        time_us=LAUNCH_US + begun_us + overlapped((memory_us, issue_us, waiting_us), exponent),
        bound="memory" if memory_us >= issue_us else "instruction",
        in_flight_bytes=round(resident * tile.threads * tile.vector * demands.row * tile.turn),
        registers=registers,
        blocks_per_sm=resident,
    )


def width_share(demands: Demands, side_by_side: float) -> float:
    """Share of the copy rate by what one instruction moves, and by the bytes that lie side by side in a tile's row."""
    next_to = (1 + APART_BYTES / WHOLE_BYTES) / (1 + APART_BYTES / side_by_side)
    return demands.rate_share * min(1.0, side_by_side / SECTOR_BYTES, next_to)
