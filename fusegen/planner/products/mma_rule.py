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
  off. gfx90a's and gfx950's matrix units multiply f32 as it is; for gfx942's xf32 a thread rounds what it stores there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fusegen.language.graph import Graph, Kind
from fusegen.language.naming import entry_name, value_names
from fusegen.language.types import DType, f4e2m1, f8e4m3, f32, i4, i8, size_of, u4
from fusegen.planner.cost import decisions
from fusegen.planner.heading import plural
from fusegen.planner.matching import NoMatch, need_countable
from fusegen.planner.model import Access, Layout, Load, Param
from fusegen.planner.products.factors import no_unit, product_dims, product_params
from fusegen.planner.products.gemm import (
    CODES_STEP,
    ROW_LANES,
    GemmPlan,
    GemmTile,
    run_of,
    shared_bytes,
)
from fusegen.planner.products.gemm_duration import estimate, lying
from fusegen.planner.products.halved import halves_text, units
from fusegen.planner.products.mma_operands import MmaDraft, named_accesses
from fusegen.planner.products.mma_tiles import counted, elements, fits, tiles, unscaled
from fusegen.planner.products.output_groups import (
    groups,
    need_one_scaling,
    need_operands,
    need_plain_groups,
    need_plain_rights,
    need_whole_groups,
    prologue_of,
    spans_of,
    taken_apart,
    within,
)
from fusegen.planner.products.parts import (
    Coding,
    Contraction,
    InnerSegments,
    Left,
    Operand,
    OutputGroup,
    Prologue,
    Segments,
)
from fusegen.planner.products.product_cost import product_rounding
from fusegen.planner.products.product_work import ProductWork
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

WIDENED: tuple[DType, ...] = (i8, i4, u4, f8e4m3, f4e2m1)
"""Codes that have a place in f16 and bf16, with what widens them in emitting.products.mma_codes."""
MOST_PASSES_AHEAD = 8  # of a thread over its sums, for all of which it reads operands first
UNROLLED_PASSES = 4  # of more passes


def gemm(graph: Graph, target: Target, layout: Layout) -> Iterator[GemmPlan]:
    """Every tile that fits the target."""
    drawn = draft(graph, target, layout)
    whole = need_whole_groups(drawn.groups, drawn.hoisted)
    shared = Shared(drawn)
    for tile, atom in tiles(drawn):
        if fits(drawn, tile, atom) and (not whole or holds_groups(drawn, tile, atom, whole)):
            yield candidate(shared, tile, atom)


@dataclass(frozen=True)
class Shared:
    """What all candidates of a draft have in common, made for the first of them."""

    drawn: MmaDraft

    @cached_property
    def by_tensor(self) -> Mapping[str, Access]:
        return {name: access for (name, place), access in self.drawn.accesses.items() if place == "tile"}

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        return tuple(self.drawn.accesses.values())

    @cached_property
    def factors(self) -> tuple[Operand, ...]:
        return (*self.drawn.left, *self.drawn.rights.values())

    @cached_property
    def left(self) -> Left:
        """Raises NoMatch for what no thread computes of the left operand."""
        drawn = self.drawn
        if drawn.parts.lefts[0].operand is not None and not drawn.left[0].along and drawn.parts.statistics:
            raise NoMatch("the left operand lies by columns, and sums along its rows are taken as it passes by rows")
        used = {f.access.tensor: f.access for f in drawn.left}
        return Left(drawn.left, prepared(drawn, drawn.left, {**self.by_tensor, **used}))

    @cached_property
    def params(self) -> tuple[Param, ...]:
        total = self.drawn.inner_segments.total if self.drawn.inner_segments else ""
        return product_params(self.drawn.hoisted, self.drawn.dims, self.accesses, total)

    @cached_property
    def askew(self) -> float:
        return max(lying(f.access, self.drawn.hoisted) for f in self.factors)

    @cached_property
    def narrow(self) -> float:
        return max((self.drawn.chunk / f.width for f in self.factors if f.width > 1), default=1.0)


def holds_groups(drawn: MmaDraft, tile: GemmTile, atom: Atom, cols: int) -> bool:
    """Has a warp so many columns, or where sums go through shared memory a tile, and no other block or warp a part of
    their sums?"""
    run = run_of(tile, atom, all(f.along for f in drawn.rights.values()))
    alone = tile.slice_k == 1 and tile.split_k == 1
    at_once = tile.warps * drawn.target.warp // ROW_LANES
    return alone and (tile.warp_cols == cols if run else tile.cols == cols and tile.band_rows % at_once == 0)


def draft(graph: Graph, target: Target, layout: Layout) -> MmaDraft:
    hoisted, parts = taken_apart(graph)
    first = parts.products[0]
    if not units(target, first.left.dtype, first.right.dtype, "warp"):
        raise NoMatch(no_unit(target, "matrix instruction of a warp", first.left.dtype, first.right.dtype))
    if len(parts.lefts) > 1:
        raise NoMatch(f"{len(parts.lefts)} left factors; the products of one kernel share theirs")
    coded = [p.right for p in parts.products if p.right.scaled]
    if not coded:
        need_plain_rights(parts)
    elif computed := next((p for p in parts.products if p.right.operand is None), None):
        where = computed.node.where
        raise NoMatch(f"the right factor of the product at {where} is computed element by element, beside one of codes")
    for group in (found := groups(hoisted, parts)):
        need_countable(size_of(group.width, graph.sizes))
    need_countable(size_of(parts.products[0].contracted, graph.sizes))
    dims = product_dims(hoisted, layout)
    drawn = MmaDraft(graph, hoisted, target, layout, parts, found, dims, named_accesses(hoisted, dims, layout, parts))
    need_plain_groups(drawn)
    if drawn.inner_segments:
        need_operands(parts)
    if coded:
        need_codes(drawn)
    if drawn.scaled:
        need_one_scaling(drawn)
    return drawn


def need_codes(drawn: MmaDraft) -> None:
    """Raises NoMatch for right factors of codes that no kernel widens on their way."""
    product, coding = drawn.parts.products[0], drawn.coding
    rights = drawn.rights.values()
    if coding is None or len({(f.bits, f.coding and (f.coding.code, f.coding.group)) for f in rights}) > 1:
        raise NoMatch("products of one kernel have right factors that are coded alike, or none of codes")
    where = f"the product at {product.node.where}"
    if drawn.target.atoms_of("warp", drawn.dtype)[0].kind != "mma" or drawn.dtype is f32:
        raise NoMatch(f"{where}: codes of {coding.code} are widened to f16 or bf16 on their way to mma.sync alone")
    if coding.code not in WIDENED:
        raise NoMatch(f"{where}: codes of {coding.code}; kernels widen {', '.join(map(str, WIDENED))}")
    if coding.zeros and (coding.code, coding.zero) != (u4, u4):
        raise NoMatch(
            f"{where}: zeros of {coding.zero} beside codes of {coding.code}; kernels take those of u4 beside u4"
        )
    if drawn.k % CODES_STEP or (coding.group and (coding.group % CODES_STEP or drawn.k % coding.group)):
        raise NoMatch(
            f"{where}: codes are widened {CODES_STEP} of K at a time, and K={drawn.k} and groups are of those"
        )
    left = drawn.parts.lefts[0]
    if len(drawn.groups) > 1 or len(drawn.dims) > 1 or left.operand is None or left.index or drawn.parts.statistics:
        raise NoMatch(f"{where}: beside codes the left factor is one matrix, and multiplied as it lies in memory")


def candidate(shared: Shared, tile: GemmTile, atom: Atom) -> GemmPlan:
    drawn, left = shared.drawn, shared.left
    graph, hoisted, target, right = drawn.graph, drawn.hoisted, drawn.target, drawn.rights
    along = all(f.along for f in right.values())
    run = run_of(tile, atom, along)
    names = value_names(hoisted)
    contractions = {
        node: Contraction(left, operand, atom, tile.accumulators(atom), names[node]) for node, operand in right.items()
    }
    widest = min(drawn.chunk, run or drawn.chunk)
    output_groups = tuple(
        taken(drawn, tile, atom, run, output_group)
        for output_group in spans_of(drawn, contractions, shared.by_tensor, tile.cols, widest, run > 0)
    )
    promote = atom.k if drawn.promote(atom) else 0  # as often as an instruction is issued, which costs no registers
    if drawn.scaled and atom.kind != "mma":
        promote = tile.k
    statistics = len(drawn.parts.statistics)
    evict_first = all(f.evict_first for f in right.values())
    work = ProductWork(
        tile, atom, drawn.dtype, drawn.together, sum(each.tiles for each in output_groups), drawn.k, along,
        left.prologue is not None, statistics, evict_first, shared.askew, shared.narrow, elements(drawn, tile),
        counted(drawn, tile), drawn.share, drawn.scales, bool(drawn.coding and drawn.segments),
        unscaled(drawn, tile, atom),
    )  # fmt: skip
    return GemmPlan(
        name=entry_name(graph),
        graph=graph,
        hoisted=hoisted,
        target=target,
        layout=drawn.layout,
        rule="gemm",
        template="gemm.cu.j2",
        regime=regime(tile, drawn.coding, drawn.segments or drawn.inner_segments),
        cols=graph.cols,
        row_dims=drawn.dims,
        accesses=shared.accesses,
        params=shared.params,
        folded=False,
        shared_bytes=shared_bytes(tile, drawn.dtype, drawn.together, statistics, run, drawn.share),
        cost=estimate(graph, target, work),
        decisions=decisions(graph),
        rounding=product_rounding(
            graph, target, atom.sum_bits, promote, halves_text((drawn.dtype, drawn.right_dtype), atom)
        ),
        tile=tile,
        k=drawn.k,
        dtype=drawn.dtype,
        block_scales=drawn.block_scales(),
        segments=drawn.segments,
        inner_segments=drawn.inner_segments,
        promote=promote,
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

    together = not output_group.steps or run  # else lanes that share a row take its columns in turn
    loads = tuple(replace(load, when="ahead" if together and ahead(load) else "now") for load in output_group.loads)
    read = any(load.when == "ahead" and len(drawn.dims) - 1 in load.access.strided for load in loads)
    whole = run or read or passes <= UNROLLED_PASSES
    return replace(output_group, loads=loads, passes=passes, unrolled=passes if whole else UNROLLED_PASSES)


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


def regime(tile: GemmTile, coding: Coding | None = None, segments: Segments | InnerSegments | None = None) -> str:
    return "; ".join([tile_text(tile), *(found.text for found in (coding, segments) if found)])


def tile_text(tile: GemmTile) -> str:
    shape = f"{tile.rows} x {tile.cols}"
    persistent = ", copies interleaved with the products; persistent blocks" if tile.persistent else ""
    slices = f"slices of {tile.k} in a ring of {tile.stages}{persistent}"
    if tile.split_k == 1:
        return f"{shape} tiles of {plural(tile.warps, 'warp', 'warps')}, {slices}"
    groups = f"slice-K by {tile.slice_k} groups of warps" if tile.slice_k > 1 else ""
    blocks = f"split-K by a cluster of {tile.cluster} blocks" if tile.cluster > 1 else ""
    each = " for each group" if groups else ""
    return f"{shape} tiles, {' and '.join(filter(None, (groups, blocks)))}; {slices}{each}"
