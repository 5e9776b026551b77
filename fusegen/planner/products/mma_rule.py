"""Chains with products: tiles of all columns' products on tensor cores, with what comes before and after in one kernel.

Two regimes, which differ in nothing but the tile:

- *tiles*, where rows are many: a block's warps share slices of both factors, which are brought ahead of their use, and
  each warp holds its part of the sums in registers. The rate of the tensor cores bounds it;
- *streams*, where rows are few: the right factors are read once, evict-first in the L2 cache, and that bounds it: on an
  H200 8 rows take as long as reading the weights alone does. A slice-K group is one warp with a ring of its own, and
  takes every so many-th slice of K, so that no warp waits for another before the end; the groups' sums, of a cluster's
  blocks (split-K) where there are too few columns for all SMs, are added in a fixed order.

What measurements on an H200 decided (docs/measurements.md, "Products by mma.sync" and "Products of few rows"):

- The loop is bound by issuing copies and making addresses, not by waiting. So `persistent` tiles unroll the ring, keep
  all addresses, and interleave cp.async with the products.
- Their blocks are persistent, and copy the next tile's first slices while sums are stored.
- ptxas keeps the order of loads and copies, and moves products: a step's fragments are loaded in the order of their
  use, one before each product, and its copies come behind them.
- Tiles of 96 and of 192 rows fill the SMs where others don't.
- f32 factors lie in shared memory as they are, and are rounded to tf32 as a warp loads its fragments: mma.sync cuts
  off. AMD's matrix units multiply f32 as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.naming import entry_name, value_names
from fusegen.language.products import Split
from fusegen.language.types import f32, size_of
from fusegen.planner.cost import decisions
from fusegen.planner.matching import NoMatch, need_countable
from fusegen.planner.model import Access, Layout, Load, RowDim
from fusegen.planner.parts import Transport
from fusegen.planner.pieces import VECTOR_BYTES, stride_name
from fusegen.planner.products.factors import Use, access_of, product_dims, product_params, uses, widest
from fusegen.planner.products.gemm import (
    GemmPlan,
    GemmTile,
    chunk_of,
    chunks_of,
    fragments_of,
    run_of,
    shared_bytes,
)
from fusegen.planner.products.gemm_duration import ProductWork, estimate, gemm_registers, lying
from fusegen.planner.products.output_groups import (
    ProductDraft,
    groups,
    need_plain_rights,
    prologue_of,
    spans_of,
    taken_apart,
    within,
)
from fusegen.planner.products.parts import Contraction, Left, Operand, OutputGroup, Prologue
from fusegen.planner.products.product_cost import product_rounding
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

# rows x cols x k, stages, warps down x across: of one product in an output group, and of two. k is in elements of two
# bytes; f32 has half as many.
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
MOST_STREAMED = 64  # rows: one slice-K group's sums fill its registers then
MOST_SUMS = 2048  # of one warp: 64 registers a thread
MOST_AHEAD = 4096  # elements of the left operand in one slice: the compiler loads fragments of all of it ahead
STREAM_COLS = (16, 32, 64)
STREAM_K = (64, 128)
STREAM_SLICE_K = (2, 4, 8)
STREAM_STAGES = (3, 4, 6)
REGISTER_STAGES = (2,)  # through registers one slice is on its way, whatever the ring's length
CLUSTERS = (1, 2, 4)
MOST_PASSES_AHEAD = 8  # of a thread over its sums, for all of which it reads operands first
UNROLLED = 4  # of more passes
IN_FLIGHT = 24 * 1024  # bytes that an SM must ask for ahead, at least, to be worth a candidate


@dataclass(frozen=True)
class MmaDraft(ProductDraft):
    """What all tiles of one chain share."""

    accesses: Mapping[tuple[str, str], Access]  # by tensor, and by the place it is used in

    @cached_property
    def left(self) -> tuple[Operand, ...]:
        return left_factors(self)

    @cached_property
    def rights(self) -> Mapping[Node, Operand]:
        """The right factor of each product."""
        return right_factors(self)

    @property
    def chunk(self) -> int:
        return chunk_of(self.dtype)

    def deep(self, tile: GemmTile) -> GemmTile:
        """The tile, whose k is in elements of two bytes, with as many bytes of the factors'."""
        return replace(tile, k=tile.k * 2 // self.dtype.bytes)

    @property
    def rows(self) -> int:
        """Of one product, at the default sizes."""
        return self.extents[-1]


def gemm(graph: Graph, target: Target, layout: Layout) -> Iterator[GemmPlan]:
    """Every tile that fits the target."""
    drawn = draft(graph, target, layout)
    for tile, atom in tiles(drawn):
        if fits(drawn, tile, atom):
            yield candidate(drawn, tile, atom)


def draft(graph: Graph, target: Target, layout: Layout) -> MmaDraft:
    hoisted, parts = taken_apart(graph)
    if not target.atoms_of("warp", dtype := parts.lefts[0].dtype):
        raise NoMatch(f"{target.arch} has no matrix instruction of a warp for factors of {dtype}")
    if len(parts.lefts) > 1:
        raise NoMatch(f"{len(parts.lefts)} left factors; the products of one kernel share theirs")
    need_plain_rights(parts)
    for group in (found := groups(hoisted, parts)):
        need_countable(size_of(group.width, graph.sizes))
    need_countable(size_of(parts.products[0].contracted, graph.sizes))
    dims = product_dims(hoisted, layout)
    return MmaDraft(graph, hoisted, target, layout, parts, found, dims, named_accesses(hoisted, dims, layout, parts))


def named_accesses(
    graph: Graph, dims: tuple[RowDim, ...], layout: Layout, parts: Split
) -> Mapping[tuple[str, str], Access]:
    """Each use of each tensor. One that is used in several ways has a name for each, and strides of its own."""
    names = value_names(graph)
    found = [use for use in uses(graph) if not passes_by(use, parts)]
    often = {use.tensor.name for use in found if sum(u.tensor is use.tensor for u in found) > 1}
    made = {}
    for use in found:
        output = any(use.tensor is t for t in graph.outputs)
        name = use.tensor.name if output else names[use.tensor.node]
        if use.tensor.name in often and use.place != "tile":
            name = f"{name}_{use.place}"
        most = chunk_of(parts.products[0].left.dtype) * use.tensor.dtype.bytes
        access = access_of(graph, dims, layout, use, name, widest(graph, layout, use, most))
        made[use.tensor.name, use.place] = replace(access, vector_bytes=min(access.vector_bytes, VECTOR_BYTES))
    return made


def passes_by(use: Use, parts: Split) -> bool:
    """Is this what a statistic takes from the left operand as it passes?"""
    left = parts.lefts[0].operand
    read = {t.name for t in (*parts.inputs, *parts.graph.outputs)}
    return left is not None and use.place == "tile" and use.tensor is left and use.tensor.name not in read


# ---------------------------------------------------------------- tiles


def tiles(drawn: MmaDraft) -> Iterator[tuple[GemmTile, Atom]]:
    """Tiles worth trying at this many rows, each with the instruction that fills it."""
    shared = TILES if drawn.target.async_copies else WAVES
    for tile in map(drawn.deep, shared.get(drawn.together, ())):
        if tile.rows <= 32 or tile.rows < 2 * drawn.rows:
            for cluster in CLUSTERS:
                split = replace(tile, cluster=cluster)
                if cluster == 1 or (cluster <= drawn.target.max_cluster and idle(drawn, split)):
                    yield split, atom_of(drawn)
    if drawn.rows <= MOST_STREAMED or drawn.together not in shared:
        yield from streams(drawn)


def atom_of(drawn: MmaDraft, streams: bool = False) -> Atom:
    """Tiles take the largest that a warp issues; few rows the smallest, which has the fewest."""
    found = drawn.target.atoms_of("warp", drawn.dtype)
    return found[-1] if streams else found[0]


def streams(drawn: MmaDraft) -> Iterator[tuple[GemmTile, Atom]]:
    atom = atom_of(drawn, streams=True)
    rows = atom.rows
    while rows < min(drawn.rows, MOST_STREAMED):
        rows *= 2
    for cols in STREAM_COLS:
        for k in STREAM_K:
            if drawn.together * rows * cols > MOST_SUMS or rows * k > MOST_AHEAD:
                continue
            for slice_k in STREAM_SLICE_K:
                for stages in STREAM_STAGES if drawn.target.async_copies else REGISTER_STAGES:
                    for cluster in CLUSTERS:
                        tile = drawn.deep(GemmTile(rows, cols, k, stages, 1, 1, slice_k, cluster, group=1))
                        if cluster <= drawn.target.max_cluster and worthwhile(drawn, tile):
                            yield tile, atom


def worthwhile(drawn: MmaDraft, tile: GemmTile) -> bool:
    """Has every slice-K group a few slices, and an SM enough on its way?"""
    slices = drawn.k // (tile.k * tile.split_k)
    room = shared_bytes(tile, drawn.dtype, drawn.together, len(drawn.parts.statistics))
    blocks = max(1, drawn.target.shared_per_sm // (room + drawn.target.shared_reserved))
    small = (tile.cols, tile.k * drawn.dtype.bytes, tile.slice_k, tile.cluster) == (32, 128, 2, 1)
    few = small and tile.stages <= min(STREAM_STAGES)
    return few or (
        slices >= 2
        and room * min(blocks, 3) >= IN_FLIGHT
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
    right = drawn.rights.values()
    run = run_of(tile, atom, all(f.along for f in right))
    if shared_bytes(tile, drawn.dtype, drawn.together, len(drawn.parts.statistics), run) > target.shared_bytes:
        return False
    if slice_k_threads * tile.slice_k > target.threads_per_block:
        return False
    held = elements(drawn, tile) if tile.slice_k == 1 else 0  # streams have no others to give way to
    if gemm_registers(tile, atom, drawn.dtype, drawn.together) + held > min(target.registers_per_thread, 255):
        return False
    if tile.persistent and not can_persist(drawn, tile):
        return False
    if tile.warp_rows % atom.rows or tile.warp_cols % atom.cols or tile.k % (2 * atom.k):
        return False
    return all(chunks_fit(f, tile, slice_k_threads, drawn.chunk) for f in (*drawn.left, *right))


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
    tile's slices by then. f32 factors and clusters were not measured.
    """
    factors = (*drawn.left, *drawn.rights.values())
    if drawn.dtype is f32 or drawn.parts.statistics or drawn.parts.lefts[0].operand is None:
        return False
    if tile.cluster > 1 or drawn.k % (tile.stages * tile.k):
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


def chunks_fit(factor: Operand, tile: GemmTile, slice_k_threads: int, chunk: int) -> bool:
    """Has every thread a whole number of the factor's chunks to bring, and are lines along M or N, whose
    addresses are XOR-swizzled, a power of 2 long?"""
    extent = tile.rows if factor.mn == "rows" else tile.cols
    if not factor.tile_along and extent & (extent - 1):
        return False
    beside = (tile.k if factor.along else extent) // chunk
    return slice_k_threads % beside == 0 and extent * tile.k // chunk % slice_k_threads == 0


# ---------------------------------------------------------------- factors


def left_factors(drawn: MmaDraft) -> tuple[Operand, ...]:
    """What the left operand is computed from: itself, or the tensors [.., M, K] of its prologue."""
    left = drawn.parts.lefts[0]
    if left.operand is not None:
        use = next(u for u in uses(drawn.hoisted) if u.place == "left")
        tensors = [(left.operand.name, "left", use)]
    else:
        tensors = []
    known = {name for name, _, _ in tensors}
    if not tensors and not left.inputs:
        raise NoMatch(
            "the left factor is computed from values of its rows alone, where one column is multiplied; "
            "write x * w in place of x @ w"
        )
    for tensor in [*left.inputs, *(t for s in drawn.parts.statistics for t in s.inputs)]:
        rows = tensor.shape[-2:-1] == drawn.graph.shape[-2:-1]  # else a vector [K]
        if rows and tensor.name not in known:
            known.add(tensor.name)
            tensors.append((tensor.name, "tile", Use(tensor, "left")))
    found = []
    for name, place, use in tensors:
        access = drawn.accesses[name, place]
        line = access.line if place == "left" else -1
        copied = drawn.target.async_copies and access.mode == "vector" and access.dtype is drawn.dtype
        transport: Transport = "cp.async" if copied and len(tensors) == 1 else "plain"
        found.append(operand(drawn, access, "rows", line == use.k_axis, transport))
    return tuple(found)


def right_factors(drawn: MmaDraft) -> Mapping[Node, Operand]:
    """The right factor of each product."""
    found = {}
    for product in drawn.parts.products:
        assert product.right.operand is not None
        access = drawn.accesses[product.right.operand.name, "right"]
        use = Use(product.right.operand, "right", product.right.transposed)
        transport: Transport = "plain"
        if drawn.target.async_copies and access.mode == "vector":
            transport = "cp.async evict-first" if read_once(drawn, access) else "cp.async"
        found[product.node] = operand(drawn, access, "cols", access.line == use.k_axis, transport)
    if len(drawn.groups) == 1:
        return found
    if len({f.along for f in found.values()}) > 1:
        found = {node: one_by_one(f) for node, f in found.items()}
    return alike(drawn, found)


def one_by_one(f: Operand) -> Operand:
    """A right factor beside others that lie the other way round: an output group's strides say how its own lies."""
    stride, step = (f.stride, "1") if f.along else ("1", f.stride)
    return replace(f, along=True, tile_along=True, transport="plain", width=1, stride=stride, step=step)


def alike(drawn: MmaDraft, found: Mapping[Node, Operand]) -> Mapping[Node, Operand]:
    """Right factors of several output groups, which the same instructions bring: as few elements at a time as any of
    them allows, and along each batch axis that one of them moves along."""
    factors = found.values()
    width = min(f.width for f in factors)
    transport: Transport = "cp.async" if all(f.copied for f in factors) else "plain"
    if all(f.evict_first for f in factors):
        transport = "cp.async evict-first"
    indices = [dim.index for dim in drawn.dims[:-1] if any(dim.index == index for f in factors for index, _ in f.batch)]
    return {
        node: replace(f, transport=transport, width=width, batch=tuple((i, dict(f.batch).get(i, "0")) for i in indices))
        for node, f in found.items()
    }


def read_once(drawn: MmaDraft, access: Access) -> bool:
    """Do all rows that a right factor is multiplied with pass by together?"""
    batches = range(len(drawn.dims) - 1)
    return access.vector == drawn.chunk and drawn.rows <= MOST_STREAMED and all(i in access.strided for i in batches)


def operand(drawn: MmaDraft, access: Access, mn: Literal["rows", "cols"], along: bool, transport: Transport) -> Operand:
    names = {t.name: value_names(drawn.hoisted)[t.node] for t in drawn.hoisted.inputs}
    last = len(drawn.dims) - 1
    batch = tuple((drawn.dims[i].index, stride_of(drawn, access, i)) for i in access.strided if i != last)
    stride = f"{access.name}_ld" if access.ld_axis is not None else stride_of(drawn, access, last)
    return Operand(
        access=access,
        mn=mn,
        along=along,
        tile_along=along or not drawn.target.async_copies,
        transport=transport,
        width=access.vector if access.mode == "vector" else 1,
        pointer=f"{names[access.tensor]}_ptr",
        stride=stride,
        batch=batch,
    )


def stride_of(drawn: MmaDraft, access: Access, dim: int) -> str:
    return stride_name(access, drawn.dims, dim)


# ---------------------------------------------------------------- a plan


def candidate(drawn: MmaDraft, tile: GemmTile, atom: Atom) -> GemmPlan:
    graph, hoisted, target = drawn.graph, drawn.hoisted, drawn.target
    left, right = drawn.left, drawn.rights
    used = {f.access.tensor: f.access for f in left}
    by_tensor = {name: access for (name, place), access in drawn.accesses.items() if place == "tile"}
    along = all(f.along for f in right.values())
    run = run_of(tile, atom, along)
    if drawn.parts.lefts[0].operand is not None and not left[0].along and drawn.parts.statistics:
        raise NoMatch("the left operand lies by columns, and sums along its rows are taken as it passes by rows")
    prologue = prepared(drawn, left, {**by_tensor, **used})
    factor = Left(left, prologue)
    contractions = {
        node: Contraction(factor, operand, atom, tile.accumulators(atom), value_names(hoisted)[node])
        for node, operand in right.items()
    }
    output_groups = tuple(
        taken(drawn, tile, atom, run, output_group)
        for output_group in spans_of(drawn, contractions, by_tensor, tile.cols, min(drawn.chunk, run or drawn.chunk))
    )
    accesses = tuple(drawn.accesses.values())
    statistics = len(drawn.parts.statistics)
    evict_first = all(f.evict_first for f in right.values())
    askew = max(lying(f.access, hoisted) for f in (*left, *right.values()))
    narrow = max((drawn.chunk / f.width for f in (*left, *right.values()) if f.width > 1), default=1.0)
    work = ProductWork(
        tile, atom, drawn.dtype, drawn.together, sum(each.tiles for each in output_groups), drawn.k, along,
        prologue is not None, statistics, evict_first, askew, narrow, elements(drawn, tile), counted(drawn, tile),
    )  # fmt: skip
    return GemmPlan(
        name=entry_name(graph),
        graph=graph,
        hoisted=hoisted,
        target=target,
        layout=drawn.layout,
        rule="gemm",
        template="gemm.cu.j2",
        regime=regime(tile),
        cols=graph.cols,
        row_dims=drawn.dims,
        accesses=accesses,
        params=product_params(hoisted, drawn.dims, accesses),
        folded=False,
        shared_bytes=shared_bytes(tile, drawn.dtype, drawn.together, statistics, run),
        cost=estimate(graph, target, work),
        decisions=decisions(graph),
        rounding=product_rounding(graph, target),
        tile=tile,
        k=drawn.k,
        dtype=drawn.dtype,
        output_groups=output_groups,
    )


def taken(drawn: MmaDraft, tile: GemmTile, atom: Atom, run: int, output_group: OutputGroup) -> OutputGroup:
    """How a thread takes the sums, and what it reads before: of few passes what each reads, and what all of them share
    where its columns stay."""
    if run:  # a lane's sums of each instruction, in two rows
        pieces = run // output_group.vector
        passes, columns_stay = tile.warp_rows // atom.rows * 2 * pieces, pieces == 1
    else:
        threads = tile.warps * tile.slice_k * drawn.target.warp * tile.cluster
        passes, columns_stay = -(-tile.band_rows * tile.cols // output_group.vector // threads), False

    def ahead(load: Load) -> bool:
        moving = len(drawn.dims) - 1 in load.access.strided
        return passes <= MOST_PASSES_AHEAD if moving else columns_stay

    loads = tuple(replace(load, when="ahead" if ahead(load) else "now") for load in output_group.loads)
    read = any(load.when == "ahead" and len(drawn.dims) - 1 in load.access.strided for load in loads)
    whole = run or read or passes <= UNROLLED
    return replace(output_group, loads=loads, passes=passes, unrolled=passes if whole else UNROLLED)


def prepared(drawn: MmaDraft, factors: tuple[Operand, ...], accesses: Mapping[str, Access]) -> Prologue | None:
    """What is computed of the left operand's elements; None where they go as they are."""
    graph, parts = drawn.hoisted, drawn.parts
    left = parts.lefts[0]
    if left.operand is not None and not parts.statistics:
        return None
    for statistic in parts.statistics:
        if statistic.node.op.name != "sum" or statistic.node.dtype is not f32:
            raise NoMatch(
                f"{statistic.node.op.name} of {statistic.node.dtype} at {statistic.node.where}: gemm takes sums of f32 "
                "along the rows that it multiplies, and nothing else of them"
            )
    needed = within(graph, left.node, *(s.node.inputs[0] for s in parts.statistics))
    if first := next((n for n in graph.nodes if n in needed and n.op.kind is Kind.REDUCE), None):
        raise NoMatch(
            f"the left factor needs {first.op.name} at {first.where} of its own row before it is multiplied; gemm "
            "reads the row once\n  only a scale of the whole row can wait until the products are summed, and only one "
            "that is surely finite, as F.rsqrt(F.mean(x * x) + 1e-6) is"
        )
    if any(n.op.name in ("row_index", "col_index") for n in needed):
        raise NoMatch("the left factor is computed from a position; gemm computes it from operands alone")
    return prologue_of(graph, parts, (f.access.tensor for f in factors), accesses)


def regime(tile: GemmTile) -> str:
    shape = f"{tile.rows} x {tile.cols}"
    persistent = ", copies interleaved with the products; persistent blocks" if tile.persistent else ""
    slices = f"slices of {tile.k} in a ring of {tile.stages}{persistent}"
    if tile.split_k == 1:
        return f"{shape} tiles of {tile.warps} warps, {slices}"
    groups = f"slice-K by {tile.slice_k} groups of warps" if tile.slice_k > 1 else ""
    blocks = f"split-K by a cluster of {tile.cluster} blocks" if tile.cluster > 1 else ""
    each = " for each group" if groups else ""
    return f"{shape} tiles, {' and '.join(filter(None, (groups, blocks)))}; {slices}{each}"
