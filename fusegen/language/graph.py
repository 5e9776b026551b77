"""The op graph: what a chain computes, before anyone decides how.

An `Op` is one entry of the table in `fusegen.ops`; a `Node` is one use of it; a `Graph` is a chain's nodes in order.
Everything here is immutable. Nodes compare by identity, which makes them dict keys.

Values between ops are f32, i32 or b8; storage dtypes (f16, bf16) appear where memory is read or written, and in an
explicit `cast`. An i32 is one of two's complement: its arithmetic is exact, modulo 2^32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, TypeVar

from fusegen.errors import SpecError, Where
from fusegen.language.nodes import OPS as OPS
from fusegen.language.nodes import Extent as Extent
from fusegen.language.nodes import Kind as Kind
from fusegen.language.nodes import Node as Node
from fusegen.language.nodes import Op as Op
from fusegen.language.nodes import Operator as Operator
from fusegen.language.nodes import Tensor as Tensor
from fusegen.language.nodes import behind as behind
from fusegen.language.nodes import by_reach, repeated_in
from fusegen.language.nodes import op_named as op_named
from fusegen.language.nodes import plain as plain
from fusegen.language.nodes import shown_by as shown_by
from fusegen.language.nodes import whole_rows as whole_rows
from fusegen.language.sizes import Expr, at_text, dims_in
from fusegen.language.sizes import broadcast as broadcast
from fusegen.language.types import (
    F8,
    Dim,
    DType,
    Shape,
    Size,
    TensorType,
    bf16,
    f16,
    f32,
    i8,
    multiply_together,
    size_of,
    u8,
)

OVERFLOWS: Mapping[str, DType] = {f"overflow_{dtype}": dtype for dtype in F8}
"""Casts after which what is beyond the range is an infinity or NaN, as F.cast(x, f8e5m2, saturate=False) asks for."""
ROUNDS: Mapping[DType, str] = {dtype: f"round_{dtype}" for dtype in (f16, bf16, *F8)}
CASTS: Mapping[str, DType] = {name: dtype for dtype, name in ROUNDS.items()} | dict(OVERFLOWS)
"""The ops after which a value is of a narrower type, though it goes on as f32."""
FITTED: Mapping[str, DType] = {**CASTS, "to_i8": i8, "to_u8": u8}
"""The same, with those that go on as i32."""

ROWS_AT = ("gather", "paged_rows")
"""Of the ops that look something up, those that find rows of a table, along its first axis."""
ALONG_ROWS = (Kind.PRODUCT, Kind.SCAN, Kind.SPREAD, Kind.ORDER)  # what they make varies along a row, whatever of
COUNT_ELEMENTS = ("col_index", "element_low", "element_high")
"""Made from nothing, another number for each element of a row. Of chosen columns an element's words take these."""
LARGEST_SIZE = 2**40
"""No dim is larger: more elements than any memory holds, and few enough for 64-bit addresses."""
MOST_PICKED = 1024
"""No selection keeps more columns of a row: as many as a block has threads."""


@dataclass(frozen=True)
class Graph:
    """A chain's meaning: inputs, outputs, sizes, and the names its author gave to values.

    `shape` is the iteration space, the broadcast of every operand: all dimensions but the last are *rows*. What lies
    behind a selection is no part of it: of each row it has the k columns that were picked.

    Of a chain with matrix products it is the products' own, [.., M, N], broadcast with what their results meet; what
    only makes their factors has spaces of its own, and so has what is reduced without a product in it (`inner`).
    """

    name: str
    doc: str
    where: Where
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    names: Mapping[Node, str]
    sizes: Mapping[str, int]
    body: str = ""  # the spec's own text, where there is some; it says nothing that the nodes don't
    origin: Graph | None = None  # what the spec said, where passes have made another graph of it
    shown: Mapping[str, str] = field(default_factory=dict)  # of tensors that are views: `x[..., :D // 2]`, for people
    rounding: Literal["fused", "eager"] = "fused"  # eager: its nodes round behind each operator (`language.eager`)
    batch_invariant: bool = False  # one order of sums for every number of rows (`planner.invariant`)
    axes_apart: bool = False  # axes are taken one by one (`planner.programs.axes_as_rows`, `.scans_over_rows`)

    def __repr__(self) -> str:
        return f"<Graph {self.name} {self.signature} at {self.sizes_text()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as a table of its nodes: a graph of thousands is deeper than recursion goes."""
        return graph_of_table, table_of_graph(self)

    @property
    def written(self) -> Graph:
        """The graph as its author wrote it: what would run unfused."""
        return self.origin or self

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that an output needs, arguments first, in the order they were written."""
        seen = behind(tensor.node for tensor in self.outputs)
        # an operator's arguments were written before it, so this keeps arguments first
        return tuple(sorted(seen, key=lambda node: node.operator.index))

    @cached_property
    def users(self) -> Mapping[Node, tuple[Node, ...]]:
        """Who reads each node, in order."""
        table: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for argument in dict.fromkeys(node.inputs):
                table[argument].append(node)
        return {node: tuple(users) for node, users in table.items()}

    @cached_property
    def shape(self) -> Shape:
        """The iteration space: the shapes of what is read and written along it, broadcast.

        Products of several widths may be returned side by side, as q, k and v are: then the first one's. Of a chain of
        several spaces, which no one kernel holds (`fusegen.language.one_kernel`), that of its first output.
        """
        return self.outputs[0].shape if self.space is None else self.space

    @cached_property
    def space(self) -> Shape | None:
        """The one iteration space; None where there are several."""
        shape: Shape = ()
        for part in self.iterated_shapes:
            if shape and part and part[-1] != shape[-1] and {part[-1], shape[-1]} <= set(self.widths):
                part = (*part[:-1], shape[-1])
            try:
                shape = broadcast(shape, part)
            except ValueError:
                return None
        return shape

    @cached_property
    def viewed(self) -> bool:
        """Are there views, joins, operands that are written to, tables whose rows are looked up by several indices, or
        sizes computed from dims? A kernel has none: `planner.programs.lowering`."""
        apart = any(n.op.kind in (Kind.VIEW, Kind.JOIN) or n.op.name == "scatter" for n in self.nodes)
        tables = [n.inputs[0] for n in self.gathers if n.inputs[0] in self.tables]
        return apart or len(set(tables)) < len(tables) or bool(self.computed_sizes)

    @cached_property
    def gathers(self) -> tuple[Node, ...]:
        """What is read in rows or columns that another value names."""
        return tuple(n for n in self.nodes if n.op.kind is Kind.GATHER)

    @cached_property
    def tables(self) -> frozenset[Node]:
        """The operands that are read in rows which indices name, and in no other way: their rows are none of the
        chain's."""
        found = {n.inputs[0] for n in self.gathers if n.op.name in ROWS_AT}
        read = {a for n in self.nodes for a in (n.inputs[1:] if n.op.name in ROWS_AT else n.inputs)}
        return frozenset(n for n in found - read - {t.node for t in self.outputs} if n.op.kind is Kind.INPUT)

    @cached_property
    def scatters(self) -> tuple[Node, ...]:
        """Rows that are written where an index names some: of a chain an operand with new rows, of a kernel the rows
        alone."""
        return tuple(n for n in self.nodes if n.op.kind is Kind.SCATTER)

    @cached_property
    def updates(self) -> Mapping[str, str]:
        """The outputs that are operands with new rows, in the operand's own memory, {output: operand}."""
        scattered = [t for t in self.outputs if t.node.op.name == "scatter"]
        return {t.name: self.tensor_of[t.node.inputs[0]].name for t in scattered}

    @cached_property
    def written_at(self) -> frozenset[Node]:
        """The outputs whose rows an index names, and the operands in whose memory they are: their rows are none of the
        chain's."""
        bases = {n.inputs[0] for n in self.scatters if n.op.name == "scatter"}
        return frozenset((*self.scatters, *bases))

    @cached_property
    def grouped(self) -> frozenset[Node]:
        """What has one value for each group of a row's neighbours: reductions of groups, and what is made of those."""
        found: set[Node] = set()
        for node in self.nodes:
            if node.op.kind is Kind.GROUP or (node.op.kind is Kind.MAP and any(a in found for a in node.inputs)):
                found.add(node)
        return frozenset(found)

    @cached_property
    def repeated(self) -> Mapping[Node, int]:
        """The operands that have one value for so many neighbours of a row, and are read in no other way."""
        return {} if self.products else repeated_in(self.nodes, {t.node for t in self.outputs})

    @cached_property
    def deals(self) -> tuple[Node, ...]:
        """What is reduced over columns that are dealt to parts."""
        return tuple(n for n in self.nodes if n.op.kind is Kind.DEAL)

    @cached_property
    def orders(self) -> tuple[Node, ...]:
        """Of slots that name a group each: where groups end, which slot goes where."""
        return tuple(n for n in self.nodes if n.op.kind is Kind.ORDER)

    @cached_property
    def parts(self) -> tuple[Node, ...]:
        """What is reduced over every so-many-th row."""
        return tuple(n for n in self.nodes if n.op.kind is Kind.PART)

    @cached_property
    def iterated(self) -> tuple[Tensor, ...]:
        """The tensors that the passes over rows and columns read or write: none of those behind a selection, of a row's
        groups or shared by neighbours in it, of parts of the rows, of spaces of their own, in rows at an index."""
        apart = {*self.picked, *self.grouped, *self.inner, *self.tables, *self.written_at, *self.parts, *self.orders}
        return tuple(t for t in (*self.inputs, *self.outputs) if t.node not in apart and t.node not in self.repeated)

    @cached_property
    def iterated_shapes(self) -> tuple[Shape, ...]:
        """Of the products, of the tensors that are read and written together, of what a selection chooses from, and of
        rows that are found by an index."""
        nodes = (*self.products, *(n.inputs[0] for n in (*self.selections, *self.parts)))
        nodes += tuple(n.inputs[-1] for n in self.scatters)
        if self.tables:
            nodes += tuple(n for n in self.gathers if n.inputs[0] in self.tables and n not in self.inner)
        shapes = (n.shape for n in (*nodes, *(self.users[n][0] for n in self.repeated)))
        return (*shapes, *(t.shape for t in self.iterated))

    @cached_property
    def selections(self) -> tuple[Node, ...]:
        """The nodes that choose columns. One kernel has one of them at most."""
        return tuple(n for n in self.nodes if n.op.name == "top_columns")

    @cached_property
    def selection(self) -> Node | None:
        """The node that chooses columns of each row; None for a chain that keeps them all."""
        return self.selections[0] if self.selections else None

    @cached_property
    def picked(self) -> frozenset[Node]:
        """Everything behind the selection: the columns, what is taken at them, and what is computed from that."""
        found: set[Node] = set()
        for node in self.nodes:
            if node.op.kind is Kind.SELECT or any(a in found for a in node.inputs):
                found.add(node)
        return frozenset(found)

    @cached_property
    def picks(self) -> int:
        """The number k of columns that the selection keeps of each row; 0 without one."""
        return size_of(self.selection.shape[-1], self.sizes) if self.selection else 0

    @cached_property
    def widths(self) -> tuple[Size, ...]:
        """The last axes of the products, in their order, each once."""
        return tuple(dict.fromkeys(n.shape[-1] for n in self.products))

    @cached_property
    def products(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op.kind is Kind.PRODUCT)

    @cached_property
    def inner(self) -> frozenset[Node]:
        """What is read for a product's factors or for a reduction without a product in it, and for nothing else."""
        if not self.products:
            return frozenset()
        from_product = {n for n in self.products}
        for node in self.nodes:
            if any(a in from_product for a in node.inputs):
                from_product.add(node)
        outer = {t.node for t in self.outputs}
        for node in reversed(self.nodes):
            apart = node.op.kind is Kind.PRODUCT or (node.op.kind is Kind.REDUCE and node not in from_product)
            if node in outer and not apart:
                outer.update(node.inputs[:1] if node.op.kind is Kind.BIAS else node.inputs)
        return frozenset(self.nodes) - outer

    @cached_property
    def cols(self) -> int:
        """The row length."""
        return size_of(self.shape[-1], self.sizes) if self.shape else 1

    @cached_property
    def rows(self) -> int:
        """The number of rows at the default sizes; a run-time argument of the kernel."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size_of(size, self.sizes)
        return rows

    @cached_property
    def reductions(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op.kind is Kind.REDUCE)

    @cached_property
    def scans(self) -> tuple[Node, ...]:
        """Running sums and products along the row, or along an axis of rows; the row's largest, and its order."""
        return tuple(n for n in self.nodes if n.op.kind is Kind.SCAN)

    @cached_property
    def tensor_of(self) -> Mapping[Node, Tensor]:
        """The input tensor behind each INPUT node."""
        return {t.node: t for t in self.inputs}

    @cached_property
    def extents(self) -> Mapping[Node, Extent]:
        """Over what each node varies. A reduction varies by row, a selection by what it picks, an index by what it
        counts."""
        table: dict[Node, Extent] = {}
        for node in self.nodes:
            if node in self.tables:  # whatever is read of it varies by its index
                table[node] = Extent.LAUNCH
            elif node.op.kind is Kind.INPUT:
                table[node] = self.input_extent(self.tensor_of[node])
            elif node.op.kind is Kind.GATHER:
                least = Extent.ELEMENT if whole_rows(node) else Extent.ROW
                table[node] = max(least, table[node.inputs[1]], key=by_reach)
            elif node.over:  # as a vector along the row
                table[node] = Extent.ELEMENT if node.shape[-1] == self.shape[-1] else Extent.ROW
            elif node.op.kind in (Kind.REDUCE, Kind.DEAL) or node.op.name in ("row_index", "row_low", "row_high"):
                table[node] = Extent.ROW
            elif node.op.kind is Kind.SELECT:
                table[node] = Extent.PICKED
            elif node.op.kind is Kind.GROUP:
                table[node] = Extent.GROUP
            elif node.op.kind is Kind.PART:
                table[node] = Extent.PART
            elif node.op.kind in ALONG_ROWS or (not node.inputs and node.op.name in COUNT_ELEMENTS):
                table[node] = Extent.ELEMENT
            else:
                table[node] = max((table[a] for a in node.inputs), key=by_reach, default=Extent.LAUNCH)
        return table

    @cached_property
    def storage(self) -> Mapping[Node, DType]:
        """The type each value has in memory, or would have between unfused operators: that of its operands, the wider
        one where they differ."""
        table = {t.node: t.dtype for t in (*self.inputs, *self.outputs)}
        table.update({t.node: t.dtype for t in self.outputs})
        given = frozenset(table)
        for node in self.nodes:
            if node.op.kind is Kind.PRODUCT:  # one type for both factors: what is computed is rounded to it
                found = self.factor_type(node, table)
                made = [a for a in node.factors if a not in given and not plain(a)]
                table.update({a: FITTED.get(a.op.name, found) for a in made})
            if node in table:
                continue
            if node.op.kind is Kind.PRODUCT:
                table[node] = node.dtype if found.narrow else found  # sums are of no 8 bits
                continue
            if node.op.kind in (Kind.TRANSPOSE, Kind.VIEW):
                table[node] = table[node.inputs[0]]
                continue
            arrays = [a for a in node.inputs if a.dtype is f32 and a.op.kind is not Kind.LEAF and a.shape]
            kinds = {table[a] for a in arrays}
            table[node] = node.dtype if node.dtype is not f32 else kinds.pop() if len(kinds) == 1 else f32
        return table

    @cached_property
    def factor_types(self) -> Mapping[Node, DType]:
        """The type that the factors of each product have when they meet; f32 where theirs differ. Where both are of 8
        bits and multiplied as they are, that of the left one."""
        return {node: self.factor_type(node, self.storage) for node in self.products}

    def factor_type(self, product: Node, storage: Mapping[Node, DType]) -> DType:
        """That of both factors; of an operand, where the other one is computed without a last cast of its own."""
        kinds = [factor_kind(a, storage) for a in product.factors]
        if kinds[0] is kinds[1] or (multiply_together(*kinds) and all(map(has_type, product.factors))):
            return kinds[0]
        fixed = [kind for kind, a in zip(kinds, product.factors, strict=True) if has_type(a)]
        return fixed[0] if len(fixed) == 1 else f32

    @cached_property
    def fixed(self) -> frozenset[Size]:
        """The sizes that are constants of a kernel that passes over rows, multiplies matrices, or sorts slots."""
        slots = {n.shape[-1] for n in self.orders}
        return self.fixed_by(self.reductions) | slots | set(dims_in(tuple(slots)))

    def fixed_by(self, reductions: Iterable[Node]) -> frozenset[Size]:
        """The same, if these were all reductions."""
        sizes: set[Size] = {node.size for node in self.nodes if node.size is not None} - self.counted
        sizes.update(self.shape[-1:], self.widths, (n.inputs[0].shape[-1] for n in self.products if not n.inner_ends))
        sizes.update(n.any_ends.shape[0] for n in self.products if n.any_ends)
        sizes.update(n.inputs[0].shape[-2] for n in self.gathers if n.op.name == "paged_rows")
        sizes.update(n.inputs[0].shape[-1] for n in reductions if not n.over)
        sizes.update(n.shape[-1] for n in (*self.selections, *self.scans, *self.grouped, *self.repeated))
        return frozenset(sizes) | frozenset(dims_in(tuple(sizes)))

    @cached_property
    def counted(self) -> frozenset[Size]:
        """The sizes of axes of rows that are reduced or that sums run along, which a call chooses."""
        return frozenset(n.inputs[0].shape[axis] for n in (*self.reductions, *self.scans) for axis in n.over)

    def input_extent(self, tensor: Tensor) -> Extent:
        """Of a chain with products, in whichever space the tensor lies: rows of a factor, or those of its product,
        which may be of one column."""
        if not tensor.shape:
            return Extent.LAUNCH
        if self.products:
            return Extent.ELEMENT if tensor.shape[-1] != 1 else Extent.ROW
        return Extent.ELEMENT if self.lies_along(tensor) else Extent.ROW

    def lies_along(self, tensor: Tensor) -> bool:
        """Has an operand an element for each of a row, if only the same one for neighbours? What rows are found by has
        one a row, though they be of one."""
        if tensor.node in self.repeated:
            return True
        return tensor.shape[-1] == self.shape[-1] and not (tensor.shape[-1] == 1 and tensor.node in self.index_operands)

    @cached_property
    def index_operands(self) -> frozenset[Node]:
        """The operands of which indices are made."""
        places = {"gather": 1, "paged_rows": 1, "take_at": 1, "scatter": 1, "put": 0}
        found = (n.inputs[places[n.op.name]] for n in (*self.gathers, *self.scatters))
        return frozenset(n for n in behind(found) if n.op.kind is Kind.INPUT)

    def at(self, /, **sizes: int) -> Graph:
        """The same graph at other sizes. Raises SpecError for a name that is not a dim of the chain or a size < 1."""
        wanted: dict[str, int] = {}
        for name, size in sizes.items():
            if name not in self.sizes:
                known = ", ".join(self.sizes) or "none"
                raise SpecError(f"{self.name} has no dim {name!r}; its dims are {known}", self.where)
            if isinstance(size, Integral) and not isinstance(size, bool):  # numpy's integers are
                size = int(size)
            least = 0 if Dim(name) in dims_in(self.shape[:-1]) and Dim(name) not in self.fixed else 1
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise SpecError(
                    f"{self.name}: {name}={size!r} is not a size; it must be an integer of at least {least}", self.where
                )
            if size > LARGEST_SIZE:
                raise SpecError(f"{self.name}: {name}={size}; a size is at most {LARGEST_SIZE}", self.where)
            wanted[name] = size
        graph = replace(self, sizes={**self.sizes, **wanted}, origin=self.origin and self.origin.at(**wanted))
        graph.need_sizes()
        graph.need_columns()
        return graph

    @cached_property
    def computed_sizes(self) -> Mapping[Size, Where]:
        """The sizes that are computed from dims, such as `2 * N`, each with the place that first has it."""
        found: dict[Size, Where] = {}
        for shape, where in (
            *((t.shape, self.where) for t in (*self.inputs, *self.outputs)),
            *((n.shape if n.size is None else (n.size,), n.where) for n in self.nodes),
        ):
            for size in shape:
                if isinstance(size, Expr):
                    found.setdefault(size, where)
        return found

    def need_sizes(self) -> None:
        """Raises SpecError where a computed size does not come out even, or is no size of an axis."""
        axes = {size for node in self.nodes for size in node.shape}
        for size, where in self.computed_sizes.items():
            try:
                number = size_of(size, self.sizes)
            except SpecError as error:
                raise SpecError(f"{self.name}: {error}", where) from None
            least = 0 if 0 in (self.sizes[d.name] for d in dims_in(size)) else 1
            if size in axes and not least <= number <= LARGEST_SIZE:
                said = f"the size {size} is {number} at {at_text(size, self.sizes)}"
                raise SpecError(f"{self.name}: {said}; a size is {least} to {LARGEST_SIZE}", where)
        for node in self.nodes:
            if node.view is not None:
                try:
                    node.view.check(self.sizes)
                except SpecError as error:
                    raise SpecError(f"{self.name}: {node.operator}: {error}", node.where) from None

    def need_columns(self) -> None:
        """Raises SpecError where a selection is to keep more columns than its rows have, or than any may."""
        for node in self.selections:
            size, cols = node.shape[-1], size_of(node.inputs[0].shape[-1], self.sizes)
            picks = size_of(size, self.sizes)
            k = str(size) if isinstance(size, int) else f"{size}={picks}"
            if picks > MOST_PICKED:
                raise SpecError(
                    f"{node.operator}: k is {k}; a selection keeps at most {MOST_PICKED} columns", node.where
                )
            if picks > cols:
                raise SpecError(
                    f"{node.operator}: k is {k}, but the rows of {self.name} have {cols} columns", node.where
                )

    def with_dtype(self, dtype: DType) -> Graph:
        """The same graph with every floating-point operand stored as `dtype`; explicit casts and 8 bits stay."""

        def stored(tensor: Tensor) -> Tensor:
            if tensor.dtype.kind != "float" or tensor.dtype.narrow or not tensor.shape:
                return tensor
            return replace(tensor, type=TensorType(dtype, tensor.shape))

        return replace(
            self,
            inputs=tuple(map(stored, self.inputs)),
            outputs=tuple(map(stored, self.outputs)),
            origin=self.origin and self.origin.with_dtype(dtype),
        )

    @property
    def signature(self) -> str:
        """`f16[M, N], f16[N] -> f16[M, N]`."""
        return f"{', '.join(str(t.type) for t in self.inputs)} -> {', '.join(str(t.type) for t in self.outputs)}"

    def sizes_text(self) -> str:
        """`M=8192 N=4096`."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    def ancestors(self, *nodes: Node) -> Iterator[Node]:
        """`nodes` and everything they need, arguments first."""
        wanted = set(nodes)
        for node in reversed(self.nodes):
            if node in wanted:
                wanted.update(node.inputs)
        return (node for node in self.nodes if node in wanted)


def factor_kind(node: Node, storage: Mapping[Node, DType]) -> DType:
    """The type of one factor: of an operand its own, of a cast and of its rows what it casts to, of another value that
    of what it is made from in its whole shape: scales and gains of another type do not change it. What is scattered is
    of its operand's type, whose memory it lies in."""
    if (source := shown_by(node)).op.kind is Kind.SCATTER:
        return storage[source.inputs[0]]
    source = shown_by(source.inputs[0]) if source.op.name in ROWS_AT else source
    if source.op.name in FITTED:
        return FITTED[source.op.name]
    if has_type(node):
        return FITTED.get(node.op.name) or storage[node]
    kinds = {factor_kind(a, storage) for a in node.inputs if a.shape == node.shape and a.dtype is f32}
    return kinds.pop() if len(kinds) == 1 else storage[node]


def overflows(node: Node) -> bool:
    """Has a value the infinities of its 8 bits, where it has any?"""
    return shown_by(node).op.name in OVERFLOWS


def has_type(node: Node) -> bool:
    """Has a factor a type of its own, as an operand and its rows have? One that is computed can become any."""
    return plain(node) or node.op.name in FITTED or shown_by(node).op.name in ROWS_AT


R = TypeVar("R")


def once_per_graph(function: Callable[[Graph], R]) -> Callable[[Graph], R]:
    """Remember a pure function's result with its graph: graphs never change, and every candidate asks again."""
    key = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def remembered(graph: Graph) -> R:
        if key not in graph.__dict__:
            graph.__dict__[key] = function(graph)  # past the frozen fields, as functools.cached_property does
        result: R = graph.__dict__[key]
        return result

    return remembered


# ---------------------------------------------------------------- as a table


FACTS = tuple(field.name for field in fields(Node) if field.name not in ("op", "inputs"))
Row = tuple[Op, tuple[int, ...], Any]
"""A node: op, the numbers of its arguments, everything else of it."""


def table_of_graph(graph: Graph) -> tuple[Any, ...]:
    """The nodes of a graph and of the one it was made of, and unused operands; then what is said of them, for each."""
    graphs = [graph, *([graph.origin] if graph.origin else [])]
    nodes = tuple(dict.fromkeys(n for g in graphs for n in (*(t.node for t in g.inputs), *g.nodes)))
    numbers = {node: number for number, node in enumerate(nodes)}
    rows: list[Row] = [
        (n.op, tuple(numbers[a] for a in n.inputs), tuple(getattr(n, fact) for fact in FACTS)) for n in nodes
    ]
    return tuple(rows), [facts_of(g, numbers) for g in graphs]


def facts_of(graph: Graph, numbers: Mapping[Node, int]) -> tuple[Any, ...]:
    names = [(numbers[node], name) for node, name in graph.names.items() if node in numbers]
    inputs, outputs = ([(t.name, t.type, numbers[t.node]) for t in side] for side in (graph.inputs, graph.outputs))
    facts = graph.name, graph.doc, graph.where, inputs, outputs, names, dict(graph.sizes), graph.body
    return *facts, dict(graph.shown), graph.rounding, graph.batch_invariant, graph.axes_apart


def graph_of_table(rows: tuple[Row, ...], graphs: list[tuple[Any, ...]]) -> Graph:
    nodes: list[Node] = []
    for op, arguments, facts in rows:
        nodes.append(Node(op, tuple(nodes[a] for a in arguments), **dict(zip(FACTS, facts, strict=True))))
    made = None
    for name, doc, where, *sides, names, sizes, body, shown, rounding, invariant, apart in reversed(graphs):
        taken, given = (tuple(Tensor(n, type, nodes[number]) for n, type, number in side) for side in sides)
        named = {nodes[number]: text for number, text in names}
        made = Graph(name, doc, where, taken, given, named, sizes, body, made, shown, rounding, invariant, apart)
    assert made is not None
    return made
