"""Graph -> one graph an operator: the chain as it would run unfused, with every value between operators in memory.

    pieces = unfused(graph)          # in an order in which they can run
    run_pieces(pieces, values, run)  # values by name: operands in, outputs out

Each piece is a graph like any other, planned and compiled on its own. What lies between two pieces is stored in the
type that `Graph.storage` says, which is what an array library would have chosen. Values made from nothing (literals,
indices, masks of positions alone) and run-time scalars cost no memory: each piece that needs them computes them. So
does one that needs a value whose own operands don't span its shape, such as the causal mask of a row vector.

A selection alone orders what it is given: of probabilities that were rounded in between, ties may come in another order
than their logits have, and a masked one is a probability of 0 like others. A take alone makes its selection again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusegen.language.graph import Extent, Graph, Kind, Node, Operator, Tensor
from fusegen.language.naming import free_name, value_names
from fusegen.language.nodes import size_number
from fusegen.language.operators import operators
from fusegen.language.sizes import dims_in
from fusegen.language.trace import OPS
from fusegen.language.types import Dim, Shape, TensorType


@dataclass(frozen=True, slots=True)
class Piece:
    """One operator as a chain of its own. `reads` and `writes` name values of the whole chain, in the order of the
    graph's inputs and outputs; a value's name is that of the operand or output it is, if it is one."""

    graph: Graph
    operator: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def unfused(graph: Graph) -> tuple[Piece, ...]:
    """The chain's operators, each alone; an operand that is returned as it is makes a copy."""
    graph = graph.written
    memory = stored(graph)
    groups = [nodes for nodes in operators(graph) if any(n in memory for n in nodes)]
    pieces = [piece(graph, nodes, memory, number) for number, nodes in enumerate(groups)]
    returned = [t for t in graph.outputs if t.node.op.kind is Kind.INPUT]
    return (*pieces, *(copy_piece(graph, t, len(groups) + n) for n, t in enumerate(returned)))


def run_pieces(
    pieces: Sequence[Piece], values: Mapping[str, Any], run: Callable[[Piece, Sequence[Any]], Sequence[Any]]
) -> dict[str, Any]:
    """Every value of the chain by its name. `values` are the operands; `run(piece, operands)` gives its outputs."""
    known = dict(values)
    for one in pieces:
        known.update(zip(one.writes, run(one, [known[name] for name in one.reads]), strict=True))
    return known


def stored(graph: Graph) -> dict[Node, str]:
    """The name of every value that is in memory when each operator runs alone: operands, outputs, all between them."""
    taken = {t.name for t in (*graph.inputs, *graph.outputs)}
    found = {t.node: t.name for t in graph.inputs if t.shape}
    outputs = {t.node: t.name for t in graph.outputs}  # of a value that is returned twice, the last: as in storage
    names = value_names(graph)
    spans = spanned(graph)
    for nodes in operators(graph):
        inside = set(nodes)
        for node in nodes:
            if node in outputs:
                found[node] = outputs[node]
                continue
            from_arrays = graph.extents[node] is not Extent.LAUNCH and dims_of(node) <= spans[node]
            if from_arrays and any(user not in inside for user in graph.users[node]):
                name = free_name(names[node], taken)
                taken.add(name)
                found[node] = name
    return found


def spanned(graph: Graph) -> dict[Node, frozenset[object]]:
    """The axes of each value that the arrays it is computed from have; none for what depends on no array."""
    table: dict[Node, frozenset[object]] = {}
    for node in graph.nodes:
        if node.op.kind is Kind.INPUT:
            table[node] = dims_of(node)
            continue
        axes = frozenset[object]().union(*(table[a] for a in node.inputs))
        if node.op.kind is Kind.SELECT:
            axes |= dims_of(node) - dims_of(replace(node, shape=(*node.shape[:-1], 1)))  # k is its own
        if node.op.kind is Kind.ORDER:  # groups are none of the slots' axes
            axes |= dims_of(node)
        table[node] = axes & dims_of(node) if node.op.kind in (Kind.REDUCE, Kind.PRODUCT, Kind.SELECT) else axes
    return table


def dims_of(node: Node) -> frozenset[object]:
    """Its axes that are longer than 1: by dim, and by place where a size is a number."""
    places = enumerate(node.shape, -len(node.shape))
    return frozenset(s if isinstance(s, Dim) else (place, s) for place, s in places if s != 1)


def piece(graph: Graph, nodes: Sequence[Node], memory: Mapping[Node, str], number: int) -> Piece:
    """The graph of the operator that `nodes` are."""
    inside = set(nodes)
    results = [n for n in nodes if n in memory]
    if any(n.op.name == "take" for n in nodes):
        memory = {n: name for n, name in memory.items() if n is not graph.selection or n in inside}
    spans = spanned(graph)
    if any(not dims_of(n) <= spans[n] for n in results):
        memory = {t.node: t.name for t in graph.inputs if t.shape} | {n: memory[n] for n in results}
        inside |= set(graph.nodes) - set(memory)
    needed = needed_for(graph, results, inside, memory)
    operator = nodes[-1].operator
    scalars = [t for t in graph.inputs if not t.shape and t.node in needed]
    computed = [n for n in needed if n in inside or n not in memory]
    read = list(dict.fromkeys(a for n in computed for a in n.inputs if a in memory and a not in inside))
    made: dict[Node, Node] = {t.node: t.node for t in scalars}
    inputs = []
    for place, node in enumerate(read):
        made[node] = Node(
            OPS["input"], (), node.shape, node.dtype, Operator(place - len(read), memory[node], node.where)
        )
        inputs.append(Tensor(memory[node], TensorType(graph.storage[node], node.shape), made[node]))
    for node in computed:
        if node not in made:
            made[node] = replace(sized(node, graph), inputs=tuple(made[a] for a in node.inputs))
    outputs = [
        Tensor(name, TensorType(dtype, n.shape), made[n]) for n in results for name, dtype in places(graph, n, memory)
    ]
    tensors = (*inputs, *scalars)
    own = Graph(
        name=f"{graph.name}_{number}_{operator.name}",
        doc=f"{operator.name} of {graph.name}, alone.",
        where=graph.where,
        inputs=tensors,
        outputs=tuple(outputs),
        names={made[n]: name for n, name in graph.names.items() if n in made},
        sizes=used_sizes(graph, [t.shape for t in (*tensors, *outputs)]),
    )
    return Piece(own, operator.name, tuple(t.name for t in tensors), tuple(t.name for t in outputs))


def needed_for(graph: Graph, results: Sequence[Node], inside: set[Node], memory: Mapping[Node, str]) -> list[Node]:
    """`results` and what they are computed from, back to values in memory; arguments first."""
    wanted = set(results)
    for node in reversed(graph.nodes):
        if node in wanted and (node in inside or node not in memory):
            wanted.update(node.inputs)
    return [node for node in graph.nodes if node in wanted]


def places(graph: Graph, node: Node, memory: Mapping[Node, str]) -> Iterator[tuple[str, Any]]:
    """Where a result goes: to each output that it is, or to its place between operators."""
    outputs = [(t.name, t.dtype) for t in graph.outputs if t.node is node]
    yield from outputs or [(memory[node], graph.storage[node])]


def sized(node: Node, graph: Graph) -> Node:
    """A size as its number: a piece's rows may run over another axis than the chain's."""
    if node.size is None:
        return node
    return Node(OPS["literal"], (), (), node.dtype, node.operator, literal=size_number(node, graph.sizes))


def used_sizes(graph: Graph, shapes: Sequence[Shape]) -> dict[str, int]:
    used = {dim.name for shape in shapes for dim in dims_in(shape)}
    return {name: size for name, size in graph.sizes.items() if name in used}


def copy_piece(graph: Graph, tensor: Tensor, number: int) -> Piece:
    """What returns an operand: a copy."""
    source = graph.tensor_of[tensor.node]
    own = replace(
        graph, name=f"{graph.name}_{number}_copy", doc=f"{source.name} of {graph.name}, copied.", inputs=(source,),
        outputs=(tensor,), names={}, body="", sizes=used_sizes(graph, [source.shape]),
    )  # fmt: skip
    return Piece(own, "copy", (source.name,), (tensor.name,))
