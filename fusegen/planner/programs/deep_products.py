"""Products of few tiles and a large K as two kernels: one that sums parts of K, and one that adds these up.

    z [M, N] = x @ w.T;  out = f(z)
    z_parts [P, M, N]: x[:, p * K / P : (p + 1) * K / P] @ w[:, the same].T of each p     # a product of P matrices
    out = f(sum over P of z_parts)                                                        # elementwise, in one order

A block has a tile of the product, and goes over all of K. Of 128 x 128 numbers that are sums of 65536 products each,
one to four tiles would leave most of a GPU idle. Parts are f32, and P is a number, so that sums have one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.naming import free_name, value_names
from fusegen.language.sizes import Shape, replaced
from fusegen.language.trace import OPS
from fusegen.language.types import TensorType, f32, size_of
from fusegen.language.views import View
from fusegen.planner.programs.column_parts import Parted
from fusegen.planner.programs.key_parts import seen, through
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import Stored
from fusegen.planner.programs.steps import Lowered, NotOneStep
from fusegen.targets.base import Target

TILE = 128  # rows and columns of a product that are blocks enough for parts of them
LEAST_DEPTH = 512  # numbers of K in a part: of fewer the tile's start and end are most of its time
STEP = 64  # a multiple of the slices that kernels go over K by
BLOCKS_AN_SM = (0.5, 1, 2)
MOST_OPERANDS = 8  # parts that one elementwise step adds up: of more a kernel of columns does


def deep_products(step: Lowered, target: Target) -> Iterator[Parted]:
    """The step as two kernels, for each number of parts that may be worth it; none for what is no product of two
    matrices with elementwise steps behind it."""
    graph = step.graph
    if len(graph.products) != 1 or not is_plain(graph, graph.products[0]):
        return
    for count in numbers_of_parts(graph, graph.products[0], target):
        try:
            yield Halves(step, count).result()
        except NotOneStep:
            return


def is_plain(graph: Graph, product: Node) -> bool:
    """Is it a product of two operands, f32 sums of which nothing but elementwise steps is made?"""
    if product.any_ends or product.scales or product.dtype is not f32 or len(product.shape) != 2:
        return False
    if any(len(f.shape) != 2 or matrix_of(f) is None for f in product.factors):
        return False
    kinds = (Kind.MAP, Kind.INPUT, Kind.TRANSPOSE, Kind.PRODUCT)
    return all(n.op.kind in kinds or n.op.name == "literal" for n in graph.nodes) and all(
        t.node.shape == product.shape for t in graph.outputs
    )


def matrix_of(factor: Node) -> Node | None:
    """The operand that a factor is, or is the transpose of."""
    source = factor.inputs[0] if factor.op.kind is Kind.TRANSPOSE else factor
    return source if source.op.kind is Kind.INPUT else None


def numbers_of_parts(graph: Graph, product: Node, target: Target) -> list[int]:
    """As many as give each SM about so many tiles, and divide K into whole steps."""
    rows, cols = (size_of(size, graph.sizes) for size in product.shape)
    depth = size_of(product.inputs[0].shape[-1], graph.sizes)
    tiles = -(-rows // TILE) * -(-cols // TILE)
    steps = depth // STEP
    whole = [count for count in range(2, steps + 1) if depth % (count * STEP) == 0 and depth // count >= LEAST_DEPTH]
    wanted = (target.sms * blocks / tiles for blocks in BLOCKS_AN_SM)
    return sorted({min(whole, key=lambda count: abs(count - each)) for each in wanted}) if whole else []


class Halves:
    """Both kernels' graphs, while they are made."""

    def __init__(self, step: Lowered, count: int) -> None:
        self.step, self.graph, self.count = step, step.graph, count
        (self.product,) = self.graph.products
        taken = {t.name for t in (*self.graph.inputs, *self.graph.outputs)}
        outputs = [t.name for t in self.graph.outputs if t.node is self.product]
        own = outputs[0] if outputs else value_names(self.graph)[self.product].rstrip("_")
        self.name = free_name(f"{own}_parts", taken)

    def result(self) -> Parted:
        shape = (self.count, *self.product.shape)
        left, right = (self.in_parts(f, along) for f, along in zip(self.product.factors, (-1, -2), strict=True))
        parts = Tensor(self.name, TensorType(f32, shape), replace(self.product, inputs=(left, right), shape=shape))
        why = f"each of {self.count} parts of K leaves its sums: {self.product.operator} has too few tiles for a GPU"
        in_chain = TensorType(f32, tuple(replaced(size, self.step.sizes) for size in shape))
        stored = Stored(self.name, in_chain, "workspace", parts.node, why)
        first = self.made((parts,), f"{self.stem}_{self.name}")
        return Parted(first, self.second(parts), (stored,))

    @property
    def stem(self) -> str:
        """What both kernels' names begin with."""
        return self.graph.name.removesuffix(f"_{self.graph.outputs[0].name}")

    def in_parts(self, factor: Node, axis: int) -> Node:
        """A factor as so many matrices, of which each has a part of K, that lies along `axis`."""
        if factor.op.kind is Kind.TRANSPOSE:
            inner = self.in_parts(factor.inputs[0], -3 - axis)
            return replace(factor, inputs=(inner,), shape=(inner.shape[0], inner.shape[2], inner.shape[1]))
        depth = factor.shape[axis]
        view = View.identity(factor.shape).split(2 + axis, (self.count, depth // self.count))
        return seen(factor, view if axis == -2 else view.transposed((1, 0, 2)))

    def second(self, parts: Tensor) -> Lowered:
        index = min(n.operator.index for n in self.graph.nodes) - 1
        own = Node(OPS["input"], (), parts.shape, f32, Operator(index, parts.name, self.product.where))
        table = {self.product: self.total(own)}
        for node in self.graph.nodes:
            if node not in table:
                inputs = tuple(table.get(a, a) for a in node.inputs)
                table[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        outputs = tuple(replace(t, node=table[t.node]) for t in self.graph.outputs)
        return self.made(outputs, f"{self.stem}_{outputs[0].name}", (replace(parts, node=own),))

    def total(self, parts: Node) -> Node:
        """The sum of all parts: of few of them as so many operands of an elementwise step, else over an axis."""
        by, shape = self.product.operator, self.product.shape
        if self.count > MOST_OPERANDS:
            over: Shape = (1, *shape)
            return seen(Node(OPS["sum"], (parts,), over, f32, by, over=(-3,)), View.identity(over).sliced((0,)))
        each = (seen(parts, View.identity(parts.shape).sliced((part,))) for part in range(self.count))
        return reduce(lambda a, b: Node(OPS["add"], (a, b), shape, f32, by), each)

    def made(self, outputs: tuple[Tensor, ...], name: str, read: tuple[Tensor, ...] = ()) -> Lowered:
        """The kernel that makes `outputs`."""
        graph = self.graph
        nodes = set(Graph(graph.name, graph.doc, graph.where, (), outputs, {}, graph.sizes).nodes)
        whole = Graph(
            name=name,
            doc=f"{', '.join(t.name for t in outputs)} of {graph.name}.",
            where=graph.where,
            inputs=tuple(t for t in (*read, *graph.inputs) if t.node in nodes),
            outputs=outputs,
            names={node: own for node, own in graph.names.items() if node in nodes},
            sizes=graph.sizes,
        )
        return through(self.step, lowered(whole), self.product)
