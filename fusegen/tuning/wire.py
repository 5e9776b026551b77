"""How a candidate gets into another process: pickled, with what is one of a kind taken by name on the other side.

Ops are compared by identity, and a graph of thousands of nodes is deeper than pickle goes. So an op travels as its
name, and a graph as a table of its nodes, arguments first. Messages are framed by their length.

Only a parent reads from pipes that it made to its own children, and they from it; nothing from a file or a network is
ever unpickled. What children answer is JSON: a child that went wrong can say nothing that runs here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import IO, Any

from fusegen.errors import Where
from fusegen.graph import Graph, Node, Op, Tensor
from fusegen.targets import TARGETS, Target
from fusegen.targets import target as target_named
from fusegen.trace import OPS

LENGTH = 8  # bytes that say how long a message is


class Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Op) and OPS.get(value.name) is value:
            return op_named, (value.name,)
        if isinstance(value, Target) and TARGETS.get(value.name) is value:
            return target_named, (value.name,)
        if isinstance(value, Graph):
            return graph_of_table, table_of_graph(value)
        if isinstance(value, Where):
            return Where, (value.file, value.line)
        return NotImplemented


def op_named(name: str) -> Op:
    from fusegen import ops  # noqa: F401  (declares them)

    return OPS[name]


FACTS = tuple(field.name for field in fields(Node) if field.name not in ("op", "inputs"))
Row = tuple[Op, tuple[int, ...], Any]
"""A node: op, the numbers of its arguments, everything else of it."""


def table_of_graph(graph: Graph) -> tuple[Any, ...]:
    """The nodes of a graph and of the one it was made of, which share many; then what is said of them, for each."""
    graphs = [graph, *([graph.origin] if graph.origin else [])]
    # an operand may be unused
    nodes = tuple(dict.fromkeys(n for g in graphs for n in (*(t.node for t in g.inputs), *g.nodes)))
    numbers = {node: number for number, node in enumerate(nodes)}
    rows: list[Row] = [
        (n.op, tuple(numbers[a] for a in n.inputs), tuple(getattr(n, fact) for fact in FACTS)) for n in nodes
    ]
    return tuple(rows), [facts_of(g, numbers) for g in graphs]


def facts_of(graph: Graph, numbers: Mapping[Node, int]) -> tuple[Any, ...]:
    names = [(numbers[node], name) for node, name in graph.names.items() if node in numbers]
    inputs, outputs = ([(t.name, t.type, numbers[t.node]) for t in side] for side in (graph.inputs, graph.outputs))
    return graph.name, graph.doc, graph.where, inputs, outputs, names, dict(graph.sizes)


def graph_of_table(rows: tuple[Row, ...], graphs: list[tuple[Any, ...]]) -> Graph:
    nodes: list[Node] = []
    for op, arguments, facts in rows:
        nodes.append(Node(op, tuple(nodes[a] for a in arguments), **dict(zip(FACTS, facts, strict=True))))
    made = None
    for name, doc, where, *sides, names, sizes in reversed(graphs):
        taken, given = (tuple(Tensor(n, type, nodes[number]) for n, type, number in side) for side in sides)
        made = Graph(name, doc, where, taken, given, {nodes[number]: text for number, text in names}, sizes, made)
    assert made is not None
    return made


def packed(value: object) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return pickle.loads(data)


def send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(LENGTH, "big") + data)
    pipe.flush()


def receive(read: Callable[[int], bytes]) -> bytes:
    """One message, by a function that reads up to so many bytes. Raises EOFError when the other side is gone."""
    return exactly(read, int.from_bytes(exactly(read, LENGTH), "big"))


def exactly(read: Callable[[int], bytes], count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = read(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side closed its end")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
