"""Chains with reductions: a row belongs to a number of threads, from one thread to a cluster of blocks.

Regimes, from short rows to long ones:

- several rows a warp, a warp a row, a block a row, in *registers*; other blocks of the SM hide what one waits for;
- in registers *as it was read*, where that is narrower than f32, and computed again;
- as it was read in *shared memory*, by asynchronous copies, and computed again;
- as much of it as fits; the rest is read again from where the last pass ended, while the L2 cache still has it;
- by a *cluster* of blocks, which add up their parts through distributed shared memory;
- *persistent with prefetch*, where an SM holds one block: that asks for the next row's vectors as it goes;
- *streamed*, read again for every pass: any length.

Rows that are no whole number of 16 bytes come and go by bulk copies where a GPU has them (`bulk_rule`). Times of each
regime, and what was tried beside them: docs/measurements.md, "Rows".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.language.scans import SCANS, Largest, Sorted
from fusegen.planner.cost import rereads_hit
from fusegen.planner.matching import (
    NoMatch,
    NotFor,
    need_countable,
    need_no_columns,
    need_no_product,
    need_no_selection,
)
from fusegen.planner.model import Layout, Load, ReductionKind, RowPlan, Staging, Tile
from fusegen.planner.pieces import VECTOR_BYTES, WORD_BYTES, row_threads_text, vector_widths
from fusegen.planner.rows.assembly import Draft, assemble, can_copy, kept_elements, row_draft
from fusegen.planner.rows.bulk import by_blocks
from fusegen.planner.rows.bulk_rule import bulk_draft, bulk_tiles, held_by_value, kept_as_read
from fusegen.planner.rows.duration import kept_words
from fusegen.planner.rows.prefetch import prefetched, worth_prefetching
from fusegen.planner.rows.schedule import Schedule, schedule, title_of
from fusegen.planner.tile import SORTED_BYTES, in_shared_memory, sorts
from fusegen.targets.base import Target

# Elements of a row that one thread holds: 64 and two blocks of 256 threads took 382 us for the LayerNorm chain at
# 16384 x 16384, 16 and one block of 1024 took 487.
MOST_HELD_ELEMENTS = 64
# A guarded vector costs a branch: the LayerNorm chain at 16384 x 4097 took 191 us with 9 single elements a thread and
# 335 with 33, where 17 in shared memory took 172.
MOST_VECTORS = 8
MOST_SORTED = 4096  # columns of a row
SORTING_BYTES = 32 * 1024  # static shared memory of a sort: one of the longest rows
SMALL_BLOCK_THREADS = 128  # threads of a block whose rows are a warp's or less: four rows of 32 threads
WORTH_KEEPING_SHARE = 0.25  # of a row: less would rather be read again whole, by more blocks
# Elements of a thread up to which the vectors that rows share are read before the first pass, not before the one that
# uses them: they wait in registers meanwhile, and are asked for first. rmsnorm 262144 x 128 took 36.4 us so and 36.9
# without, the LayerNorm chain at 16384 x 4096 99.7 and 99.8; but with 64 elements a thread 117.0 and 109.4, and at
# 16384 x 16384, where an SM then held one block less, 633 and 425. Which of both is better where both can be, the
# registers say. (Of add_rmsnorm 8 x 4096 with 512 threads a row NVRTC 13.0 and 13.5 put the load of gain off all the
# same.)
MOST_AHEAD_ELEMENTS = 32
# Where rows lie across blocks, whose pieces wait in registers too, elements of all those vectors together: at
# 16384 x 4097 the LayerNorm chain took 127 us with 64 of them read ahead and 111 without, and in f32 with 32 of them
# 222 and 206; but add_rmsnorm 32768 x 2047 with 16 of them 133 and 136.
MOST_AHEAD_ACROSS_ELEMENTS = 16
# Shorter rows leave an SM room for several blocks, or a block alone waits for nobody: scale_softmax 4096 x 131072 took
# 544 us with 14 of 16 vectors kept and 552 to 562 with persistent blocks, add_rmsnorm 2048 x 131072 551 and 578 to 623,
# log_softmax 1024 x 131072 206 and 227 to 237.
PERSISTENT_CLUSTER_BLOCKS = 8
PERSISTENT_BLOCK_THREADS = 512  # threads from which one block an SM computes as fast as memory delivers
# Merged where a row waits in shared memory: one more pass over it costs a few instructions an element, Welford's
# update some forty. layernorm_affine 8192 x 24576 took 269 us with it and 212 without.
IN_SHARED: tuple[ReductionKind, ...] = ("softmax",)
STREAMING_BLOCK_THREADS = 256  # threads from which a block alone keeps enough of a long row in flight


def rowwise(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    """Every legal number of threads a row, vector width and staging."""
    need_no_product(graph, "rowwise")
    need_no_columns(graph, "rowwise")
    need_no_selection(graph)
    if not graph.reductions and not graph.scans:
        raise NotFor("the chain reduces nothing; rowwise is for rows with a sum, a maximum, a softmax ...")
    need_countable(graph.cols)
    if graph.scans:
        yield from scanning(graph, target, layout)
        return
    widths = vector_widths(graph, layout)
    if graph.repeated:  # of vectors that lie across two rows no element has one value
        widths = tuple(width for width in widths if graph.cols % width == 0)
    for vector in group_widths(graph, target, widths):
        draft = row_draft(graph, target, layout, vector)
        again = read_again(draft)
        values = schedule(graph, draft.accesses, "values", by_vectors=True)
        inputs = schedule(graph, draft.accesses, "inputs", by_vectors=True, online=IN_SHARED)
        packed = schedule(graph, draft.accesses, "inputs", by_vectors=True, online=())
        nothing = schedule(graph, again.accesses, "nothing", by_vectors=True)
        both = inputs.kept_bytes <= values.kept_bytes and inputs.passes != values.passes
        fewest = inputs if both else values
        partly = schedule(graph, again.accesses, fewest.keeps, by_vectors=True)
        for per_row in row_threads_tried(draft):
            alone = tile_of(draft, per_row)
            yield from in_registers(draft, values, alone)
            if packs(draft, packed, values) and in_whole_turns(draft, alone):
                yield from in_registers(draft, packed, alone)
            streams = per_row >= STREAMING_BLOCK_THREADS
            for tile in (alone, *(clusters(draft, fewest, alone) if streams else ())):
                yield from in_shared(draft, values, tile)
                if both:
                    yield from in_shared(draft, inputs, tile)
                yield from partly_in_shared(again, partly, tile)
                yield from in_persistent_blocks(draft, inputs, tile)
                if streams:
                    yield candidate(again, nothing, tile, "stream")
    if not graph.grouped and not graph.repeated:
        yield from by_bulk_copies(graph, target, layout)


def group_widths(graph: Graph, target: Target, widths: tuple[int, ...]) -> tuple[int, ...]:
    """The vector widths by which a group of the row is a power of two of neighbouring lanes, from the widest down to 2:
    of short rows more threads then have a part. All that there are without groups."""
    sizes = {node.group for node in graph.nodes if node in graph.grouped and node.group}
    if not sizes:
        return widths
    (size,) = sizes
    if size & (size - 1):
        raise NoMatch(f"groups of {size} columns; threads that reduce one together are a power of two, as of 32 or 128")
    most = min(size, max(widths))
    found = tuple(most >> step for step in range(most.bit_length() - 1)) or (1,)
    if size // most > target.warp:
        together = most * target.warp
        raise NoMatch(f"groups of {size} columns; a warp of {target.warp} threads reduces at most {together} together")
    return found


def group_lanes(graph: Graph, vector: int) -> int:
    """Neighbouring threads that have a group of the row together; 1 without groups."""
    return max((node.group // vector for node in graph.nodes if node in graph.grouped and node.group), default=1)


def scanning(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    """Rows with running sums, which a block holds in its registers; or a cluster of blocks, where the largest elements
    alone are asked for, which have no order."""
    running = [node for node in graph.scans if not isinstance(SCANS[node.op.name], Largest)]
    for vector in vector_widths(graph, layout):
        draft = row_draft(graph, target, layout, vector)
        values = schedule(graph, draft.accesses, "values", by_vectors=True)
        for per_row in row_threads_tried(draft):
            alone = tile_of(draft, per_row)
            several = per_row >= STREAMING_BLOCK_THREADS and not running
            for tile in (alone, *(clusters(draft, values, alone) if several else ())):
                if (
                    tile.rows_per_block * sum(SORTED_BYTES * places for *_, places in sorts(values.passes))
                    <= SORTING_BYTES
                ):
                    yield from in_registers(draft, values, tile)
    if (sort := next((n for n in running if isinstance(SCANS[n.op.name], Sorted)), None)) and graph.cols > MOST_SORTED:
        raise NoMatch(
            f"{sort.operator} at {sort.where} sorts rows of {graph.cols}, and a block sorts at most {MOST_SORTED}"
        )
    most = min(MOST_HELD_ELEMENTS, MOST_VECTORS * max(vector_widths(graph, layout))) * target.threads_per_block
    most *= 1 if running else target.max_cluster
    if graph.cols > most:
        first = (running or graph.scans)[0]
        who = "block" if running or target.max_cluster == 1 else "cluster of blocks"
        raise NoMatch(
            f"{first.operator} at {first.where} runs along rows of {graph.cols}, and the registers of a {who} hold at "
            f"most {most} elements"
        )


def by_bulk_copies(graph: Graph, target: Target, layout: Layout) -> Iterator[RowPlan]:
    """Rows that start anywhere, whole: what later passes need in registers, or as it was read where results go by
    blocks of 16 bytes."""
    for vector in (1, 2, 4):
        draft = bulk_draft(graph, target, layout, vector)
        if draft is None:
            return
        values = schedule(graph, draft.accesses, "values", by_vectors=True)
        inputs = schedule(graph, draft.accesses, "inputs", by_vectors=True, online=IN_SHARED)
        if vector <= 2:
            for tile in bulk_tiles(draft):
                made = candidate(draft, held_by_value(values), tile, "registers" if values.kept_bytes else "none")
                if fits(made):
                    yield made
        stays = kept_as_read(inputs) if inputs.kept_bytes and by_blocks(inputs.passes[-1]) else None
        for per_row in row_threads_tried(draft) if stays else ():
            if stays and per_row >= SMALL_BLOCK_THREADS:
                per_thread = -(-graph.cols // (vector * per_row))
                tile = Tile(per_row, per_row, 1, vector, per_thread, kept=per_thread)
                made = candidate(draft, stays, tile, "shared")
                if fits(made):
                    yield made


def in_order_of(plan: RowPlan, layout: Layout) -> Iterator[RowPlan]:
    """Plans by the tile of `plan`, which this layout's own candidates need not have: values are in registers, or rows
    are streamed, always forward, and with what `plan` merges merged."""
    graph, target, tile = plan.graph, plan.target, replace(plan.tile, kept=0)
    draft = row_draft(graph, target, layout, tile.vector)
    if plan.keeps == "values":
        values = schedule(graph, draft.accesses, "values", by_vectors=True)
        made = candidate(draft, values, tile, "registers" if values.kept_bytes else "none")
        if fits(made):
            yield made
    kinds = [reduction.kind for row_pass in plan.passes for reduction in row_pass.reductions]
    if graph.scans:
        return
    again = read_again(draft)
    nothing = schedule(graph, again.accesses, "nothing", by_vectors=True, online=kinds)
    made = candidate(again, nothing, tile, "stream")
    yield replace(made, passes=tuple(replace(row_pass, backward=False) for row_pass in made.passes))


def fits(made: RowPlan) -> bool:
    """Does a block have the registers and the shared memory?"""
    target = made.target
    registers = min(target.registers_per_thread, target.registers_per_sm // made.threads)
    return made.cost.registers <= registers and made.shared_bytes + made.static_shared_bytes <= target.shared_bytes


def read_again(draft: Draft) -> Draft:
    """The draft of plans that read a row more than once: none of it should leave the caches first."""
    return replace(draft, accesses=tuple(replace(access, evict_first=False) for access in draft.accesses))


def row_threads_tried(draft: Draft) -> Iterator[int]:
    """Threads a row: powers of two, none so large that half of it would idle, none so few that a group of the row
    would be one thread's in several turns."""
    per_row = lanes = group_lanes(draft.graph, draft.vector)
    while per_row <= draft.target.threads_per_block and lanes <= draft.target.warp:
        if per_row == lanes or draft.vectors > per_row // 2:
            yield per_row
        per_row *= 2


def tile_of(draft: Draft, per_row: int) -> Tile:
    threads = per_row if per_row > draft.target.warp else max(SMALL_BLOCK_THREADS, draft.target.warp)
    remainder = remainder_of(draft, per_row)
    return Tile(
        threads=threads,
        threads_per_row=per_row,
        rows_per_block=threads // per_row,
        vector=draft.vector,
        per_thread=-(-(draft.graph.cols - remainder) // (draft.vector * per_row)),
        remainder=remainder,
    )


def remainder_of(draft: Draft, per_row: int) -> int:
    """The values behind a row's last whole vector, where to take them singly saves every thread a turn; else 0.

    bias_gelu_residual_ln at 16384 x 4097 took 115.6 us with a fifth turn for one value, 111.1 with that value as a
    remainder, and in f32 217.5 and 198.8; rmsnorm at 65536 x 1027 78.3 and 73.2. Where it saves no turn it costs more
    than a vector that is partly filled: masked_softmax at 16 x 12 x 1000 x 1023 took 254 us so and 235.
    """
    if draft.graph.scans:
        return 0
    whole = draft.graph.cols // draft.vector
    saves = whole and whole % per_row == 0 and draft.vector <= per_row
    return draft.graph.cols % draft.vector if saves else 0


def clusters(draft: Draft, planned: Schedule, tile: Tile) -> Iterator[Tile]:
    """The same blocks, several of them a row, where a row would leave an SM room for two blocks at most: a row that is
    kept, or, where one pass keeps nothing, that is read."""
    element = planned.kept_bytes or max(access.dtype.bytes for access in draft.accesses)
    if 3 * element * draft.graph.cols <= draft.target.shared_per_sm:
        return
    cluster = 2
    while cluster <= draft.target.max_cluster and draft.vectors > tile.threads * cluster // 2:
        per_row = tile.threads * cluster
        remainder = remainder_of(draft, per_row)
        yield replace(
            tile,
            threads_per_row=per_row,
            per_thread=-(-(draft.graph.cols - remainder) // (draft.vector * per_row)),
            cluster=cluster,
            remainder=remainder,
        )
        cluster *= 2


def in_registers(draft: Draft, planned: Schedule, tile: Tile) -> Iterator[RowPlan]:
    """The whole row in registers, by each way to read what rows share: all have one configuration."""
    limit = min(draft.target.registers_per_thread, draft.target.registers_per_sm // tile.threads)
    if tile.per_thread * tile.vector > MOST_HELD_ELEMENTS or tile.per_thread > MOST_VECTORS:
        return
    staging: Staging = "registers" if planned.kept_bytes else "none"
    for way in ways_to_read(draft, planned, tile):
        made = candidate(draft, way, tile, staging)
        if made.cost.registers <= limit and (not made.prefetched or worth_prefetching(made)):
            yield made


def ways_to_read(draft: Draft, planned: Schedule, tile: Tile) -> Iterator[Schedule]:
    """What rows share is read late, or else as each pass begins; or it is prefetched; or read ahead of the first
    pass."""
    late = planned
    if draft.divides and in_whole_turns(draft, tile):
        late = read_late(draft, planned)
    yield late
    if late != planned and (prefetching := prefetched(draft, late, tile)) != late:
        yield prefetching
    held = tile.per_thread * tile.vector
    if held <= MOST_AHEAD_ELEMENTS and (early := read_ahead(draft, planned)) != planned:
        ahead = sum(load.when == "ahead" for load in early.passes[0].loads)
        if draft.divides or held * ahead <= MOST_AHEAD_ACROSS_ELEMENTS:
            yield early


def in_shared(draft: Draft, planned: Schedule, tile: Tile) -> Iterator[RowPlan]:
    """The whole row in shared memory."""
    if (
        tile.row_threads >= SMALL_BLOCK_THREADS
        and planned.kept_bytes
        and room_for(draft, planned, tile, blocks=1) >= tile.per_thread
    ):
        yield candidate(draft, planned, replace(tile, kept=tile.per_thread), "shared")


def partly_in_shared(draft: Draft, planned: Schedule, tile: Tile) -> Iterator[RowPlan]:
    """As much of the row in shared memory as leaves an SM room for 1, 2 or 3 blocks, where all that is kept can be read
    again."""
    if (
        tile.row_threads < SMALL_BLOCK_THREADS
        or not planned.kept_bytes
        or any(row_pass.keeps for row_pass in planned.passes)
    ):
        return
    for kept in sorted({room_for(draft, planned, tile, blocks) for blocks in (1, 2, 3)}, reverse=True):
        if WORTH_KEEPING_SHARE * tile.per_thread <= kept < tile.per_thread:
            yield candidate(draft, planned, replace(tile, kept=kept), "shared")


def in_persistent_blocks(draft: Draft, planned: Schedule, tile: Tile) -> Iterator[RowPlan]:
    """As it was read, in shared memory and what that has no room for in registers, by as many blocks as an SM holds
    one of each: they take rows in turn, and fetch the next while they write this one."""
    few = tile.cluster < PERSISTENT_CLUSTER_BLOCKS or tile.threads < PERSISTENT_BLOCK_THREADS or tile.per_thread < 2
    if few or not planned.kept_bytes or not can_persist(draft, planned):
        return
    kept = min(tile.per_thread, room_for(draft, planned, tile, blocks=1, turns=2))
    if 2 * planned.kept_bytes * tile.row_threads * tile.per_thread * tile.vector <= draft.target.shared_per_sm:
        return  # an SM holds two rows: one hides what the other waits for
    made = candidate(draft, planned, replace(tile, kept=kept), "persistent")
    if kept and made.cost.registers <= draft.target.registers_per_sm // tile.threads:
        yield made


def can_persist(draft: Draft, planned: Schedule) -> bool:
    """Can rows be fetched by asynchronous copies, whole, from one row dimension, and all before the first pass; and is
    what is written whole words?

    A row that no vector divides lies across blocks, which a thread shares with the next one: neither could ask for the
    next row's in their place without a barrier.
    """
    first, *later = planned.passes
    keeps = [load for load in first.loads if load.when == "keep"]
    stores = [store.access for row_pass in planned.passes for store in row_pass.stores]
    return (
        not draft.graph.gathers
        and not draft.graph.scatters  # whose rows are known once their indices are read
        and draft.target.async_copies
        and draft.divides
        and len(draft.dims) == 1
        and can_copy(planned.passes)
        and all(a.mode == "vector" and a.vector * a.dtype.bytes % VECTOR_BYTES == 0 for a in stores)
        and not any(row_pass.until for row_pass in planned.passes)
        and not any(load.until or len(load.access.strided) != 1 for load in keeps)
        and not any(row_pass.keeps or any(load.when == "keep" for load in row_pass.loads) for row_pass in later)
    )


def read_ahead(draft: Draft, planned: Schedule) -> Schedule:
    """The passes, with what later ones read of vectors that rows share, all of them or those of one sample, read before
    the first."""
    first, *later = planned.passes
    early = {load.access.tensor for load in first.loads}
    ahead: dict[str, Load] = {}
    for row_pass in later:
        for load in row_pass.loads:
            access = load.access
            shared = access.by_column and len(access.strided) < len(draft.dims) and access.mode == "vector"
            if shared and load.when == "now" and load.access.tensor not in early:
                ahead.setdefault(load.access.tensor, replace(load, when="ahead"))
    if not ahead or any(row_pass.until for row_pass in planned.passes):
        return planned
    title = f"read {', '.join(load.value for load in ahead.values())} ahead; {first.title}"
    passes = [replace(first, title=title, loads=(*ahead.values(), *first.loads))]
    for row_pass in later:
        found = tuple(replace(load, when="kept") if load.access.tensor in ahead else load for load in row_pass.loads)
        passes.append(
            replace(
                row_pass,
                loads=found,
                title=title_of(
                    found, row_pass.keeps, row_pass.reductions, row_pass.stores, row_pass.scans, row_pass.groups
                ),
            )
        )
    return replace(planned, passes=tuple(passes))


def read_late(draft: Draft, planned: Schedule) -> Schedule:
    """The passes, with later ones reading what rows share vector by vector, where they use it.

    layernorm_statistics 65536 x 1000 took 70 us so, with 71 registers, and 83 read ahead, with 115; layernorm_affine
    65536 x 768 54 and 60.
    """
    first, *later = planned.passes
    passes = [first]
    for row_pass in later:
        now = [load.access for load in row_pass.loads if load.when == "now" and load.access.by_column]
        shared = now and all(len(access.strided) < len(draft.dims) and access.mode == "vector" for access in now)
        passes.append(replace(row_pass, late=True) if shared else row_pass)
    return replace(planned, passes=tuple(passes))


def in_whole_turns(draft: Draft, tile: Tile) -> bool:
    """Has no part of a warp a last turn that is not whole? It writes its row in pieces, which are far apart in time
    where each has to wait: head_layernorm of 80 took 96 us with late vectors, 98 with packed ones, and 59."""
    return tile.threads_per_row >= draft.target.warp or draft.vectors % tile.threads_per_row == 0


def packs(draft: Draft, packed: Schedule, values: Schedule) -> bool:
    """Do registers have less to hold where they keep whole vectors as they were read, narrower than f32, and all else
    is computed again?"""
    kept = [load.access for row_pass in packed.passes for load in row_pass.loads if load.when == "keep"]
    narrow = bool(kept) and all(a.mode == "vector" and a.dtype.bytes * a.vector % WORD_BYTES == 0 for a in kept)
    words = sum(access.dtype.bytes for access in kept) / WORD_BYTES
    return narrow and draft.divides and words < kept_words(values.passes)


def room_for(draft: Draft, planned: Schedule, tile: Tile, blocks: int, turns: int = 1) -> int:
    """Vectors of a thread that fit in a block's shared memory, when an SM is to hold that many blocks."""
    target = draft.target
    static = 4 * planned.slots * (target.warp + tile.cluster) * turns
    room = min(target.shared_bytes, target.shared_per_sm // blocks - target.shared_reserved) - static
    return room // (planned.kept_bytes * kept_elements(target, planned.passes, replace(tile, kept=1)))


def candidate(draft: Draft, planned: Schedule, tile: Tile, staging: Staging) -> RowPlan:
    again = {"shared": tile.again, "persistent": 0.0}.get(staging, 1.0)
    shared_bytes = planned.kept_bytes * tile.kept_cols if in_shared_memory(staging) else 0
    hits = rereads_hit(draft.graph, draft.target, tile, again, shared_bytes)
    share = f"{tile.per_thread} x {tile.vector} elements a thread"
    share += f" and {tile.remainder} singly" if tile.remainder else ""
    share += ", rows by bulk copies" if draft.bulk else ""
    regime = f"{row_threads_text(tile, draft.target)}, {share}; {keeping_text(planned, tile, staging, hits)}"
    return assemble(draft, planned, tile, rule="rowwise", regime=regime, staging=staging, again_from_l2=hits)


def keeping_text(planned: Schedule, tile: Tile, staging: Staging, hits: bool) -> str:
    """`h in registers`, `read 2x, then from L2`."""
    if len(planned.passes) == 1:
        return "one pass, nothing kept"
    if staging == "stream":
        return f"read {len(planned.passes)}x, {'then from L2' if hits else 'each time from DRAM'}"
    kept = ", ".join(planned.kept_names) or "nothing"
    if staging == "registers":
        return f"{kept} in registers{', as read' if planned.keeps == 'inputs' else ''}"
    if staging == "persistent":
        held = tile.per_thread - tile.kept
        rest = f", {held} of {tile.per_thread} vectors in registers" if held else ""
        return f"{kept} in shared memory{rest}, the next row's prefetched while this one is written"
    part = f"{tile.kept} of {tile.per_thread} vectors of " if tile.kept < tile.per_thread else ""
    return f"{part}{kept} in shared memory"
