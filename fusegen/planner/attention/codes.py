"""Keys and values as factors of attention: how they lie in memory, and what numbers of 8 bits become on their way.

    F.cast(k, bf16)                          # codes alone, each of which is a number of the factors' type
    F.cast(F.dequantize(k, scale), bf16)     # codes, of each key beside a scale [.., T, 1] or [.., 1, 1]

What meets codes as one value a key is applied to each element where a tile is widened in registers, and the result is
rounded there as the chain has it, to the factors' type at last. A scale might stand behind the product instead, for one
multiplication a score where this takes one for each of a key's numbers. But that is another chain where its author
rounds between scale and product, and where a scale may be infinite: 0 times it is NaN in a sum of finite products. In
registers the chain is computed as it is written, whatever is made of codes and of what keys have one of. Where several
tiles of queries would each do so again, a kernel of its own does it once (`programs.is_wasteful`).
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import FITTED, ROUNDS, Graph, Kind, Node, plain
from fusegen.language.ordering import with_nodes
from fusegen.language.products import Unsplittable
from fusegen.language.trace import OPS
from fusegen.language.types import DType, Size, bf16, f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f16, f32, i8, u8

CODES = frozenset((f8e4m3, f8e5m2, f8e4m3fnuz, f8e5m2fnuz, i8, u8))  # of 8 bits: f16 and bf16 have all their numbers
WIDENED_BY = (ROUNDS[f16], ROUNDS[bf16], "to_f32")  # what stands between these and a factor
PER_KEY = (Kind.MAP, Kind.INPUT)  # what values are made of that meet codes, beside numbers and rows of pages


# ---------------------------------------------------------------- factors of a kernel's graph


def steps_to(factor: Node) -> tuple[Node, ...]:
    """A factor, and what it is a transpose of or is made of, element by element, down to what lies in memory, or in
    pages."""
    found = [factor]
    while (inner := step_of(found[-1])) is not None:
        found.append(inner)
    return tuple(found)


def step_of(node: Node) -> Node | None:
    """What is transposed, or that argument which has an element for each of the result's; None where there is none."""
    if node.op.kind is Kind.TRANSPOSE or node.op.name in WIDENED_BY:
        return node.inputs[0]
    if node.op.kind is not Kind.MAP:
        return None
    wide = [a for a in node.inputs if a.shape == node.shape]
    return wide[0] if len(wide) == 1 else None


def lies_in_pages(node: Node) -> bool:
    return node.op.name == "paged_rows"


def paged(factor: Node) -> Node | None:
    """The rows of pages that a factor is, whichever way round; None of one that lies in memory."""
    node = steps_to(factor)[-1]
    return node if lies_in_pages(node) else None


def read_of(factor: Node) -> Node:
    """The operand that a factor lies in, whole or in pages."""
    return read_rows(steps_to(factor)[-1])


def read_rows(node: Node) -> Node:
    """The operand that rows lie in, in pages or by themselves."""
    return node.inputs[0] if lies_in_pages(node) else node


def is_turned(factor: Node) -> bool:
    return any(node.op.kind is Kind.TRANSPOSE for node in steps_to(factor))


def element_steps(factor: Node, dtype: DType) -> tuple[Node, ...]:
    """What is made of each code, in order, casts that change none left out: those of codes themselves, and a last one
    to the factors' type, to which the result is rounded anyway."""
    steps = [node for node in reversed(steps_to(factor)) if node.op.kind is Kind.MAP]
    while steps and steps[0].op.name in WIDENED_BY:
        del steps[0]
    while steps and steps[-1].op.name in (ROUNDS[dtype], "to_f32"):
        del steps[-1]
    return tuple(steps)


def beside_codes(factor: Node, dtype: DType) -> tuple[Node, ...]:
    """What meets codes on their way to be that factor, and all that it is made of, arguments first: down to operands,
    and to rows of pages."""
    steps = element_steps(factor, dtype)
    wide = set(steps_to(factor))
    found: dict[Node, None] = {}
    for step in steps:
        for argument in step.inputs:
            if argument not in wide:
                found.update(dict.fromkeys(above(argument)))
    return tuple(found)


def above(node: Node) -> tuple[Node, ...]:
    """A value and what it is made of, down to rows of pages, whose pages and names are no values of a key."""
    if lies_in_pages(node):
        return (node,)
    return (*dict.fromkeys(n for a in node.inputs for n in above(a)), node)


def is_coded(graph: Graph, factor: Node, dtype: DType) -> bool:
    """Is it an operand of 8-bit numbers, all of which are numbers of the factors' type, or made of such and of what has
    one value a key?"""
    read = read_of(factor)
    if read.op.kind is not Kind.INPUT or dtype not in (f16, bf16) or graph.tensor_of[read].dtype not in CODES:
        return False
    steps = element_steps(factor, dtype)
    if steps and (given := step_of(steps[0])) is not None and given.dtype is not f32:  # of whole numbers
        return False
    return all(
        lies_in_pages(node)
        or (node.op.kind in PER_KEY and node.shape[-1:] in ((), (1,)) and node.op.name != "philox")
        or (node.op.name in ("literal", "size"))
        for node in beside_codes(factor, dtype)
    )


def lies(graph: Graph, factor: Node, side: str, dtype: DType) -> bool:
    """Is it read as it lies in memory, or made of codes that do?"""
    if any(node.op.kind is Kind.MAP for node in steps_to(factor)):
        return side == "right" and is_coded(graph, factor, dtype)
    return plain(factor) or paged(factor) is not None


def rounded_last(graph: Graph) -> Graph:
    """f(codes) as a factor  ->  round(f(codes)), as a product rounds it

    Then it has the factors' type by itself, whatever becomes of the other one."""
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = [made[a] for a in node.inputs]
        if node.op.kind is Kind.PRODUCT and is_rounded_last(graph, node.inputs[1], dtype := graph.factor_types[node]):
            inputs[1] = Node(OPS[ROUNDS[dtype]], (inputs[1],), inputs[1].shape, f32, inputs[1].operator)
        made[node] = node if tuple(inputs) == node.inputs else replace(node, inputs=tuple(inputs))
    return graph if all(made[node] is node for node in graph.nodes) else with_nodes(graph, made)


def is_rounded_last(graph: Graph, factor: Node, dtype: DType) -> bool:
    """Is it made of codes, and rounded by nobody but the product?"""
    steps = [node for node in steps_to(factor) if node.op.kind is Kind.MAP]
    return bool(steps) and steps[0].op.name not in FITTED and is_coded(graph, factor, dtype)


def need_same_pages(graph: Graph, factor: Node, dtype: DType) -> None:
    """Raises Unsplittable for values of keys that lie in pages, and codes that lie in no such ones."""
    rows = paged(factor)
    for node in filter(lies_in_pages, beside_codes(factor, dtype)):
        table, index = node.inputs
        if (
            rows is None
            or index is not rows.inputs[1]
            or any(table.shape[axis] != rows.inputs[0].shape[axis] for axis in (0, -2))
        ):
            name, codes = (graph.tensor_of[read].name for read in (table, read_of(factor)))
            raise Unsplittable(
                f"{name} lies in pages, and {codes}, which it meets, in none or in others: attention takes "
                "both from the same pages"
            )


def sizes_of(table: Node) -> tuple[Size, Size]:
    """How many pages, and rows of each."""
    return table.shape[0], table.shape[-2]


# ---------------------------------------------------------------- factors as a chain has them


def codes_of(node: Node) -> Node | None:
    """Of a value that codes are made, or are shown by, the one that has these."""
    if node.op.kind in (Kind.VIEW, Kind.GATHER) or node.op.name in WIDENED_BY:
        return node.inputs[0]
    return step_of(node)


def widens_codes(graph: Graph, node: Node) -> bool:
    """Is it made, element by element, of an operand of 8-bit numbers, or of rows of its pages, by way of views?"""
    made = False
    while (inner := codes_of(node)) is not None:
        made |= node.op.kind is Kind.MAP
        node = inner
    return made and node.op.kind is Kind.INPUT and graph.tensor_of[node].dtype in CODES
