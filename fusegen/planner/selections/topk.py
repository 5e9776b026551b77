"""Chains that choose k columns of each row: the row is read once, probabilities are made for k columns alone.

Regimes, from short rows to long ones:

- *in a warp* (register-resident): the k-th largest of the lanes' delegates, each the largest of some of its keys, is a
  bound that k elements reach and few more do; these are ranked by comparing them. A lane has one delegate, or several
  that a network sorts, so that many rows share a warp. Or a few lanes take out the largest k times;
- a *threshold* (streaming): a block keeps the largest key of every few vectors. The k-th largest of these, by
  bisection, is a threshold; vectors that exceed it are read again, and their elements above it are candidates. Ties may
  make too many: then the best k stay. A long row goes by in segments, each of which raises the threshold;
- the same by a *cluster* of blocks, for few rows; its first block ranks what all blocks are left with.

Candidates are compared as 64-bit numbers, the key's order above the column's, so that ties have one answer. The sum of
exponentials needs no maximum beforehand: the largest key comes with the threshold. What bounds it on an H200:
docs/measurements.md, "Top-k by a threshold".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusegen.language.graph import CASTS, Extent, Graph, Kind, Node, behind
from fusegen.language.nodes import GroupLimit
from fusegen.language.types import DType, bf16, f16, f32, i32
from fusegen.planner.matching import NoMatch, need_countable, need_selection
from fusegen.planner.model import Access, Layout, Plan, RowPlan, Selection, Tile
from fusegen.planner.pieces import VECTOR_BYTES, row_threads_text, vector_widths, words_of
from fusegen.planner.rows.assembly import Choosing, Draft, assemble, row_draft
from fusegen.planner.rows.duration import resident_blocks
from fusegen.planner.selections.choosing import (
    BLOCK_BYTES,
    DELEGATES_FOR_EACH,
    MANY_MARKS,
    SLACK_PART,
    bins_of,
    duration_of,
    entries_of,
    expected,
    groups_of,
    likely_of_warp,
    limit_of,
    most_ranked,
    most_ranked_of_delegates,
    note_of,
    note_words,
    segment_of,
)
from fusegen.planner.selections.picker import picker
from fusegen.planner.selections.picking import Picking, holding, picking
from fusegen.planner.selections.small_k_cost import power_from
from fusegen.planner.ways import InWarp, OneByOne, Packed, Streaming, Way
from fusegen.targets.base import Target

WARP_ELEMENTS = 32  # of a row in one lane's registers, where a warp has it,
# and where a part of one has: 131072 x 256 took 56 us with 16 a lane, 88 with 32. Each store of a lane's keys then met
# seven others in its bank; keys have lain by thread since, and nothing was measured anew
PART_WARP_ELEMENTS = 16
DELEGATES_ELEMENTS = 32  # the same where lanes have several delegates
FEWEST_WARPS = 2  # of a scheduler: one loads while another chooses
# 65536 x 64, k = 8, f32 took 22.6 us by two lanes a row, 17.2 by four; x 32, k = 4 15.2 and 11.3
FEWEST_DELEGATES_LANES = 4
PACKED_ELEMENTS = 64  # the same where a key is one word with its column, and half of them where it is f32
GROUP = 4  # such keys that share a delegate
# Of a lane, where they do. Rows that wait in shared memory leave no room for others on their way: 65536 x 256, k = 6
# took 25.5 us by four lanes a row, and 20.4 without groups
GROUPED_ELEMENTS = 32
PACKED_THREADS = (128, 512)  # of a block
SHARED_OUT_THREADS = (128, 256, 512, 1024)  # where it has the launch of a product or of a sort of many slots
MOST_DELEGATES = 16  # of a lane, in registers beside its keys
WARP_PICKS = 32
TURN_LANES = 8
WARP_BLOCK_THREADS = 128
# Of the candidates that a warp ranks by comparing them, those of a row in random order: where more are likely, some row
# of most warps has too many, and finds the best one after another. 4096 x 1000, k = 32, f32 took 228 us so, and 16 by a
# block.
LIKELY_SHARE = 0.7
# Fewer threads for each row, where each has no more elements than so many. H200, against blocks of 128: 8192 x 1000,
# k = 100, f32 took 35.9 us and not 45.0, bf16 39.3 and 59.5; 8192 x 4096, k = 50, bf16 35.2 and 42.1; 16384 x 2000,
# k = 20, f32 50.9 and 58.4; 32768 x 512, k = 64, bf16 121 and 335, where two warps of four had nothing to choose from.
NARROW_ELEMENTS = {32: 32, 64: 64}
TEMPLATES: Mapping[type[Way], str] = {
    OneByOne: "topk_warp.cu.j2", InWarp: "topk_warp.cu.j2", Packed: "topk_words.cu.j2",
    Streaming: "topk_streaming.cu.j2",
}  # fmt: skip
BLOCK_THREADS = (128, 256, 512, 1024)
TURN_VECTORS = (2, 4, 8)
TURN_ELEMENTS = 32  # of a thread: they wait in registers
# Of a thread: left alone ptxas takes 75 to 90, most of them for what is rare, and few blocks are resident. With so many
# it spills nothing of a masked softmax of f32, nor of a ragged one of bf16.
REGISTERS = 64
# Where a turn's vectors are in flight while a segment's candidates are found, or groups are many
MORE_REGISTERS = 80


def topk(graph: Graph, target: Target, layout: Layout) -> Iterator[Plan]:
    """Every legal part of a warp, block and cluster."""
    need_selection(graph, "topk", (f32, i32))
    need_countable(graph.cols)
    if limit := need_selection(graph, "topk", (f32, i32)).limit:
        yield from within_groups(graph, target, layout, limit)
        return
    for vector in vector_widths(graph, layout):
        draft = row_draft(graph, target, layout, vector)
        yield from one_by_one(draft)
        yield from packed(draft)
        yield from by_warp(draft)
        yield from by_delegates(draft)
        yield from by_streaming(draft)


def within_groups(graph: Graph, target: Target, layout: Layout, limit: GroupLimit) -> Iterator[Plan]:
    """Parts of a warp for each row, whose vectors lie in one group each. Raises NoMatch for rows that are longer."""
    size, rest = divmod(graph.cols, limit.groups)
    said = f"topk chooses of {limit}"
    if rest or size < limit.by:
        raise NoMatch(f"{said}, and a row of {graph.cols} has no {limit.groups} groups of {limit.by} or more")
    found = False
    for vector in sorted({math.gcd(width, size) for width in vector_widths(graph, layout)}, reverse=True):
        draft = row_draft(graph, target, layout, vector)
        for plan in (*by_warp(draft), *by_delegates(draft)):
            found = True
            yield plan
    if not found:
        most = target.warp * WARP_ELEMENTS
        raise NoMatch(f"{said}: a row is held by one warp at most, some {most} columns of which {WARP_PICKS} are kept")


def one_by_one(draft: Draft) -> Iterator[Plan]:
    """A few lanes for each row, or one, that find the largest of its keys, k times."""
    graph, target = draft.graph, draft.target
    planned = picking(graph, draft.accesses, "values")
    lanes = 1
    while lanes <= TURN_LANES and draft.vectors > lanes // 2:
        per_thread = -(-draft.vectors // lanes)
        if per_thread * draft.vector <= PART_WARP_ELEMENTS:
            tile = Tile(WARP_BLOCK_THREADS, lanes, WARP_BLOCK_THREADS // lanes, draft.vector, per_thread)
            chosen = selection_of(planned, graph.picks, OneByOne())
            if fits(chosen, tile, target):
                yield candidate(draft, planned, tile, chosen)
        lanes *= 2


def block_sizes(target: Target) -> tuple[int, ...]:
    """Threads of a block whose parts of warps have a row each."""
    return PACKED_THREADS if target.shares == 1 else SHARED_OUT_THREADS


def packed(draft: Draft) -> Iterator[Plan]:
    """A few lanes for each row, or one, whose keys have room for their columns in one word."""
    graph, target = draft.graph, draft.target
    assert graph.selection is not None
    stored = stored_of(graph, graph.selection.inputs[0])
    best = power_from(graph.picks)
    if not stored or best > MOST_DELEGATES:
        return
    most = PACKED_ELEMENTS // stored.bytes * 2
    sizes = block_sizes(target)
    lanes = 1
    while lanes <= target.warp and draft.vectors > lanes // 2:
        per_thread = -(-draft.vectors // lanes)
        elements = per_thread * draft.vector
        ways = [(Packed(best, stored), threads) for threads in sizes] * (best <= elements <= most)
        if by_groups(draft, lanes, best) and f"larger_pair_{stored.name}" in target.spelling.functions:
            ways += [(Packed(best, stored, GROUP), threads) for threads in sizes]
        for way, threads in ways:
            tile = Tile(threads, lanes, threads // lanes, draft.vector, per_thread)
            written = written_together(draft, way.own(lanes))
            planned = picking(graph, written.accesses, "values")
            planned = replace(planned, picked=holding(planned.picked))
            chosen = selection_of(planned, graph.picks, way)
            if fits(chosen, tile, target):
                yield candidate(written, planned, tile, chosen)
        lanes *= 2


def written_together(draft: Draft, own: int) -> Draft:
    """Of the chosen columns a lane has so many in its registers, one rank after another: where rows of what is written
    of them start aligned, they are written as vectors."""
    graph = draft.graph
    width = math.gcd(graph.picks, own)
    picked = {t.name for t in graph.outputs if t.node in graph.picked}
    loose = draft.layout.unaligned | draft.layout.apart

    def together(access: Access) -> Access:
        if width == 1 or not access.output or access.tensor not in picked - loose or not access.by_column:
            return access
        return replace(access, mode="vector", vector=width, vector_bytes=min(VECTOR_BYTES, width * access.dtype.bytes))

    return replace(draft, accesses=tuple(map(together, draft.accesses)))


def by_groups(draft: Draft, lanes: int, best: int) -> bool:
    """May the best groups be found first? A vector is two of them, and each lane takes some of the best."""
    vector, cols = draft.vector, draft.graph.cols
    whole = vector == 2 * GROUP and cols % (vector * lanes) == 0
    return whole and 2 <= lanes <= best < cols // GROUP and cols // lanes <= GROUPED_ELEMENTS


def stored_of(graph: Graph, key: Node) -> DType | None:
    """The type of 16 bits that a key was stored, or is rounded, as: it has every number that the key may be. Else f32;
    None for whole numbers."""
    tensor = graph.tensor_of.get(key)
    stored = tensor.dtype if tensor else CASTS.get(key.op.name)
    return stored if stored in (f16, bf16) else f32 if key.dtype is f32 else None


def by_warp(draft: Draft) -> Iterator[Plan]:
    """A part of a warp for each row, from as many lanes as columns are chosen."""
    graph, target = draft.graph, draft.target
    planned = picking(graph, draft.accesses, "values")
    lanes = target.warp
    while lanes >= max(4, graph.picks):
        per_thread = -(-draft.vectors // lanes)
        most = WARP_ELEMENTS if lanes == target.warp else PART_WARP_ELEMENTS
        likely = likely_of_warp(graph.picks, lanes)
        few = graph.picks <= min(lanes, WARP_PICKS) and likely <= LIKELY_SHARE * most_ranked(graph.picks)
        if few and per_thread * draft.vector <= most and draft.vectors > lanes // 2:
            tile = Tile(WARP_BLOCK_THREADS, lanes, WARP_BLOCK_THREADS // lanes, draft.vector, per_thread)
            way = InWarp(by_rounds(graph.picks, lanes, target), most_ranked(graph.picks))
            chosen = selection_of(planned, graph.picks, way)
            if fits(chosen, tile, target):
                yield candidate(draft, planned, tile, chosen)
        lanes //= 2


def by_delegates(draft: Draft) -> Iterator[Plan]:
    """A few lanes for each row, of which each has several delegates. Keys that are limited to groups are never packed,
    and have large blocks too where they may share a cluster's launch with a sort of many slots, which asks for such."""
    planned = picking(draft.graph, draft.accesses, "values")
    large = draft.target.shares > 1 or (planned.limit and draft.target.max_cluster > 1)
    for threads in block_sizes(draft.target) if large else (WARP_BLOCK_THREADS,):
        yield from delegates_in_blocks(draft, planned, threads)


def delegates_in_blocks(draft: Draft, planned: Picking, threads: int) -> Iterator[Plan]:
    """The same of so many threads a block."""
    graph, target = draft.graph, draft.target
    lanes = 2 if planned.limit else FEWEST_DELEGATES_LANES
    while lanes <= target.warp:
        per_thread = -(-draft.vectors // lanes)
        elements = per_thread * draft.vector
        tile = Tile(threads, lanes, threads // lanes, draft.vector, per_thread)
        count = delegates_of(graph.picks, lanes, elements)
        if count and elements <= DELEGATES_ELEMENTS and draft.vectors > lanes // 2:
            way = InWarp(False, most_ranked_of_delegates(graph.picks), count)
            chosen = selection_of(planned, graph.picks, way)
            room = target.shared_per_sm // (picker(chosen, tile, target.warp).bytes + BLOCK_BYTES)
            if room * tile.threads >= FEWEST_WARPS * target.warp * target.schedulers_per_sm:
                yield candidate(draft, planned, tile, chosen)
        lanes *= 2


def delegates_of(k: int, lanes: int, elements: int) -> int:
    """Of a lane: at least k, as a power of two, and enough for a bar that few more than k keys reach; 0 where a lane
    has too few keys for that."""
    count = power_from(k)
    while 2 * count <= min(elements, MOST_DELEGATES) and count * lanes < DELEGATES_FOR_EACH * k:
        count *= 2
    likely = likely_of_warp(k, count * lanes) if count * lanes > k else math.inf
    enough = 2 <= count <= min(elements, MOST_DELEGATES) and likely <= LIKELY_SHARE * most_ranked_of_delegates(k)
    return count if enough else 0


def by_rounds(k: int, lanes: int, target: Target) -> bool:
    """Do k rounds find the bar in fewer steps than it takes every lane to look at all others? A whole warp has words
    for a round."""
    steps = lanes.bit_length() - 1
    return lanes == target.warp or k * (2 * steps + 2) < 3 * lanes + 2 * steps


def by_streaming(draft: Draft) -> Iterator[Plan]:
    """A block or a cluster for each row."""
    graph, target = draft.graph, draft.target
    planned = picking(graph, draft.accesses, "nothing")
    for threads in (*NARROW_ELEMENTS, *BLOCK_THREADS):
        for turn in TURN_VECTORS:
            for cluster in clusters(target):
                if tile := tile_of(draft, threads, turn, cluster):
                    chosen = streaming_of(planned, graph, tile, turn, target)
                    if chosen and fits(chosen, tile, target):
                        yield candidate(draft, planned, tile, chosen)


def fits(chosen: Selection, tile: Tile, target: Target) -> bool:
    return picker(chosen, tile, target.warp).bytes + BLOCK_BYTES <= target.shared_bytes


def clusters(target: Target) -> Iterator[int]:
    cluster = 1
    while cluster <= target.max_cluster:
        yield cluster
        cluster *= 2


def tile_of(draft: Draft, threads: int, turn: int, cluster: int) -> Tile | None:
    """None where a thread's turn is too long for its registers, or half of a turn would lie beyond the row."""
    if threads > draft.target.threads_per_block or turn * draft.vector > max(
        TURN_ELEMENTS, TURN_VECTORS[0] * draft.vector
    ):
        return None
    words = sum(words_of(access) for access in draft.accesses if not access.output and access.by_column)
    if turn > TURN_VECTORS[0] and turn * words > TURN_ELEMENTS:
        return None
    per_row = threads * cluster
    if (turn, threads) != (TURN_VECTORS[0], BLOCK_THREADS[0]) and 2 * draft.vectors <= per_row * turn:
        return None
    if cluster > 1 and (2 * draft.vectors <= per_row * turn or threads in NARROW_ELEMENTS):
        return None
    turns = -(-draft.vectors // (per_row * turn))
    if threads in NARROW_ELEMENTS and (
        threads < draft.target.warp or turns * turn * draft.vector > NARROW_ELEMENTS[threads]
    ):
        return None
    return Tile(threads, per_row, 1, draft.vector, turns * turn, cluster=cluster)


def computed_apart(graph: Graph) -> bool:
    """May the keys of one element differ in a last bit between the pass and where candidates are looked at again?

    Compilers fuse a product into a sum where that is its only use: so they do where nothing but the key is computed,
    but not in a pass that has another use for the product. A threshold from the pass's keys would leave out all of a
    row of equals.
    """
    assert graph.selection is not None
    behind_key = set(behind([graph.selection.inputs[0]]))
    outputs = {t.node for t in graph.outputs}
    for node in behind_key:
        for factor in node.inputs if node.op.name in ("add", "sub") else ():
            users = [user for user in graph.users[factor] if user.op.kind is not Kind.SELECT]
            elsewhere = factor in outputs or any(user not in behind_key for user in users)
            if elsewhere and "*" in factor.expr and graph.extents[factor] is Extent.ELEMENT:
                return True
    return False


def streaming_of(planned: Picking, graph: Graph, tile: Tile, turn: int, target: Target) -> Selection | None:
    """None where there are no registers for a block, where a larger one could have a threshold before the first cut, or
    where a cluster's largest keys have no room: its blocks meet for one threshold alone."""
    k, apart = graph.picks, computed_apart(graph)
    groups = 0 if apart else groups_of(k, tile.threads_per_row, turn)
    words = note_words(target)
    note = note_of(tile.vector, turn, tile.per_thread, words)
    segment = segment_of(note, turn, tile.per_thread, words)
    if tile.cluster > 1 and (segment < tile.per_thread or apart):
        return None
    if not apart and k > tile.threads_per_row * groups:
        if (tile.threads, turn, tile.cluster) != (BLOCK_THREADS[0], TURN_VECTORS[0], 1):
            return None
        groups = 0
    warps, entries, limit = tile.threads // target.warp, entries_of(k, tile.threads), limit_of(k)
    want = -(-k // (warps * tile.cluster))
    way = Streaming(
        turn=turn,
        groups=groups,
        note=note,
        notes=segment // note * target.warp,
        segment=segment,
        want=want,
        wanted_at_most=want + want // SLACK_PART,
        ranked=k < warps and tile.cluster == 1,
        ties_last=groups > 0 and segment // note > MANY_MARKS,
        entries=entries,
        limit=limit,
        **cuts_of(entries // warps, limit // warps, segments=segment < tile.per_thread, cluster=tile.cluster),
        bins=bins_of(k, tile.threads),
    )
    chosen = replace(selection_of(planned, k, way), vote_bytes=target.vote_bytes)
    if target.registers_per_thread > 255:  # a wave of gfx90a and gfx942 has 512, and the compiler needs no such word
        return chosen
    shared = picker(chosen, tile, target.warp).bytes  # which may have room for fewer than registers have
    blocks = resident_blocks(target, tile.threads, wanted_registers(way, tile), shared)
    return replace(chosen, resident=blocks) if blocks else None


def cuts_of(room: int, limit: int, *, segments: bool, cluster: int) -> dict[str, int]:
    """How many candidates of a warp behind a segment make a cut, where there is room for `room`: fewer where later
    segments bring more, and no more than a cluster's first block has room for."""
    last = limit if cluster > 1 else room if segments else 0
    return {"cut_early": (room + limit) // 2 if segments else 0, "cut_last": last}


def wanted_registers(way: Streaming, tile: Tile) -> int:
    return MORE_REGISTERS if way.segment < tile.per_thread or way.groups > 4 else REGISTERS


def selection_of(planned: Picking, k: int, way: Way) -> Selection:
    return Selection(
        way=way,
        k=k,
        key=planned.key,
        dtype=planned.dtype,
        key_body=planned.key_body,
        columns=planned.columns,
        values=planned.values,
        picked=planned.picked,
        bare=planned.bare,
        limit=planned.limit,
    )


def candidate(draft: Draft, planned: Picking, tile: Tile, chosen: Selection) -> RowPlan:
    graph, target, by_warp = draft.graph, draft.target, not isinstance(chosen.way, Streaming)
    registers = registers_of(chosen, tile)
    return assemble(
        draft,
        planned.schedule,
        tile,
        rule="topk",
        regime=f"{row_threads_text(tile, target)}; {choosing_text(chosen, tile, graph.cols)}",
        staging="registers" if by_warp else "stream",
        choosing=Choosing(
            template=TEMPLATES[type(chosen.way)],
            selection=chosen,
            shared_bytes=picker(chosen, tile, target.warp).bytes,
            duration=lambda work, moved: duration_of(target, graph, work, chosen, moved, registers),
        ),
    )


def registers_of(chosen: Selection, tile: Tile) -> int:
    """NVRTC took 31, 39 and 56 for warps with 8, 16 and 32 elements a lane; hiprtc 61 to 85 for thresholds."""
    if isinstance(chosen.way, Packed):
        return 24 + tile.per_thread * tile.vector // 2 + 2 * chosen.way.sorted
    if isinstance(chosen.way, InWarp) and chosen.way.delegates > 1:
        return 24 + tile.per_thread * tile.vector + chosen.way.delegates
    if not isinstance(chosen.way, Streaming):
        return 24 + tile.per_thread * tile.vector
    return wanted_registers(chosen.way, tile) if chosen.resident else 80


def choosing_text(chosen: Selection, tile: Tile, cols: int) -> str:
    """What the kernel does, and what it expects of a row whose keys lie in no order."""
    if not isinstance(chosen.way, Streaming):
        how = "one after another" if chosen.one_by_one else "by rank"
        if isinstance(chosen.way, Packed):
            how = f"by a network, {chosen.way.sorted} at a time"
            how += f", of the best groups of {chosen.way.group}" * (chosen.way.group > 1)
        if isinstance(chosen.way, InWarp) and chosen.way.delegates > 1:
            how += f" behind {chosen.way.delegates} delegates a lane"
        return f"{chosen.key} in registers, the best {chosen.k} {how}"
    found = expected(chosen, tile, cols)
    cuts = f", cut {'once' if found.cuts == 1 else f'{found.cuts} times'} to the best {chosen.k}" if found.cuts else ""
    return (
        f"streaming threshold select, {chosen.way.turn} x {tile.vector} elements a thread at a time; some "
        f"{round(found.candidates)} of {cols} pass the threshold, whose vectors are read again{cuts}"
    )
