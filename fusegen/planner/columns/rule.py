"""Reductions over rows: sums of columns, their largest values, and what is made of those; and running sums.

A block has a tile of columns, and its threads take the tile's rows in turns. What hides the time that memory takes to
answer is bytes in flight: some 40 KB an SM at 4.8 TB/s. Short of warps, as reductions to few columns are, a thread has
the loads of several rows under way; elementwise chains, which are not, do best with one (planner/rows/elementwise.py).
A tile's row should be some 256 bytes side by side or more, as rows of other kernels should (planner/rows/duration.py).

So few columns have few tiles, fewer than a GPU has SMs: 1024 columns of f32 are 8 tiles of 512 bytes. On Hopper and
later the blocks of a cluster, up to 16, share the rows of a tile, and its sums meet in their shared memory. Elsewhere
tiles are narrower, down to a sector of 32 bytes, and rows in flight as many as registers hold. Sums are always made in
one order: no block waits for another but those of its cluster, and nothing is added by atomics.

What needs the result of a column's reduction in each row, as a variance does, takes another pass over the rows.

Running sums are made in one pass, whose block goes through the rows of its columns from the first to the last: in each
turn the next ones, so many for each thread, of which it knows what comes before them once the threads before it have
told theirs. The blocks of a cluster share a turn's rows, and tell one another what theirs make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from fusegen.language.axes import over_rows, reduced_axes
from fusegen.language.graph import Graph, Kind, Node, Tensor
from fusegen.language.naming import entry_name, value_names
from fusegen.language.reference import PLACES
from fusegen.language.scans import SCANS, ScanWay
from fusegen.language.sizes import Dim
from fusegen.language.types import DType, Shape, f32, size_of
from fusegen.planner.columns.duration import Demands, column_cost, column_traffic, registers_of
from fusegen.planner.columns.plan import Behind, ColumnPass, ColumnsPlan, ColumnTile, shared_bytes
from fusegen.planner.cost import decisions
from fusegen.planner.matching import NoMatch, need_countable, need_no_product, need_no_selection
from fusegen.planner.model import Access, Layout, Load, Mode, Reduction, ReductionKind, RowDim, Store
from fusegen.planner.parts import Argument, Scan, Statement, Value
from fusegen.planner.pieces import (
    VECTOR_BYTES,
    arrays,
    merged_axes,
    moves_along,
    named_dims,
    params,
    roundings,
    statement,
)
from fusegen.planner.ranges import fits
from fusegen.targets.base import Target

BLOCKS = (128, 256, 512, 1024)
TURNS = (1, 2, 4, 8)
CLUSTERS = (1, 2, 4, 8, 16)
SHARED_BYTES = 48 * 1024  # static shared memory of a block
LEAST_ROW, MOST_ROW = 32, 2048  # bytes of a tile's row
RUNNING_LEEWAY = 1.3  # of registers: hiprtc 7.2 takes so many more for running sums than are counted, or spills


def columns(graph: Graph, target: Target, layout: Layout) -> Iterator[ColumnsPlan]:
    """Every tile of columns, block, cluster and number of rows in flight that may be worth it."""
    need_no_product(graph, "columns")
    need_no_selection(graph)
    need_countable(graph.cols)
    if drawn := next((node for node in graph.nodes if node.op.name in PLACES), None):
        raise NoMatch(
            f"{drawn.operator} at {drawn.where} draws random numbers; columns, which reduces over rows, draws none\n"
            "  draw them in a chain of their own, and pass what it returns"
        )
    for tensor in graph.outputs:
        if tensor.shape[-1:] != graph.shape[-1:]:
            raise NoMatch(
                f"{tensor.name} has one value a row, and the chain reduces over rows; columns writes what has the "
                f"rows' length, {graph.shape[-1]}: a program cuts here"
            )
    need_one_walk(graph)
    dims, reduced = column_dims(graph, layout)
    kept = math.prod(extent_of(graph, dim) for place, dim in enumerate(dims) if place not in reduced)
    for vector in vectors(graph, layout):
        found = column_accesses(graph, dims, reduced, layout, vector)
        passes = Schedule(graph, found, dims, reduced)
        moved, given = column_traffic(graph, passes.made), params(graph, dims, found)
        demands, decided, rounds = Demands.of(passes.made, vector), decisions(graph), roundings(graph)
        for tile, shared in tiles(graph, target, vector, passes.made, demands, kept):
            yield ColumnsPlan(
                name=entry_name(graph),
                graph=graph,
                target=target,
                layout=layout,
                rule="columns",
                template="columns.cu.j2",
                regime=regime(tile, running=any(one.scans for one in passes.made)),
                cols=graph.cols,
                row_dims=dims,
                accesses=found,
                params=given,
                folded=False,
                shared_bytes=0,
                cost=column_cost(graph, target, tile, demands, shared, moved, kept),
                decisions=decided,
                rounding=rounds,
                tile=tile,
                reduced=reduced,
                counts=passes.counts,
                once_loads=passes.once,
                passes=passes.made,
            )


def need_one_walk(graph: Graph) -> None:
    """Raises NoMatch where running sums are not all made in one walk over the rows."""
    scans = [node for node in over_rows(graph) if node.op.kind is Kind.SCAN]
    running = set(scans)
    for node in over_rows(graph):
        if below := next((a for a in graph.ancestors(*node.inputs) if a in running), None):
            raise NoMatch(
                f"{node.operator} at {node.where} is of what {below.operator} at {below.where} makes, which goes over "
                "the rows first: a program cuts here"
            )
    for node in scans[1:]:
        if direction(node) != direction(scans[0]):
            raise NoMatch(
                f"{node.operator} at {node.where} goes over the rows from the other end than {scans[0].operator} at "
                f"{scans[0].where}: a program cuts here"
            )


def direction(node: Node) -> bool:
    """Does a running sum begin at the last row?"""
    way = SCANS[node.op.name]
    return isinstance(way, ScanWay) and way.reverse


def regime(tile: ColumnTile, running: bool) -> str:
    rows = f"{tile.turn} row{'s' if tile.turn > 1 else ''} a thread in flight"
    who = f"a block of {tile.threads} threads"
    if tile.cluster > 1:
        who = f"a cluster of {tile.cluster} blocks of {tile.threads} threads"
    meet = "each thread's rows follow one another" if running else "parts are summed in shared memory"
    return f"{who} for {tile.cols} columns, {tile.row_step} rows at a time, {rows}; {meet}"


# ---------------------------------------------------------------- tiles


def tiles(
    graph: Graph, target: Target, vector: int, passes: tuple[ColumnPass, ...], demands: Demands, kept: int
) -> Iterator[tuple[ColumnTile, int]]:
    """Each tile, and the bytes of shared memory that it takes."""
    rows = graph.rows // max(1, kept)
    sizes = [load.access.dtype.bytes for one in passes for load in one.loads]
    narrow = vector * min(sizes, default=4)
    for threads in BLOCKS:
        lanes = 1
        while lanes <= threads:
            row = lanes * narrow
            fits = lanes == 1 or lanes // 2 * vector < graph.cols  # half of them have columns
            if fits and (row >= LEAST_ROW or lanes * vector >= graph.cols) and row <= MOST_ROW:
                yield from turned(target, ColumnTile(threads, lanes, vector, 1), passes, demands, rows)
            lanes *= 2


def turned(
    target: Target, tile: ColumnTile, passes: tuple[ColumnPass, ...], demands: Demands, rows: int
) -> Iterator[tuple[ColumnTile, int]]:
    """The tile with each cluster and each number of rows in flight; no more of both than there are rows."""
    most: float = min(target.registers_per_thread, target.registers_per_sm // tile.threads)
    if demands.running and not target.counts_blocks:
        most /= RUNNING_LEEWAY
    for cluster in CLUSTERS:
        if cluster > target.max_cluster or tile.cols % cluster or (cluster > 1 and rows < tile.rows * cluster):
            continue
        shared = shared_bytes(replace(tile, cluster=cluster), passes, target.warp)
        if shared > SHARED_BYTES:
            continue
        for turn in TURNS:
            made = ColumnTile(tile.threads, tile.lanes, tile.vector, turn, cluster)
            if turn > 1 and (rows < made.rows_in_turn or registers_of(made, demands) > most):
                break
            yield made, shared


def vectors(graph: Graph, layout: Layout) -> tuple[int, ...]:
    """Elements a thread takes together: 16 bytes of the widest or of the narrowest operand, if they divide the row;
    else as many as do."""
    sizes = {t.dtype.bytes for t in arrays(graph) if t.shape[-1:] == graph.shape[-1:]}
    widths = {VECTOR_BYTES // size for size in sizes if size > 1} or {VECTOR_BYTES}
    found = set()
    for width in widths:
        while graph.cols % width:
            width //= 2
        found.add(width)
    return tuple(sorted(found, reverse=True))


# ---------------------------------------------------------------- dimensions and operands


def column_dims(graph: Graph, layout: Layout) -> tuple[tuple[RowDim, ...], tuple[int, ...]]:
    """The leading axes, neighbours merged where both are reduced or neither is; and which of these dimensions are
    reduced. An axis that is counted stays alone."""
    gone, leading = reduced_axes(graph), len(graph.shape) - 1
    asked = {node.size for node in graph.nodes if node.size is not None}
    indexed = any(node.op.name == "row_index" for node in graph.nodes)
    counted = {axis for axis in range(leading) if graph.shape[axis] in asked or (indexed and axis == leading - 1)}

    def joins(axis: int) -> bool:
        return not counted & {axis - 1, axis} and (axis - 1 in gone) == (axis in gone)

    groups = merged_axes(graph, layout, joins)
    reduced = tuple(place for place, group in enumerate(groups) if group[0] in gone)
    return named_dims(graph, groups), reduced


def extent_of(graph: Graph, dim: RowDim) -> int:
    return math.prod(size_of(graph.shape[axis], graph.sizes) for axis in dim.axes)


def column_accesses(
    graph: Graph, dims: Sequence[RowDim], reduced: tuple[int, ...], layout: Layout, vector: int
) -> tuple[Access, ...]:
    names = value_names(graph)
    found = []
    for tensor in arrays(graph):
        output = any(tensor is t for t in graph.outputs)
        by_column = tensor.shape[-1] == graph.shape[-1]
        strided = tuple(i for i, d in enumerate(dims) if any(moves_along(graph, tensor, a) for a in d.axes))
        result = output and not any(place in reduced for place in strided)  # of a column, written by itself
        aligned = by_column and vector > 1 and not result and tensor.name not in layout.unaligned
        mode: Mode = "vector" if aligned else "element"
        found.append(
            Access(
                tensor=tensor.name,
                name=tensor.name if output else names[tensor.node],
                dtype=tensor.dtype,
                shape=tensor.shape,
                output=output,
                by_column=by_column,
                strided=strided,
                mode=mode,
                vector=1 if result else vector,
                vector_bytes=min(VECTOR_BYTES, vector * tensor.dtype.bytes) if aligned else tensor.dtype.bytes,
            )
        )
    return tuple(found)


# ---------------------------------------------------------------- what is computed when


class Schedule:
    """The passes of a graph: a reduction of what earlier results are needed for comes in a later pass."""

    def __init__(self, graph: Graph, found: Sequence[Access], dims: Sequence[RowDim], reduced: tuple[int, ...]) -> None:
        self.graph = graph
        self.names = value_names(graph)
        self.gone = frozenset(reduced_axes(graph))
        self.accesses = {access.tensor: access for access in found}
        self.along_rows = {a.tensor for a in found if any(place in reduced for place in a.strided)}
        self.levels = self.found_levels()
        self.counts = self.counted(dims)
        inputs = [t for t in graph.inputs if t.shape]
        self.vectors = {t.node: t for t in inputs if t.name not in self.along_rows and self.accesses[t.name].by_column}
        self.scalars = {
            t.node: t for t in inputs if t.name not in self.along_rows and not self.accesses[t.name].by_column
        }
        self.once = tuple(self.load(t) for t in self.scalars.values())
        last = max(self.levels[n] for n in (*(r.inputs[0] for r in graph.reductions), *self.along(graph.outputs)))
        self.made = self.with_keeps([self.column_pass(number, last) for number in range(last + 1)])

    def along(self, tensors: Iterable[Tensor]) -> list[Node]:
        """The nodes of those that move along the rows that are reduced."""
        return [t.node for t in tensors if self.moves(t.shape)]

    def moves(self, shape: Shape) -> bool:
        rank = len(self.graph.shape)
        return any(size != 1 and place in self.gone for place, size in enumerate(shape, rank - len(shape)))

    def found_levels(self) -> dict[Node, int]:
        """How many reductions one behind another each value needs."""
        levels: dict[Node, int] = {}
        for node in self.graph.nodes:
            own = max((levels[a] for a in node.inputs), default=0)
            levels[node] = own + (node.op.kind is Kind.REDUCE)
        return levels

    def counted(self, dims: Sequence[RowDim]) -> dict[str, str]:
        """The extents that hold the sizes that values are divided by: `{"M": "rows"}`."""
        found = {}
        for dim in dims:
            size = self.graph.shape[dim.axes[0]]
            if len(dim.axes) == 1 and isinstance(size, Dim):
                found[size.name] = dim.extent
        return found

    def load(self, tensor: Tensor) -> Load:
        return Load(self.accesses[tensor.name], self.names[tensor.node])

    def needed(self, roots: Iterable[Node], behind_scans: bool = False) -> list[Node]:
        """What `roots` are computed from, down to operands and results of reductions, in the graph's order;
        `behind_scans`: down to running sums too."""
        wanted, stack = set[Node](), list(roots)
        ends = (Kind.REDUCE, Kind.SCAN) if behind_scans else (Kind.REDUCE,)
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack.extend(() if node.op.kind in ends else node.inputs)
        return [node for node in self.graph.nodes if node in wanted]

    def computed(self, nodes: Iterable[Node]) -> tuple[Statement, ...]:
        """One statement for each value that has a name and is no operand."""
        skipped = (Kind.INPUT, Kind.REDUCE, Kind.SCAN)
        found = [n for n in nodes if n.op.kind not in skipped and n in self.names]
        return tuple(self.sized(statement(node, self.graph), node) for node in found)

    def sized(self, made: Statement, node: Node) -> Statement:
        """Sizes that a call chooses are values of the kernel, by the names of their dims."""
        args: list[Argument] = []
        for argument, own in zip(made.args, node.inputs, strict=True):
            run_time = own.size is not None and own.size in self.graph.counted and isinstance(own.size, Dim)
            args.append(Value(count_name(cast(Dim, own.size), own.dtype), own.dtype) if run_time else argument)
        return Statement(made.op, made.name, made.dtype, tuple(args), made.exact)

    def column_pass(self, number: int, last: int) -> ColumnPass:
        graph = self.graph
        reductions = [n for n in graph.reductions if self.levels[n] == number + 1]
        outputs = [t for t in graph.outputs if self.moves(t.shape) and self.levels[t.node] == number]
        nodes = self.needed((*(n.inputs[0] for n in reductions), *(t.node for t in outputs)))
        element = [n for n in nodes if n.op.kind is not Kind.REDUCE and self.moves(n.shape)]
        scans = [n for n in nodes if n.op.kind is Kind.SCAN]
        if scans and reductions:
            raise NoMatch(
                f"{reductions[0].operator} at {reductions[0].where} reduces the rows that {scans[0].operator} at "
                f"{scans[0].where} runs over, in the same pass: a program cuts here"
            )
        before = self.needed(n.inputs[0] for n in scans) if scans else nodes
        behind_scans = self.needed((t.node for t in outputs), behind_scans=True) if scans else []
        read = [graph.tensor_of[n] for n in element if n.op.kind is Kind.INPUT]
        finished = [t for t in graph.outputs if not self.moves(t.shape) and max(1, self.levels[t.node]) == number + 1]
        behind = self.needed(t.node for t in finished)
        place = sum(self.levels[n] <= number for n in graph.reductions)
        found = tuple(
            Reduction(
                kind=cast(ReductionKind, n.op.name),
                value=self.names[n.inputs[0]],
                results=(self.names[n],),
                slot=place + index,
                dtype=n.dtype,
            )
            for index, n in enumerate(reductions)
        )
        stores = tuple(Store(self.accesses[t.name], self.names[t.node], fits=fits(t, self.graph)) for t in outputs)
        running = tuple(
            Scan(SCANS[n.op.name], self.names[n.inputs[0]], self.names[n], n.dtype, source=n.inputs[0].dtype)
            for n in scans
        )
        loads = tuple(self.load(t) for t in read if self.accesses[t.name].by_column)
        row_loads = tuple(self.load(t) for t in read if not self.accesses[t.name].by_column)
        return ColumnPass(
            title=title([*loads, *row_loads], found, running, stores),
            loads=loads,
            row_loads=row_loads,
            column_loads=tuple(self.load(self.vectors[n]) for n in nodes if n in self.vectors),
            takes=tuple(self.names[n] for n in nodes if n.op.kind is Kind.REDUCE),
            column_body=self.computed(n for n in nodes if n not in element),
            body=self.computed(n for n in element if n in before),
            reductions=found,
            scans=running,
            running_body=self.computed(n for n in element if n in behind_scans),
            stores=stores,
            behind=Behind(
                loads=tuple(self.load(self.vectors[n]) for n in behind if n in self.vectors),
                takes=tuple(self.names[n] for n in behind if n.op.kind is Kind.REDUCE and n not in reductions),
                body=self.computed(behind),
                stores=tuple(
                    Store(self.accesses[t.name], self.names[t.node], fits=fits(t, self.graph)) for t in finished
                ),
            ),
        )

    def with_keeps(self, passes: Sequence[ColumnPass]) -> tuple[ColumnPass, ...]:
        """With the results that later passes take, or what is behind them."""
        made = []
        for number, one in enumerate(passes):
            later = {name for other in passes[number + 1 :] for name in (*other.takes, *other.behind.takes)}
            keeps = tuple(r.results[0] for r in one.reductions if r.results[0] in later)
            made.append(replace(one, keeps=keeps))
        return tuple(made)


def count_name(dim: Dim, dtype: DType) -> str:
    """What a kernel calls the number of a dim that a call chooses, as f32 or as a whole number."""
    return f"{dim.name}_counted" if dtype is f32 else f"{dim.name}_counted_whole"


def title(
    loads: Sequence[Load], reductions: Sequence[Reduction], scans: Sequence[Scan], stores: Sequence[Store]
) -> str:
    """`read dy, x; dgamma = sum(mul)`."""
    parts = [f"read {', '.join(load.value for load in loads)}"] if loads else []
    parts += [f"{r.results[0]} = {r.kind}({r.value})" for r in reductions]
    parts += [f"{scan.result} = {scan.way.name}({scan.value})" for scan in scans]
    parts += [f"write {', '.join(store.access.name for store in stores)}"] if stores else []
    return "; ".join(parts)
