"""What a planner says and a template spells: a Plan and its parts, all frozen.

A Plan says everything about one kernel that could be wrong: which operands are read how, what runs in which order,
what is kept where, what the launch looks like. A template only prints it; a launcher only obeys it.

Rows and columns: the last axis of the chain's shape is the *row*, its length is a constant of the kernel; all other
axes are *rows*, their sizes and strides are run-time arguments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from fusegen.errors import NoPlan
from fusegen.graph import Graph
from fusegen.planner.heading import header_lines
from fusegen.planner.held_rows import Dense, Hold
from fusegen.planner.traffic import Cost, TensorTraffic, Traffic
from fusegen.targets.base import Target
from fusegen.types import DType, Shape, f16


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan may assume of its operands in memory. The default is what a fresh contiguous tensor gives.

    `split`: the leading axes of some operand can't be walked with one stride, so each axis keeps its own; nor does each
    row begin where the one before it ends.
    `unaligned`: operands whose address or row stride is no multiple of the vector; they move one element at a time.
    `turned`: factors of products whose matrices lie the other way round: the elements along their last axis but one are
    next to each other.
    """

    split: bool = False
    unaligned: frozenset[str] = frozenset()
    turned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RowDim:
    """One run-time dimension of rows: neighbouring axes of the chain's shape, walked with one stride.

    `extent` is the kernel argument that holds the product of their sizes; `index` the kernel's variable.
    A flat plan has a single RowDim "n" over all axes, the last one included.
    """

    extent: str
    index: str
    axes: tuple[int, ...]


Mode = Literal[
    "vector",  # whole vectors; the address and every stride are multiples of the vector
    "across",  # vectors of rows that start anywhere: they lie across aligned blocks, which move whole
    "bulk",  # rows that start anywhere, whole, by way of shared memory: bulk copies of the blocks that they lie in
    "element",  # one element at a time: always right
]


@dataclass(frozen=True, slots=True)
class Access:
    """How one tensor is read or written.

    `strided` holds the positions in `Plan.row_dims` along which the tensor moves, each by a run-time stride in
    elements (the argument `<tensor>_stride` or `<tensor>_stride_<dim>`); along the others it is broadcast.
    `by_column` is False for a per-row scalar. `vector_bytes` is what one instruction moves: the alignment that the
    launcher must check (mode "vector": address and strides; "across" and "bulk": the address, and no stride is
    negative, so that nothing is read before the first byte).

    A factor of a product says more of how it lies. `line`: its axis whose elements are next to each other, counted from
    the right; `pitch`: the other axis of its matrices, where no row dimension walks it; `axes`: the tensor's own axes
    that each of `strided` walks, where they are not those below the chain's.
    """

    tensor: str
    name: str  # C identifier stem: `<name>_ptr`, `<name>_row`, `<name>_vec`
    dtype: DType
    shape: Shape
    output: bool
    by_column: bool
    strided: tuple[int, ...]
    mode: Mode
    vector: int  # elements that one thread moves together
    vector_bytes: int
    once: bool = False  # each byte is used once and by one thread: a read leaves the caches first
    line: int = -1
    pitch: int | None = None
    axes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel argument, in order.

    kind "pointer": address of `tensor`; "value": a run-time scalar; "extent": size of `row_dims[dim]` (64-bit);
    "stride": stride of `tensor` along `row_dims[dim]`, or along its own `axes`, in elements (64-bit); "map": how
    `tensor` lies in memory, for tensor copies of a `box`, whose axes walk the tensor's own axes `walks` (counted from
    the right; the last one's elements are next to each other), in shared memory permuted within lines of `swizzle`
    bytes, f32 rounded to tf32 on the way if that is its `dtype`.
    """

    kind: Literal["pointer", "value", "extent", "stride", "map"]
    name: str
    tensor: str = ""
    dim: int = 0
    dtype: DType | None = None
    output: bool = False
    axes: tuple[int, ...] = ()  # of the tensor, counted from the right
    walks: tuple[tuple[int, ...], ...] = ()
    box: tuple[int, ...] = ()
    swizzle: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """`const <ctype> name = expr;` in single-assignment order."""

    name: str
    ctype: str
    expr: str


@dataclass(frozen=True, slots=True)
class Load:
    """A tensor's element as the value `value`, from the vector that a stage reads ("now"), reads and keeps for later
    stages ("keep"), reads only for later ones ("ahead"), finds kept by an earlier one ("kept"), or in shared memory,
    where a bulk copy has brought it since the first stage ("fetched")."""

    access: Access
    value: str
    ctype: str
    when: Literal["now", "keep", "ahead", "kept", "fetched"] = "now"
    offset_bytes: int = 0  # of the kept vectors in dynamic shared memory
    until: str = ""  # `<= last`: the columns whose values are needed; the others read as zero


@dataclass(frozen=True, slots=True)
class Store:
    """The value `value`, written to a tensor; `rest` beyond the stage's limit.

    `staged`: by way of shared memory, `offset_bytes` from its start, where the row is complete before its aligned
    blocks are written.
    """

    access: Access
    value: str
    rest: str = ""
    staged: bool = False
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Keep:
    """A computed value that later stages take up again, in `<value>_kept`: registers, or dynamic shared memory."""

    value: str
    ctype: str
    offset_bytes: int = 0


ReductionKind = Literal["sum", "max", "min", "softmax", "welford"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What one walk accumulates of the element value `value`, and the row values it leaves behind.

    "sum", "max", "min" leave one. "softmax" is the pair max, sum(exp(value - max)) in a single walk, rescaling the sum
    when the maximum grows (Milakov & Gimelshein 2018); "welford" the pair sum, sum((value - mean)^2) in a single walk
    (Welford 1962, merged after Chan, Golub & LeVeque 1983).
    """

    kind: ReductionKind
    value: str
    results: tuple[str, ...]
    slot: int = 0  # first row of the shared array that carries it across warps
    guarded: bool = True  # softmax: a row of -inf gives 0, not NaN; welford: an infinite sum stays one
    rest: str = ""  # the element value beyond the stage's limit

    @property
    def part(self) -> str:
        """The thread's own partial result."""
        return f"{self.results[-1]}_part"


@dataclass(frozen=True, slots=True)
class Stage:
    """One walk over the row: read, compute, reduce, write; then what is computed once a row."""

    title: str
    loads: tuple[Load, ...]
    takes: tuple[Keep, ...]  # values kept by earlier stages
    body: tuple[Statement, ...]
    keeps: tuple[Keep, ...]
    reductions: tuple[Reduction, ...]
    stores: tuple[Store, ...]
    row_body: tuple[Statement, ...]
    row_stores: tuple[Store, ...]
    until: str = ""  # `<= last`: columns beyond are all alike, and their vectors are not computed one by one
    rest_body: tuple[Statement, ...] = ()  # what they are, once a row, before the walk
    backward: bool = False  # from the row's end: what the last walk read last is the likeliest to be in a cache
    blocks_of: str = ""  # an output whose aligned blocks are the walk's vectors; else the row's first column begins one
    late: bool = False  # reads each vector where it is used, where registers would hold all of a thread's before

    @property
    def reads(self) -> tuple[Load, ...]:
        """The loads that go to memory in this walk."""
        return tuple(load for load in self.loads if load.when != "kept")


@dataclass(frozen=True, slots=True)
class Selection:
    """How a kernel chooses k columns of each row, and what it makes of them. See planner/rules/topk.py.

    `by` "team": the keys of a row lie in the registers of one warp or of a part of it; "threshold": the row streams by,
    `turn` vectors of a thread at a time, and of every `note` of these the largest key stays, in one of `notes` words of
    its warp. Behind every `segment` vectors of a thread the largest keys of `groups` parts of what it has seen give a
    threshold; a lane then looks at one vector that exceeds it at a time. The block holds `entries` candidates, and cuts
    them down to `limit` where they grow too many, with counts of `bins` ranges of keys. "hold": a block's or a
    cluster's registers hold the row, and `hold` says the rest. "dense": a block's do, and many are chosen: see `dense`.
    """

    by: Literal["team", "threshold", "hold", "dense"]
    k: int
    key: str  # the element value that decides
    loads: tuple[Load, ...]  # what the key is made from,
    body: tuple[Statement, ...]  # and how
    columns: str  # the k columns' name,
    values: str  # and that of the keys there; empty where nothing asks for them
    picked: tuple[Stage, ...]  # walks over the k columns: their loads are gathered
    turn: int = 0
    groups: int = 0  # 0: the first cut gives the threshold
    note: int = 0
    notes: int = 0
    segment: int = 0
    entries: int = 0
    limit: int = 0
    bins: int = 0
    resident: int = 0  # blocks that an SM is to hold, and for which the compiler keeps registers; 0: it is not told
    vote_bytes: int = 0  # static shared memory of the block's votes
    hold: Hold | None = None
    dense: Dense | None = None


Staging = Literal[
    "none",
    "registers",
    "shared",
    "rolling",  # in shared memory and registers, by blocks that take rows in turn and fetch the next as they use up one
    "stream",
]
Keeps = Literal["values", "inputs", "nothing"]  # from one walk to the next: what was computed, what was read, nothing


@dataclass(frozen=True, slots=True)
class Tile:
    """How threads share the work.

    A row belongs to `threads_per_row` threads, each of which takes `per_thread` vectors of `vector` elements,
    `threads_per_row` vectors apart. `rows_per_block` rows are in flight in a block. `col_tiles` blocks share a row
    (only without reductions), or `cluster` blocks, which reach into each other's shared memory. Of what is kept in
    shared memory, a thread's first `kept` vectors have room there; the others are read again, or held in registers as
    they were read by a "rolling" plan. The last `apart` values of a row belong to no vector: its first threads take one
    each.
    """

    threads: int
    threads_per_row: int
    rows_per_block: int
    vector: int
    per_thread: int
    col_tiles: int = 1
    cluster: int = 1
    kept: int = 0
    apart: int = 0

    @property
    def cols(self) -> int:
        """Columns (elements, in a flat plan) that one block covers in a row."""
        return self.threads_per_row * self.per_thread * self.vector

    @property
    def blocks_per_row(self) -> int:
        return self.col_tiles * self.cluster

    @property
    def team(self) -> int:
        """Threads of one block that share a row."""
        return self.threads_per_row // self.cluster

    @property
    def kept_cols(self) -> int:
        """Columns of a row that have room in one block's shared memory."""
        return self.team * self.kept * self.vector

    @property
    def again(self) -> float:
        """The share of a row that has none."""
        return 1 - self.kept / self.per_thread


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing the planner decided, in the user's words, with the bytes it saves (0 where none)."""

    subject: str
    verdict: str
    bytes_saved: int = 0


@dataclass(frozen=True, slots=True)
class Summed:
    """How a product's sums over K are made: as `shares` sums, each of every so-many-th slice of `depth` in ascending
    order, which are added up at the end. One of everything, unless said otherwise."""

    shares: int = 1
    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """One kernel, decided: what there is to know for printing, compiling, launching, timing or keeping it.

    A subclass says how the kernel works inside; its template and speller take that subclass.
    """

    name: str  # entry symbol
    graph: Graph
    target: Target
    layout: Layout
    rule: str  # "elementwise", "rowwise"
    template: str  # file in templates/
    regime: str  # "warp per row, 8 rows per block, h in registers"
    cols: int  # row length, a constant of the kernel (1 in a flat plan)
    flat: bool = False  # one array without rows
    row_dims: tuple[RowDim, ...]
    accesses: tuple[Access, ...]
    params: tuple[Param, ...]
    folded: bool  # blocks are counted along two dimensions of the grid, since the first can't hold one for every row
    shared_bytes: int  # dynamic
    cost: Cost
    decisions: tuple[Decision, ...] = ()
    rounding: tuple[str, ...] = ()  # where a value is rounded to a storage type

    def __str__(self) -> str:
        """The lines that open the kernel."""
        return "\n".join(header_lines(self))

    @property
    def lowered(self) -> Graph:
        """The graph as the kernel computes it, which the names in its text are of; `graph` is the one that was written.
        They differ in rounding, never in meaning."""
        return self.graph

    @property
    def summed(self) -> Summed:
        """How matrix products are summed, for those who bound their errors."""
        return Summed()

    @property
    def matrix_tflops(self) -> float:
        """What matrix units do with factors of the chain's type, halves if it has none, by the data sheet."""
        return self.target.product_tflops(next(iter(self.graph.factor_types.values()), f16))

    @property
    @abstractmethod
    def configuration(self) -> str:
        """Tells this plan from every other candidate of its graph, target and layout; measurements are kept under it.

        It begins with the rule. What says it may not change its words: a choice that a rule learns to make joins at the
        end, and only where it is not the usual one, so that plans that do not make it keep their names.
        """

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, object]:
        """What the rule chose, as plain values for scripts."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Of a block."""

    @property
    @abstractmethod
    def cluster(self) -> int:
        """Blocks that reach into each other's shared memory; 1 without."""

    @property
    @abstractmethod
    def rows_per_block(self) -> int:
        """Rows that a block has in flight; elements, in a flat plan."""

    @property
    @abstractmethod
    def static_shared_bytes(self) -> int: ...

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Of one launch; elements in a flat plan."""

    @property
    def rolling(self) -> bool:
        """Does a block take rows in turn? A launch then has no more blocks than a GPU holds at once."""
        return False

    @abstractmethod
    def blocks(self, *extents: int, resident: int | None = None) -> int:
        """Blocks of a launch over `extents`, the sizes of `row_dims`.

        `resident`: how many the GPU holds at once, which bounds those that take rows in turn; None: by the target's
        facts.
        """

    def grid(self, blocks: int) -> tuple[int, int]:
        """That many blocks, or a few more, along the grid's dimensions x and y."""
        columns = min(blocks, self.target.max_blocks(self.threads)) if self.folded else blocks
        return columns, -(-blocks // columns)

    @property
    def max_blocks(self) -> int:
        """Of one launch."""
        return self.target.max_blocks(self.threads) * (self.target.max_grid_y if self.folded else 1)

    def follows(self, access: Access) -> bool:
        """Must each row of this tensor begin where the one before it ends?"""
        return False

    @property
    def across(self) -> bool:
        """Are there rows that start anywhere, whose vectors lie across aligned blocks?"""
        return any(access.mode == "across" for access in self.accesses)

    @property
    def inputs(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if not a.output)

    @property
    def outputs(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.output)


# Where a bulk copy should begin in shared memory: from 16, 32 or 64 bytes behind such a place on, the LayerNorm chain
# at 4096 x 4096 took 38 us in place of 31, and at 4096 x 1024 18 to 23 in place of 12.
LINE_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class RowPlan(Plan):
    """A kernel that walks over rows, or over one flat array."""

    staging: Staging
    keeps: Keeps
    tile: Tile
    tail: Literal["none", "vector", "element"]
    launch_body: tuple[Statement, ...]  # once a thread
    row_loads: tuple[Load, ...]  # per-row scalars
    row_body: tuple[Statement, ...]  # once a row, before the first stage
    row_stores: tuple[Store, ...]
    stages: tuple[Stage, ...]
    copies: bool  # what the first walk keeps in shared memory gets there by asynchronous copies
    slots: int  # rows of the shared array that carries partial results across warps; 0 without
    selection: Selection | None = None

    @property
    def configuration(self) -> str:
        """`rowwise registers 256/256 2x8`: rule, staging, threads a block / threads a row, vectors a thread x elements
        a vector; then `name=value` for each choice that is not the usual one."""
        tile = self.tile
        room = tile.per_thread if self.in_shared else 0
        choices = {  # name: what is chosen, and the usual
            "col_tiles": (tile.col_tiles, 1),
            "cluster": (tile.cluster, 1),
            "kept": (tile.kept, room),
            "keeps": (self.keeps, "nothing" if self.staging == "stream" else "values"),
            "turn": (self.selection.turn if self.selection else 0, 0),
            "rows": ("bulk" if self.bulk else "", ""),
        }
        unusual = [f" {name}={chosen}" for name, (chosen, usual) in choices.items() if chosen != usual]
        shape = f"{tile.threads}/{tile.threads_per_row} {tile.per_thread}x{tile.vector}"
        return f"{self.rule} {self.staging} {shape}{''.join(unusual)}"

    @property
    def facts(self) -> Mapping[str, object]:
        return {"staging": self.staging, "tile": asdict(self.tile)}

    @property
    def packed(self) -> bool:
        """Do registers hold what was read as it was read, and not as f32?"""
        return self.staging == "registers" and self.keeps == "inputs" and self.selection is None

    @property
    def bulk(self) -> bool:
        """Do rows come to shared memory and leave it by bulk copies?"""
        return any(access.mode == "bulk" for access in self.accesses)

    @property
    def together(self) -> bool:
        """Do a block's rows come and go as one, since each begins where the one before it ends?"""
        return self.bulk and self.tile.rows_per_block > 1

    @property
    def fetched(self) -> tuple[Access, ...]:
        """The vectors that bulk copies bring to shared memory while the first walk runs."""
        loads = (load for stage in self.stages for load in stage.loads if load.when == "fetched")
        return tuple({load.access.tensor: load.access for load in loads}.values())

    @property
    def in_shared(self) -> bool:
        """Is what later walks need again in shared memory, or most of it?"""
        return self.staging in ("shared", "rolling")

    @property
    def rolling(self) -> bool:
        return self.staging == "rolling"

    def follows(self, access: Access) -> bool:
        return self.together and access.mode == "bulk"

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def cluster(self) -> int:
        return self.tile.cluster

    @property
    def rows_per_block(self) -> int:
        return self.tile.rows_per_block

    @property
    def warps_per_row(self) -> int:
        """Warps of a block that share a row; 1 when a warp holds one row or several."""
        return max(1, self.tile.team // self.target.warp)

    @property
    def parts_per_row(self) -> int:
        """Partial results of one reduction in a block: of its warps, and of the cluster's blocks."""
        return self.warps_per_row + (self.tile.cluster if self.tile.cluster > 1 else 0)

    @property
    def static_shared_bytes(self) -> int:
        votes = self.selection.vote_bytes if self.selection else 0
        arrivals = 8 if self.bulk or self.fetched else 0
        fetched = 0
        for access in self.fetched:
            fetched = -(-fetched // LINE_BYTES) * LINE_BYTES + self.cols * access.dtype.bytes
        static = fetched + 4 * self.slots * self.parts_per_row * (2 if self.rolling else 1) + votes + arrivals
        return -(-static // 16) * 16 if self.shared_bytes else static  # where the rest begins

    def blocks(self, *extents: int, resident: int | None = None) -> int:
        blocks = -(-math.prod(extents) // self.tile.rows_per_block) * self.tile.blocks_per_row
        if not self.rolling:
            return blocks
        at_once = self.target.sms * self.cost.blocks_per_sm if resident is None else resident
        at_once = min(at_once, self.target.max_blocks(self.threads))
        shared_by = self.tile.blocks_per_row
        return min(blocks, max(1, at_once // shared_by) * shared_by)

    @property
    def max_rows(self) -> int:
        if self.rolling:
            return 2**62  # counted in 64 bits, one turn beyond the last row included
        most = self.max_blocks // self.tile.blocks_per_row * self.tile.rows_per_block
        # with several dimensions a row's number has 32 bits, that of a block's last thread included: it is divided
        return most if len(self.row_dims) == 1 else min(most, 2**32 - self.tile.rows_per_block)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that can't plan the graph, and why."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every legal plan, cheapest first, and every rule's refusal."""

    graph: Graph
    target: Target
    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]

    def need(self) -> tuple[Plan, ...]:
        """The plans; raises NoPlan with every rule's reason when there is none."""
        if not self.plans:
            reasons = "".join(f"\n  {r.rule}: {r.reason}" for r in self.refusals)
            raise NoPlan(f"no rule can plan {self.graph.name} on {self.target}{reasons}")
        return self.plans


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel: the plan, its text, and the numpy reference beside it."""

    plan: Plan
    text: str
    reference: str
    filename: str


__all__ = [
    "Access", "Candidates", "Cost", "Decision", "Hold", "Keep", "Keeps", "Layout", "Load", "Mode", "Param", "Plan",
    "Reduction", "Refusal", "RowDim", "RowPlan", "Selection", "Source", "Stage", "Staging", "Statement", "Store",
    "Summed", "TensorTraffic", "Tile", "Traffic",
]  # fmt: skip
