"""Vectors that every row shares and later passes take, brought to shared memory while the first pass runs.

Read where they are used, they wait behind the rows' own loads, which have the memory to themselves while a launch
begins; and to ask for them early is not enough, since the compiler (NVRTC 13.0, 13.5) puts a load, a prefetch or a
cp.async off until what was loaded before is used. A bulk copy by one thread stays where it is, and takes no registers.

The LayerNorm chain in f16 on an H200 (cold L2, medians of 16 to 70 launches in random order, each kernel loaded two or
three times) took, read late and prefetched: 12.8 and 11.7 us with 256 threads a row, 12.4 and 12.2 with 128, 12.8 and
12.0 with 512 at 1024 x 4096; 31.5 and 31.0 with 256, 32.2 and 31.3 with 128 at 4096 x 4096; with 512 threads 5.1 and
5.05 at 8 x 4096, but 5.8 and 5.9 at 64 x 4096, 9.1 and 9.0 at 512 x 4096, 19.7 and 19.2 at 2048 x 4096, 20.2 and 19.3
at 1024 x 8192; at 16384 x 4096 100.25 and 100.0, 100.55 and 100.45, but with 512 threads 101.1 and 102.75. Without any
vectors of columns it would take 30.0 to 30.8 at 4096 x 4096. Other types are not measured.

Of a single vector nothing was gained: add_rmsnorm took 4.68 and 4.72 at 8 x 4096, 133.1 and 133.6 at 16384 x 4096. Nor
where the vectors are more than what is read of a row: layernorm_affine took 10.9 and 11.0 at 1024 x 4096, 24.9 and 25.7
at 2048 x 8192, with 512 threads. A prefetch by each thread cost 4 us at 4096 x 4096; one bulk prefetch to the L2 cache
by the first block gained as much as this at 8 rows and with 128 threads at 1024, and nothing with 256 or at 4096.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.planner.model import Load, RowPlan, Tile
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.rows.assembly import Draft
from fusegen.planner.rows.schedule import Schedule, title_of

FEWEST_VECTORS = 2
FEWEST_THREADS = 128  # of a row, and so several warps; of fewer it is not measured
LEAST_BYTES = 8 << 10  # of a vector; shorter ones are not measured, from where a bulk copy should begin
MOST_BYTES = 48 << 10  # static shared memory of a block
MOST_WAVES = 6.0  # of blocks: later ones find the vectors in the caches


def prefetched(draft: Draft, planned: Schedule, tile: Tile) -> Schedule:
    """The passes, with such vectors prefetched by a bulk copy each; the same where there are too few, or no barrier
    stands between the first thread, which asks for them, and the others, which take them."""
    first, *later = planned.passes
    barrier = first.reductions and tile.rows_per_block == tile.cluster == 1 and tile.row_threads >= FEWEST_THREADS
    if (
        not draft.target.bulk_copies
        or not draft.divides
        or not barrier
        or any(row_pass.until for row_pass in planned.passes)
    ):
        return planned
    early = {load.access.tensor for load in first.loads}

    def fetch(load: Load) -> Load:
        access = load.access
        long = access.by_column and draft.graph.cols * access.dtype.bytes >= LEAST_BYTES
        whole = long and access.mode == "vector" and access.vector_bytes == VECTOR_BYTES
        shared = whole and not access.strided and access.tensor not in early
        return replace(load, when="prefetched") if shared and load.when == "now" else load

    passes = [first]
    for row_pass in later:
        loads = tuple(map(fetch, row_pass.loads))
        passes.append(
            replace(
                row_pass,
                loads=loads,
                title=title_of(
                    loads, row_pass.keeps, row_pass.reductions, row_pass.stores, row_pass.scans, row_pass.groups
                ),
            )
        )
    values = {
        load.access.tensor: load.value for row_pass in passes for load in row_pass.loads if load.when == "prefetched"
    }
    if len(values) < FEWEST_VECTORS:
        return planned
    passes[0] = replace(first, title=f"{first.title}; prefetch {', '.join(values.values())}")
    return replace(planned, passes=tuple(passes))


def worth_prefetching(made: RowPlan) -> bool:
    """Does a launch of the graph's rows have few waves of blocks, a block the room, and a row as many bytes to read?"""
    waves = made.graph.rows / (made.target.sms * made.cost.blocks_per_sm)
    rows = (load.access for load in made.passes[0].reads if load.access.by_column and load.access.strided)
    fewer = sum(access.dtype.bytes for access in made.prefetched) <= sum(access.dtype.bytes for access in rows)
    return fewer and waves <= MOST_WAVES and made.static_shared_bytes <= MOST_BYTES
