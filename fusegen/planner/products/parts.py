"""What plans of products are made of, all frozen: operands, a prologue, contractions, their output groups and plans.

`Factor` and `Product` are the chain's (fusegen.language.products); an `Operand` is a factor as a kernel brings it, a
`Contraction` a product as a kernel sums it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from fusegen.language.graph import Graph
from fusegen.language.types import DType
from fusegen.planner.model import Access, Argument, Body, Load, Plan, RowDim, Statement, Store
from fusegen.planner.parts import BOXED, Transport, used_by
from fusegen.targets.atoms import Atom
from fusegen.targets.base import Target


@dataclass(frozen=True, slots=True)
class Coding:
    """What the elements of a right factor stand for, which are codes: (code - zero) * scale.

    There are a scale and a zero for each `group` of K; for all of K where that is 0. A kernel multiplies code - zero,
    which the factors' type holds exactly, and scales the sums of a group in f32.
    """

    code: DType
    group: int
    scales: Access
    zeros: Access | None = None
    zero: DType | None = None  # of a zero, which may be one of two in a byte

    @property
    def text(self) -> str:
        every = f"every {self.group} of K" if self.group else "each column"
        return f"codes of {self.code} widened on their way to the tensor cores, sums scaled for {every}"


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales that sums of each `block` of K are multiplied by: one for each row, and one for `block` columns."""

    block: int
    rows: Access
    cols: tuple[Access, ...]  # of each product


@dataclass(frozen=True, slots=True)
class Segments:
    """Groups of rows that lie one behind the other, each of which is multiplied with right factors of its own.

    `ends`: behind which row each of the `count` groups ends. A tile has rows of one group alone, so that each group
    begins a tile. Rows of no group make tiles too, whose sums are 0."""

    ends: Access
    count: int

    @property
    def text(self) -> str:
        return f"each of rows of one of {self.count} groups"


@dataclass(frozen=True, slots=True)
class InnerSegments:
    """Groups of what is summed over, which lie one behind the other: a product is the sum over one of them.

    `ends`: behind which of `total`, an argument of the kernel, each of the `count` groups ends; `number`: the kernel's
    index of a group."""

    ends: Access
    count: int
    total: str
    number: str

    @property
    def text(self) -> str:
        return f"each summed over one of {self.count} groups"


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows that an index names: what it is made of, once for each row that a thread brings elements of, and the
    kernel's argument for how many rows there are."""

    loads: tuple[Load, ...]
    body: tuple[Statement, ...]
    index: Argument
    count: str


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that is multiplied, or that the left factor is computed from: how its slices get to shared memory.

    `mn`: the axis that is not summed over, rows of a left factor and columns of a right one. `along`: neighbours in
    memory differ in K, else in M or N. `tile_along`: the same of the slice in shared memory.

    The others say how threads find the elements that they bring; tensor copies have a map for that. `width`: elements
    that one copy or load moves. `stride`: the kernel's argument for the axis whose neighbours are not next to each
    other. `batch`: (index, stride argument) of each further dimension that the tensor moves along. `step`: the stride
    along K, where that is a run-time number; `along` then says in which order a thread takes elements, one by one, and
    not how they lie. `rows_at`: its rows are those that an index names.
    """

    access: Access
    mn: Literal["rows", "cols"]
    along: bool
    tile_along: bool
    transport: Transport
    width: int = 0
    pointer: str = ""
    stride: str = ""
    batch: tuple[tuple[str, str], ...] = ()
    step: str = ""
    coding: Coding | None = None
    rows_at: RowsAt | None = None

    @property
    def name(self) -> str:
        return self.access.name

    @property
    def bits(self) -> int:
        """Of an element."""
        return self.coding.code.bits if self.coding else self.access.dtype.bits

    @property
    def copied(self) -> bool:
        """Does it get into shared memory past the registers?"""
        return self.transport != "plain"

    @property
    def evict_first(self) -> bool:
        """Is the L2 cache told that it is read once?"""
        return self.transport == "cp.async evict-first"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prologue(Body):
    """A body for each of the left factor's elements, on their way to the tensor cores: made from tensors [.., M, K],
    from `vectors` [K], and from values [.., M, 1].

    `value` is rounded to the factors' type and multiplied. Reductions are sums along a row, which a thread takes of the
    elements that it prepares; their results are row values of the epilogue. Where the value is an element times that of
    a vector of its own type, `scale` may say so, and `body` leaves it out: f32 holds such a product exactly, so the
    instruction that multiplies two at a time and rounds each once gives the same.
    """

    vectors: tuple[Load, ...]  # those of the loads
    value: str
    changes: bool  # False: what is multiplied is the tensor itself, and only reductions are taken
    scale: Load | None = None

    @property
    def matrices(self) -> tuple[Load, ...]:
        return tuple(load for load in self.loads if load not in self.vectors)


@dataclass(frozen=True, slots=True)
class Left:
    """What a left factor is made of: the tensor itself, or the tensors [.., M, K] that its prologue takes."""

    operands: tuple[Operand, ...]
    prologue: Prologue | None = None


@dataclass(frozen=True, slots=True)
class Contraction:
    """left @ right, step by step along K. `value` names an element of the sums in the body behind them."""

    left: Left
    right: Operand
    atom: Atom
    accumulators: int  # sums of one thread
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputGroup(Body):
    """Contractions that are used together, of `cols` columns each, and a body for each element of their sums.

    A thread takes `vector` columns of a row at a time, `passes` times, `unrolled` of which the compiler lays out one
    behind the other. Loads "ahead" are read before the first. Where a tile's columns are reduced, that comes first,
    step by step: a step's reductions are of the tile's columns, its row body and row stores are of their results, which
    later steps and the body take. `held`: an element's value that the first step makes, which then takes the place of
    its sum in the first contraction.
    """

    contractions: tuple[Contraction, ...]
    cols: int
    first_tile: int  # of the tiles that lie side by side
    tiles: int
    vector: int
    passes: int = 1
    unrolled: int = 1
    steps: tuple[Body, ...] = ()
    held: str = ""

    @property
    def rights(self) -> tuple[Operand, ...]:
        return tuple(found.right for found in self.contractions)

    @property
    def asked(self) -> frozenset[str]:
        """The values that its elements are made of."""
        found = used_by(self.body) | {store.value for store in self.stores}
        return found.union(
            *(used_by(s.body) | {r.value for r in s.reductions} | used_by(s.row_body) for s in self.steps)
        )

    @property
    def brought(self) -> tuple[Load, ...]:
        """Loads by tensor copies, to shared memory."""
        return tuple(load for load in self.loads if load.transport == "tensor")

    @property
    def boxes(self) -> tuple[Store, ...]:
        """Stores by way of boxes in shared memory."""
        return tuple(store for store in self.stores if store.transport in BOXED)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """What a block, or the blocks of a cluster, sum at a time."""

    rows: int
    cols: int


@dataclass(frozen=True, kw_only=True)
class ProductWork:
    """Products of one left factor on tensor cores, tile by tile: what their time depends on."""

    graph: Graph
    target: Target
    row_dims: tuple[RowDim, ...]
    tile: ProductTile
    k: int  # K
    dtype: DType  # of the factors, or of the left ones
    block_scales: BlockScales | None = None
    segments: Segments | None = None
    inner_segments: InnerSegments | None = None
    promote: int = 0  # sums of so many of K begin at 0, and are added in f32; 0: all are added where they are made
    output_groups: tuple[OutputGroup, ...]
    hoisted: Graph

    @property
    def contractions(self) -> tuple[Contraction, ...]:
        """Of a tile's main loop: those of any output group, which share their left factor, and differ in the right
        ones."""
        return self.output_groups[0].contractions

    @property
    def left(self) -> tuple[Operand, ...]:
        """What the left factor is computed from; its slices have the first one's place in shared memory."""
        return self.contractions[0].left.operands

    @property
    def prologue(self) -> Prologue | None:
        """None: the left factor is multiplied as it lies in memory."""
        return self.contractions[0].left.prologue

    @property
    def atom(self) -> Atom:
        return self.contractions[0].atom

    @property
    def coding(self) -> Coding | None:
        """Of the right factors, which are all coded alike; None where they are multiplied as they lie in memory."""
        return self.contractions[0].right.coding

    @property
    def several(self) -> bool:
        """Has a tile to be told which output group it is of?"""
        return len(self.output_groups) > 1

    @property
    def tiles_across(self) -> int:
        """Tiles side by side, of all output groups."""
        return sum(output_group.tiles for output_group in self.output_groups)

    @property
    def products(self) -> int:
        """Sums of one element of a tile."""
        return len(self.contractions)

    @property
    def statistics(self) -> int:
        """Sums along the rows of the left factor."""
        return len(self.prologue.reductions) if self.prologue else 0


@dataclass(frozen=True, kw_only=True)
class ProductPlan(ProductWork, Plan):
    """Such products, with what comes before and behind them, as one kernel."""

    @property
    def lowered(self) -> Graph:
        return self.hoisted

    @property
    def facts(self) -> Mapping[str, object]:
        return {"tile": {name: value for name, value in asdict(self.tile).items() if name != "atom"}}

    @property
    def rows_per_block(self) -> int:
        return self.tile.rows

    @property
    def static_shared_bytes(self) -> int:
        return 0

    @property
    def groups_a_lane(self) -> int:
        """Groups of rows that each lane of a warp looks at to find a tile's; 0 where there are none. Where each thread
        went over all of them it waited for memory eight times of 64, 3 of 80 us; by wgmma, which does so for each tile,
        gate and up of 32 rows an expert took 154 us so, and 144 (H200)."""
        return -(-self.segments.count // self.target.warp) if self.segments else 0

    @property
    def slices_ahead(self) -> int:
        """Slices of the right factors that are asked for before the wait for the kernels before this one."""
        rights = {right.access.tensor for output_group in self.output_groups for right in output_group.rights}
        return self.slices_at_first if rights <= self.early else 0

    @property
    def reads_ahead(self) -> bool:
        return self.slices_ahead > 0

    @property
    def slices_at_first(self) -> int:
        """Slices that there is room for before any is multiplied; 0 where factors can't be asked for by themselves."""
        return 0

    @property
    def rights_ahead(self) -> str:
        """`the first 4 slices of gate and up`; empty where none are asked for before the wait."""
        if not self.slices_ahead:
            return ""
        names = dict.fromkeys(r.access.tensor for output_group in self.output_groups for r in output_group.rights)
        count = "slice" if self.slices_ahead == 1 else f"{self.slices_ahead} slices"
        return f"the first {count} of {', '.join(names)}"
