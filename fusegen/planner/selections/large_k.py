"""Register-resident top-k for large k: a block's registers hold the row, of which many columns are chosen.

Where a tenth of a row is chosen, most of what is noted of a row that streams by (planner/selections/topk.py) is a
candidate in the end, and lanes look at it again one by one. Here keys stay in registers until the bar is known
(planner/selections/large_k_cost.py); then each thread counts its candidates and packs them behind those of the threads
before it. Where ties make them more than there is room for, the bar is raised among keys and columns by halving, all in
registers. Ranks are made as everywhere: by ranges of keys, and within a range by comparison. Here the ranges are finest
at the bar, where keys are many, and lie by value, since half of all orders of floats lie between -1 and 1.

Of 32768 x 8192 with k = 512 of f32 on an H200 (cold L2; kernels that ended early; 256 threads a row, an early
version) the keys took 254 us, which is what their bytes take, the bar 4, packing 47, counts of ranges 36, places 30,
ranks 72 and what is written 48: it issues as fast as it can. Streaming by, such rows took 731 us; with 128 threads it
is 428. 32768 x 1000 with k = 512 took 1513 us and takes 200, 190 by the best block. Rows of ties are sorted instead: of
4096 x 8192, k = 512, those of half integers took 232 us and those of equal keys 278, in random order 65.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.planner.matching import NotFor, need_countable, need_selection
from fusegen.planner.model import Layout, Plan, RowPlan, Tile
from fusegen.planner.pieces import row_threads_text, vector_widths
from fusegen.planner.rows.assembly import Draft, row_draft
from fusegen.planner.rows.duration import resident_blocks
from fusegen.planner.selections.large_k_cost import (
    MOST_ELEMENTS,
    SPARSEST_COLUMNS,
    candidates_of,
    duration_of,
    large_k_of,
)
from fusegen.planner.selections.picker import of_large_k
from fusegen.planner.selections.picking import Picking, picking
from fusegen.planner.selections.small_k import MOST_REGISTERS, STATIC_BYTES, held_plan, need_one_pass, registers_of
from fusegen.planner.selections.topk import BLOCK_THREADS, NARROW_ELEMENTS, selection_of
from fusegen.targets.base import Target

RESIDENT_BLOCKS = 2  # blocks of an SM: one reads while another one ranks


def large_k(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Every block that holds a row."""
    node = need_selection(graph, "topk_large_k")
    need_countable(graph.cols)
    if graph.picks * SPARSEST_COLUMNS < graph.cols:
        raise NotFor(
            f"{node.operator} at {node.where} chooses {graph.picks} of {graph.cols} columns; topk_large_k is for one in"
            f" {SPARSEST_COLUMNS} and more"
        )
    for vector in vector_widths(graph, layout):
        draft = row_draft(graph, target, layout, vector)
        planned = picking(graph, draft.accesses, "nothing")
        need_one_pass(graph, planned, "topk_large_k")
        for threads in (*NARROW_ELEMENTS, *BLOCK_THREADS):
            if tile := tile_of(draft, threads):
                yield from by_tile(draft, planned, tile)


def tile_of(draft: Draft, threads: int) -> Tile | None:
    """None where a thread would have no key, or more than it has registers for."""
    if threads > draft.target.threads_per_block or threads % draft.target.warp or threads > draft.vectors:
        return None
    per_thread = -(-draft.vectors // threads)
    if per_thread * draft.vector > MOST_ELEMENTS:
        return None
    return Tile(threads, threads, 1, draft.vector, per_thread)


def by_tile(draft: Draft, planned: Picking, tile: Tile) -> Iterator[RowPlan]:
    """The plan, if its warps have keys enough, and its blocks registers and shared memory."""
    graph, target, k = draft.graph, draft.target, draft.graph.picks
    chosen = large_k_of(k, graph.cols, tile, target)
    registers = registers_of(planned, tile)
    if chosen is None or registers > min(MOST_REGISTERS, target.registers_per_thread):
        return
    shared = of_large_k(chosen, tile, planned.adds_up).bytes
    resident = resident_of(target, tile, registers, shared)
    if shared + STATIC_BYTES > target.shared_bytes or resident < RESIDENT_BLOCKS:
        return
    found = round(candidates_of(chosen, tile, graph.cols))
    yield held_plan(
        draft, planned, tile, replace(selection_of(planned, k, chosen), resident=resident), shared, "topk_large_k",
        f"{row_threads_text(tile, target)}, the row in registers; some {found} of {graph.cols} pass the threshold",
        lambda work, moved: duration_of(target, graph, work, chosen, moved, registers),
    )  # fmt: skip


def resident_of(target: Target, tile: Tile, registers: int, shared: int) -> int:
    """Blocks of an SM, by as many warps as its schedulers share evenly: others cost registers and hold nothing."""
    resident = resident_blocks(target, tile.threads, registers, shared)
    even = max(1, target.schedulers_per_sm * target.warp // tile.threads)
    return resident // even * even or resident
