"""Which values a derived chain reads from the forward chain's outputs, instead of computing them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.ordering import with_nodes
from fusegen.language.trace import OPS
from fusegen.language.types import size_of

DEAR = (Kind.PRODUCT, Kind.SCAN, Kind.SELECT)
SMALL = 16  # one value a row, beside what is read anyway


def with_outputs_read(graph: Graph, count: int) -> Graph:
    """The graph of the first `count` outputs, gradients, with others, the forward chain's, as operands: each where that
    pays. It reads less memory, or spares a product, a scan or a choice, or, for little memory, a reduction. A value
    that is stored as it is computed, in f32 or as whole numbers, is the same; others are read as they were rounded."""
    for place in range(count, len(graph.outputs)):
        tensor = graph.outputs[place]
        before = gradients_of(graph, count)
        if tensor.node not in before.nodes or tensor.node.op.kind is Kind.INPUT:
            continue
        taken = any(user.op.name == "take" for user in before.users[tensor.node])
        if taken or any(t.node is tensor.node for t in before.outputs):  # what is taken is chosen in the same kernel
            continue
        found = read(graph, tensor, place - len(graph.outputs))
        if pays(before, gradients_of(found, count), tensor):
            graph = found
    return gradients_of(graph, count)


def gradients_of(graph: Graph, count: int) -> Graph:
    return replace(graph, outputs=graph.outputs[:count])


def read(graph: Graph, tensor: Tensor, index: int) -> Graph:
    """The graph with one value as an operand."""
    node = Node(OPS["input"], (), tensor.shape, tensor.dtype.value, Operator(index, tensor.name, tensor.node.where))
    made: dict[Node, Node] = {}
    for own in graph.nodes:
        inputs = tuple(made[a] for a in own.inputs)
        made[own] = node if own is tensor.node else own if inputs == own.inputs else replace(own, inputs=inputs)
    found = with_nodes(graph, made)
    return replace(found, inputs=(*graph.inputs, replace(tensor, node=node)), names={**found.names, node: tensor.name})


def pays(before: Graph, after: Graph, tensor: Tensor) -> bool:
    less = bytes_read(after) - bytes_read(before)
    if less < 0 or any(count(after, kind) < count(before, kind) for kind in DEAR):
        return True
    exact = tensor.dtype is tensor.dtype.value
    if exact and less == 0:
        return True
    spared = count(after, Kind.REDUCE) < count(before, Kind.REDUCE)
    return spared and size(tensor, after.sizes) * SMALL <= bytes_read(before)


def count(graph: Graph, kind: Kind) -> int:
    return sum(node.op.kind is kind for node in graph.nodes)


def bytes_read(graph: Graph) -> int:
    used = set(graph.nodes)
    return sum(size(t, graph.sizes) for t in graph.inputs if t.node in used)


def size(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    elements = 1
    for one in tensor.shape:
        elements *= size_of(one, sizes)
    return elements * tensor.dtype.bytes
