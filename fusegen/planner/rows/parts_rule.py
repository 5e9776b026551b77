"""Rows whose columns are reduced over all rows besides: gradients of a norm's weights beside that of its input.

Reductions over rows come to a kernel as *parts*: of so many, part p reduces rows p, p + count, ... Another kernel, of
columns, makes the whole of them. A block takes the rows of one part in turn (of several, where several rows share a
block), and its threads keep their columns' values in f32 registers from row to row, and write them at the end: what the
rows are made of is read once. Sums are made in one order, of ascending rows, and nothing is added by atomics.

Where a GPU copies to shared memory asynchronously, rows are asked for some turns ahead (`InTurn.ring`): a block alone
waits for nobody then, and bytes are in flight at all times. Each thread copies its own columns, and reads them there in
every pass, so that no barrier stands between. Elsewhere rows are kept in registers, and other blocks hide the wait.

On an H100 (3.00 TB/s of copy rate, medians, cold L2) the gradients of RMSNorm took 151.0 us at 16384 x 4096 in bf16
and 150.6 at 8192 x 8192, both kernels, 0.89 of the floor (torch.compile: 167 and 235); the first kernel alone 146 and
145, 0.93 and 0.94. Two or four rows ahead, 256 or 512 threads a row and 264 to 528 parts were within 8 % of each other
at 16384 x 4096, and rows in registers (148.4) as good as rows ahead. LayerNorm's at 1024 x 12288 took 49.8, 0.51 of the
floor, since a block has eight rows; in registers, by vectors of four, 45.5. Column sums of f32 at 1048576 x 1024 took
1420, 1.01, and with several rows a block 1385. A row that lies in shared memory is read vector by vector where it is
used: all of a thread's vectors read first, LayerNorm's at 1024 x 12288 spilled 76 bytes, and took 42.0 us on an H200
where they take 39.0 now; RMSNorm's and column sums took the same both ways. Costs are those of other kernels of rows
(planner/rows/duration.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.planner.matching import NoMatch, NotFor, need_countable, need_no_product, need_no_selection
from fusegen.planner.model import Access, Cost, Layout, RowPlan, Staging, Tile
from fusegen.planner.parts import InTurn
from fusegen.planner.pieces import VECTOR_BYTES, WORD_BYTES, row_threads_text, vector_widths
from fusegen.planner.rows.assembly import Draft, assemble, row_draft
from fusegen.planner.rows.duration import (
    COPY_SHARE,
    ISSUE_FACTOR,
    LAUNCH_US,
    LOAD_US,
    OVERLAP_EXPONENT,
    REDUCTION_US,
    SLOT_CYCLES,
    WARP_US,
    Work,
    estimated_registers,
    instructions,
    resident_blocks,
    width_share,
)
from fusegen.planner.rows.rowwise import row_threads_tried, tile_of
from fusegen.planner.rows.schedule import Schedule, schedule, title_of
from fusegen.planner.tile import partial_bytes
from fusegen.planner.time import floor_us, overlapped
from fusegen.targets.base import Target

BESIDE_SEVERAL = 16  # registers where sums of several columns are kept: with fewer left LayerNorm's gradients spilled
MOST_PARTS_WORDS = 64  # registers of a thread that hold its columns' values: more would leave too few for a row
# From asking for a byte to having it, where memory is at its rate: 40 KB an SM in flight are 4.8 TB/s over 132 of them.
FLIGHT_US = 1.1
# Rows that come by asynchronous copies to several blocks of an SM while others are written. Those of 16 bytes took 5 %
# longer than expected, and those of 8 bytes, which go through the L1 cache, 4 % less, unless they leave it less room
# than they fill: RMSNorm's gradients at 16384 x 4096 took 113.0 us by the former and 106.0 by the latter with three
# blocks an SM, 111.6 and 111.7 with four; at 12672 rows 90.4 and 84.7; at 8192 x 8192, with two blocks that fill as
# much as four, 108.5 and 109.8 (H200). By one block an SM LayerNorm's at 1024 x 12288 took 39.1 and 39.7.
WIDE_COPIES_FACTOR = 1.05
NARROW_COPIES_FACTOR = 0.96
CROWDED_FACTOR = 1.01
MOST_HELD_WORDS = 16  # of what all rows share
RINGS = (2, 3, 4, 6, 8)  # rows ahead
COPIED_BYTES = (4, 8, 16)  # that one asynchronous copy moves
MOST_IN_FLIGHT = 128 * 1024  # bytes an SM that rings are to hold: memory answers some 40 KB an SM at 4.8 TB/s


def row_parts(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    """Every number of threads a row, and of rows ahead."""
    if not graph.parts:
        raise NotFor(
            "the chain reduces no parts of its rows; row_parts is the first of two kernels for sums of columns"
        )
    need_no_product(graph, "row_parts")
    need_no_selection(graph)
    need_countable(graph.cols)
    if graph.scans or graph.grouped or graph.repeated or graph.gathers or any(node.over for node in graph.reductions):
        raise NoMatch("row_parts takes rows in turn, without running sums, groups, gathers or other sums of columns")
    count = graph.parts[0].count
    found = False
    for vector in widths(graph, layout):
        draft = row_draft(graph, target, layout, vector)
        for per_row in row_threads_tried(draft):
            tile = replace(tile_of(draft, per_row), remainder=0)
            tile = replace(tile, per_thread=-(-graph.cols // (vector * per_row)))
            if count % tile.rows_per_block or tile.per_thread * vector * len(graph.parts) > MOST_PARTS_WORDS:
                continue
            for made in in_turn(draft, tile, count):
                found = True
                yield made
    if not found:
        raise NoMatch(
            f"rows of {graph.cols} with {len(graph.parts)} sums of columns; no block's registers hold "
            "the sums of so many columns beside a row"
        )


def widths(graph: Graph, layout: Layout) -> tuple[int, ...]:
    """The vector widths that divide a row."""
    found = {width for width in vector_widths(graph, layout) if graph.cols % width == 0}
    width = max(vector_widths(graph, layout))
    while graph.cols % width:
        width //= 2
    return tuple(sorted(found | {width}, reverse=True))


def in_turn(draft: Draft, tile: Tile, count: int) -> Iterator[RowPlan]:
    graph = draft.graph
    streamed = holding(draft, schedule(graph, draft.accesses, "nothing", by_vectors=True, online=()), tile)
    late = replace(streamed, passes=tuple(replace(row_pass, late=True) for row_pass in streamed.passes))
    for ring in RINGS if rings_fit(draft, streamed) else ():
        made = candidate(draft, late, tile, InTurn(count, ring))
        flying = made.cost.blocks_per_sm * made.shared_bytes
        if fits(made) and (ring == RINGS[0] or flying <= MOST_IN_FLIGHT):
            yield made
    values = holding(draft, schedule(graph, draft.accesses, "values", by_vectors=True), tile)
    made = candidate(draft, values, tile, InTurn(count))
    if fits(made):
        yield made


def holding(draft: Draft, planned: Schedule, tile: Tile) -> Schedule:
    """The passes, with the vectors that all rows share in registers, where these are few."""
    words = tile.per_thread * draft.vector * sum(a.dtype.bytes for a in shared_vectors(planned)) / WORD_BYTES
    if words > MOST_HELD_WORDS:
        return planned
    passes = []
    for row_pass in planned.passes:
        held = tuple(
            replace(load, when="held") if load.access in shared_vectors(planned) else load for load in row_pass.loads
        )
        title = title_of(
            held, row_pass.keeps, row_pass.reductions, row_pass.stores, row_pass.scans, row_pass.groups, row_pass.parts
        )
        passes.append(replace(row_pass, loads=held, title=title))
    return replace(planned, passes=tuple(passes))


def shared_vectors(planned: Schedule) -> tuple[Access, ...]:
    loads = (load for row_pass in planned.passes for load in row_pass.loads if load.when in ("now", "held"))
    return tuple(dict.fromkeys(a.access for a in loads if a.access.by_column and not a.access.strided))


def fits(made: RowPlan) -> bool:
    """Does a block have the registers and the shared memory?"""
    target = made.target
    registers = min(target.registers_per_thread, target.registers_per_sm // made.threads)
    return made.cost.registers <= registers and made.shared_bytes + made.static_shared_bytes <= target.shared_bytes


def rings_fit(draft: Draft, planned: Schedule) -> bool:
    """Can every row be copied ahead: whole vectors of 4, 8 or 16 bytes, along one row dimension?"""
    loads = [load.access for row_pass in planned.passes for load in row_pass.loads if load.access.strided]
    return (
        draft.target.async_copies
        and len(draft.dims) == 1
        and bool(loads)
        and all(a.mode == "vector" and a.vector * a.dtype.bytes in COPIED_BYTES for a in loads)
    )


def candidate(draft: Draft, planned: Schedule, tile: Tile, how: InTurn) -> RowPlan:
    loops = {load.access.tensor: load.access for p in planned.passes for load in p.loads if load.access.strided}
    row_bytes = sum(access.dtype.bytes for access in loops.values())
    ring_bytes = how.ring * row_bytes * tile.threads * tile.per_thread * draft.vector
    share = f"{tile.per_thread} x {tile.vector} elements a thread"
    ahead = f"{how.ring} rows ahead in shared memory" if how.ring else "rows as they come"
    parts = f"{how.count} parts of the rows, each in turn by {row_threads_text(tile, draft.target)}"
    staging: Staging = "registers" if planned.kept_bytes else "none"
    regime = f"{parts}, {share}; {ahead}; sums of columns in registers"
    made = assemble(draft, planned, tile, rule="row_parts", regime=regime, staging=staging, again_from_l2=how.ring > 0)
    made = replace(made, template="row_parts.cu.j2", in_turn=how, folded=False, shared_bytes=ring_bytes)
    return replace(made, cost=duration(made, row_bytes, planned.kept_bytes))


def duration(made: RowPlan, row_bytes: int, kept_bytes: int) -> Cost:
    """Bytes at the rate of a copy, or at what is in flight allows; instructions; and each block's rows, one after
    another."""
    graph, target, tile, how = made.graph, made.target, made.tile, made.in_turn
    assert how is not None
    moved = made.cost.traffic
    shared = made.shared_bytes + partial_bytes(tile, target.warp, made.slots, persistent=True)
    blocks = made.blocks()
    rows = math.ceil(max(1, graph.rows) / tile.rows_per_block)
    work = Work(
        tile=tile, staging=made.staging, passes=made.passes, accesses=made.accesses, copies=False, shared_bytes=shared,
        kept_bytes=kept_bytes, ragged=False, blocks=rows,
    )  # fmt: skip
    elements = tile.per_thread * tile.vector
    held = {load.access for row_pass in made.passes for load in row_pass.loads if load.when == "held"}
    registers = estimated_registers(work) + elements * len(graph.parts)
    registers += BESIDE_SEVERAL if len(graph.parts) > 1 else 0
    registers += elements * sum(access.dtype.bytes for access in held) // WORD_BYTES
    resident = max(1, resident_blocks(target, tile.threads, registers, shared))
    beside = max(1.0, min(resident, blocks / target.sms))  # blocks of an SM
    busy = min(1.0, blocks / target.sms)
    ahead = how.ring or 0.5  # without a ring half of the time nothing is asked for
    flying = beside * busy * target.sms * tile.threads * elements * row_bytes * ahead
    rate = target.dram_gbs * COPY_SHARE * 1e3 * width_share(work) * busy
    writes = any(store.access.by_column for row_pass in made.passes for store in row_pass.stores)
    if how.ring and writes and beside >= 2:
        copied = min(load.access.vector * load.access.dtype.bytes for load in made.ring_loads)
        crowded = 2 * beside * made.shared_bytes > target.shared_per_sm
        rate /= WIDE_COPIES_FACTOR if copied == VECTOR_BYTES else CROWDED_FACTOR if crowded else NARROW_COPIES_FACTOR
    read = sum(t.moved for t in moved.tensors if not t.output)
    memory_us = max(moved.moved / rate, read * FLIGHT_US / flying if flying else 0.0)
    per_us = target.fp32_tflops * 1e6 / 2
    thread = instructions(graph, work) + 2 * elements * len(graph.parts)
    issue_us = ISSUE_FACTOR * rows * tile.threads * thread / per_us / busy
    reductions = sum(len(row_pass.reductions) for row_pass in made.passes)
    turn_us = thread * SLOT_CYCLES * target.sms * target.f32_lanes / per_us
    turn_us += reductions * (REDUCTION_US + WARP_US * max(0, tile.row_threads // target.warp - 1))
    turn_us += 0.0 if how.ring else LOAD_US * (1 + len(made.passes) / 4)
    waves = max(1, math.ceil(blocks / target.sms / resident))
    waiting_us = waves * 2 * LOAD_US + waves * math.ceil(rows / blocks) * turn_us
    return Cost(
        traffic=moved,
        floor_us=floor_us(target, moved),
        time_us=LAUNCH_US + overlapped((memory_us, issue_us, waiting_us), OVERLAP_EXPONENT),
        bound="memory" if memory_us >= issue_us else "instruction",
        in_flight_bytes=round(beside * tile.threads * elements * row_bytes * ahead),
        registers=registers,
        blocks_per_sm=resident,
    )
