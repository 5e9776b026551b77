"""What a planner says and a template spells: a Plan, frozen. Its parts are those of planner/parts.py.

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
from fusegen.language import notebook
from fusegen.language.graph import Graph
from fusegen.language.types import f16, size_of
from fusegen.planner.block_count import BlockCount
from fusegen.planner.heading import header_lines
from fusegen.planner.parts import (
    Access,
    Argument,
    Body,
    Dependent,
    Gathered,
    GroupStep,
    InTurn,
    Keep,
    Layout,
    Load,
    Mode,
    Needs,
    Number,
    Param,
    Reduction,
    ReductionKind,
    RowDim,
    RowPass,
    Selection,
    Statement,
    Store,
    Until,
    Value,
    counts,
    used_by,
)
from fusegen.planner.rows.in_place import by_own_columns, overwritable, turned
from fusegen.planner.summed import Summed
from fusegen.planner.tile import (
    LINE_BYTES,
    Keeps,
    Staging,
    Tile,
    begins_anywhere,
    in_shared_memory,
    packed,
    partial_bytes,
    prefetched,
    prefetched_bytes,
    scanned_bytes,
    unusual,
)
from fusegen.planner.traffic import Cost, TensorTraffic, Traffic
from fusegen.targets.base import Target


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing the planner decided, in the user's words, with the bytes it saves (0 where none)."""

    subject: str
    verdict: str
    bytes_saved: int = 0


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
    dependent: Dependent | None = None  # of a program's kernel: how it is launched beside its neighbours
    joined: bool = False  # one step of a launch of several, which is told the block's number among its own

    def __str__(self) -> str:
        """The lines that open the kernel."""
        return "\n".join(header_lines(self))

    def _repr_html_(self) -> str | None:
        """Graph and figures, for notebooks."""
        return notebook.drawn(self)

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
    def writes_without_rows(self) -> bool:
        """Has a launch over no rows results, as a sum of columns has?"""
        return False

    @property
    def waits(self) -> bool:
        """Does it begin while kernels before it run, and wait for them?"""
        return self.dependent is not None and self.dependent.waits

    @property
    def early(self) -> frozenset[str]:
        """The tensors that it may read before it waits."""
        return self.dependent.ahead if self.dependent is not None and self.waits else frozenset()

    @property
    def in_any_block(self) -> bool:
        """May some blocks do all of them in turn? Barriers of copies are made once; persistent blocks count theirs."""
        return False

    @property
    def waits_inside(self) -> bool:
        """Does something come before the wait? Else the kernel begins with it."""
        return False

    @property
    def reads_ahead(self) -> bool:
        """Does it read anything before the wait?"""
        return False

    @property
    def before_wait(self) -> str:
        """What is read, or made ready, before the wait; empty where nothing is."""
        return ""

    @property
    def launched(self) -> str:
        """How it is launched beside its neighbours, in words; empty where it begins once all before it is done."""
        return self.dependent.said(self.before_wait) if self.dependent else ""

    @property
    def persistent_rows(self) -> bool:
        """Are blocks persistent, taking rows in turn? A launch then has no more of them than a GPU holds at once."""
        return False

    @property
    @abstractmethod
    def block_count(self) -> BlockCount:
        """How many blocks a launch has, on a GPU that holds as many at once as the target's facts say."""

    def blocks(self, *extents: int, resident: int | None = None) -> int:
        """Blocks of a launch over `extents`, the sizes of `row_dims`.

        `resident`: how many the GPU holds at once, which bounds persistent blocks of rows; None: by the target's
        facts.
        """
        count = self.block_count
        if self.persistent_rows and resident is not None:
            count = count.held(min(resident, self.target.max_blocks(self.threads)))
        return count.of(*extents)

    @property
    def planned_blocks(self) -> int:
        """Of a launch at the graph's sizes."""
        shape, sizes = self.graph.shape, self.graph.sizes
        return self.blocks(*(math.prod(size_of(shape[axis], sizes) for axis in dim.axes) for dim in self.row_dims))

    def grid(self, blocks: int) -> tuple[int, int]:
        """That many blocks, or a few more, along the grid's dimensions x and y."""
        columns = min(blocks, self.target.max_blocks(self.threads)) if self.folded else blocks
        return columns, -(-blocks // columns)

    @property
    def max_blocks(self) -> int:
        """Of one launch."""
        return self.target.max_blocks(self.threads) * (self.target.max_grid_y if self.folded else 1)

    def needs_contiguous_rows(self, access: Access) -> bool:
        """Must each row of this tensor begin where the one before it ends?"""
        return False

    def any_alignment(self, access: Access) -> bool:
        """May the tensor begin at the address of any element?"""
        return access.mode == "element"

    def axes_walked(self, access: Access, dim: int) -> tuple[int, ...]:
        """The tensor's own axes, counted from the right, that row dimension `dim` moves along; shapes align at the
        right, as in numpy."""
        if access.axes:
            return access.axes[access.strided.index(dim)]
        rank = len(self.graph.shape)
        return tuple(axis - rank for axis in self.row_dims[dim].axes if rank - axis <= len(access.shape))

    @property
    def needs(self) -> tuple[Needs, ...]:
        """Of the arrays of each access."""
        return tuple(map(self.needs_of, self.accesses))

    def needs_of(self, access: Access) -> Needs:
        groups = tuple(self.axes_walked(access, dim) for dim in access.walked)
        if access.gathered:
            groups += ((-len(access.shape),),)
        if access.ld_axis is not None:
            groups += ((access.ld_axis,),)
        if access.group_axis is not None:
            groups += ((access.group_axis,),)
        whole = access.mode == "vector" and not self.flat
        least = 0 if access.mode in ("misaligned", "bulk") else None
        if access.mode != "element" and any(p.kind == "map" and p.tensor == access.tensor for p in self.params):
            least = 1  # a tensor copy passes forward
        whole_rows = self.flat or self.needs_contiguous_rows(access)
        dense = range(-len(access.shape), 0 if self.flat else -1) if whole_rows else ()
        return Needs(
            tensor=access.tensor,
            groups=groups,
            dense=tuple(dense),
            dense_stride=self.cols,
            address_bytes=1 if self.any_alignment(access) or access.led else access.vector_bytes,
            stride_bytes=access.vector_bytes if whole else 1,
            least_stride=least,
            transposable=access.transposable,
            right=access.right,
        )

    @property
    def in_place(self) -> frozenset[tuple[str, str]]:
        """Which outputs may be written over which operands, (output, operand): `out=` may then be the operand."""
        return frozenset()

    @property
    def transposable(self) -> frozenset[str]:
        """The tensors that may lie either way round."""
        return frozenset(access.tensor for access in self.accesses if access.transposable)

    @property
    def order(self) -> tuple[object, ...]:
        """In which order the values of a row are summed, and by which threads: what its bits depend on beside the
        formula. Empty where nothing is summed, and where it is not known."""
        return ()

    @property
    def misaligned_rows(self) -> bool:
        """Are there rows that start anywhere, whose vectors lie across aligned blocks?"""
        return any(access.mode == "misaligned" for access in self.accesses)

    @property
    def inputs(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if not a.output)

    @property
    def outputs(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.output)


@dataclass(frozen=True, kw_only=True)
class RowPlan(Plan):
    """A kernel that passes over rows, or over one flat array."""

    staging: Staging
    keeps: Keeps
    tile: Tile
    tail: Literal["none", "vector", "element"]
    launch_body: tuple[Statement, ...]  # once a thread
    row_loads: tuple[Load, ...]  # per-row scalars
    row_body: tuple[Statement, ...]  # once a row, before the first pass
    row_stores: tuple[Store, ...]
    passes: tuple[RowPass, ...]
    slots: int  # rows of the shared array that carries partial results across warps; 0 without
    # all threads of a row take the first one's bits of what a reduction rounds on its way
    uniform_results: bool = False
    selection: Selection | None = None
    # rows are taken in turn, and columns reduced over them
    in_turn: InTurn | None = None

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
            "turn": (self.selection.streamed if self.selection else 0, 0),
            "rows": ("bulk" if self.bulk else "", ""),
            "ring": (self.in_turn.ring if self.in_turn else 0, 0),
            "best": (self.selection.best if self.selection else "", ""),
            "turned": ("tiles" if self.turned else "", ""),
            "delegates": (self.selection.delegates if self.selection else 1, 1),
        }
        shape = f"{tile.threads}/{tile.threads_per_row} {tile.per_thread}x{tile.vector}"
        return f"{self.rule} {self.staging} {shape}{unusual(choices)}"

    @property
    def facts(self) -> Mapping[str, object]:
        return {"staging": self.staging, "tile": asdict(self.tile)}

    @property
    def vector_cols(self) -> int:
        """The columns that vectors hold."""
        return self.cols - self.tile.remainder

    @property
    def unrolled(self) -> bool:
        """Are all turns of a thread's loops laid out one after another?"""
        return self.tile.per_thread > 1 and self.staging in ("registers", "none")

    @property
    def lacks_rows(self) -> bool:
        """May a thread have no row?"""
        return not self.flat and self.tile.rows_per_block > 1

    @property
    def stands_in(self) -> bool:
        """Does a thread without a row take the last one once more, and write nothing? Tests around each pass cost
        registers: LayerNorm of heads of 80 has 72 so, had 93, and took 50.3 us, with whole stores too, for 54.8."""
        return self.lacks_rows and (not self.selection or self.selection.packed) and not self.layout.in_place

    @property
    def in_place(self) -> frozenset[tuple[str, str]]:
        if self.in_turn:  # rows are read ahead
            return frozenset()
        passes = () if self.selection else self.passes
        pairs = overwritable(self.accesses, passes, len(self.row_dims), self.in_shared and self.tile.again > 0)
        return by_own_columns(pairs, self.accesses, self.passes)

    @property
    def in_any_block(self) -> bool:
        return not (self.persistent_rows or self.in_turn or self.bulk or self.prefetched or self.cluster > 1)

    @property
    def packed(self) -> bool:
        return packed(self.staging, self.keeps)

    @property
    def copies(self) -> bool:
        """Does what the first pass keeps get to shared memory by asynchronous copies?"""
        return any(load.transport == "cp.async" for row_pass in self.passes[:1] for load in row_pass.loads)

    @property
    def bulk(self) -> bool:
        """Do rows come to shared memory and leave it by bulk copies?"""
        return any(access.mode == "bulk" for access in self.accesses)

    @property
    def turned(self) -> frozenset[str]:
        """The tensors that go through tiles in shared memory, since they lie turned round."""
        return turned(self.passes)

    @property
    def contiguous_rows(self) -> bool:
        """Do a block's rows come and go as one, since each begins where the one before it ends?"""
        return self.bulk and self.tile.rows_per_block > 1

    @property
    def prefetched(self) -> tuple[Access, ...]:
        return prefetched(self.passes)

    @property
    def in_shared(self) -> bool:
        return in_shared_memory(self.staging)

    @property
    def persistent_rows(self) -> bool:
        return self.staging == "persistent"

    @property
    def told_first(self) -> RowPass | None:
        """The pass behind which a cluster's blocks first tell each other something: by then each must know all run."""
        return next((row_pass for row_pass in self.passes if row_pass.reductions or row_pass.scans), None)

    @property
    def writes_without_rows(self) -> bool:
        return self.in_turn is not None

    @property
    def takes_turns(self) -> bool:
        """Do blocks take rows in turn? A reduction then has two places for its parts, of one row and of the next."""
        return self.persistent_rows or self.in_turn is not None

    @property
    def ring_loads(self) -> tuple[Load, ...]:
        """What asynchronous copies bring rows ahead, each tensor once."""
        if self.in_turn is None or not self.in_turn.ring:
            return ()
        every = (load for row_pass in self.passes for load in row_pass.loads if load.access.strided)
        return tuple({load.access.tensor: load for load in every}.values())

    @property
    def rows_ahead(self) -> tuple[Load, ...]:
        """What a persistent plan fetches a row ahead, or rows ahead."""
        if self.ring_loads:
            return (*self.ring_loads, *(load for load in self.row_loads if load.access.strided))
        return tuple(load for load in self.passes[0].loads if load.when == "keep") if self.persistent_rows else ()

    def needs_contiguous_rows(self, access: Access) -> bool:
        return self.contiguous_rows and access.mode == "bulk"

    def any_alignment(self, access: Access) -> bool:
        """So may results of rows that start anywhere, whose blocks are found at run time. What is read so may not: its
        first block would be read from before the first byte on."""
        if access.output and access.mode == "bulk":
            return not self.contiguous_rows or begins_anywhere(access, self.tile, self.cols)
        return access.mode == "element" or (access.output and access.mode == "misaligned")

    @property
    def order(self) -> tuple[object, ...]:
        """Whichever way it is kept, and read: a thread sums its own columns in ascending order, or in descending order
        going backward, then all threads of a row in a tree."""
        tile = self.tile
        row_passes = tuple(
            (
                tuple((r.kind, r.value) for r in (*row_pass.reductions, *row_pass.group_reductions)),
                row_pass.scans,
                row_pass.backward,
                row_pass.until,
            )
            for row_pass in self.passes
            if row_pass.reductions or row_pass.scans or row_pass.groups
        )
        chosen = (self.rule, self.selection.streamed) if self.selection else ()
        shared = (tile.threads_per_row, tile.vector, tile.cluster, tile.remainder)
        if self.in_turn:
            return ("in turn", *shared, *row_passes)
        return (*chosen, *shared, *row_passes) if row_passes or chosen else ()

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
        return self.tile.warps_per_row(self.target.warp)

    @property
    def parts_per_row(self) -> int:
        return self.tile.parts_per_row(self.target.warp)

    @property
    def static_shared_bytes(self) -> int:
        votes = self.selection.vote_bytes if self.selection else 0
        arrivals = 8 if self.bulk or self.prefetched else 0
        partials = partial_bytes(self.tile, self.target.warp, self.slots, self.takes_turns)
        partials += scanned_bytes(self.passes, self.tile, self.target.warp)
        static = prefetched_bytes(self.passes, self.cols) + partials + votes + arrivals
        return -(-static // self.shared_alignment) * self.shared_alignment if self.shared_bytes else static

    @property
    def shared_alignment(self) -> int:
        """Of what follows the static shared memory, in bytes."""
        return LINE_BYTES if self.bulk else 16

    @property
    def block_count(self) -> BlockCount:
        if self.in_turn:
            return BlockCount(
                reduced=tuple(range(len(self.row_dims))), across=self.in_turn.count // self.tile.rows_per_block
            )
        count = BlockCount(rows=self.tile.rows_per_block, merged=True, blocks=self.tile.blocks_per_row)
        if not self.persistent_rows:
            return count
        at_once = self.target.sms * self.cost.blocks_per_sm
        return count.held(min(at_once, self.target.max_blocks(self.threads)))

    @property
    def max_rows(self) -> int:
        if self.takes_turns:
            return 2**62  # counted in 64 bits, one turn beyond the last row included
        most = self.max_blocks // self.tile.blocks_per_row * self.tile.rows_per_block
        # with several dimensions a row's number has 32 bits, that of a block's last thread included: it is divided
        return most if len(self.row_dims) == 1 else min(most, 2**32 - self.tile.rows_per_block)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that can't plan the graph, and why. `other_kind`: it is for graphs of another kind, or other targets."""

    rule: str
    reason: str
    other_kind: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every legal plan, cheapest first, and every rule's refusal."""

    graph: Graph
    target: Target
    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]

    def need(self, every: bool = False) -> tuple[Plan, ...]:
        """The plans; raises NoPlan when there is none, with the reason of the nearest rule, or of `every` one."""
        if self.plans:
            return self.plans
        nearest = [r for r in self.refusals if not r.other_kind][:1]
        shown = self.refusals if every or not nearest else nearest
        lines = [
            f"no rule can plan {self.graph.name} on {self.target}",
            *(f"{r.rule}: {r.reason}".replace("\n", "\n  ") for r in shown),
        ]
        if len(shown) < len(self.refusals):
            lines.append(f"`fusegen explain {self.graph.where.file}:{self.graph.name}` says what every rule refused")
        raise NoPlan("\n  ".join(lines))


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel: the plan, its text, and the numpy reference beside it."""

    plan: Plan
    text: str
    reference: str
    filename: str


__all__ = [
    "Access", "Argument", "Body", "Candidates", "Cost", "Decision", "Dependent", "Gathered", "GroupStep", "Keep",
    "Keeps", "Layout", "Load", "Mode", "Needs", "Number", "Param", "Plan", "Reduction", "ReductionKind", "Refusal",
    "RowDim", "RowPass", "RowPlan", "Selection", "Source", "Staging", "Statement", "Store", "Summed", "TensorTraffic",
    "Tile", "Traffic", "Until", "Value", "counts", "used_by",
]  # fmt: skip
