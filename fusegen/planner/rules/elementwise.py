"""Chains without reductions: every element by itself.

Where every tensor has the whole shape, rows do not matter and the chain is walked as one flat array. Otherwise blocks
take tiles of rows and columns, so that a row vector's address follows from the column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusegen.graph import Graph
from fusegen.planner.cost import Work, decisions, estimate, traffic
from fusegen.planner.model import Access, Layout, Plan, RowDim, Tile
from fusegen.planner.pieces import VECTOR_BYTES, accesses, arrays, is_contiguous_walk, params, row_dims, vector_widths
from fusegen.planner.rules import NoMatch
from fusegen.planner.rules.rowwise import index_rows, rounding_of
from fusegen.planner.schedule import schedule
from fusegen.targets.base import Target
from fusegen.types import b8

BLOCKS = (128, 256, 512)
# One vector a thread leaves the most threads in flight: on an H200, 256M f32 copied in 503 us with 1, 506 with 2 and
# 516 with 4; swiglu_elementwise 8192 x 14336 took 201, 251 and 347 us.
PER_THREAD = (1,)


def elementwise(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Every block size and number of vectors a thread, flat where the chain allows."""
    if graph.reductions:
        first = graph.reductions[0]
        raise NoMatch(f"{first.op.name} at {first.where} reduces a row; elementwise has no reductions")
    if is_contiguous_walk(graph) and not layout.split:
        yield from flat(graph, target, layout)
    else:
        yield from tiled(graph, target, layout)


def flat(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    dims = (RowDim("n", "i", tuple(range(len(graph.shape)))),)
    sizes = {t.dtype.bytes for t in arrays(graph) if t.dtype is not b8} or {1}
    for vector in sorted({VECTOR_BYTES // s for s in sizes}, reverse=True):
        found = tuple(flat_access(a, layout, vector) for a in accesses(graph, dims, layout, vector))
        for threads in BLOCKS:
            for per_thread in PER_THREAD:
                step = threads * vector * per_thread
                tile = Tile(threads, threads, step, vector, per_thread)
                yield build(graph, target, layout, dims, found, tile, flat=True)


def flat_access(access: Access, layout: Layout, vector: int) -> Access:
    """In a flat walk only the address must be aligned: the array's end goes element by element."""
    aligned = access.tensor not in layout.unaligned and vector > 1
    width = min(VECTOR_BYTES, vector * access.dtype.bytes) if aligned else access.dtype.bytes
    return replace(access, strided=(0,), by_column=True, mode="vector" if aligned else "element", vector_bytes=width)


def tiled(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    dims = row_dims(graph, layout)
    for vector in vector_widths(graph):
        found = accesses(graph, dims, layout, vector)
        windowed = any(a.mode == "window" for a in found)
        vectors = -(-(graph.cols + (vector - 1 if windowed else 0)) // vector)
        for threads in BLOCKS:
            for per_thread in PER_THREAD:
                per_row = 1
                while per_row < threads and per_row * per_thread < vectors:
                    per_row *= 2
                if per_thread > 1 and per_row * (per_thread - 1) >= vectors:
                    continue  # the last vector of every thread would lie outside the row
                col_tiles = -(-vectors // (per_row * per_thread))
                tile = Tile(threads, per_row, threads // per_row, vector, per_thread, col_tiles)
                yield build(graph, target, layout, dims, found, tile, flat=False)


def build(
    graph: Graph, target: Target, layout: Layout, dims: tuple[RowDim, ...], found: tuple[Access, ...], tile: Tile,
    flat: bool,
) -> Plan:  # fmt: skip
    plan = schedule(graph, found, staged=True)
    windowed = any(a.mode == "window" for a in found)
    moved = traffic(graph, plan.stages, again_from_l2=False)
    rows = graph.rows * graph.cols if flat else graph.rows
    blocks = -(-rows // tile.rows_per_block) * tile.col_tiles
    divides = graph.cols % tile.vector == 0
    work = Work(tile, "none", plan.stages, found, 0, 0, 1, windowed, not flat and not divides, blocks)
    vectors = -(-(graph.cols + (tile.vector - 1 if windowed else 0)) // tile.vector)
    exact = tile.per_thread * tile.threads_per_row * tile.col_tiles == vectors
    where = "one flat array" if flat else "tiles of rows and columns"
    on_rows = "" if flat else f" on {tile.rows_per_block} row{'s' if tile.rows_per_block > 1 else ''}"
    share = f"{tile.per_thread} x {tile.vector} elements a thread"
    return Plan(
        name=graph.name,
        graph=graph,
        target=target,
        layout=layout,
        rule="elementwise",
        template="elementwise.cu.j2" if flat else "rowwise.cu.j2",
        regime=f"{where}; a block of {tile.threads} threads{on_rows}, {share}",
        staging="none",
        tile=tile,
        cols=1 if flat else graph.cols,
        flat=flat,
        tail="element" if flat or not divides else "none" if exact else "vector",
        windowed=windowed,
        row_dims=dims,
        accesses=found,
        params=params(graph, dims, found, flat),
        launch_body=plan.launch_body,
        row_loads=plan.row_loads,
        row_body=index_rows(plan.row_body, dims),
        row_stores=plan.row_stores,
        stages=plan.stages,
        slots=0,
        loop_barrier=False,
        shared_bytes=0,
        cost=estimate(target, work, moved, graph),
        decisions=decisions(graph),
        rounding=rounding_of(graph),
    )
