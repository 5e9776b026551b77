"""Chains with reductions: a row belongs to a team of threads, from one thread to a whole block.

Regimes, from short rows to long ones: several rows a warp, a warp a row, a block a row; between walks the row is kept
in registers, in shared memory, or read again (streamed).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusegen.graph import Graph
from fusegen.planner.cost import Work, decisions, estimate, estimated_registers, rereads_hit, traffic
from fusegen.planner.model import Access, Layout, Plan, RowDim, Stage, Staging, Statement, Tile
from fusegen.planner.pieces import accesses, params, row_dims, vector_widths
from fusegen.planner.rules import NoMatch
from fusegen.planner.schedule import Schedule, schedule
from fusegen.targets.base import Target

# Elements of a row that one thread holds. NVRTC and clang interleave whole unrolled loops: at 64 elements the softmax
# chain took 168 registers on sm_90a and 262 on gfx942, at 32 it took 48 and 80.
MOST_IN_REGISTERS = 32
# A guarded vector costs a branch: 17 single elements a thread took 437 us where 9 in shared memory took 251 (H200,
# the LayerNorm chain at 16384 x 4097).
MOST_VECTORS = 8
REGISTER_MARGIN = 1.2  # of the estimate; at 1.0 log_softmax with 512 threads spilled 66 B on sm_90a
SMALL_BLOCK = 128  # threads of a block whose rows are a warp's or less: four rows of 32 threads


@dataclass(frozen=True, slots=True)
class Draft:
    """What all candidates of one vector width share."""

    graph: Graph
    target: Target
    layout: Layout
    dims: tuple[RowDim, ...]
    accesses: tuple[Access, ...]
    vector: int
    windowed: bool
    vectors: int  # that a row spans


def rowwise(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Every legal team, vector width and staging."""
    if not graph.reductions:
        raise NoMatch("the chain reduces nothing; rowwise is for rows with a sum, a maximum, a softmax ...")
    for vector in vector_widths(graph):
        draft = make_draft(graph, target, layout, vector)
        staged = schedule(graph, draft.accesses, staged=True)
        streamed = schedule(graph, draft.accesses, staged=False)
        for per_row in teams(draft):
            yield from staged_plans(draft, staged, per_row)
            if per_row >= 256 or per_row == target.threads_per_block:
                yield from streamed_plan(draft, streamed, per_row)


def make_draft(graph: Graph, target: Target, layout: Layout, vector: int) -> Draft:
    dims = row_dims(graph, layout)
    found = accesses(graph, dims, layout, vector)
    windowed = any(a.mode == "window" for a in found)
    vectors = -(-(graph.cols + (vector - 1 if windowed else 0)) // vector)
    return Draft(graph, target, layout, dims, found, vector, windowed, vectors)


def teams(draft: Draft) -> Iterator[int]:
    """Threads a row: powers of two, none so large that half of it would idle."""
    per_row = 1
    while per_row <= draft.target.threads_per_block:
        if per_row == 1 or draft.vectors > per_row // 2:
            yield per_row
        per_row *= 2


def tile_of(draft: Draft, per_row: int) -> Tile:
    threads = per_row if per_row > draft.target.warp else max(SMALL_BLOCK, draft.target.warp)
    return Tile(
        threads=threads,
        threads_per_row=per_row,
        rows_per_block=threads // per_row,
        vector=draft.vector,
        per_thread=-(-draft.vectors // per_row),
    )


def staged_plans(draft: Draft, plan: Schedule, per_row: int) -> Iterator[Plan]:
    tile = tile_of(draft, per_row)
    in_registers = build(draft, plan, tile, "registers" if plan.kept_bytes else "none", 0)
    limit = min(draft.target.registers_per_thread, draft.target.registers_per_sm // tile.threads)
    few = tile.per_thread * tile.vector <= MOST_IN_REGISTERS and tile.per_thread <= MOST_VECTORS
    if few and in_registers.cost.registers * REGISTER_MARGIN <= limit:
        yield in_registers
    if per_row < SMALL_BLOCK or not plan.kept_bytes:
        return
    shared = plan.kept_bytes * tile.cols
    made = build(draft, plan, tile, "shared", shared)
    if shared + made.static_shared_bytes <= draft.target.shared_bytes:
        yield made


def streamed_plan(draft: Draft, plan: Schedule, per_row: int) -> Iterator[Plan]:
    yield build(draft, plan, tile_of(draft, per_row), "stream", 0)


def build(draft: Draft, plan: Schedule, tile: Tile, staging: Staging, shared: int) -> Plan:
    """One candidate, costed."""
    graph, target = draft.graph, draft.target
    warps = max(1, tile.threads_per_row // target.warp)
    slots = plan.slots if warps > 1 else 0
    stages = tuple(place(s, tile, staging) for s in plan.stages)
    hits = rereads_hit(graph, target, tile)
    moved = traffic(graph, stages, hits)
    blocks = -(-graph.rows // tile.rows_per_block)
    divides = graph.cols % tile.vector == 0
    shared_all = shared + 4 * slots * warps
    work = Work(
        tile, staging, stages, draft.accesses, shared_all, plan.kept_bytes, warps, draft.windowed, not divides, blocks
    )
    exact = tile.per_thread * tile.threads_per_row == draft.vectors
    reductions = sum(len(s.reductions) for s in stages)
    return Plan(
        name=graph.name,
        graph=graph,
        target=target,
        layout=draft.layout,
        rule="rowwise",
        template="rowwise.cu.j2",
        regime=regime_of(tile, staging, plan, target, hits),
        staging=staging,
        tile=tile,
        cols=graph.cols,
        flat=False,
        tail="element" if not divides else "none" if exact else "vector",
        windowed=draft.windowed,
        row_dims=draft.dims,
        accesses=draft.accesses,
        params=params(graph, draft.dims, draft.accesses, flat=False),
        launch_body=plan.launch_body,
        row_loads=plan.row_loads,
        row_body=index_rows(plan.row_body, draft.dims),
        row_stores=plan.row_stores,
        stages=stages,
        slots=slots,
        loop_barrier=slots > 0 and reductions == 1,
        shared_bytes=shared,
        cost=estimate(target, work, moved, graph),
        decisions=decisions(graph),
        rounding=rounding_of(graph),
    )


def place(stage: Stage, tile: Tile, staging: Staging) -> Stage:
    """Offsets of kept values in bytes of the block's shared memory, from bytes per element."""
    if staging != "shared":
        return stage
    return replace(
        stage,
        loads=tuple(replace(load, offset_bytes=load.offset_bytes * tile.cols) for load in stage.loads),
        takes=tuple(replace(k, offset_bytes=k.offset_bytes * tile.cols) for k in stage.takes),
        keeps=tuple(replace(k, offset_bytes=k.offset_bytes * tile.cols) for k in stage.keeps),
    )


def index_rows(body: tuple[Statement, ...], dims: tuple[RowDim, ...]) -> tuple[Statement, ...]:
    """The row index as the innermost row dimension counts it."""
    return tuple(s if s.expr else replace(s, expr=f"static_cast<int>({dims[-1].index})") for s in body)


def regime_of(tile: Tile, staging: Staging, plan: Schedule, target: Target, hits: bool) -> str:
    """`256 threads a row, 2 vectors of 8 each; h in registers`."""
    if tile.threads_per_row == tile.threads:
        team = f"a block of {tile.threads} threads a row"
    elif tile.threads_per_row == target.warp:
        team = f"a warp a row, {tile.rows_per_block} rows a block"
    else:
        plural = "s" if tile.threads_per_row > 1 else ""
        team = f"{tile.threads_per_row} thread{plural} a row, {tile.rows_per_block} rows a block"
    kept = ", ".join(plan.kept_names) or "nothing"
    once = len(plan.stages) == 1
    keeping = {
        "none": "one walk, nothing kept",
        "registers": f"{kept} in registers",
        "shared": f"{kept} in shared memory",
        "stream": "one walk, nothing kept"
        if once
        else f"read {len(plan.stages)}x, {'then from L2' if hits else 'from DRAM'}",
    }[staging]
    return f"{team}, {tile.per_thread} x {tile.vector} elements a thread; {keeping}"


def rounding_of(graph: Graph) -> tuple[str, ...]:
    """Where values are rounded to a storage type; between those places everything is f32."""
    points = [f"{t.name} to {t.dtype} when stored" for t in graph.outputs if t.dtype.kind == "float"]
    casts = [n for n in graph.nodes if n.op.name.startswith("round_")]
    return (*(f"{graph.names.get(n, 'a value')} to {n.op.name[6:]} by an explicit cast" for n in casts), *points)


__all__ = ["build", "estimated_registers", "rowwise"]
