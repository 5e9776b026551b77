"""Chains without reductions: every element by itself.

Where every tensor has the whole shape, rows do not matter and the chain is taken as one flat array. Otherwise blocks
take tiles of rows and columns, so that a row vector's address follows from the column.

A thread takes one vector where vectors may be had, which leaves the most threads in flight: on an H200, 256M f32
copied in 503 us with one, 506 with two and 516 with four; swiglu_elementwise at 8192 x 14336 took 201, 251 and 347 us.
What moves by single elements takes eight a thread, a block apart: bias_relu 65536 x 4096 in f16 took 285 us so, and 763
with eight neighbours a thread (254 by vectors). Rows that no vector divides go by the aligned blocks of what they
write: bias_relu 65536 x 4097 in bf16 took 266 us so, 375 by vectors shifted into place, 292 by single elements.

A thread that waits for an index first may take two vectors of the row that it names: of an embedding's table of 128256
rows, 32768 of 8192 bf16 took 263 us so, 282 by one vector and 273 by four, 65536 of 1024 69.1, 72.8 and 69.9; a copy of
as much takes 258 and 68.5 (H200). Copies of rows for experts, in seven shapes, took 0.91 to 0.93 of the time by one.

Where a tensor lies turned round, rows of a warp are next to each other in it, and few threads share one: of bf16 two
threads with 16 bytes each and 16 rows fill sectors of 32 bytes on both sides (see `sectors`). Doubling 4096 x 8192 in
bf16, stored turned round, took 48.4 us so on an H200, where a copy takes 31.6: each request asks for one sector of a
line. Through a tile of 64 x 64 in shared memory it asks for two or four of them, for which a block waits once, and took
43.6; adding a matrix that lies turned round took 68.5 and 56.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Extent, Graph
from fusegen.planner.matching import NotFor, need_countable, need_no_columns, need_no_product, need_no_selection
from fusegen.planner.model import Access, Layout, RowDim, RowPlan, Tile
from fusegen.planner.pieces import VECTOR_BYTES, accesses, arrays, is_flat, one_named, vector_widths
from fusegen.planner.rows.assembly import Draft, assemble, row_draft
from fusegen.planner.rows.rowwise import group_lanes, group_widths
from fusegen.planner.rows.schedule import Schedule, schedule
from fusegen.planner.rows.sectors import goes_by_tiles, tile_bytes, turned_along
from fusegen.targets.base import Target

BLOCK_THREADS = (128, 256, 512)
# That share a row where a tensor lies turned round: its rows are next to each other, and the other threads of a warp,
# which have as many rows, fill sectors of it together, while these fill sectors of the others.
FEW_THREADS = (1, 2, 4, 8, 16)
# The same where rows are read again for those beside them, which a block's L1 cache has then. Of a causal convolution
# NVRTC gives a thread 40 registers so, and 72 where a block has one row: each case of missing rows is code of its own.
BESIDE = (64, 128)
TILE_ROWS = 32  # that make a run of a tensor that lies turned round, at least


def elementwise(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    """Every block size, flat where the chain allows."""
    need_no_product(graph, "elementwise")
    need_no_columns(graph, "elementwise")
    need_no_selection(graph)
    if graph.reductions:
        first = graph.reductions[0]
        raise NotFor(f"{first.op.name} at {first.where} reduces a row; elementwise has no reductions")
    if graph.scans:
        raise NotFor(f"{graph.scans[0].operator} at {graph.scans[0].where} runs along a row; elementwise has no scans")
    if (graph.gathers or graph.scatters) and not any(graph.extents[t.node] is Extent.ELEMENT for t in graph.outputs):
        yield from row_values(graph, target, layout)
    elif is_flat(graph) and not layout.split and not layout.apart and not layout.interleaved:
        yield from flat(graph, target, layout)
    else:
        yield from tiled(graph, target, layout)


def flat(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    dims = (RowDim("n", "i", tuple(range(len(graph.shape)))),)
    sizes = {t.dtype.bytes for t in arrays(graph) if t.dtype.bytes > 1} or {1}
    widths = {VECTOR_BYTES // s for s in sizes} | ({1} if layout.unaligned else set())
    for vector in sorted(widths, reverse=True):
        found = tuple(flat_access(a, layout, vector) for a in accesses(graph, dims, layout, vector))
        draft = Draft(graph, target, layout, dims, found, vector, flat=True)
        planned = schedule(graph, found, keeps="values", by_vectors=False)
        for threads, per_thread in itertools.product(BLOCK_THREADS, shares(vector)):
            tile = Tile(threads, threads, threads * vector * per_thread, vector, per_thread)
            regime = f"one flat array; a block of {threads} threads, {share_text(tile)}"
            yield assemble(draft, planned, tile, rule="elementwise", regime=regime)


def shares(vector: int) -> tuple[int, ...]:
    """Vectors a thread. One single element is too little for a thread; eight, a block apart, stay coalesced."""
    return (1,) if vector > 1 else (1, 8)


def share_text(tile: Tile) -> str:
    if tile.per_thread > 1:
        return f"{tile.per_thread} x {tile.vector} elements a thread"
    return f"{tile.vector} element{'s' if tile.vector > 1 else ''} a thread"


def flat_access(access: Access, layout: Layout, vector: int) -> Access:
    """In a flat pass only the address must be aligned: the array's end goes element by element."""
    aligned = access.tensor not in layout.unaligned and vector > 1
    width = min(VECTOR_BYTES, vector * access.dtype.bytes) if aligned else access.dtype.bytes
    return replace(access, strided=(0,), by_column=True, mode="vector" if aligned else "element", vector_bytes=width)


def row_values(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    """Rows of which nothing is read but columns that indices name: a thread takes one."""
    draft = row_draft(graph, target, layout, vector=1)
    planned = schedule(graph, draft.accesses, keeps="values", by_vectors=True)
    for threads in BLOCK_THREADS:
        tile = Tile(threads, 1, threads, 1, 1)
        yield assemble(draft, planned, tile, rule="elementwise", regime=f"a thread a row, {threads} rows a block")


def tiled(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    need_countable(graph.cols)
    for vector in group_widths(graph, target, vector_widths(graph, layout)):
        draft = row_draft(graph, target, layout, vector, turned=True)
        planned = schedule(graph, draft.accesses, keeps="values", by_vectors=True)
        few = FEW_THREADS if turned_along(graph, layout, draft.dims) else BESIDE if layout.again else ()
        each = (*shares(vector), 2) if vector > 1 and one_named(draft.accesses) else shares(vector)
        for threads, per_thread, most in itertools.product(BLOCK_THREADS, each, (*few, max(BLOCK_THREADS))):
            per_row = group_lanes(graph, vector)
            while per_row < min(threads, most) and per_row * per_thread < draft.vectors:
                per_row *= 2
            if per_row * (per_thread - 1) >= draft.vectors:
                continue  # the last vectors of every thread would lie outside of the row
            col_tiles = -(-draft.vectors // (per_row * per_thread))
            tile = Tile(threads, per_row, threads // per_row, vector, per_thread, col_tiles)
            rows = f"{tile.rows_per_block} row{'s' if tile.rows_per_block > 1 else ''}"
            regime = f"tiles of rows and columns; a block of {threads} threads on {rows}, {share_text(tile)}"
            yield assemble(draft, planned, tile, rule="elementwise", regime=regime)
            if per_row in few and few is FEW_THREADS and may_turn(draft, planned, tile):
                turned = f"{regime}; what lies turned round goes through shared memory"
                yield assemble(draft, planned, tile, rule="elementwise", regime=turned, turned=True)


def may_turn(draft: Draft, planned: Schedule, tile: Tile) -> bool:
    """May tensors go through tiles in shared memory: is there one that lies so, does a thread have one vector, are all
    columns its own, and is there room?"""
    turned = [a for a in draft.accesses if goes_by_tiles(draft.graph, draft.layout, draft.dims, a)]
    bound = draft.layout.in_place or tile.per_thread > 1 or tile.rows_per_block < TILE_ROWS
    bound = bound or any(a.mode == "misaligned" and a.output for a in draft.accesses)
    bound = bound or any(p.until or p.groups or p.reductions or p.scans for p in planned.passes)
    room = sum(tile_bytes(a, tile) for a in turned) <= draft.target.shared_bytes
    return bool(turned) and not bound and room and len(planned.passes) == 1
