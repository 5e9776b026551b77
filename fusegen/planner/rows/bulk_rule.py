"""Rows whose length is no whole number of 16 bytes, by bulk copies: one thread asks for a row, and one sends it off.

Such rows start anywhere between two blocks of 16 bytes. To shift each vector into place takes instructions: the
LayerNorm chain in f16 issued 24.8 of them for an element at 16384 x 4096 and 38.8 to 47.4 at 16384 x 4097, rmsnorm 10.0
at 65536 x 1024 and 22.6 at 65536 x 1027. Here the copy engine moves the blocks, and a thread reads and writes single
elements in shared memory, where they may lie anywhere: neighbouring threads at neighbouring addresses.

Times on an H200 (cold L2, medians of 9), and of vectors shifted into place in the same run: the LayerNorm chain in f16
at 16384 x 4097 107.4 us and 117.3, at 16384 x 16385 421.8 and 581.5 (589 where results had a place of their own: the L1
cache then has no room for what all rows share); rmsnorm 262144 x 127 43.4 and 50.0 (46.0 with a copy for each row);
masked_softmax 16 x 12 x 1000 x 1023 202.6 and 244.1; log_softmax from bf16 to f32 at 4096 x 50257 326.7 and 376.3, at
4096 x 32001 206.2 and 225.9, in f16 at 32768 x 3333 111.1 and 140.7. What the copies alone take, in and out, leaves
little to gain for the rest (all this before rows lay in lines as in memory, see planner/bulk.py): rmsnorm 65536 x 1027
took 73.4 us so, 73.1 by vectors, 72.5 without any computation, and 65536 x 1024 69.8.

What a block does once is much of it where rows are short, so several come together, of several dimensions too, and
nothing is asked of their strides at run time: where they lie apart, the launch asks for another plan. A padded softmax
of 32 x 12 x 577 x 577 took 155 us by a warp a row so, 181 where each block found out how its rows lie, and 169 by
blocks of a row; masked_softmax 16 x 12 x 1000 x 1023 197 and by blocks of a row 204 (medians of 9, one run each).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusegen.language.graph import Graph
from fusegen.planner.limits import limits
from fusegen.planner.model import Keep, Layout, Load, Tile
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.rows.assembly import Draft, row_draft
from fusegen.planner.rows.schedule import Schedule
from fusegen.targets.base import Target

MOST_ELEMENTS = 64  # of a row, in the registers of one thread
LEAST_ELEMENTS = 8  # of a thread: fewer are outweighed by what it does once
# threads of a block of several rows: a softmax of 131072 x 513 took 71.4 us so and 76.3 with 256
SEVERAL_ROWS_THREADS = 128


def bulk_draft(graph: Graph, target: Target, layout: Layout, vector: int) -> Draft | None:
    """The draft with `vector` elements a thread, or None where rows are whole blocks, or may not be copied so, or where
    none are written: sums of 524288 x 255 bf16 took 77 us so and 72 otherwise, of 4194304 x 33 85 and 76.

    A chain without leading axes has one row, which starts where it is allocated."""
    draft = row_draft(graph, target, layout, vector)
    rows = [access for access in draft.accesses if access.by_column and len(access.strided) == len(draft.dims)]
    written = any(access.output for access in rows)
    lie_anywhere = draft.dims and written and any(graph.cols * access.dtype.bytes % VECTOR_BYTES for access in rows)
    loose = layout.unaligned | layout.apart | layout.woven
    if (
        graph.gathers
        or graph.scatters
        or not target.bulk_copies
        or not lie_anywhere
        or any(access.tensor in loose for access in rows)
    ):
        return None
    found = tuple(
        replace(access, mode="bulk", vector_bytes=VECTOR_BYTES, evict_first=False) if access in rows else access
        for access in draft.accesses
    )
    return replace(draft, accesses=found, bulk=True)


def bulk_tiles(draft: Draft) -> Iterator[Tile]:
    """Teams whose registers hold a row: parts of a warp, a warp, a block."""
    target, cols = draft.target, draft.graph.cols
    masked = len(draft.dims) > 1 and limits(draft.graph)  # what comes together comes whole, a causal mask's half too
    contiguous = not draft.layout.split and not masked
    per_row = 1
    while per_row <= target.threads_per_block and (per_row == 1 or draft.vectors > per_row // 2):
        per_thread = -(-cols // (draft.vector * per_row))
        side_by_side = draft.vector == 1 or per_row >= target.warp
        held = per_thread * draft.vector
        few = per_row < target.warp and cols >= LEAST_ELEMENTS * target.warp  # a warp would have enough to do
        if side_by_side and not few and LEAST_ELEMENTS <= held <= MOST_ELEMENTS:
            threads = SEVERAL_ROWS_THREADS if contiguous and per_row <= target.warp else per_row
            if threads >= target.warp:
                yield Tile(threads, per_row, threads // per_row, draft.vector, per_thread)
        per_row *= 2


def held_by_value(planned: Schedule) -> Schedule:
    """The passes, with values in registers where the schedule keeps what was read: its place is then free."""
    passes = []
    for row_pass in planned.passes:
        kept = [load for load in row_pass.loads if load.when == "kept" and load.access.mode == "bulk"]
        keep = [load for load in row_pass.loads if load.when == "keep" and load.access.mode == "bulk"]
        passes.append(
            replace(
                row_pass,
                loads=tuple(
                    replace(load, when="now") if load in keep else load for load in row_pass.loads if load not in kept
                ),
                takes=(*row_pass.takes, *map(as_value, kept)),
                keeps=(*row_pass.keeps, *map(as_value, keep)),
            )
        )
    return replace(planned, passes=tuple(passes))


def kept_as_read(planned: Schedule) -> Schedule | None:
    """The passes, with rows where they were brought to, and all else read again; None where later passes take what was
    computed."""
    if any(row_pass.keeps for row_pass in planned.passes):
        return None
    passes = [replace(row_pass, loads=tuple(map(read_again, row_pass.loads))) for row_pass in planned.passes]
    return replace(planned, passes=tuple(passes))


def read_again(load: Load) -> Load:
    return load if load.access.mode == "bulk" else replace(load, when="now")


def as_value(load: Load) -> Keep:
    return Keep(load.value, load.dtype)
