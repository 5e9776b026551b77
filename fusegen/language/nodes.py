"""What a graph is made of: an `Op` is one entry of the op table, a `Node` one use of it, a `Tensor` an operand
or output.

Everything here is immutable. Nodes compare by identity, which makes them dict keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fusegen.errors import SpecError, Where
from fusegen.language.types import DType, Shape, Size, TensorType, f32, fits_i32, size_of
from fusegen.language.views import View


class Kind(Enum):
    """What an op does to shapes, and therefore where it may run."""

    INPUT = "input"  # an operand in memory, or a run-time scalar
    LEAF = "leaf"  # made from nothing: a literal, a size, an index
    MAP = "map"  # element by element, with broadcasting
    REDUCE = "reduce"  # the last axis becomes 1, or others
    SCAN = "scan"  # each element becomes what it and those before it in the row make
    GROUP = "group"  # of each group of neighbours along the last axis one value
    SPREAD = "spread"  # each group's value at every place of the group
    DEAL = "deal"  # of a row's columns, dealt to so many parts a tile at a time, one value for each part
    PART = "part"  # of all rows so many, each of every so-many-th row: sums and the like, one for each column
    SELECT = "select"  # the last axis becomes the k columns that were chosen of it
    TRANSPOSE = "transpose"  # the same memory with its last two axes swapped: a factor only
    VIEW = "view"  # some elements of one value, in other axes: slices, permutations, axes split and merged
    JOIN = "join"  # several values side by side
    UNPACK = "unpack"  # numbers of 4 bits from the bytes that hold them: a factor of one kernel only
    GATHER = "gather"  # what an operand has in rows or columns that another value names
    ORDER = "order"  # of slots that name a group each: where groups end, which slot goes where
    SCATTER = "scatter"  # an operand with new rows, where another value names them: written in its own memory
    PRODUCT = "product"  # [.., M, K] and [.., K, N] become [.., M, N]
    BIAS = "bias"  # each row of a grouped product plus, or times, what an operand has for the row's group


PRIMITIVE_KINDS = (Kind.MAP, Kind.REDUCE, Kind.SCAN, Kind.SELECT, Kind.GATHER)
"""Of the ops that a spec's author calls by a function or an operator."""
OF_KERNELS = ("paged_rows",)
"""Ops of these kinds that only kernels have."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One op, whole: meaning, device text, cost and error, in one place. Ops are compared by identity.

    `ref` is its meaning as numpy text, `expr` its device text; `{0}`, `{1}` are arguments (always names or bracketed
    literals), `{out}` the result. A reduction's `ref` takes the whole row and keeps its axis; its `expr` combines
    `{0}` and `{1}`, starting from `init`.

    `forms` are both texts once more for arguments of a type that wants others: arithmetic on i32 is that of numpy's
    int32, exact and modulo 2^32.

    `slopes` are the absolute partial derivatives, one for each argument, as numpy text: an error e of an argument
    becomes slope * e. `ulps` bounds the device function's own error in units in the last place of `scale` (numpy text,
    the result unless named). Bounds are those of the OpenCL full profile (OpenCL C 3.0, table 65), which AMD's device
    library keeps and NVIDIA's undercuts; those of what fusegen.emitting.prelude makes are derived there.

    `gradients` are what reverse mode makes of `d`, the gradient of the result `out`, for each argument `x`, `y`, `z`: a
    line of a spec's own language, with a few words of `fusegen.derivatives.reverse`. One alone is that of all
    arguments; None: the result does not vary with it, or by steps. Without any there is no gradient.
    """

    name: str
    kind: Kind
    arity: int
    ref: str
    expr: str
    doc: str
    flops: int = 1
    slots: int = 0  # instructions that a GPU issues for one element; 0: as many as flops
    result: DType | None = None  # None: f32 when any argument is, else i32, else b8
    takes: str = "number"  # "number" (f32 or i32), "float", "int", "bool", "where", "any"
    init: str = ""
    slopes: tuple[str, ...] = ()
    ulps: float = 1.0
    scale: str = "{out}"
    symbol: str = ""  # "+": how the spec writes it, for titles
    forms: Mapping[DType, tuple[str, str]] = field(default_factory=dict)  # (ref, expr) by the last argument's type
    over: Mapping[DType, str] = field(default_factory=dict)  # of a reduction: `ref` over {axes}, by its type
    gradients: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def issued(self) -> int:
        return self.slots or self.flops

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are the op itself, by its name."""
        return op_named, (self.name,)


OPS: dict[str, Op] = {}
"""By name; filled by fusegen.ops, the one place where ops are declared."""


def op_named(name: str) -> Op:
    return OPS[name]


@dataclass(frozen=True, slots=True)
class Operator:
    """What the user wrote as one step: `x + bias`, `F.layernorm(h, gamma, beta)`. Unfused, it would be one kernel."""

    index: int
    name: str
    where: Where

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A row of `groups` parts of one length: columns are chosen of the `best` of them, whose `by` largest keys add up
    to most. NaN comes before every number, and of equals the first."""

    groups: int
    best: int
    by: int

    def __str__(self) -> str:
        largest = "largest key" if self.by == 1 else f"{self.by} largest keys' sum"
        return f"the best {self.best} of {self.groups} groups by their {largest}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value: an op, its arguments, its shape and value dtype, and where the user wrote it."""

    op: Op
    inputs: tuple[Node, ...]
    shape: Shape
    dtype: DType  # of the value: f32, i32 or b8
    operator: Operator
    literal: float | int | bool | None = None  # of a literal
    size: Size | None = None  # of a size leaf: the dimension it counts
    missing: float | int | bool | None = None  # of a take: what stands where the column is none of the row's
    ordered: bool = True  # of top_columns: best first; else in any order
    view: View | None = None  # of a view: which elements of its argument
    parts: tuple[View, ...] = ()  # of a join: where each argument lies in it
    text: str = ""  # of both, their meaning as numpy text, in which sizes stand by their names
    over: tuple[int, ...] = ()  # of a reduction over axes of rows: these, counted from the right; else the last
    # of a running sum, which planners make of one of the last axis: the one that it runs along
    group: int = 0  # of a group reduction, and of a spread: values of a group; of a deal: columns of a tile
    count: int = 0  # of a reduction of every count-th row: so many parts, of which part p has rows p, p + count, ...
    # of a deal: as many, of which part p has tiles p, p + count, ...
    promote: int | None = None  # of a product: how many of K are summed apart, and then added in f32; 0: all of them
    bare: bool = False  # of top_columns: a row of nothing but -inf stands for NaN, whose columns come in order
    limit: GroupLimit | None = None  # of top_columns: which groups of a row it chooses from; None: from all of it
    shift: bool = False  # no result depends on it, as on the largest value that a softmax subtracts: no gradient either

    @property
    def where(self) -> Where:
        return self.operator.where

    @property
    def factors(self) -> tuple[Node, Node]:
        """Of a product; behind them it may have `ends`, and `scales`."""
        left, right, *_ = self.inputs
        return left, right

    @property
    def ends(self) -> Node | None:
        """Of a grouped product, and of its bias or scale: behind which row each group's rows end
        (fusegen.language.grouped_products)."""
        return self.inputs[2] if self.op.name == "grouped_matmul" or self.op.kind is Kind.BIAS else None

    @property
    def inner_ends(self) -> Node | None:
        """Of a product for each group of what is summed over: behind which of that each group ends."""
        return self.inputs[2] if self.op.name == "matmul_over_groups" else None

    @property
    def any_ends(self) -> Node | None:
        """Where groups end, of rows or of what is summed over."""
        return self.ends or self.inner_ends

    @property
    def scales(self) -> tuple[Node, ...]:
        """Of a product: those of its factors' blocks."""
        return self.inputs[3:] if self.any_ends else self.inputs[2:]

    @property
    def ref(self) -> str:
        """The op's meaning, as numpy text, for arguments such as these."""
        return self.text or self.texts[0]

    @property
    def expr(self) -> str:
        """The op's device text for arguments such as these."""
        return self.texts[1]

    @property
    def texts(self) -> tuple[str, str]:
        usual = (self.op.ref, self.op.expr)
        ref, expr = self.op.forms.get(self.inputs[-1].dtype, usual) if self.inputs else usual
        if self.over and self.op.over:
            ref = self.op.over[self.dtype].replace("{axes}", str(self.over if len(self.over) > 1 else self.over[0]))
        return ref, expr

    def __repr__(self) -> str:
        return f"<{self.op.name} {list(map(str, self.shape))}>"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named operand of the chain in memory, or (with an empty shape) a run-time scalar."""

    name: str
    type: TensorType
    node: Node

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        return self.type.shape


class Extent(Enum):
    """Over what a value varies inside one launch."""

    LAUNCH = 0  # the same everywhere
    ROW = 1  # one value a row
    GROUP = 2  # one value for each group of a row's neighbours
    PICKED = 3  # one value for each column that the row's selection keeps
    ELEMENT = 4  # one value an element
    PART = 5  # one value for each column of a part of the rows


def whole_rows(node: Node) -> bool:
    """Does a gather give rows of several values, which lie next to each other? Else it gives one value for an index."""
    return node.op.name in ("gather", "paged_rows") and node.inputs[0].shape[1:][-1:] not in ((), (1,))


def plain(node: Node) -> bool:
    """Is a factor an operand, as it lies in memory, transposed, or in another view?"""
    while node.op.kind in (Kind.VIEW, Kind.TRANSPOSE):
        (node,) = node.inputs
    return node.op.kind is Kind.INPUT


def behind(nodes: Iterable[Node], until: Node | None = None) -> tuple[Node, ...]:
    """`nodes` and everything they are computed from, arguments first, down to `until` and nothing below it.

    Chains may be too long for recursion.
    """
    seen: dict[Node, None] = {}

    def arguments(node: Node) -> Iterator[Node]:
        return iter(() if node is until else node.inputs)

    for node in nodes:
        stack = [] if node in seen else [(node, arguments(node))]
        while stack:
            current, rest = stack[-1]
            for argument in rest:
                if argument not in seen:
                    stack.append((argument, arguments(argument)))
                    break
            else:
                seen.setdefault(current)
                stack.pop()
    return tuple(seen)


def by_reach(extent: Extent) -> int:
    return extent.value


def size_number(node: Node, sizes: Mapping[str, int]) -> float | int:
    """The number of a size leaf, in its type. Raises SpecError where whole numbers do not hold it."""
    assert node.size is not None
    number = size_of(node.size, sizes)
    if node.dtype is f32:
        return float(number)
    if not fits_i32(number):
        raise SpecError(
            f"{node.operator}: the size {node.size} is {number}, beyond i32, which it meets\n"
            "  F.cast(x, f32) goes on in f32",
            node.where,
        )
    return number


def shown_by(node: Node) -> Node:
    """What a view, or a view of a view, shows; else the value itself."""
    while node.op.kind is Kind.VIEW:
        (node,) = node.inputs
    return node


def repeated_in(nodes: Iterable[Node], outputs: set[Node]) -> dict[Node, int]:
    """The operands that nothing but `spread` reads, as of what has a value a channel where rows have many places of
    each; and how many places of a row have each value."""
    listed = tuple(nodes)
    apart = outputs.union(a for n in listed if n.op.name != "spread" for a in n.inputs)
    groups = {n.inputs[0]: n.group for n in listed if n.op.name == "spread"}
    return {n: group for n, group in groups.items() if n.op.kind is Kind.INPUT and n not in apart}
