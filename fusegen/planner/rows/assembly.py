"""A rule's choice becomes a costed Plan: the one place where a Plan's fields are filled in.

A rule drafts what all candidates of one vector width share, then picks tiles and stagings; everything else follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fusegen.language.graph import Graph
from fusegen.language.naming import entry_name
from fusegen.planner.cost import decisions, traffic
from fusegen.planner.model import Access, Cost, Layout, RowDim, RowPass, RowPlan, Selection, Staging, Tile, Traffic
from fusegen.planner.pieces import (
    PIECE_BYTES,
    VECTOR_BYTES,
    WORD_BYTES,
    accesses,
    params,
    roundings,
    row_dims,
    staged_elements,
)
from fusegen.planner.rows.bulk import with_places
from fusegen.planner.rows.counted import counted
from fusegen.planner.rows.duration import Work, estimate
from fusegen.planner.rows.row_order import order_decisions, ordered
from fusegen.planner.rows.schedule import ONLINE, Schedule
from fusegen.planner.rows.sectors import by_tiles, times_moved, turned_along
from fusegen.planner.tile import in_shared_memory, packed, partial_bytes, prefetched_bytes, scanned_bytes
from fusegen.targets.base import Target

# A grid with room for this many blocks in a line has one for every row. A loop over rows would do with fewer, but the
# compiler takes what is the same in every turn out of it, row vectors included, and the registers they fill cost
# resident blocks: the LayerNorm chain with 4 vectors of 8 halves took 127 registers with it and 91 without on sm_90a,
# 156 and 64 on gfx942.
MANY_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Draft:
    """What the candidates of one vector width share. `flat`: one array without rows."""

    graph: Graph
    target: Target
    layout: Layout
    dims: tuple[RowDim, ...]
    accesses: tuple[Access, ...]
    vector: int
    flat: bool = False
    bulk: bool = False  # rows come to shared memory and leave it by bulk copies

    @property
    def divides(self) -> bool:
        """Is a row a whole number of vectors?"""
        return self.graph.cols % self.vector == 0

    @property
    def vectors(self) -> int:
        """Vectors that a row spans."""
        return -(-self.graph.cols // self.vector)


@dataclass(frozen=True, slots=True)
class Choosing:
    """What a plan that chooses columns has beside its passes over the row. `shared_bytes`: for the choice; `slots`:
    does it need those of the passes' reductions?"""

    template: str
    selection: Selection
    shared_bytes: int
    duration: Callable[[Work, Traffic], Cost]
    slots: bool = True


def row_draft(graph: Graph, target: Target, layout: Layout, vector: int, turned: bool = False) -> Draft:
    """A draft over rows, each tensor read as its shape and layout allow. `turned`: rows follow one another that are
    next to each other in a tensor that lies turned round."""
    dims = ordered(graph, target, row_dims(graph, layout))
    if turned and (along := turned_along(graph, layout, dims)):
        dims = (*(dim for dim in dims if dim is not along), along)
    return Draft(graph, target, layout, dims, accesses(graph, dims, layout, vector), vector)


def assemble(
    draft: Draft, planned: Schedule, tile: Tile, *, rule: str, regime: str, staging: Staging = "none",
    again_from_l2: bool = False, choosing: Choosing | None = None, turned: bool = False,
) -> RowPlan:  # fmt: skip
    """The plan of one tile and staging, costed. `again_from_l2`: a row that is read again is still in the L2 cache.
    `turned`: what lies turned round goes through tiles in shared memory."""
    graph, target = draft.graph, draft.target
    slots = planned.slots if tile.parts_per_row(target.warp) > 1 and (choosing is None or choosing.slots) else 0
    partials = partial_bytes(tile, target.warp, slots, staging == "persistent")
    in_memory = in_shared_memory(staging)
    kept = kept_elements(target, planned.passes, tile) if in_memory and not draft.bulk else 0
    passes = tuple(placed(row_pass, number, tile, staging, kept) for number, row_pass in enumerate(planned.passes))
    copies = in_memory and not draft.bulk and target.async_copies and can_copy(passes)
    copies = copies and all_whole(passes, graph.cols - tile.remainder)
    if copies:
        passes = tuple(copied(row_pass) for row_pass in passes)
    room = target.shared_bytes - partials
    if draft.bulk:
        passes, shared = with_places(passes, tile, graph.cols, target.warp)
    else:
        passes, shared = written_whole(draft, passes, tile, planned.kept_bytes * kept, room, in_memory, copies)
    if turned:
        passes, shared = by_tiles(graph, draft.layout, draft.dims, passes, tile)
    if choosing:
        shared += choosing.shared_bytes
    again = tile.again if staging == "shared" else 0.0
    moved = traffic(graph, passes, again_from_l2, again, draft.layout.again, tile.rows_per_block, draft.target.l2_bytes)
    work = Work(
        tile=tile,
        staging=staging,
        passes=passes,
        accesses=tuple(a for a in draft.accesses if not a.output) if choosing else draft.accesses,
        copies=copies,
        shared_bytes=shared
        + partials
        + scanned_bytes(passes, tile, target.warp)
        + prefetched_bytes(passes, graph.cols),
        kept_bytes=planned.kept_bytes,
        ragged=not draft.flat and not draft.divides,
        flat=draft.flat,
        bulk=draft.bulk,
        packed=packed(staging, planned.keeps),
        times_moved=times_moved(graph, target, draft.layout, draft.dims, draft.accesses, tile, turned),
        counted=counted(graph),
        blocks=tile.blocks(max(1, graph.rows * (graph.cols if draft.flat else 1))),
    )
    return RowPlan(
        name=entry_name(graph),
        graph=graph,
        target=target,
        layout=draft.layout,
        rule=rule,
        template=choosing.template if choosing else template_of(draft, staging),
        regime=regime,
        staging=staging,
        keeps=planned.keeps,
        tile=tile,
        cols=1 if draft.flat else graph.cols,
        flat=draft.flat,
        tail=tail_of(draft, tile),
        row_dims=draft.dims,
        accesses=draft.accesses,
        params=params(graph, draft.dims, with_strides(draft, tile)),
        launch_body=planned.launch_body,
        row_loads=planned.row_loads,
        row_body=planned.row_body,
        row_stores=planned.row_stores,
        passes=passes,
        folded=target.max_blocks(tile.threads) < MANY_BLOCKS,
        slots=slots,
        uniform_results=merges(passes) and shares_rounding(passes, choosing is not None),
        shared_bytes=shared,
        selection=choosing.selection if choosing else None,
        cost=choosing.duration(work, moved) if choosing else estimate(target, work, moved, graph),
        decisions=(*order_decisions(graph, target, draft.dims), *decisions(graph)),
        rounding=roundings(graph),
    )


def template_of(draft: Draft, staging: Staging) -> str:
    if draft.flat:
        return "elementwise.cu.j2"
    return "persistent.cu.j2" if staging == "persistent" else "rowwise.cu.j2"


def merges(passes: Sequence[RowPass]) -> bool:
    """Is some reduction an online one, whose parts are rounded as they are merged?"""
    return any(reduction.kind in ONLINE for row_pass in passes for reduction in row_pass.reductions)


def shares_rounding(passes: Sequence[RowPass], chooses: bool) -> bool:
    """Must all threads of a row have the same bits of what is rounded as it is merged? Which of two parts is the
    other's makes no difference to a sum, but to that; and by blocks any thread may have any column, or keys that are
    made of it are compared."""
    return any(row_pass.blocks_of for row_pass in passes) or (
        chooses and any(row_pass.reductions for row_pass in passes[:-1])
    )


def with_strides(draft: Draft, tile: Tile) -> tuple[Access, ...]:
    """The tensors whose rows may lie apart."""
    contiguous = draft.bulk and tile.rows_per_block > 1
    apart = tuple(access for access in draft.accesses if not (contiguous and access.mode == "bulk"))
    return () if draft.flat else apart


def can_copy(passes: Sequence[RowPass]) -> bool:
    """Does the first pass keep what it reads, and do all passes keep nothing but whole vectors of 4, 8 or 16 bytes, as
    cp.async takes them?"""
    first, *_ = passes
    kept = [load.access for row_pass in passes for load in row_pass.loads if load.when == "keep"]
    whole = all(a.mode != "element" and a.vector * a.dtype.bytes in (4, 8, 16) for a in kept)
    return any(load.when == "keep" for load in first.loads) and whole and not first.keeps


def all_whole(passes: Sequence[RowPass], cols: int) -> bool:
    """Does no vector that is kept as it was read reach beyond the row's end? That of a row alone, which starts where
    vectors do, may."""
    kept = (load.access for row_pass in passes for load in row_pass.loads if load.when == "keep")
    return all(a.mode == "misaligned" or cols % a.vector == 0 for a in kept)


def copied(row_pass: RowPass) -> RowPass:
    """The same, where what is kept gets to shared memory past the registers."""
    loads = (replace(a, transport="cp.async") if a.when in ("keep", "kept") else a for a in row_pass.loads)
    return replace(row_pass, loads=tuple(loads))


def written_whole(
    draft: Draft, passes: tuple[RowPass, ...], tile: Tile, shared: int, room: int, in_shared: bool, copies: bool
) -> tuple[tuple[RowPass, ...], int]:
    """The passes, writing whole aligned blocks of rows that start anywhere; and the bytes of shared memory that takes,
    with the `shared` ones of what is kept, at most `room`.

    A pass that may take any columns goes by the blocks of what it writes. One that may not stages its results in shared
    memory, where there is room for them. Where neither will do, lanes hand each other what their blocks lack.
    """
    found = []
    for row_pass in passes:
        ragged = [store for store in row_pass.stores if store.access.mode == "misaligned"]
        if not ragged or draft.graph.picks:
            found.append(row_pass)
            continue
        if takes_any_columns(row_pass, tile, in_shared, copies):
            found.append(replace(row_pass, blocks_of=ragged[0].access.name))
            continue
        stores = []
        for store in row_pass.stores:
            size = staged_elements(tile) * tile.rows_per_block * store.access.dtype.bytes
            at = -(-shared // VECTOR_BYTES) * VECTOR_BYTES
            wide = tile.vector * store.access.dtype.bytes >= PIECE_BYTES  # it is read by pieces
            if store in ragged and wide and tile.cluster == 1 and at + size <= room:
                stores.append(replace(store, staged=True, offset_bytes=at))
                shared = at + size
            else:
                stores.append(store)
        found.append(replace(row_pass, stores=tuple(stores)))
    return tuple(found), shared


def takes_any_columns(row_pass: RowPass, tile: Tile, in_shared: bool, copies: bool) -> bool:
    """May a thread take other columns in this pass than in those before: is nothing summed, and nothing taken from
    registers or, as it was computed, from a thread's own places in shared memory?

    What was read and not copied lies in shared memory as vectors of the row, side by side in a block, but not in a
    cluster of them, and not beyond a mask's limit, where a block may end.
    """
    kept = any(load.when != "now" for load in row_pass.loads)
    bound = row_pass.reductions or row_pass.scans or row_pass.keeps or row_pass.takes or (kept and not in_shared)
    words = all(a.vector * a.dtype.bytes % WORD_BYTES == 0 for a in (load.access for load in row_pass.loads))
    return not bound and (not kept or copies or (tile.cluster == 1 and words and not row_pass.until))


def kept_elements(target: Target, passes: Sequence[RowPass], tile: Tile) -> int:
    """Elements that one block's shared memory has room for, with the vectors that `tile` keeps.

    Vectors across blocks are copied as the blocks that they lie in: for each warp's vectors there is one more of those.
    """
    misaligned = any(load.when == "keep" and load.access.mode == "misaligned" for load in passes[0].loads)
    if misaligned and target.async_copies and can_copy(passes):
        return tile.kept_cols // target.warp * (target.warp + 1)
    return tile.kept_cols


def tail_of(draft: Draft, tile: Tile) -> Literal["none", "vector", "element"]:
    """What must be tested where a row ends: nothing, whole vectors, or single elements."""
    if draft.flat or not (draft.divides or tile.remainder):
        return "element"
    vectors = (draft.graph.cols - tile.remainder) // draft.vector
    return "none" if tile.per_thread * tile.threads_per_row * tile.col_tiles == vectors else "vector"


def placed(row_pass: RowPass, number: int, tile: Tile, staging: Staging, kept: int) -> RowPass:
    """Offsets of kept values in bytes of the block's shared memory, from bytes per element; and in which order the row
    is read."""
    serpentine = number % 2 == 1 and (staging == "stream" or (staging == "shared" and tile.kept < tile.per_thread))
    if not in_shared_memory(staging):
        return replace(row_pass, backward=serpentine)
    return replace(
        row_pass,
        loads=tuple(replace(load, offset_bytes=load.offset_bytes * kept) for load in row_pass.loads),
        takes=tuple(replace(keep, offset_bytes=keep.offset_bytes * kept) for keep in row_pass.takes),
        keeps=tuple(replace(keep, offset_bytes=keep.offset_bytes * kept) for keep in row_pass.keeps),
        backward=serpentine,
    )
