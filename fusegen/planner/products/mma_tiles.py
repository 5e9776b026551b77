"""Tiles that are worth trying for products by mma.sync, MFMA and WMMA, and which of them fit a target and a chain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusegen.language.block_products import BLOCK
from fusegen.language.graph import Kind
from fusegen.language.types import size_of
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.products.gemm import (
    GemmTile,
    chunks_of,
    fragments_of,
    run_of,
    shared_bytes,
)
from fusegen.planner.products.gemm_duration import gemm_registers
from fusegen.planner.products.halved import units
from fusegen.planner.products.mma_operands import DEEPEST_SLICE, MOST_STREAMED_ROWS, MmaDraft
from fusegen.planner.products.parts import Coding, Operand
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

# rows x cols x k, stages, warps down x across: of one product in an output group, and of two. k is in elements of two
# bytes; f32 has half as many, 8 bits twice.
TILES: Mapping[int, tuple[GemmTile, ...]] = {
    1: (
        GemmTile(128, 256, 64, 4, 2, 4, persistent=True),
        GemmTile(128, 256, 32, 4, 2, 4, persistent=True),
        GemmTile(128, 256, 64, 4, 2, 4),
        GemmTile(128, 256, 64, 3, 2, 4),
        GemmTile(256, 128, 64, 4, 4, 2),
        GemmTile(256, 128, 64, 3, 4, 2),
        GemmTile(128, 256, 32, 4, 2, 4),
        GemmTile(96, 256, 64, 4, 2, 4),
        GemmTile(192, 128, 64, 4, 4, 2),
        GemmTile(96, 128, 64, 4, 2, 2),
        GemmTile(128, 128, 64, 3, 2, 2),
        GemmTile(128, 128, 32, 4, 2, 2),
        GemmTile(128, 128, 64, 3, 2, 4),
        GemmTile(64, 256, 64, 3, 1, 4),
        GemmTile(64, 128, 64, 4, 2, 2),
        GemmTile(128, 64, 64, 4, 2, 2),
        GemmTile(64, 64, 64, 4, 2, 2),
        GemmTile(32, 64, 64, 4, 1, 2),
    ),
    2: (
        GemmTile(128, 64, 64, 3, 2, 2),
        GemmTile(128, 64, 32, 4, 2, 2),
        GemmTile(128, 128, 64, 4, 2, 4),
        GemmTile(128, 128, 64, 3, 2, 4),
        GemmTile(64, 64, 64, 3, 2, 2),
        GemmTile(64, 32, 64, 4, 2, 2),
        GemmTile(32, 32, 64, 4, 1, 2),
    ),
}
# Of one product of few columns, in blocks of which a choice of columns and a sort make more than of four warps. Sixteen
# warps of 64 x 32 spill, and took 634 us for 65536 x 256 of 7168 where eight of 64 x 64 took 513.
SHARED_OUT = (GemmTile(256, 64, 64, 4, 4, 2), GemmTile(128, 64, 64, 4, 4, 2))
# Of 64 lanes, without asynchronous copies. Sums go through shared memory in as many bands as fit into the place of the
# slices: with more room than 32 KiB no second block would fit beside the first.
WAVES: Mapping[int, tuple[GemmTile, ...]] = {
    1: (
        GemmTile(128, 128, 32, 2, 2, 2, bands=4),
        GemmTile(128, 64, 32, 2, 2, 2, bands=2),
        GemmTile(64, 128, 32, 2, 2, 2, bands=2),
        GemmTile(64, 64, 32, 2, 2, 2),
    ),
    2: (GemmTile(128, 64, 32, 2, 2, 2, bands=4), GemmTile(64, 64, 32, 2, 2, 2, bands=2)),
}
# Of 32 lanes: twice as many warps have half of the sums each
SHORT_WAVES: Mapping[int, tuple[GemmTile, ...]] = {
    1: (
        GemmTile(128, 128, 32, 2, 2, 4, bands=4),
        GemmTile(128, 64, 32, 2, 4, 2, bands=2),
        GemmTile(64, 128, 32, 2, 2, 4, bands=2),
        GemmTile(64, 64, 32, 2, 2, 2),
    ),
    2: (GemmTile(128, 64, 32, 2, 4, 2, bands=4), GemmTile(64, 64, 32, 2, 2, 2, bands=2)),
}
# Which have the 128 columns of groups that quantization goes by: a warp, or by way of shared memory a tile
GROUPED: Mapping[int, tuple[GemmTile, ...]] = {
    1: (
        GemmTile(64, 128, 64, 4, 4, 1),
        GemmTile(128, 128, 64, 3, 2, 2, by_shared=True),
        GemmTile(64, 128, 32, 4, 2, 4, by_shared=True),
    ),
    2: (GemmTile(64, 128, 64, 3, 2, 4, by_shared=True), GemmTile(64, 128, 32, 4, 2, 4, by_shared=True)),
}
GROUPED_WAVES: Mapping[int, tuple[GemmTile, ...]] = {2: (GemmTile(64, 128, 32, 2, 2, 2, bands=2),)}
GROUPED_SHORT_WAVES: Mapping[int, tuple[GemmTile, ...]] = {2: (GemmTile(64, 128, 32, 2, 2, 4, bands=2),)}
MOST_SUMS = 2048  # of one warp: 64 registers a thread
MOST_AHEAD_ELEMENTS = 4096  # elements of the left operand in one slice: the compiler loads fragments of all of it ahead
STREAM_COLS = (16, 32, 64)
STREAM_K = (64, DEEPEST_SLICE)
STREAM_SLICE_K = (2, 4, 8)
STREAM_STAGES = (3, 4, 6)
ALONE_STAGES = (3, 4)  # of one warp: 6 spilled 16 B on an H200
REDUCED_REGISTERS = 32  # what rows of a tile are reduced to: tiles that had fewer left spilled 40 B on an A100
SCALED_REGISTERS = 80  # scales of a slice's blocks, and what finds them: 64 x 32 tiles spilled 92 to 128 B on an H200
REGISTER_STAGES = (2,)  # through registers one slice is on its way, whatever the ring's length
# Of grouped products of codes, without what else there is: 8 x 64 tiles of two products in MXFP4 spilled 636 B on an
# H200 and took 79 us where 8 x 16 took 34; 8 x 32 of slices of 128, which have 168, spilled 8 B for an A100.
MOST_CODED = 164
CLUSTERS = (1, 2, 4)
FEW_SMS = 16  # as many as a cluster has blocks, where a launch is one
IN_FLIGHT_BYTES = 24 * 1024  # bytes that an SM must ask for ahead, at least, to be worth a candidate


def tiles(drawn: MmaDraft) -> Iterator[tuple[GemmTile, Atom]]:
    """Tiles worth trying at this many rows, each with the instruction that fills it."""
    if drawn.coding:
        yield from streams(drawn)
        return
    shared, grouped = tables(drawn.target)
    usual = shared.get(drawn.together, ())
    if drawn.hoisted.grouped:
        usual += grouped.get(drawn.together, ())
    if drawn.target.shares > 1:  # a cluster's rows are those of blocks that follow one another
        usual = tuple(replace(tile, group=1) for tile in (*usual, *SHARED_OUT * (drawn.together == 1)))
    # deep slices of 8 bits that threads bring a byte at a time take more registers than there are, and beside scales of
    # blocks so do shallow ones by few warps
    small = tuple(t for t in usual if t.rows == t.cols <= 64 and drawn.deep(t) != t)
    shallow = tuple(t for t in small if t.rows == 64)
    if drawn.scaled and any(elements(drawn, tile) for tile in small):
        shallow += tuple(replace(tile, warps_down=2 * tile.warps_down) for tile in small)
    for tile in (*map(drawn.deep, usual), *shallow):
        # of few rows too, where deep tiles of 32 have no registers
        bytewise = tile in shallow and elements(drawn, tile)
        if tile.rows <= 32 or tile.rows < 2 * drawn.rows or bytewise:
            for cluster in CLUSTERS:
                split = replace(tile, cluster=cluster)
                if cluster == 1 or (cluster <= drawn.target.max_cluster and idle(drawn, split)):
                    yield split, atom_of(drawn)
    few = drawn.target.sms <= FEW_SMS  # each takes much of the factors, and is to have much of them on its way
    if drawn.rows <= MOST_STREAMED_ROWS or few or drawn.target.shares > 1 or drawn.together not in shared:
        yield from streams(drawn)


def tables(target: Target) -> tuple[Mapping[int, tuple[GemmTile, ...]], Mapping[int, tuple[GemmTile, ...]]]:
    """The usual tiles, and those of grouped columns."""
    if target.async_copies:
        return TILES, GROUPED
    return (WAVES, GROUPED_WAVES) if target.warp == 64 else (SHORT_WAVES, GROUPED_SHORT_WAVES)


def atom_of(drawn: MmaDraft, streams: bool = False) -> Atom:
    """Tiles take the largest that a warp issues; few rows the smallest, which has the fewest."""
    found = units(drawn.target, drawn.dtype, drawn.right_dtype, "warp")
    return found[-1] if streams else found[0]


def streams(drawn: MmaDraft) -> Iterator[tuple[GemmTile, Atom]]:
    atom, shares = atom_of(drawn, streams=True), drawn.target.shares
    fewest = atom.rows
    while fewest < min(-(-drawn.rows // shares), MOST_STREAMED_ROWS):
        fewest *= 2
    each: tuple[int, ...] = (fewest,)
    if drawn.segments and fewest < MOST_STREAMED_ROWS:
        # groups that have some rows more than others begin another tile, which reads their right factor again
        each = fewest, 2 * fewest
    elif shares > 1 and fewest > atom.rows:  # so many that each block of a cluster has a tile
        each = fewest, fewest // 2
    for rows, cols in itertools.product(each, STREAM_COLS):
        for k in STREAM_K:
            if drawn.together * rows * cols > MOST_SUMS or rows * k > MOST_AHEAD_ELEMENTS:
                continue
            if drawn.segments and rows < MOST_STREAMED_ROWS and coded_registers(drawn, rows, cols, k) > MOST_CODED:
                continue
            if rows > fewest and k == STREAM_K[0] and drawn.together == 1:
                yield from alone(drawn, rows, cols, k, atom)
            if rows > fewest and rows * cols == MOST_SUMS:  # of one product: spilled 12 B on an H200, 8 on an A100
                continue
            for slice_k in STREAM_SLICE_K:
                for stages in STREAM_STAGES if drawn.target.async_copies else REGISTER_STAGES:
                    for cluster in CLUSTERS if shares == 1 else (1,):
                        tile = drawn.deep(GemmTile(rows, cols, k, stages, 1, 1, slice_k, cluster, group=1))
                        if cluster <= drawn.target.max_cluster and worthwhile(drawn, tile):
                            yield tile, atom


def alone(drawn: MmaDraft, rows: int, cols: int, k: int, atom: Atom) -> Iterator[tuple[GemmTile, Atom]]:
    """Tiles of one warp, which adds up no one's sums. 1024 rows in 64 groups, 2048 columns and a K of 1024 took 79.7 us
    in such of 32 x 64, and 83.7 in those of 32 x 32 of two warps; SwiGLU of two products 149.3 and 145.4 (H200)."""
    if drawn.coding is not None or not drawn.target.async_copies:
        return
    for stages in ALONE_STAGES:
        tile = drawn.deep(GemmTile(rows, cols, k, stages, 1, 1, 1, group=1))
        if worthwhile(drawn, tile):
            yield tile, atom


def coded_registers(drawn: MmaDraft, rows: int, cols: int, k: int) -> int:
    """Registers of a thread that widens codes: two turns of both factors' fragments, sums twice, of a group of codes
    and of all, and scales twice, of a slice and of the next one. 0 where there are no codes."""
    if drawn.coding is None:
        return 0
    columns = cols // 16 * drawn.together
    scales = max(1, k // (drawn.coding.group or k))
    return columns * (16 + rows + 4 * scales) + rows


def worthwhile(drawn: MmaDraft, tile: GemmTile) -> bool:
    """Has every slice-K group a few slices, and an SM enough on its way?"""
    slices = drawn.k // (tile.k * tile.split_k)
    room = shared_bytes(tile, drawn.dtype, drawn.together, len(drawn.parts.statistics), share=drawn.share)
    blocks = max(1, drawn.target.shared_per_sm // (room + drawn.target.shared_reserved))
    small = (tile.cols, tile.k * drawn.dtype.bytes, tile.slice_k, tile.cluster) == (32, 128, 2, 1)
    few = small and tile.stages <= min(STREAM_STAGES)
    return few or (
        slices >= 2
        and room * min(blocks, 3) >= IN_FLIGHT_BYTES
        and (tile.cluster == 1 or tiles_across(drawn, tile) < drawn.target.sms)
    )


def idle(drawn: MmaDraft, tile: GemmTile) -> bool:
    """Would half of the SMs have nothing to do, were K not split over a cluster; and has each block some of it?"""
    blocks = tiles_across(drawn, tile) * max(1, -(-drawn.graph.rows // tile.rows))
    return blocks * tile.cluster < 2 * drawn.target.sms and drawn.k >= 4 * tile.k * tile.cluster


def tiles_across(drawn: MmaDraft, tile: GemmTile) -> int:
    return sum(-(-size_of(g.width, drawn.graph.sizes) // tile.cols) for g in drawn.groups)


def fits(drawn: MmaDraft, tile: GemmTile, atom: Atom) -> bool:
    """Has the target room for it, and has every thread a whole number of chunks to bring?"""
    target = drawn.target
    slice_k_threads = tile.warps * target.warp
    if drawn.scaled and (BLOCK % tile.k or BLOCK % tile.warp_cols):  # a warp's slice is of one block
        return False
    right = drawn.rights.values()
    run = run_of(tile, atom, all(f.along for f in right))
    room = shared_bytes(tile, drawn.dtype, drawn.together, len(drawn.parts.statistics), run, drawn.share)
    if room > target.shared_bytes:
        return False
    if slice_k_threads * tile.slice_k > target.threads_per_block:
        return False
    held = elements(drawn, tile) if tile.slice_k == 1 else 0  # streams have no others to give way to
    if drawn.scaled:
        held += unscaled(drawn, tile, atom) or SCALED_REGISTERS  # AMD's lanes have one row's scales of an instruction
    if run and any(node.op.kind is Kind.GROUP for node in drawn.hoisted.nodes):
        held += REDUCED_REGISTERS
    if gemm_registers(tile, atom, drawn.dtype, drawn.together) + held > min(target.registers_per_thread, 255):
        return False
    if tile.persistent and not can_persist(drawn, tile):
        return False
    if tile.warp_rows % atom.rows or tile.warp_cols % atom.cols or tile.k % (2 * atom.k):
        return False
    if drawn.coding and not groups_fit(drawn.coding, tile):
        return False
    return all(chunks_fit(f, tile, slice_k_threads, drawn.chunk) for f in (*drawn.left, *right))


def unscaled(drawn: MmaDraft, tile: GemmTile, atom: Atom) -> int:
    """Sums of a slice that a thread has apart, until they are scaled by its block's scales. Not of mma.sync, where an
    instruction's are scaled as they come."""
    return drawn.together * tile.accumulators(atom) if drawn.scaled and atom.kind != "mma" else 0


def elements(drawn: MmaDraft, tile: GemmTile) -> int:
    """That a thread loads one by one for each slice, and holds until they go to shared memory: on GPUs whose copies
    bring whole chunks past the registers."""
    if not drawn.target.async_copies:
        return 0
    left = sum(tile.rows for f in drawn.left if f.width == 1)
    right = sum(tile.cols for f in drawn.rights.values() if f.width == 1) // len(drawn.groups)
    return (left + right) * tile.k // (tile.warps * drawn.target.warp)


def counted(drawn: MmaDraft, tile: GemmTile) -> int:
    """Chunks that a thread brings of a slice, and which may not be whole: of all rows, since these are a launch's own,
    of columns that fill no tile, and of a K that fills no slice."""
    ragged = any(size_of(g.width, drawn.graph.sizes) % tile.cols for g in drawn.groups)
    uneven = drawn.k % (tile.k * tile.split_k) != 0
    extent = tile.rows + tile.cols * drawn.together * (ragged or uneven)
    return extent * tile.k // drawn.chunk // (tile.warps * drawn.target.warp)


def can_persist(drawn: MmaDraft, tile: GemmTile) -> bool:
    """Are copies cheap enough to be interleaved with the products, in persistent blocks?

    A thread keeps the address of each chunk, and from slice to slice these differ by constants: of factors that lie
    along K and are copied as they are. Ragged columns and Ks cost registers that are not there: ptxas
    spilled 8 to 92 bytes. Sums that go through shared memory would have to take the ring's place, which holds the next
    tile's slices by then. Factors of f32 and of 8 bits, and clusters, were not measured.
    """
    factors = (*drawn.left, *drawn.rights.values())
    if drawn.dtype.bytes != 2 or drawn.parts.statistics or drawn.parts.lefts[0].operand is None:
        return False
    if tile.cluster > 1 or drawn.k % (tile.stages * tile.k) or drawn.inner_segments:
        return False
    ragged = any(size_of(g.width, drawn.graph.sizes) % tile.cols for g in drawn.groups)
    return not ragged and all(f.copied and f.along for f in factors) and finds_room(drawn, tile)


def finds_room(drawn: MmaDraft, tile: GemmTile) -> bool:
    """Has a step as many products as fragments to load and chunks to copy before them?"""
    atom, products = atom_of(drawn), drawn.together
    chunks = chunks_of(tile, drawn.dtype, products, tile.warps * drawn.target.warp)
    a_step = -(-chunks * atom.k // tile.k)
    room = tile.warp_rows // atom.rows * (tile.warp_cols // atom.cols)
    return fragments_of(tile, atom, products) + a_step <= room


def groups_fit(coding: Coding, tile: GemmTile) -> bool:
    """Does a slice lie in one group of K, or hold some whole ones?"""
    group = coding.group or tile.k
    return group % tile.k == 0 or tile.k % group == 0


def chunks_fit(factor: Operand, tile: GemmTile, slice_k_threads: int, chunk: int) -> bool:
    """Has every thread a whole number of the factor's chunks to bring, and are lines along M or N, whose
    addresses are XOR-swizzled, a power of 2 long?"""
    extent = tile.rows if factor.mn == "rows" else tile.cols
    if factor.coding:
        chunk = VECTOR_BYTES * 8 // factor.bits
    if not factor.tile_along and extent & (extent - 1):
        return False
    beside = (tile.k if factor.along else extent) // chunk
    return beside > 0 and slice_k_threads % beside == 0 and extent * tile.k // chunk % slice_k_threads == 0
