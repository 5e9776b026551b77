"""Register-resident top-k for small k: the registers of a block or of a cluster hold the row.

The row is read once, whole and at once: no threshold has to grow, and the blocks of a row wait for each other twice.
The first time every warp has said what some of its threads' largest keys reach, which makes one bar for the row
(planner/selections/small_k_cost.py); the second time the first block has the row's candidates, and ranks them. Where
these are too many, as in rows of ties or in order, the bar is raised by halving until k to `limit` are left.

Few rows gain most: 64 x 50257 f32 with k = 256 took 14.8 us so on an H200, and 24.3 as rows that stream by; clusters
that read as much and do nothing with it took 9.2, an empty launch 3.4. What lies between is a chain of waits: of the
first version's first block, by its cycle counter, for what its warps say 1900 cycles, to meet 1100, for marks and
candidates 3900 while they were read from memory again and not from shared memory, to meet 1100, for ranks 2200. That
the kernel's own text is cold costs nothing that could be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.planner.matching import NoMatch, need_countable, need_selection
from fusegen.planner.model import Cost, Layout, Plan, RowPlan, Selection, Tile, Traffic
from fusegen.planner.pieces import row_threads_text, vector_widths, words_of
from fusegen.planner.rows.assembly import Choosing, Draft, assemble, row_draft
from fusegen.planner.rows.duration import Work
from fusegen.planner.selections.picker import of_small_k
from fusegen.planner.selections.picking import Picking, picking
from fusegen.planner.selections.small_k_cost import MOST_ELEMENTS, MOST_WARPS, duration_of, reaching, small_k_of
from fusegen.planner.selections.topk import BLOCK_THREADS, clusters, selection_of
from fusegen.targets.base import Target

# Registers of a thread beside its keys, and for each further operand: NVRTC took 56 to 62 for 32 keys, 91 to 116 for
# 64, and spilled nothing.
BESIDE_REGISTERS = 28
OPERAND_REGISTERS = 8
MOST_REGISTERS = 128
STATIC_BYTES = 1024  # at most, of votes and of sums beside the choice


def small_k(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Every block and cluster that holds a row."""
    need_selection(graph, "topk_small_k")
    need_countable(graph.cols)
    for vector in vector_widths(graph, layout):
        draft = row_draft(graph, target, layout, vector)
        planned = picking(graph, draft.accesses, "nothing")
        need_one_pass(graph, planned, "topk_small_k")
        for threads in BLOCK_THREADS:
            for cluster in clusters(target):
                if tile := tile_of(draft, threads, cluster):
                    yield from by_tile(draft, planned, tile)


def need_one_pass(graph: Graph, planned: Picking, rule: str) -> None:
    """Raises NoMatch where the row is passed over for more than its keys and what is one value a row."""
    assert graph.selection is not None
    if graph.selection.limit:
        raise NoMatch(f"columns are chosen of {graph.selection.limit}; {rule} chooses from whole rows")
    chooses = f"{graph.selection.operator} at {graph.selection.where} chooses by {planned.key}"
    *before, last = planned.schedule.passes
    if before:
        raise NoMatch(f"{chooses}, which needs a reduction of the row first; {rule} takes one pass over a row")
    if last.stores:
        raise NoMatch(f"{chooses}, and {last.stores[0].access.name} is written whole; {rule} writes what is chosen")
    if others := [r for r in last.reductions if r.kind == "softmax" and r.value != planned.key]:
        raise NoMatch(f"{chooses}, and a softmax is one of {others[0].value}; {rule} takes both of one value")


def tile_of(draft: Draft, threads: int, cluster: int) -> Tile | None:
    """None where a thread would have no key, or more than it can mark."""
    per_row = threads * cluster
    per_thread = -(-draft.vectors // per_row)
    most = MOST_WARPS * draft.target.warp
    if threads > draft.target.threads_per_block or per_row > min(draft.vectors, most):
        return None
    if per_thread * draft.vector > MOST_ELEMENTS:
        return None
    return Tile(threads, per_row, 1, draft.vector, per_thread, cluster=cluster)


def by_tile(draft: Draft, planned: Picking, tile: Tile) -> Iterator[RowPlan]:
    """The plan, if its rows have registers and shared memory, and k are fewer than the threads' largest keys."""
    graph, target, k = draft.graph, draft.target, draft.graph.picks
    small_k = small_k_of(k, tile, target)
    registers = registers_of(planned, tile)
    resident = target.registers_per_sm // (tile.threads * registers)
    shared = of_small_k(small_k, tile, k, target.warp, planned.adds_up).bytes
    if (
        4 * small_k.want > 3 * target.warp
        or not resident
        or registers > min(MOST_REGISTERS, target.registers_per_thread)
    ):
        return
    if shared + STATIC_BYTES > target.shared_bytes:
        return
    found = (
        f"some {round(reaching(small_k, tile, graph.cols))} of {graph.cols} reach the threshold of {small_k.need} warps"
    )
    yield held_plan(
        draft, planned, tile, replace(selection_of(planned, k, small_k), resident=resident), shared, "topk_small_k",
        f"{row_threads_text(tile, target)}, the row in registers; {found}",
        lambda work, moved: duration_of(target, graph, work, small_k, moved, registers),
    )  # fmt: skip


def held_plan(
    draft: Draft, planned: Picking, tile: Tile, selection: Selection, shared: int, rule: str, regime: str,
    duration: Callable[[Work, Traffic], Cost],
) -> RowPlan:  # fmt: skip
    """The plan by which registers hold a row and `shared` bytes of a block what is chosen from it."""
    target = draft.target
    if target.registers_per_thread > 255:  # of gfx90a's and gfx942's 512 the compiler needs no such word
        selection = replace(selection, resident=0)
    [row_pass] = planned.schedule.passes
    summed = any(r.kind != "softmax" for r in row_pass.reductions) or any(s.reductions for s in selection.picked)
    choosing = Choosing(
        template=f"{rule}.cu.j2",
        selection=replace(selection, vote_bytes=target.vote_bytes),
        shared_bytes=shared,
        duration=duration,
        slots=summed,
    )
    return assemble(draft, planned.schedule, tile, rule=rule, regime=regime, staging="registers", choosing=choosing)


def registers_of(planned: Picking, tile: Tile) -> int:
    """Of a thread: its keys are born as the vectors die that they are made from."""
    words = tile.per_thread * sum(words_of(load.access) for load in planned.key_body.loads)
    keys = tile.per_thread * tile.vector
    wanted = max(keys, words) + BESIDE_REGISTERS + OPERAND_REGISTERS * (len(planned.key_body.loads) - 1)
    return int(-(-wanted // 8) * 8)
