"""What an exported launcher knows of a chain: frozen values, each a table of templates/export/launch.h.

Arrays are told by their places: of a call, operands first, then outputs, then what lies between kernels; of a launch,
in the order of its steps' bindings.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.language.graph import Graph, Tensor
from fusegen.language.sizes import Size
from fusegen.language.types import DType
from fusegen.language.views import View
from fusegen.planner.block_count import BlockCount
from fusegen.targets.base import Target


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code for one architecture, and the text it was compiled from."""

    entry: str
    text: str
    filename: str  # of the text
    binary: bytes
    compiler: str


@dataclass(frozen=True, slots=True)
class Need:
    """How one array must lie. Axes are bits, the last axis's the lowest."""

    array: int
    line: int  # the axis, counted from the right from 1 on, whose elements are next to each other; 0: any
    groups: tuple[int, ...]
    dense: int
    dense_stride: int
    address_bytes: int
    stride_bytes: int
    least_stride: int | None
    anywhere: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel; `kind` is that of the plan's parameter, "pointer" of an address as well."""

    kind: str
    array: int = 0  # of a value, its place among the launch's scalars; of "blocks", the part
    extents: int = 0  # which of the launch's extents it is of,
    dim: int = 0  # and of which dimension of rows
    axes: int = 0
    box_axes: tuple[int, ...] = ()
    box: tuple[int, ...] = ()
    swizzle: int = 0
    dtype: DType | None = None  # of a tensor map


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a launch."""

    extents: int  # which of the launch's extents it counts
    count: BlockCount
    resident: bool  # persistent blocks: as many as the GPU holds
    dims: int
    max_rows: int
    without_rows: bool
    most: int = 0  # blocks of a step that others of its cluster follow; with more it is a launch of its own; 0: any
    each: int = 0  # blocks of the step that each cluster takes; 0: one cluster takes all


@dataclass(frozen=True, slots=True)
class Fixed:
    """A size that a variant is compiled for: of the launch's sizes, number `place`."""

    place: int
    size: int
    name: str


@dataclass(frozen=True, slots=True)
class Variant:
    """A launch for arrays that lie in one way; `layout` says which, in words."""

    layout: str
    code: Code
    threads: int
    shared_bytes: int
    cluster: int
    most_columns: int  # blocks along the grid's first dimension; 0: all of them
    most_blocks: int
    by_cluster: bool  # clusters take the blocks of all parts in turn
    waits: bool
    parts: tuple[Part, ...]
    needs: tuple[Need, ...]
    arguments: tuple[Argument, ...]
    fixed: tuple[Fixed, ...]
    pairs: tuple[tuple[int, int], ...]  # (output, operand): may be written over it
    woven: tuple[tuple[int, ...], ...]  # arrays whose elements lie by turns in one array


@dataclass(frozen=True, slots=True)
class Seen:
    """An array of a launch: the call's array number `base`, or a view of it, which has a number of its own."""

    base: int
    written: bool
    view: View | None = None
    number: int = -1


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch. `alone`: so many launches behind it do its steps one by one, where it has no variant for arrays."""

    name: str
    variants: tuple[Variant, ...]
    arrays: tuple[Seen, ...]
    extents: tuple[
        tuple[Size, ...], ...
    ]  # the dimensions of rows, as parts of variants count them, in the chain's dims
    sizes: tuple[Size, ...]  # that variants may be compiled for
    values: tuple[int, ...]  # its run-time scalars, by their places among the call's
    alone: int = 0


@dataclass(frozen=True, slots=True)
class Between:
    """A tensor of the workspace, from the launch that writes it to the last one that reads it."""

    name: str
    dtype: DType
    shape: tuple[Size, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A chain for one target."""

    target: Target
    launches: tuple[Launch, ...]
    between: tuple[Between, ...]
    pairs: tuple[tuple[int, int], ...]  # outputs of the call that may be written over operands
    compiled: frozenset[str]  # dims whose sizes are constants of its kernels

    @property
    def capability(self) -> tuple[int, int, bool]:
        """Of NVIDIA's: major, minor, and whether code runs on exactly that; zeros of others."""
        digits = self.target.arch.removeprefix("sm_")
        if digits == self.target.arch:
            return 0, 0, False
        suffix = not digits[-1].isdigit()
        number = int(digits.rstrip("abcdefghijklmnopqrstuvwxyz"))
        return number // 10, number % 10, suffix

    @property
    def codes(self) -> tuple[Code, ...]:
        return tuple(variant.code for launch in self.launches for variant in launch.variants)


@dataclass(frozen=True, slots=True)
class Exported:
    """A chain for several targets. `arrays`: its operands in memory, then its outputs that are not operands."""

    graph: Graph
    arrays: tuple[Tensor, ...]
    values: tuple[Tensor, ...]  # run-time scalars
    units: tuple[Unit, ...]
    reference: str  # the numpy text of the whole chain
    notes: tuple[str, ...] = ()  # layouts for which there is no kernel, and why

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self.graph.sizes)

    @property
    def works_in_memory(self) -> bool:
        """Does it take a workspace on some target?"""
        return any(unit.between for unit in self.units)
