"""Products on Hopper's tensor cores: tensor copies bring both factors as they lie, wgmma sums, registers hold the rest.

What a tensor copy moves is a box of a tensor at a multiple of 16 bytes, with strides in multiples of 16 bytes: factors
that lie otherwise, and right factors that are computed, are the general rule's, `gemm`.

What measurements on an H200 decided (docs/measurements.md, "Products on Hopper"):

- Two warpgroups have tiles of 128 x 128 each (ping-pong), which hides what stands behind a product, or share one
  of 128 x 256 (cooperative), which moves less through shared memory and is faster for large products of f32 by tf32.
- A left factor that is computed goes to the tensor cores from registers: a group prepares a slice while the other one
  multiplies. A tile's sums are stored behind the next one's products, where the left factor is quickly prepared; where
  it takes longer, it is better prepared within its tile, and stored at its end.
- Where tiles are few, other widths fill the SMs, and the blocks of a cluster share a tile's K (split-K).
- f32 is rounded to tf32 by the tensor copies: to even, and to an infinity beyond the largest tf32.
- Rows that an index names are copied by the producer's threads, 16 bytes each, as the weights come by tensor copies. An
  mbarrier is told of them once they are there, and consumers fence: a thread that fences waits for all of its own
  copies, and took 1.1 to 1.2 times as long. Tensor copies of single rows took 4 times as long.
- Cache hints, tensor maps fetched ahead and boxes without the rows beyond the last gained nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self, get_args

from fusegen.language.block_products import BLOCK
from fusegen.language.graph import Graph, Node, Tensor
from fusegen.language.naming import entry_name, value_names
from fusegen.language.products import Split
from fusegen.language.types import f32, size_of, tf32
from fusegen.planner.cost import decisions
from fusegen.planner.matching import NoMatch, NotFor
from fusegen.planner.model import Access, Cost, Layout, Load, Param, Store
from fusegen.planner.parts import BOXED, Transport
from fusegen.planner.pieces import VECTOR_BYTES
from fusegen.planner.products.factors import (
    Use,
    access_of,
    line_of,
    no_unit,
    product_dims,
    product_params,
    uses,
    widest,
)
from fusegen.planner.products.gemm_duration import lying
from fusegen.planner.products.in_step import said
from fusegen.planner.products.output_groups import (
    Group,
    ProductDraft,
    groups,
    need_one_scaling,
    need_operands,
    need_plain_groups,
    need_plain_rights,
    need_whole_groups,
    prologue_of,
    rows_at,
    spans_of,
    taken_apart,
)
from fusegen.planner.products.parts import (
    BlockScales,
    Contraction,
    Left,
    Operand,
    OutputGroup,
    Prologue,
)
from fusegen.planner.products.product_cost import product_rounding, tiles_down
from fusegen.planner.products.slice_scales import scale_bytes
from fusegen.planner.products.wgmma import PLACE_BYTES, WgmmaPlan, WgmmaWork, box_cols, regime, vector_bytes
from fusegen.planner.products.wgmma_cost import estimate
from fusegen.planner.products.wgmma_operands import (
    QUAD_COLS,
    VECTOR_COLS,
    boxed,
    brought,
    by_quads,
    holds_groups,
    prepared_matrix,
    scales,
    unaligned,
)
from fusegen.planner.products.wgmma_tiles import (
    LINE_ELEMENTS,
    GroupSchedule,
    WgmmaTile,
    promoted_tiles,
    tiles_of_few,
    tiles_of_many,
)
from fusegen.planner.tile import LINE_BYTES
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target

MOST_ROWS = 128
FEW_ROWS = 64  # up to which weights are streamed
MOST_ROUNDS = 4  # of tiles on all SMs
LEAST_SLICES = 4  # of a block that shares a tile
CLUSTERED_SHARE = {4: 0.91, 8: 0.9}  # of an H200's SMs, 120 have room for clusters of four
MOST_BATCHES = 1  # row dimensions beside the products' rows: tensor copies of three axes
MOST_EARLY_BYTES = 4  # bytes of all vectors' elements: a thread keeps 32 or 64 of each while it sums
LEAST_COLS = 16  # of a box that is stored: a sector of 32 bytes a row
LEAST_STAGES = 3
MOST_PRODUCTS = 2  # whose sums a thread has registers for


def wgmma(graph: Graph, target: Target, layout: Layout) -> Iterator[WgmmaPlan]:
    """Every tile, ping-pong and cooperative."""
    if not target.wgmma:
        raise NotFor(f"{target.arch} has no wgmma; sm_90a has")
    hoisted, parts = taken_apart(graph)
    first = parts.products[0]
    if not target.atoms_of("warpgroup", first.left.dtype, first.right.dtype):
        raise NoMatch(no_unit(target, "wgmma", first.left.dtype, first.right.dtype))
    found = groups(hoisted, parts)
    check(hoisted, parts, found, "wgmma", gathers=True, inner=True)
    drafts = {
        schedule: WgmmaDraft.of(graph, hoisted, parts, found, target, layout, schedule)
        for schedule in get_args(GroupSchedule)
    }
    plans = [plan for drawn in drafts.values() for tile in drawn.tiles() for plan in drawn.plans(tile)]
    if not plans:
        raise NoMatch(
            f"slices of the factors, and of the vectors that the left one is computed from, take more than the "
            f"{target.shared_bytes} bytes of shared memory of a block"
        )
    yield from plans


def check(
    graph: Graph, parts: Split, found: tuple[Group, ...], unit: str, *, codes: bool = False, gathers: bool = False,
    inner: bool = False,
) -> None:  # fmt: skip
    """Raises NoMatch for what the template has no place for; `unit`: what multiplies; `codes`: may right factors be?
    `gathers`: do its kernels find rows of the left factor by an index? `inner`: do they sum over groups?"""
    need_plain_rights(parts, codes=codes)
    need_whole_groups(found, graph)
    if len(parts.lefts) > 1:
        raise NoMatch(f"the products have different left factors; {unit}'s tile has one")
    if parts.products[0].node.inner_ends is not None:
        need_operands(parts)
    if parts.products[0].node.inner_ends is not None and not inner:
        raise NoMatch(f"the products are summed over groups, which begin anywhere; {unit}'s slices are all of K")
    if parts.lefts[0].index is not None:
        if not gathers:
            raise NoMatch(
                "an index names the left factor's rows; tensor copies bring rows that lie one behind the other"
            )
        need_plain_rows(parts)
    if (together := len(found[0].products)) > MOST_PRODUCTS:
        raise NoMatch(f"{together} products are used together; {unit} has registers for the sums of {MOST_PRODUCTS}")
    for group in found:
        if (cols := size_of(group.width, graph.sizes)) % 2:
            raise NoMatch(f"rows of {cols} columns; a thread of {unit} holds pairs of them")
        for tensor in group.outputs:
            if tensor.shape[-1] != group.width and tensor.node not in graph.grouped:
                raise NoMatch(f"{tensor.name} has one value a row; {unit} stores tiles")


def need_plain_rows(parts: Split) -> None:
    """Raises NoMatch for rows that an index names where more than copies of 16 bytes is to be made of them."""
    product = parts.products[0]
    where = f"an index names the left factor's rows at {product.node.where}"
    if parts.lefts[0].dtype is f32:
        raise NoMatch(f"{where}, of f32; tensor copies alone round that to tf32")
    if any(p.scales for p in parts.products):
        raise NoMatch(f"{where}, and their blocks have scales; wgmma's kernels read those by the products' rows")


@dataclass(frozen=True)
class WgmmaDraft(ProductDraft):
    """What a schedule's tiles share. `access`: how each use of a tensor is read or written, by its tensor's name."""

    rule: ClassVar[str] = "wgmma"
    made: ClassVar[type[WgmmaPlan]] = WgmmaPlan
    brings_operands: ClassVar[bool] = True  # of the epilogue, behind a tile's slices
    tells_places: ClassVar[bool] = True  # does the producer tell where a tile of a group lies?

    schedule: GroupSchedule
    access: Mapping[str, Access]
    factors: Mapping[str, Use]

    @classmethod
    def of(
        cls, graph: Graph, hoisted: Graph, parts: Split, found_groups: tuple[Group, ...], target: Target,
        layout: Layout, schedule: GroupSchedule,
    ) -> Self:  # fmt: skip
        dims = product_dims(hoisted, layout)
        if len(dims) > 1 and parts.lefts[0].index is not None:
            raise NoMatch("an index names the left factor's rows, of several products; wgmma finds those of one")
        if len(dims) - 1 > MOST_BATCHES:
            beside = f"{len(dims) - 1} dimensions of products beside their rows"
            raise NoMatch(f"{beside}; {cls.rule}'s tensor copies pass {MOST_BATCHES}")
        names = value_names(hoisted)
        found: dict[str, Access] = {}
        factors: dict[str, Use] = {}
        matrix = prepared_matrix(hoisted, parts, cls.rule)
        # every tile's part of the ring is as long; ping-pong, boxes that wait for a tile's end hold up the other
        # group's slices: relu(x @ w.T + bias) + residual at 4096^3 took 1.055 so, 1.037 without, and 1.019 cooperative
        bring = cls.brings_operands and matrix is None and schedule == "cooperative" and not hoisted.grouped
        bring &= len(found_groups) == 1 and parts.lefts[0].index is None
        for use in uses(hoisted):
            name = use.tensor.name
            prepared = use.tensor is matrix
            if prepared and name in found:
                continue
            if name in found:
                raise NoMatch(f"{name} is used in two ways; {cls.rule} moves each tensor in one")
            if use.place in ("scale", "left scale"):
                found[name] = access_of(hoisted, dims, layout, use, names[use.tensor.node], 1)
                continue
            use = Use(use.tensor, "tile") if prepared else use
            width = widest(hoisted, layout, use)
            if use.place != "tile" or prepared:
                factors[name] = Use(use.tensor, "left") if prepared else use
                if width < VECTOR_BYTES // use.tensor.dtype.bytes:
                    raise NoMatch(f"{name} {unaligned(hoisted, layout, use)}; tensor copies need multiples of 16 bytes")
            elif use.tensor.node in hoisted.grouped:
                width = 1
            elif not boxed(hoisted, use, width) and not (bring and brought(hoisted, use, width)):
                width = QUAD_COLS if by_quads(hoisted, use, width) else min(width, 2)
            output = any(use.tensor is t for t in hoisted.outputs)
            word = name if output else names[use.tensor.node]  # in the kernel
            found[name] = access_of(hoisted, dims, layout, use, word, width)
        draft = cls(graph, hoisted, target, layout, parts, found_groups, dims, schedule, found, factors)
        if grouped := draft.segments or draft.inner_segments:
            found[grouped.ends.tensor] = grouped.ends
        draft.check_ways()
        if draft.scaled:
            need_one_scaling(draft)
        draft.check_along()
        draft.check_groups()
        return draft

    def check_ways(self) -> None:
        """Raises NoMatch where right factors of one tile lie in two ways: an instruction is told, for all its columns.
        Tiles of another output group have a main loop of their own, but for left factors that are prepared."""
        rights = self.rights
        for products in [group.products for group in self.groups] if self.matrix is None else [tuple(rights)]:
            ways = {rights[node].along: rights[node].access.tensor for node in products}
            if len(ways) > 1:
                one, other = ways.values()
                raise NoMatch(
                    f"{one} and {other} are multiplied side by side, and one lies along the summed axis and the other "
                    "across it\n  lay them alike, as in x @ w.T for all of them"
                )

    def block_scales(self) -> BlockScales | None:
        if not self.scaled:
            return None
        rows, *_ = (self.access[t.name] for t in self.parts.products[0].scales[0].inputs)
        cols = tuple(self.access[t.name] for p in self.parts.products for t in p.scales[1].inputs)
        return BlockScales(BLOCK, rows, cols)

    def check_along(self) -> None:
        """Raises NoMatch for factors that lie across K, or are computed, where these are none of 16 bits."""
        if not self.atom.along_k:
            return
        if self.matrix is not None:
            raise NoMatch(
                f"the left factor is computed from {self.matrix.name} of {self.dtype}; {self.rule} prepares halves"
            )
        for name, use in self.factors.items():
            if line_of(use, self.layout) != use.k_axis:
                kind = use.tensor.dtype
                raise NoMatch(
                    f"{name} is of {kind} and lies across the summed axis; {self.rule} takes {kind} along it only"
                )

    def check_groups(self) -> None:
        """Raises NoMatch for grouped products whose left factor has lines along rows: a tensor copy's first coordinate
        would be a group's first row, which an H200 answers with an illegal instruction."""
        need_plain_groups(self)
        for name, use in self.factors.items():
            if self.segments and use.place == "left" and line_of(use, self.layout) != use.k_axis:
                raise NoMatch(
                    f"{name} has rows next to each other, and those of a group begin anywhere; no tensor copy does"
                )
            if self.inner_segments and line_of(use, self.layout) == use.k_axis:
                raise NoMatch(
                    f"{name} lies along what is summed over, and groups of that begin anywhere; no tensor copy does"
                )

    def plan(self, tile: WgmmaTile) -> WgmmaPlan:
        graph = self.graph
        work = WgmmaWork(
            graph=graph,
            hoisted=self.hoisted,
            target=self.target,
            row_dims=self.dims,
            tile=tile,
            k=self.k,
            dtype=self.dtype,
            block_scales=self.block_scales(),
            segments=self.segments,
            inner_segments=self.inner_segments,
            promote=self.promote(tile.atom),
            output_groups=self.output_groups(tile),
        )
        return self.made(
            **vars(work),
            name=entry_name(graph),
            layout=self.layout,
            rule=self.rule,
            template=f"{self.rule}.cu.j2",
            regime=self.regime(tile) + said(work.tiles_in_step),
            cols=graph.cols,
            accesses=tuple(self.access.values()),
            params=self.params(tile),
            folded=False,
            shared_bytes=self.shared_bytes(tile),
            decisions=decisions(graph),
            rounding=product_rounding(graph, self.target, tile.atom.sum_bits, work.promote),
            cost=self.cost(work),
        )

    def cost(self, work: WgmmaWork) -> Cost:
        return estimate(work)

    @property
    def line(self) -> int:
        """Elements of a slice of what is summed."""
        return LINE_BYTES // self.dtype.bytes

    def regime(self, tile: WgmmaTile) -> str:
        return regime(tile, self.together, self.line, self.segments or self.inner_segments, self.gathers)

    def output_groups(self, tile: WgmmaTile) -> tuple[OutputGroup, ...]:
        """Those of all rules; boxes are moved by tensor copies, and vectors read before the sums are there, where that
        leaves a thread registers enough: several output groups' would take some, promoted sums do. So do a group's
        beside a matrix, which spilled 64 bytes, and beside rows that an index names: 12 to 20."""

        def read(load: Load) -> Load:
            ahead = few and not load.access.strided
            return replace(load, transport=self.transport(load.access), when="ahead" if ahead else "now")

        def written(store: Store) -> Store:
            eights = store.access.dtype.bytes == 1 and store.access.vector == QUAD_COLS
            quads = eights and box_cols(width // tile.split_k) % (4 * QUAD_COLS) == 0
            return replace(store, transport="quads" if quads else self.transport(store.access))

        width = tile.cols // self.together
        left = Left((self.operand(self.matrix or self.parts.lefts[0].operand, "rows"),), self.prologue)
        contractions = {
            node: Contraction(left, right, tile.atom, tile.accumulators(width), value_names(self.hoisted)[node])
            for node, right in self.rights.items()
        }
        found = tuple(spans_of(self, contractions, self.access, width, 2, in_registers=True))
        vectors = [load.access for output_group in found for load in output_group.loads if not load.access.strided]
        few = len(found) == 1 and sum(access.dtype.bytes for access in vectors) <= MOST_EARLY_BYTES
        matrices = any(load.access.strided for output_group in found for load in output_group.loads)
        few = few and not (self.gathers or self.promote(tile.atom) or (self.segments and matrices))
        return tuple(
            replace(
                output_group,
                loads=tuple(sorted(map(read, output_group.loads), key=in_turn)),
                stores=tuple(sorted(map(written, output_group.stores), key=in_turn)),
            )
            for output_group in found
        )

    @cached_property
    def atom(self) -> Atom:
        return self.target.atoms_of("warpgroup", self.dtype, self.right_dtype)[0]

    @cached_property
    def many(self) -> tuple[WgmmaTile, ...]:
        return (promoted_tiles if self.promote(self.atom) else tiles_of_many)(self.atom)

    @cached_property
    def rights(self) -> Mapping[Node, Operand]:
        """The right factor of each product."""
        return {p.node: self.operand(p.right.operand, "cols") for p in self.parts.products}

    def transport(self, access: Access) -> Transport:
        """Groups end inside of boxes, which tensor copies store whole."""
        if self.by_rows(access):
            return "rows"
        return "tensor" if self.is_mapped(access) else "plain"

    @property
    def lanes_store(self) -> bool:
        """As plans say it."""
        return bool(self.segments and self.promote(self.atom))

    def by_rows(self, access: Access) -> bool:
        """Do lanes store some rows of its boxes?"""
        return access.output and self.segments is not None and self.is_boxed(access)

    def suits(self, tile: WgmmaTile) -> bool:
        """Can each block of a cluster bring a part of every right factor? Lines along columns are brought whole. Does
        another group multiply while one prepares its left factor? And are tiles few, where the tile is for that?"""
        if self.matrix is not None and tile.schedule == "pingpong":
            return False
        if (self.segments or self.inner_segments) and tile.split_k > 1:  # the device counts tiles, or slices
            return False
        whole = need_whole_groups(self.groups, self.hoisted)  # columns that a tile has to have
        if whole and (tile.split_k > 1 or not holds_groups(self.hoisted, tile.cols // self.together, whole)):
            return False
        if (promote := self.promote(tile.atom)) and tile.parts * tile.across > 1:
            if promote > LINE_BYTES // self.dtype.bytes:  # sums of both parts would wait
                return False
            if self.brings:  # boxes of so many rows are longer than a slice of the right factor
                return False
        if self.scaled and (tile.cols // self.together % (BLOCK // 2) or self.k // BLOCK % tile.split_k):
            return False
        streamed = self.rows <= FEW_ROWS and not self.scaled  # by mma.sync, which scales no blocks
        if tile not in self.many and (streamed or not self.few(tile)):
            return False
        if tile.cols // self.together // tile.split_k % LEAST_COLS:
            return False
        share = tile.cols // self.together // tile.cluster
        return share % LINE_ELEMENTS == 0 or all(right.along for right in self.rights.values())

    @property
    def even_rows(self) -> int:
        """Rows of as many tiles as 128 of each make, all alike. What a tensor copy fills with zeros beyond the last row
        takes as long as what it reads, and longer: x @ w.T at 65 x 4096 x 4096 took 26.6 us in tiles of 128 x 64, and
        at 128 x 4096 x 4096 21.1."""
        rows = max(1, MOST_ROWS if self.segments else self.extents[-1])  # groups have any number
        even = -(-rows // -(-rows // MOST_ROWS))
        return -(-even // self.atom.warp_rows) * self.atom.warp_rows

    def few(self, tile: WgmmaTile) -> bool:
        """Is the GPU filled so few times that another width may fill it better? Of those that blocks share, have all
        room at once, and has each block some slices? Rows of a left factor whose lines run along them may lie so that
        copies can't move it, and another kernel sums in another order: there blocks share none, so that a row's bits
        are the same whatever lies beside it."""
        *others, rows = self.extents
        across = sum(-(-size_of(g.width, self.graph.sizes) // (tile.cols // self.together)) for g in self.groups)
        down = tiles_down(self.graph, tile.rows) if self.segments else -(-rows // tile.rows)
        tiles = math.prod(others) * down * across
        if tile.split_k == 1:
            return tiles <= MOST_ROUNDS * self.target.sms
        slices = self.k * self.dtype.bytes // LINE_BYTES
        left = self.matrix or self.parts.lefts[0].operand
        room = int(CLUSTERED_SHARE.get(tile.split_k, 1.0) * self.target.sms)
        fits = tiles * tile.split_k <= room and slices >= LEAST_SLICES * tile.split_k
        return fits and self.operand(left, "rows").along

    def tiles(self) -> Iterator[WgmmaTile]:
        """Those of this schedule. Where lines of right factors start between sectors, what is brought once for the
        blocks of a cluster is worth more: there others than the usual ones have them as well."""
        yield from (tile for tile in self.many if tile.schedule == self.schedule)
        few = [replace(tile, rows=self.even_rows) for tile in tiles_of_few(self.atom) if tile.schedule == self.schedule]
        few = [tile for tile in few if tile not in self.many]
        yield from few
        if any(lying(right.access, self.graph) > 1.0 for right in self.rights.values()):
            yield from (replace(tile, cluster=2) for tile in few if tile.split_k == 1)

    def plans(self, tile: WgmmaTile) -> Iterator[WgmmaPlan]:
        """At most one."""
        if self.suits(tile) and (fitted := self.fitted(tile)):
            yield self.plan(fitted)

    def fitted(self, tile: WgmmaTile) -> WgmmaTile | None:
        """The tile with as many stages as shared memory has room for: where tiles are few, fewer do."""
        least = tile.stages if tile in self.many else max(LEAST_STAGES, -(-tile.exchange_bytes // tile.right_bytes))
        while self.shared_bytes(tile) > self.target.shared_bytes and tile.stages > least:
            tile = replace(tile, stages=tile.stages - 1)
        return tile if self.shared_bytes(tile) <= self.target.shared_bytes else None

    def shared_bytes(self, tile: WgmmaTile) -> int:
        statistics = tile.statistics_bytes(len(self.parts.statistics))
        found = tile.shared_bytes + tile.stages * vector_bytes(self.prologue) + statistics
        found += scale_bytes(tile.rows, tile.held_rows, tile.cols, tile.stages) if self.scaled else 0
        if not (self.segments and self.tells_places) or self.prologue:
            return found
        return -(-found // PLACE_BYTES) * PLACE_BYTES + tile.stages * PLACE_BYTES

    # ---- tensors

    @cached_property
    def matrix(self) -> Tensor | None:
        """What the left factor is computed from, or its rows' statistics; None where it goes as it lies."""
        return prepared_matrix(self.hoisted, self.parts, self.rule)

    @cached_property
    def prologue(self) -> Prologue | None:
        matrix, graph = self.matrix, self.hoisted
        if matrix is None:
            return None
        left = self.parts.lefts[0].node
        scale = next((t for t in graph.inputs if t is not matrix and scales(left, matrix, t)), None)
        return prologue_of(graph, self.parts, [matrix.name], self.access, scale)

    def operand(self, tensor: Tensor | None, side: Literal["rows", "cols"]) -> Operand:
        assert tensor is not None  # check() saw to it
        along = line_of(self.factors[tensor.name], self.layout) == self.factors[tensor.name].k_axis
        access = self.access[tensor.name]
        if access.gathered is None:
            return Operand(access, side, along, along, "tensor")
        rows = rows_at(self.hoisted, self.parts.lefts[0], access, self.access)
        return Operand(access, side, along, along, "cp.async", rows_at=rows)

    @property
    def gathers(self) -> bool:
        """Are the left factor's rows those that an index names?"""
        return self.parts.lefts[0].index is not None

    def params(self, tile: WgmmaTile) -> tuple[Param, ...]:
        """Those of every rule, with a map in place of the pointer and the strides of what tensor copies move; of what
        lanes store besides, with all of them."""
        mapped = {name for name, access in self.access.items() if self.is_mapped(access)}
        both = {name for name, access in self.access.items() if self.by_rows(access)}
        found = []
        total = self.inner_segments.total if self.inner_segments else ""
        for param in product_params(self.hoisted, self.dims, self.access.values(), total):
            if param.tensor in mapped and param.kind == "pointer":
                found.append(self.map(param, tile))
                param = replace(param, kind="address")
            if param.tensor not in mapped - both or param.kind == "size":
                found.append(param)
        return tuple(found)

    @property
    def brings(self) -> bool:
        """Do operands of the epilogue come by tensor copies?"""
        beside = (a for a in self.access.values() if not a.output and a.tensor not in self.factors)
        return any(map(self.is_mapped, beside))

    def is_mapped(self, access: Access) -> bool:
        if access.tensor in self.factors:
            return access.gathered is None
        return self.is_boxed(access) and not (self.by_rows(access) and self.lanes_store)

    def is_boxed(self, access: Access) -> bool:
        """Does it come and go by boxes in shared memory?"""
        return access.vector == VECTOR_COLS and access.dtype.bytes == 2

    def map(self, pointer: Param, tile: WgmmaTile) -> Param:
        """The matrices of a tensor, and a batch axis where it has one."""
        access = self.access[pointer.tensor]
        rank = len(self.hoisted.shape)
        rows = access.axes or tuple(tuple(axis - rank for axis in self.dims[i].axes) for i in access.strided)
        matrix = ((access.ld_axis,),) if access.ld_axis is not None else ()
        group = ((access.group_axis,),) if access.group_axis is not None else ()
        box_axes = (*rows, *group, *matrix, (access.line,))
        box = (*[1] * (len(box_axes) - 2), *self.box(access, tile))
        dtype = tf32 if access.tensor in self.factors and access.dtype is f32 else access.dtype
        swizzle = box[-1] * dtype.bytes  # a whole line of the box
        return replace(
            pointer, kind="map", name=f"{access.name}_map", dtype=dtype, box_axes=box_axes, box=box, swizzle=swizzle
        )

    def box(self, access: Access, tile: WgmmaTile) -> tuple[int, int]:
        """What one copy moves: lines of 128 bytes, of all rows or columns of a tile where these are the lines."""
        if access.tensor not in self.factors:
            cols = box_cols(tile.cols // self.together // tile.split_k)
            return tile.box_rows if access.output else tile.rows, cols
        use = self.factors[access.tensor]
        if line_of(use, self.layout) != use.k_axis:
            return LINE_ELEMENTS, LINE_ELEMENTS
        line = LINE_BYTES // self.dtype.bytes
        if use.place == "left":
            return tile.rows, line
        return tile.cols // self.together // tile.cluster, line


def in_turn(part: Load | Store) -> tuple[bool, bool]:
    """In the order of a body: what is read ahead of the sums, what tensor copies move, and the rest by pairs."""
    return not (isinstance(part, Load) and part.when == "ahead"), part.transport not in BOXED
