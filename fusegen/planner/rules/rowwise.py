"""Chains with reductions: a row belongs to a team of threads, from one thread to a whole block.

Regimes, from short rows to long ones: several rows a warp, a warp a row, a block a row; between walks the row is kept
in registers, in shared memory, or read again (streamed).
"""

from __future__ import annotations

from collections.abc import Iterator

from fusegen.graph import Graph
from fusegen.planner.assembly import Draft, assemble, row_draft
from fusegen.planner.cost import rereads_hit
from fusegen.planner.model import Layout, Plan, Staging, Tile
from fusegen.planner.pieces import vector_widths
from fusegen.planner.rules import NoMatch, need_countable
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

STREAMING_BLOCK = 256  # threads from which a block alone keeps enough of a long row in flight


def rowwise(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Every legal team, vector width and staging."""
    if not graph.reductions:
        raise NoMatch("the chain reduces nothing; rowwise is for rows with a sum, a maximum, a softmax ...")
    need_countable(graph.cols)
    for vector in vector_widths(graph, layout):
        draft = row_draft(graph, target, layout, vector)
        staged = schedule(graph, draft.accesses, staged=True, whole_vectors=draft.divides)
        streamed = schedule(graph, draft.accesses, staged=False, whole_vectors=draft.divides)
        for per_row in teams(draft):
            tile = tile_of(draft, per_row)
            yield from in_registers(draft, staged, tile)
            yield from in_shared(draft, staged, tile)
            if per_row >= STREAMING_BLOCK:
                yield candidate(draft, streamed, tile, "stream")


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


def in_registers(draft: Draft, walks: Schedule, tile: Tile) -> Iterator[Plan]:
    limit = min(draft.target.registers_per_thread, draft.target.registers_per_sm // tile.threads)
    if tile.per_thread * tile.vector > MOST_IN_REGISTERS or tile.per_thread > MOST_VECTORS:
        return
    made = candidate(draft, walks, tile, "registers" if walks.kept_bytes else "none")
    if made.cost.registers * REGISTER_MARGIN <= limit:
        yield made


def in_shared(draft: Draft, walks: Schedule, tile: Tile) -> Iterator[Plan]:
    if tile.threads_per_row < SMALL_BLOCK or not walks.kept_bytes:
        return
    if walks.kept_bytes * tile.cols + 4 * walks.slots * draft.target.warp <= draft.target.shared_bytes:
        yield candidate(draft, walks, tile, "shared")


def candidate(draft: Draft, walks: Schedule, tile: Tile, staging: Staging) -> Plan:
    hits = rereads_hit(draft.graph, draft.target, tile)
    share = f"{tile.per_thread} x {tile.vector} elements a thread"
    regime = f"{team_text(tile, draft.target)}, {share}; {keeping_text(walks, staging, hits)}"
    return assemble(draft, walks, tile, rule="rowwise", regime=regime, staging=staging, again_from_l2=hits)


def team_text(tile: Tile, target: Target) -> str:
    if tile.threads_per_row == tile.threads:
        return f"a block of {tile.threads} threads a row"
    if tile.threads_per_row == target.warp:
        return f"a warp a row, {tile.rows_per_block} rows a block"
    plural = "s" if tile.threads_per_row > 1 else ""
    return f"{tile.threads_per_row} thread{plural} a row, {tile.rows_per_block} rows a block"


def keeping_text(walks: Schedule, staging: Staging, hits: bool) -> str:
    """`h in registers`, `read 2x, then from L2`."""
    if len(walks.stages) == 1:
        return "one walk, nothing kept"
    if staging == "stream":
        return f"read {len(walks.stages)}x, {'then from L2' if hits else 'each time from DRAM'}"
    kept = ", ".join(walks.kept_names) or "nothing"
    return f"{kept} in {'shared memory' if staging == 'shared' else 'registers'}"
