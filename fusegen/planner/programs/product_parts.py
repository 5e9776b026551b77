"""Reductions of a product's rows as two kernels: the product's own, which reduces each tile's columns, and one of rows.

    z [M, N] = x @ w.T;  top [M, 1] = max(z);  total [M, 1] = sum(exp(z - top))
    top_parts, total_parts [M, G]: of each G-th of the columns    # one kernel, which writes no z
    top = max(top_parts);  total = sum(total_parts * exp(top_parts - top))

A tile of products holds some columns of a row, and all of a group's: its sums are reduced where they are, in registers.
So logits of a large vocabulary are never in memory: of 128256 columns 501 groups of 256 are. What is taken of a row at
one column is the sum of all columns of which others count as 0, and so exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusegen.language.graph import Extent, Graph, Node, Operator, Tensor
from fusegen.language.naming import free_name, value_names
from fusegen.language.ordering import with_nodes
from fusegen.language.trace import OPS
from fusegen.language.types import DType, TensorType, b8, f32, i32, size_of
from fusegen.planner.programs.column_parts import Parted, restricted
from fusegen.planner.programs.model import Stored
from fusegen.planner.programs.steps import Lowered
from fusegen.planner.rows.schedule import Online, match_softmax
from fusegen.targets.base import Target

WIDTHS = (256, 128, 64)  # columns of a group: what tiles of products have
LEAST_GROUPS = 2  # of a row; one would be a tile that holds whole rows


def grouped(step: Lowered, target: Target) -> Iterator[Parted]:
    """The step as two kernels, for each width of a group; none where a result is more than one value a row, or needs a
    reduction of what another one gives, but for sums of exponentials under a row's largest value."""
    graph = taken_as_sums(step.graph)
    behind = of_products(graph)
    sums = tuple(n for n in graph.reductions if n in behind and not n.over)
    if not graph.products or not sums or graph.selections or graph.gathers or graph.scans:
        return
    if any(graph.extents[t.node] is not Extent.ROW for t in graph.outputs) or any(n.over for n in graph.reductions):
        return
    pairs = {n: pair for n in sums if (pair := match_softmax(n)) is not None and pair.first in sums}
    for node in sums:
        inner = [n for n in graph.ancestors(*node.inputs) if n in sums]
        if inner and (node not in pairs or set(inner) != {pairs[node].first}):
            return
        if node.dtype is not f32 or node.op.name not in ("sum", "max", "min"):
            return
        if node.inputs[0].shape[-1] != graph.products[0].shape[-1]:
            return
    cols = size_of(graph.products[0].shape[-1], graph.sizes)
    for width in WIDTHS:
        if -(-cols // width) >= LEAST_GROUPS:
            yield Halves(replace(step, graph=graph), sums, pairs, width, -(-cols // width)).result()


def of_products(graph: Graph) -> set[Node]:
    """What is computed from products."""
    found = set(graph.products)
    for node in graph.nodes:
        if any(a in found for a in node.inputs):
            found.add(node)
    return found


def taken_as_sums(graph: Graph) -> Graph:
    """The graph in which what is taken of a product's row at one column is a sum over the row."""
    behind, table = of_products(graph), dict[Node, Node]()
    for node in graph.nodes:
        made = replace(node, inputs=tuple(table[a] for a in node.inputs)) if node.inputs else node
        taken = node.op.name == "take_at" and node.inputs[0] in behind and node.inputs[1] not in behind
        table[node] = as_sum(made, graph) if taken else made
    return with_nodes(graph, table) if any(n.op.name == "take_at" for n in graph.nodes) else graph


def as_sum(node: Node, graph: Graph) -> Node:
    """x at a column: the sum of x where that is the column and 0 elsewhere; what is missing where there is no such."""
    values, column = node.inputs
    own, last = node.operator, values.shape[-1]

    def number(value: float | int, dtype: DType) -> Node:
        return Node(OPS["literal"], (), (), dtype, own, literal=value)

    index = Node(OPS["col_index"], (), (last,), i32, own)
    here = Node(OPS["eq"], (index, column), values.shape, b8, own)
    alone = Node(OPS["where"], (here, values, number(0.0, f32)), values.shape, f32, own)
    total = Node(OPS["sum"], (alone,), node.shape, f32, own)
    low = Node(OPS["ge"], (column, number(0, i32)), column.shape, b8, own)
    high = Node(OPS["lt"], (column, number(size_of(last, graph.sizes), i32)), column.shape, b8, own)
    inside = Node(OPS["logical_and"], (low, high), column.shape, b8, own)
    missing = number(0.0 if node.missing is None else float(node.missing), f32)
    return Node(OPS["where"], (inside, total, missing), node.shape, f32, own)


class Halves:
    """Both kernels' graphs, while they are made: what each reduction of the row becomes in either."""

    def __init__(
        self, step: Lowered, sums: tuple[Node, ...], pairs: Mapping[Node, Online], width: int, count: int
    ) -> None:
        self.step = step
        self.graph = step.graph
        self.sums = sums
        self.pairs = pairs
        self.width = width
        self.count = count
        self.names = value_names(self.graph)
        self.taken = {t.name for t in (*self.graph.inputs, *self.graph.outputs)} | set(self.names.values())
        self.parts: dict[Node, Tensor] = {}  # of each reduction, what the first kernel writes

    def result(self) -> Parted:
        for node in self.sums:
            self.parts[node] = self.part(node)
        outputs = tuple(self.parts.values())
        first = restricted(self.step, outputs, (), {})
        stored = tuple(
            Stored(
                t.name, t.type, "workspace", t.node, f"each tile of {self.width} columns leaves what it has of a row"
            )
            for t in outputs
        )
        return Parted(first, self.second(), stored)

    # ---- the product's kernel

    def part(self, node: Node) -> Tensor:
        """A reduction of each group; of exponentials under the row's largest value those under the group's own."""
        value = node.inputs[0]
        if node in self.pairs:
            pair = self.pairs[node]
            top = self.parts[pair.first].node
            own, shape = node.operator, pair.value.shape
            low = Node(OPS["literal"], (), (), f32, own, literal=-math.inf)
            nothing = Node(OPS["eq"], (top, low), top.shape, b8, own)
            zero = Node(OPS["literal"], (), (), f32, own, literal=0.0)
            pivot = Node(OPS["where"], (nothing, zero, top), top.shape, f32, own)
            text = f"np.repeat({{0}}, {self.width}, axis=-1)[..., :{self.cols}]"
            wide = Node(OPS["spread"], (pivot,), shape, f32, own, group=self.width, text=text)
            below = Node(OPS["sub"], (pair.value, wide), shape, f32, own)
            value = Node(OPS["exp"], (below,), shape, f32, own)
        shape = (*value.shape[:-1], self.count)
        steps = f"range(0, {self.cols}, {self.width})"
        text = f"np.stack([{{0}}[..., c : c + {self.width}].{node.op.name}(-1) for c in {steps}], axis=-1)"
        made = replace(node, op=OPS[f"group_{node.op.name}"], inputs=(value,), shape=shape, group=self.width, text=text)
        name = free_name(f"{self.names[node].rstrip('_')}_parts", self.taken)
        self.taken.add(name)
        return Tensor(name, TensorType(f32, shape), made)

    @property
    def cols(self) -> int:
        return size_of(self.graph.products[0].shape[-1], self.graph.sizes)

    # ---- the kernel of rows

    def second(self) -> Lowered:
        index = min(n.operator.index for n in self.graph.nodes) - len(self.parts)
        held: dict[Node, Node] = {}
        read = []
        for place, (node, tensor) in enumerate(self.parts.items()):
            own = Node(OPS["input"], (), tensor.shape, f32, Operator(index + place, tensor.name, node.where))
            held[node] = own
            read.append(Tensor(tensor.name, tensor.type, own))
        table: dict[Node, Node] = {}
        for node in self.graph.nodes:
            if node in self.pairs:
                pair, by = self.pairs[node], node.operator
                (exponentials,) = node.inputs
                pivot = table[exponentials.inputs[0].inputs[1]]
                shape = held[node].shape
                below = Node(OPS["sub"], (held[pair.first], pivot), shape, f32, by)
                factor = Node(OPS["exp"], (below,), shape, f32, by)
                scaled = Node(OPS["mul"], (held[node], factor), shape, f32, by)
                table[node] = replace(node, inputs=(scaled,))
            elif node in self.parts:
                table[node] = replace(node, inputs=(held[node],))
            elif node.inputs and all(a in table for a in node.inputs):
                table[node] = replace(node, inputs=tuple(table[a] for a in node.inputs))
            elif not node.inputs:
                table[node] = node
        outputs = tuple(replace(t, node=table[t.node]) for t in self.graph.outputs)
        names = {table[n]: name for n, name in self.graph.names.items() if n in table}
        step = replace(self.step, graph=replace(self.graph, names=names, inputs=(*read, *self.graph.inputs)))
        return restricted(step, outputs, (), {})
