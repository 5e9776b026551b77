"""Reductions over rows as two kernels: one that makes parts of them as it passes over the rows, one that adds those up.

    dx [M, N] = ...;  dgamma [1, N] = sum over M of v [M, N]
    dx [M, N] = ...;  dgamma_parts [P, N]: of rows p, p + P, ... of v      # one kernel, over whole rows
    dgamma [1, N] = sum over P of dgamma_parts                             # another one, over columns

The first kernel may do with its rows what any kernel of rows does, reductions of them included, and reads them once
(planner/rows/parts_rule.py). P is a number, a multiple of the GPU's SMs, and so few that its rows are little beside M.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.naming import free_name
from fusegen.language.sizes import dims_in
from fusegen.language.trace import OPS
from fusegen.language.types import TensorType, f32
from fusegen.language.views import View
from fusegen.planner.programs.model import Stored
from fusegen.planner.programs.steps import Bound, Lowered
from fusegen.targets.base import Target

PARTED = ("sum", "max", "min")
PARTS_A_SM = (1, 2, 3, 4, 8, 16, 32)  # from blocks of many threads to several short rows a block
ROWS_A_PART = 4  # at least: fewer would write more than is worth it


@dataclass(frozen=True, slots=True)
class Parted:
    """Both kernels, and the tensors between them."""

    first: Lowered
    second: Lowered
    between: tuple[Stored, ...]


def parted(step: Lowered, target: Target) -> Iterator[Parted]:
    """The step as two kernels, for each number of parts; none where its reductions over rows are not all the same way,
    over all rows, of values along the whole row, with nothing but columns behind them."""
    graph = step.graph
    sums = tuple(node for node in graph.reductions if node.over)
    if not sums or not all(may_part(graph, node) for node in sums) or graph.products or graph.selections:
        return
    behind = set(sums)
    for node in graph.nodes:
        if any(a in behind for a in node.inputs):
            behind.add(node)
    if any(n.op.kind is not Kind.MAP for n in behind if n not in sums):
        return
    late = [t for t in graph.outputs if t.node in behind]
    columns = {t.node for t in graph.inputs if not along_rows(graph, t.node)}
    wanted = {a for n in behind if n not in sums for a in n.inputs if a not in behind}
    if not all(n in columns or (n.op.kind is Kind.LEAF and n.size is None) for n in wanted):
        return  # what the rows' own values or their number are behind the sums
    for number in PARTS_A_SM:
        count = number * target.sms
        if count * ROWS_A_PART <= graph.rows or number == PARTS_A_SM[0]:
            yield by_parts(step, sums, behind, late, count)


def may_part(graph: Graph, node: Node) -> bool:
    rank = len(graph.shape)
    whole = len(node.over) == rank - 1 and node.inputs[0].shape == graph.shape
    alone = not any(a.over for a in graph.ancestors(*node.inputs))
    return node.op.name in PARTED and node.dtype is f32 and whole and alone


def along_rows(graph: Graph, node: Node) -> bool:
    return any(size != 1 for size in node.shape[:-1])


def by_parts(step: Lowered, sums: tuple[Node, ...], behind: set[Node], late: list[Tensor], count: int) -> Parted:
    graph = step.graph
    taken = {t.name for t in (*graph.inputs, *graph.outputs)} | set(graph.names.values())
    stored: list[Stored] = []
    made: list[Tensor] = []
    for node in sums:
        own = next((t.name for t in graph.outputs if t.node is node), graph.names.get(node, node.op.name))
        name = free_name(f"{own}_parts", taken)
        taken.add(name)
        shape = (*(1,) * (len(graph.shape) - 2), count, graph.shape[-1])
        part = replace(
            node, op=OPS[f"part_{node.op.name}"], shape=shape, over=(), count=count, text=meaning(node.op.name, count)
        )
        type = TensorType(f32, shape)
        made.append(Tensor(name, type, part))
        why = f"{node.operator} reduces all rows: each of {count} blocks leaves what it has of them"
        stored.append(Stored(name, type, "workspace", part, why))
    early = tuple(t for t in graph.outputs if t.node not in behind)
    first = restricted(step, (*early, *made), (), {})
    second = restricted(step, tuple(late), tuple(zip(sums, made, strict=True)), {n: n for n in behind})
    return Parted(first, second, tuple(stored))


def meaning(name: str, count: int) -> str:
    """The numpy text of parts of the rows."""
    rows = "{0}.reshape(-1, {0}.shape[-1])"
    start = {"sum": "0.0", "max": "-np.inf", "min": "np.inf"}[name]
    part = f"{rows}[p::{count}].{name}(0, initial={start})"
    return f"np.stack([{part} for p in range({count})]).reshape(*(1,) * ({{0}}.ndim - 2), {count}, -1)"


def restricted(
    step: Lowered, outputs: tuple[Tensor, ...], parts: tuple[tuple[Node, Tensor], ...], behind: dict[Node, Node]
) -> Lowered:
    """The step that makes `outputs`; where there are `parts`, from those."""
    graph = step.graph
    inputs: tuple[Tensor, ...] = graph.inputs
    table: dict[Node, Node] = {}
    if parts:
        index = min(n.operator.index for n in graph.nodes) - len(parts)
        read = []
        for place, (node, tensor) in enumerate(parts):
            own = Node(OPS["input"], (), tensor.shape, f32, Operator(index + place, tensor.name, node.where))
            read.append(Tensor(tensor.name, tensor.type, own))
            table[node] = replace(node, inputs=(own,), over=(-2,))
        for node in graph.nodes:
            if node in behind and node not in table:
                table[node] = replace(node, inputs=tuple(table.get(a, a) for a in node.inputs))
        outputs = tuple(replace(t, node=table[t.node]) for t in outputs)
        inputs = (*read, *inputs)
    whole = Graph(graph.name, graph.doc, graph.where, inputs, outputs, {}, graph.sizes)
    nodes = set(whole.nodes)
    inputs = tuple(t for t in inputs if t.node in nodes)
    shapes = [*(t.shape for t in (*inputs, *outputs)), *(n.shape for n in nodes)]
    shapes += [(n.size,) for n in nodes if n.size is not None]
    dims = {dim.name for shape in shapes for dim in dims_in(shape)}
    names = {table.get(n, n): name for n, name in graph.names.items()}
    made = Graph(
        name=f"{graph.name}_{outputs[0].name}",
        doc=f"{', '.join(t.name for t in outputs)} of {graph.name}.",
        where=graph.where,
        inputs=inputs,
        outputs=outputs,
        names={n: name for n, name in names.items() if n in nodes},
        sizes={name: size for name, size in graph.sizes.items() if name in dims},
        shown={name: text for name, text in graph.shown.items() if name in {t.name for t in (*inputs, *outputs)}},
    )
    kept = {t.name for t in (*inputs, *outputs)}
    fresh = [t for t in (*inputs, *outputs) if t.name not in {b.tensor for b in step.bounds} and t.shape]
    whole_ones = (Bound(t.name, t.name, View.identity(t.shape).renamed(step.sizes)) for t in fresh)
    bounds = (*(b for b in step.bounds if b.tensor in kept), *whole_ones)
    return Lowered(made, bounds, {name: size for name, size in step.sizes.items() if name in dims})
