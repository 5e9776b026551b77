"""What a plan is made of, all frozen: operands as a kernel reads them, passes over a row, the choice of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fusegen.language.graph import Op
from fusegen.language.nodes import GroupLimit
from fusegen.language.scans import Way as ScannedWay
from fusegen.language.types import DType, Shape, f32
from fusegen.planner.ways import InWarp, OneByOne, Packed, Streaming, Way


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan may assume of its operands in memory. The default is what a fresh contiguous tensor gives.

    `split`: the leading axes of some operand can't be moved along with one stride, so each axis keeps its own; nor does
    each row begin where the one before it ends. `unaligned`: operands whose address or row stride is no multiple of the
    vector; they move one element at a time. `transposed`: factors of products whose matrices lie the other way round:
    the elements along their last axis but one are next to each other. `apart`: tensors whose elements along a row are
    not next to each other, as those of every other column; they move one element at a time, by a stride of their own.
    `in_place`: outputs that are written over an operand, (output, operand), which has the same memory and strides.
    `interleaved`: tensors, several each time, that are every second (third ...) element of one array, in order: what
    lies next to each other there is one element of each, and they move together. `within`: operands that are the first
    columns of another one's rows, (those columns, the rows), in the same memory. `strides`: of those that are `apart`,
    where they are known, the strides of all axes, in elements; what is planned for others takes longer, no more.
    `again`: operands most of whose elements another one shows as well, (those elements, that operand), which comes from
    the same memory: as rows one further on. Whoever reads both finds the second in a cache.
    """

    split: bool = False
    unaligned: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    in_place: frozenset[tuple[str, str]] = frozenset()
    interleaved: frozenset[tuple[str, ...]] = frozenset()
    within: frozenset[tuple[str, str]] = frozenset()
    strides: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    again: frozenset[tuple[str, str]] = frozenset()

    @property
    def woven(self) -> frozenset[str]:
        """All tensors that are interleaved with others."""
        return frozenset(name for names in self.interleaved for name in names)


@dataclass(frozen=True, slots=True)
class RowDim:
    """One run-time dimension of rows: neighbouring axes of the chain's shape, moved along with one stride.

    `extent` is the kernel argument that holds the product of their sizes; `index` the kernel's variable.
    A flat plan has a single RowDim "n" over all axes, the last one included.
    """

    extent: str
    index: str
    axes: tuple[int, ...]


Mode = Literal[
    "vector",  # whole vectors; the address and every stride are multiples of the vector
    "misaligned",  # vectors of rows that start anywhere: they lie across aligned blocks, which move whole
    "bulk",  # rows that start anywhere, whole, by way of shared memory: bulk copies of the blocks that they lie in
    "element",  # one element at a time: always right
]


Transport = Literal[  # how elements get from memory to where they are used, or back
    "plain",  # by loads and stores, through a thread's registers
    "cp.async",  # to shared memory past the registers, up to 16 bytes a thread
    "cp.async evict-first",  # the same, and the L2 cache is told that they are read once
    "quads",  # the four lanes that have a row swap pairs of 8 bits, and each stores 8 neighbours
    "tensor",  # boxes of a tensor between memory and shared memory, by one thread and a map
    "rows",  # the same where groups end in boxes: of such a one lanes store 16 bytes each of some rows
    "turned",  # to or from lines of a tensor that lies turned round, by all threads of a block and a tile of its rows
]

BOXED: tuple[Transport, ...] = ("tensor", "rows")  # by way of boxes in shared memory


@dataclass(frozen=True, slots=True)
class Value:
    """A value by its name in the kernel, f32, i32 or b8."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Number:
    """A constant of the kernel: a literal of the spec's, or a size."""

    value: float | int | bool
    dtype: DType


Argument = Value | Number


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows of a table that an index names, along the table's first axis: the kernel is told how many there are by the
    argument `count`, and the step from one to the next by the argument `stride`. Of an index that names none it reads
    row 0, and makes 0 of each value. Of a table without columns it reads a value for each index, none where that names
    nothing. `along`: the positions in `Plan.row_dims` along which the index moves.
    """

    index: Argument
    count: str
    stride: str
    along: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interleaved:
    """A tensor's elements are every `count`-th of an array, from number `place` on. The others are those of other
    tensors, and all move in the vectors, and through the pointer, of the first one, whose name is `first`."""

    first: str
    place: int
    count: int


@dataclass(frozen=True, slots=True)
class Access:
    """How one tensor is read or written.

    `strided` holds the positions in `Plan.row_dims` along which the tensor moves, each by a run-time stride in
    elements (the argument `<tensor>_stride` or `<tensor>_stride_<dim>`); along the others it is broadcast.
    `by_column` is False for a per-row scalar. `apart`: the elements of its rows are a run-time stride apart (the
    argument `<tensor>_stride_elements`). `vector_bytes` is what one instruction moves: the alignment that the
    launcher must check (mode "vector": address and strides; "misaligned" and "bulk": the address, and no stride is
    negative, so that nothing is read before the first byte).

    `gathered`: its rows are those that an index names; of `strided`, those that the index moves along take no stride.

    A factor of a product says more of how it lies. `line`: its axis whose elements are next to each other, counted from
    the right; `ld_axis`: the other axis of its matrices, whose stride is the leading dimension, where no row dimension
    moves along it; `group_axis`: of a grouped product's right factor or bias the axis that counts groups, whose stride
    is the argument `<tensor>_group`; `axes`: the tensor's own axes that each of `strided` moves along, where they are
    not those below the chain's; `right`: it is a right factor; `transposable`: either axis of its matrices may be the
    line, in a plan for another layout.
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
    # evict-first: each byte is used once and by one thread, and leaves the caches before others
    evict_first: bool = False
    apart: bool = False
    line: int = -1
    ld_axis: int | None = None
    group_axis: int | None = None
    axes: tuple[tuple[int, ...], ...] = ()
    right: bool = False
    transposable: bool = False
    group: int = 0  # columns of the row that one of its elements is of, where it has one for each group of them
    gathered: Gathered | None = None
    anywhere: bool = False  # of its rows, every thread may read the column that a value names
    interleaved: Interleaved | None = None

    @property
    def walked(self) -> tuple[int, ...]:
        """The positions in `Plan.row_dims` along which the tensor moves by a stride."""
        index = self.gathered.along if self.gathered else ()
        return tuple(dim for dim in self.strided if dim not in index)

    @property
    def stem(self) -> str:
        """What its pointer and its vectors are called after."""
        return self.interleaved.first if self.interleaved else self.name

    @property
    def together(self) -> int:
        """Tensors whose elements lie in one vector."""
        return self.interleaved.count if self.interleaved else 1

    @property
    def led(self) -> bool:
        """Does it move with a tensor before it?"""
        return self.interleaved is not None and self.interleaved.place > 0


@dataclass(frozen=True, slots=True)
class Needs:
    """How the arrays of one operand must lie for a plan to take them as they are. Axes are the tensor's own, counted
    from the right; an axis of one element lies in every way.

    Where one stride does not pass each of `groups`, or none of `dense_stride` elements passes `large_k`, another plan
    has to be for a layout that is `split`. Where the address is no multiple of `address_bytes`, or a group's stride
    none of `stride_bytes`, or less than `least_stride`, one for which the operand is `unaligned`. If it is
    `transposable`, the elements along either of its last two axes may be next to each other, but not those along one
    axis of one right factor and along the other axis of another: one for which it is `transposed`.
    """

    tensor: str
    groups: tuple[tuple[int, ...], ...]
    dense: tuple[int, ...] = ()
    dense_stride: int = 0
    address_bytes: int = 1
    stride_bytes: int = 1
    least_stride: int | None = None  # in elements; None: any, backward too
    transposable: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class Dependent:
    """How a program's kernel is launched beside its neighbours (programmatic dependent launch).

    One that `waits` begins while the kernels before it run, and waits for the end of all of them before it touches
    what any of them reads or writes. So a kernel's end means that of all before it. One that `triggers` lets the next
    kernel begin as soon as all of its own blocks run. `ahead`: the tensors that no kernel before it writes, and that
    may be read before the wait. `idle`: the kernel just before it leaves the memory most of its time.
    """

    waits: bool
    triggers: bool
    ahead: frozenset[str] = frozenset()
    idle: bool = False

    def said(self, before_wait: str) -> str:
        """In words; `before_wait` is what comes before the wait, if anything does."""
        lines = []
        if self.waits:
            place = f"behind {before_wait}" if before_wait else "before all else"
            lines.append(f"begins while the kernels before it run, and waits for them {place}")
        if self.triggers:
            lines.append("lets the next one begin once all its blocks run")
        return "; ".join(lines)


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel argument, in order.

    kind "pointer": address of `tensor`; "value": a run-time scalar; "blocks": how many blocks a step of a launch has
    (64-bit); "extent": size of `row_dims[dim]` (64-bit);
    "size": size of `tensor` along its own `axes` (64-bit); "stride": stride of `tensor` along `row_dims[dim]`, or along
    its own `axes`, in elements (64-bit); "map": how
    `tensor` lies in memory, for tensor copies of a `box`, whose axes are the tensor's own axes `box_axes` (counted from
    the right; the last one's elements are next to each other), in shared memory permuted within lines of `swizzle`
    bytes, f32 rounded to tf32 on the way if that is its `dtype`; "address": that of a `tensor` which has a map besides.
    """

    kind: Literal["pointer", "value", "blocks", "extent", "size", "stride", "map", "address"]
    name: str
    tensor: str = ""
    dim: int = 0
    dtype: DType | None = None
    output: bool = False
    axes: tuple[int, ...] = ()  # of the tensor, counted from the right
    box_axes: tuple[tuple[int, ...], ...] = ()
    box: tuple[int, ...] = ()
    swizzle: int = 0
    shared: bool = False  # a pointer to memory that another one may point to
    updated: bool = False  # a pointer to what the kernel writes, and reads as it was before


@dataclass(frozen=True, slots=True)
class Statement:
    """`name` is `op` of `args`, in single-assignment order.

    It holds no node of the graph: plans are pickled, and a node has all of the chain behind it. `access`: the tensor
    that it reads at the place which its argument names; of a table whose rows passes read, it only says where they are.
    """

    op: Op
    name: str
    dtype: DType
    args: tuple[Argument, ...]
    exact: bool = False  # arithmetic on ints that surely stays one: it need not wrap
    access: Access | None = None
    missing: Number | None = None  # what stands where there is no such place

    @property
    def uses(self) -> frozenset[str]:
        """The names of the values it is made of."""
        return frozenset(arg.name for arg in self.args if isinstance(arg, Value))


def used_by(body: Iterable[Statement]) -> frozenset[str]:
    """The names of the values that statements are made of."""
    return frozenset(name for statement in body for name in statement.uses)


def counts(body: Iterable[Statement], *indices: str) -> bool:
    """Does a statement ask for a number of its row, its column or its element, by one of these ops?"""
    return any(statement.op.name in indices for statement in body)


@dataclass(frozen=True, slots=True)
class Until:
    """The columns with `col <= bound`, or `col < bound`."""

    sign: Literal["<", "<="]
    bound: Argument


@dataclass(frozen=True, slots=True)
class Load:
    """A tensor's element as the value `value`, from the vector that a pass reads ("now"), reads and keeps for later
    passes ("keep"), reads only for later ones ("ahead"), finds kept by an earlier one ("kept"), in shared memory,
    where a bulk copy has brought it since the first pass ("prefetched"), or in registers, for all rows that the thread
    takes in turn ("held")."""

    access: Access
    value: str
    when: Literal["now", "keep", "ahead", "kept", "prefetched", "held"] = "now"
    offset_bytes: int = 0  # of the kept vectors in dynamic shared memory
    until: Until | None = None  # the columns whose values are needed; the others read as zero
    transport: Transport = "plain"

    @property
    def dtype(self) -> DType:
        """Of the value: floats of every width are f32 there."""
        return self.access.dtype.value


@dataclass(frozen=True, slots=True)
class Store:
    """The value `value`, written to a tensor; `masked` beyond the pass's limit.

    `fits`: surely a number of the tensor's type, which needs no test of its range. `staged`: by way of shared memory,
    `offset_bytes` from its start, where the row is complete before its aligned blocks are written.
    """

    access: Access
    value: str
    masked: Argument | None = None
    fits: bool = False
    staged: bool = False
    offset_bytes: int = 0
    transport: Transport = "plain"


@dataclass(frozen=True, slots=True)
class Keep:
    """A computed value that later passes take up again, in `<value>_kept`: registers, or dynamic shared memory; or, in
    `<value>_here`, the statements behind a reduction of groups, for as long as its vector is at hand (`here`)."""

    value: str
    dtype: DType
    offset_bytes: int = 0
    here: bool = False


ReductionKind = Literal["sum", "prod", "max", "min", "softmax", "welford"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What one pass accumulates of the element value `value`, and the row values it leaves behind.

    "sum", "prod", "max", "min" leave one. "softmax" is the pair max, sum(exp(value - max)) in a single pass, rescaling
    the sum when the maximum grows (Milakov & Gimelshein 2018); "welford" the pair sum, sum((value - mean)^2) in a
    single pass (Welford 1962, merged after Chan, Golub & LeVeque 1983).
    """

    kind: ReductionKind
    value: str
    results: tuple[str, ...]
    slot: int = 0  # first row of the shared array that carries it across warps
    guarded: bool = True  # softmax: a row of -inf gives 0, not NaN; welford: an infinite sum stays one
    masked: Argument | None = None  # the element value beyond the pass's limit
    dtype: DType = f32  # of what is reduced: f32 or i32

    @property
    def part(self) -> str:
        """The thread's own partial result."""
        return f"{self.results[-1]}_part"


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass makes of each element value `value` and of others in the row, as of those before it, in columns'
    order: the element value `result`, which stays in registers for later passes.

    Of the row's largest: as far as `limit`, found by sums over the row. Two places of the shared array for partial
    results carry these by turns, from `slot` on."""

    way: ScannedWay
    value: str
    result: str
    dtype: DType = f32  # f32 or i32
    limit: Argument | None = None
    slot: int = 0
    source: DType = f32  # of the element value
    places: int = 0  # of a sort: the row's length, up to a power of 2

    @property
    def keep(self) -> Keep:
        return Keep(self.result, self.dtype)


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """What a thread makes of the element value `value` over the rows that it takes in turn, for each of its columns:
    their sum, largest or smallest value. `access`: where it is written, a row for each part of the rows."""

    kind: ReductionKind
    value: str
    access: Access
    dtype: DType = f32

    @property
    def name(self) -> str:
        """The thread's registers."""
        return f"{self.access.name}_part"


@dataclass(frozen=True, slots=True)
class InTurn:
    """A kernel whose threads take rows in turn: of `count` parts of the rows, part p has every count-th from row p on.

    `ring`: how many rows ahead asynchronous copies bring to shared memory, each thread's own columns to a place of its
    own; 0: rows are read as they come.
    """

    count: int
    ring: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """What is made of each element, in this order; and of its row, once: behind the elements where it is made of what
    they were reduced to, else before them."""

    loads: tuple[Load, ...] = ()
    takes: tuple[Keep, ...] = ()  # values kept by earlier bodies
    body: tuple[Statement, ...] = ()
    keeps: tuple[Keep, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    scans: tuple[Scan, ...] = ()
    parts: tuple[ColumnPart, ...] = ()
    stores: tuple[Store, ...] = ()
    row_loads: tuple[Load, ...] = ()
    row_body: tuple[Statement, ...] = ()
    row_stores: tuple[Store, ...] = ()

    @property
    def scans_kept(self) -> tuple[Keep, ...]:
        return tuple(scan.keep for scan in self.scans)


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What a pass makes of each group of neighbours of a row, once the first `before` statements of its body are done
    for all elements of a thread's vector: these lie in one group, and neighbouring threads have the others."""

    size: int  # columns of a group
    before: int
    reductions: tuple[Reduction, ...]
    body: tuple[Statement, ...]
    stores: tuple[Store, ...]

    @property
    def results(self) -> frozenset[str]:
        return frozenset((*(name for r in self.reductions for name in r.results), *(s.name for s in self.body)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPass(Body):
    """One pass over the row: a body for each of its elements, and in which order they are taken. `groups`: where the
    body's statements wait for what is made of groups."""

    title: str
    groups: tuple[GroupStep, ...] = ()
    until: Until | None = None  # columns beyond are all alike, and their vectors are not computed one by one
    masked_body: tuple[Statement, ...] = ()  # what they are, once a row, before the pass
    backward: bool = False  # from the row's end: what the last pass read last is the likeliest to be in a cache
    blocks_of: str = ""  # an output whose aligned blocks are the pass's vectors; else the row's first column begins one
    behind_barrier: bool = False  # it writes where others may still be reading: all threads of the block meet before it
    late: bool = False  # reads each vector where it is used, where registers would hold all of a thread's before

    @property
    def reads(self) -> tuple[Load, ...]:
        """The loads that go to memory in this pass."""
        return tuple(load for load in self.loads if load.when not in ("kept", "held"))

    @property
    def group_reductions(self) -> tuple[Reduction, ...]:
        return tuple(r for step in self.groups for r in step.reductions)

    @property
    def stages(self) -> tuple[Body, ...]:
        """The bodies of the elements before, between and behind the steps of groups: each statement once, in the order
        of the body, and everything else as soon as its value is made. What a later stage asks for of an earlier one is
        kept `here`, and read from its vector again."""
        marks = (0, *(step.before for step in self.groups), len(self.body))
        parts = [self.body[start:end] for start, end in itertools.pairwise(marks)]
        made = {s.name: stage for stage, part in enumerate(parts) for s in part}
        types = {s.name: s.dtype for s in self.body}
        ready = made | {name: stage for stage, step in enumerate(self.groups, 1) for name in step.results}
        ended = [
            Body(
                body=part,
                keeps=tuple(keep for keep in self.keeps if ready.get(keep.value, 0) == stage),
                reductions=tuple(r for r in self.reductions if ready.get(r.value, 0) == stage),
                stores=tuple(store for store in self.stores if ready.get(store.value, 0) == stage),
            )
            for stage, part in enumerate(parts)
        ]
        uses: list[frozenset[str]] = []
        for stage, own in enumerate(ended):
            values = {
                *(keep.value for keep in own.keeps), *(r.value for r in own.reductions),
                *(store.value for store in own.stores),
                *(r.value for step in self.groups[stage : stage + 1] for r in step.reductions),
            }  # fmt: skip
            uses.append(used_by(own.body) | values)
        found = []
        for stage, (body, names) in enumerate(zip(ended, uses, strict=True)):
            later = frozenset().union(*uses[stage + 1 :])
            again = [s.name for s in self.body if s.name in names and made[s.name] < stage]
            found.append(
                replace(
                    body,
                    loads=tuple(load for load in self.loads if load.value in names),
                    takes=(
                        *(take for take in self.takes if take.value in names),
                        *(Keep(name, types[name], here=True) for name in again),
                    ),
                    keeps=(*body.keeps, *(Keep(s.name, s.dtype, here=True) for s in body.body if s.name in later)),
                )
            )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a kernel chooses, k columns of each row, which `way` it does so, and what it makes of them."""

    k: int
    key: str  # the element value that decides, f32 or i32
    dtype: DType
    key_body: Body  # how it is made of operands
    columns: str  # the k columns' name,
    values: str  # and that of the keys there; empty where nothing asks for them
    picked: tuple[RowPass, ...]  # passes over the k columns: their loads are gathered
    bare: bool  # of a row of nothing but -inf the first columns are chosen (see fusegen.language.ordering)
    way: Way
    limit: GroupLimit | None = None  # columns are chosen in a row's best groups alone
    resident: int = 0  # blocks that an SM is to hold, and for which the compiler keeps registers; 0: it is not told
    vote_bytes: int = 0  # static shared memory of the block's votes

    @property
    def by(self) -> Literal["warp", "streaming", "small_k", "large_k"]:
        return self.way.by

    @property
    def delegates(self) -> int:
        """Of a lane, where a warp or a part of it has a row."""
        return self.way.delegates if isinstance(self.way, InWarp) else 1

    @property
    def one_by_one(self) -> bool:
        """Is the largest key taken out k times?"""
        return isinstance(self.way, OneByOne)

    @property
    def packed(self) -> bool:
        """Is a key one word with its column?"""
        return isinstance(self.way, Packed)

    @property
    def clipped(self) -> bool:
        """Has that word room for some of the key's bits alone?"""
        return isinstance(self.way, Packed) and self.way.clipped

    @property
    def best(self) -> str:
        """How a warp or a part of it finds the best, where that is not by rank: a word of configurations."""
        if isinstance(self.way, Packed):
            return "packed" if self.way.group == 1 else "grouped"
        return "in_turn" if self.one_by_one else ""

    @property
    def streamed(self) -> int:
        """Vectors of a thread that stream by at a time; 0 where registers hold the row."""
        return self.way.turn if isinstance(self.way, Streaming) else 0
