"""A chain's op graph for people: its operands, the operators that its author wrote, who reads whom, and in which kernel
each is computed."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.naming import value_names
from fusegen.language.operators import operators
from fusegen.language.types import shape_text
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.reporting.state import Item

MOST_LINES = 400  # of a file behind the place of a chain, to find its body in


@dataclass(frozen=True, slots=True)
class Picture:
    """The items, operands first, and where to find them: `operators` by the index of an operator, `operands` and
    `stored` by the name of an array in memory. `spec` is the chain's body, from line `first_line` of its file on."""

    items: tuple[Item, ...]
    operators: Mapping[int, int]
    operands: Mapping[str, int]
    stored: Mapping[str, int]
    spec: tuple[str, ...]
    first_line: int

    def tensors_of(self, step: Step | None) -> dict[str, int]:
        """The items behind the arrays and scalars that a kernel takes; without a step they are the chain's own."""
        if step is None:
            return dict(self.operands)
        known = {**self.operands, **self.stored}
        found = {name: self.operands[name] for name in step.values if name in self.operands}
        return found | {binding.tensor: known[binding.base] for binding in step.reads if binding.base in known}


def picture(graph: Graph, program: ProgramPlan | None) -> Picture:
    graph = graph.written
    groups = operators(graph)
    count = len(graph.inputs)
    operands = {tensor.name: place for place, tensor in enumerate(graph.inputs)}
    places = {nodes[-1].operator.index: count + place for place, nodes in enumerate(groups)}
    kernels = kernels_of(places, program)
    names = value_names(graph)
    spec, first = body(graph)
    memory = {stored.node: str(stored.type) for stored in program.boundaries} if program else {}
    memory |= {tensor.node: str(tensor.type) for tensor in graph.outputs}
    items = [
        Item("operand", tensor.name, tensor.name, str(tensor.type), str(tensor.type), "", 0, (), (), ())
        for tensor in graph.inputs
    ]
    for nodes in groups:
        result, operator = nodes[-1], nodes[-1].operator
        reads = {reached(node, graph, operands, places) for node in arguments(nodes)}
        line = operator.where.line - first + 1 if first and operator.where.file == graph.where.file else 0
        items.append(
            Item(
                kind="operator",
                name=operator.name,
                value=names.get(result, operator.name),
                type=f"{result.dtype}{shape_text(result.shape)}",
                stored=next((memory[node] for node in reversed(nodes) if node in memory), ""),
                where=str(operator.where),
                line=line if 0 < line <= len(spec) else 0,
                reads=tuple(sorted({item for found in reads for item in found} - {len(items)})),
                kernels=tuple(kernels[operator.index]),
                outputs=tuple(tensor.name for tensor in graph.outputs if tensor.node in nodes),
            )
        )
    stored = {s.name: places[s.node.operator.index] for s in program.boundaries
              if s.node.operator.index in places} if program else {}  # fmt: skip
    return Picture(tuple(items), places, operands, stored, spec, first)


def kernels_of(places: Mapping[int, int], program: ProgramPlan | None) -> dict[int, list[int]]:
    """The launches that compute each operator."""
    if program is None:
        return {index: [0] for index in places}
    found: dict[int, list[int]] = {index: [] for index in places}
    for place, steps in enumerate(program.launches):
        made = {n.operator.index for s in steps for n in s.graph.nodes if n.op.kind not in (Kind.INPUT, Kind.LEAF)}
        for index in made & places.keys():
            found[index].append(place)
    for stored in program.boundaries:  # a view that is in memory is who wrote that
        if (index := stored.node.operator.index) in places and not found[index]:
            found[index].append(program.ends(stored)[0])
    return found


def arguments(nodes: Sequence[Node]) -> Iterator[Node]:
    """What an operator takes from others."""
    own = set(nodes)
    yield from dict.fromkeys(a for node in nodes for a in node.inputs if a not in own)


def reached(
    node: Node, graph: Graph, operands: Mapping[str, int], places: Mapping[int, int]
) -> frozenset[int]:  # fmt: skip
    """The items that a value is of: its own, or where it is none, as `2 * scale`, those that it is made of."""
    found, stack, seen = set(), [node], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op.kind is Kind.INPUT:
            found.add(operands[graph.tensor_of[current].name])
        elif current.operator.index in places:
            found.add(places[current.operator.index])
        else:
            stack += current.inputs
    return frozenset(found)


def body(graph: Graph) -> tuple[tuple[str, ...], int]:
    """The spec's own lines, and the number of the first in its file; 0 where the file does not have them, word for
    word, behind the place where the chain begins."""
    lines = graph.body.splitlines()
    wanted = [line.strip() for line in lines[1:]]
    file = [line.strip() for line in linecache.getlines(graph.where.file)]
    start = max(graph.where.line - 1, 0)
    for at in range(start, min(len(file), start + MOST_LINES) if wanted else start):
        if file[at : at + len(wanted)] == wanted:
            return tuple(lines[1:]), at + 1
    return tuple(lines), 0
