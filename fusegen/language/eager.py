"""Rounding as operators have it that run one after another: `@chain(..., rounding="eager")`.

A fused chain goes on in f32 between its operators, and rounds where it is stored. Unfused, each operator stores what it
has, in the type that torch gives its result, and the next one reads that. With eager rounding the fused kernel rounds
there too, so that it equals the unfused chain bit for bit wherever the operators themselves are exact: sums, products,
comparisons and what is made of them.

An operator is what the author wrote as one step: `x + bias`, `F.softmax(scores)`. Within it nothing is rounded, as
torch's own kernels don't. The type of a result is that of its arrays (torch's type promotion): of bf16 and bf16 it is
bf16, of bf16 and f16 or f32 it is f32; numbers and run-time scalars don't change it. A value that was cast goes on in
the type that it was cast to.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace

from fusegen.language.graph import CASTS, OPS, Graph, Kind, Node
from fusegen.language.types import DType, b8, bf16, f16, f32

HALVES = {f16: "round_f16", bf16: "round_bf16"}
# of values of one type these are values of it, as they are
EXACT = ("neg", "abs", "relu", "max", "min", "maximum", "minimum", "where")
SHOWING = (Kind.INPUT, Kind.LEAF, Kind.VIEW, Kind.JOIN, Kind.TRANSPOSE, Kind.GATHER, Kind.SCATTER, Kind.SPREAD)


def rounded(graph: Graph) -> Graph:
    """The graph with a rounding behind each operator."""
    types = eager_types(graph)
    table: dict[Node, Node] = {}
    names = {node: name for node, name in graph.names.items() if node in graph.users}
    stored: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(table[a] if a.operator == node.operator else stored.get(a, table[a]) for a in node.inputs)
        if is_widened(node):
            (table[node],) = inputs
            names.pop(node, None)
            continue
        table[node] = made = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node in names and made is not node:
            names[made] = names.pop(node)
        round_to = HALVES.get(types[node] or f32)
        if round_to is None or node.op.kind in SHOWING or node.op.name in CASTS or is_exact(node, types):
            continue
        kept = all(t.dtype is types[node] for t in graph.outputs if t.node is node)  # rounded when it is stored
        if kept and all(user.operator == node.operator for user in graph.users[node]):
            continue
        stored[node] = Node(OPS[round_to], (made,), node.shape, f32, node.operator)
        if made in names:
            names[stored[node]] = names.pop(made)
    outputs = tuple(replace(t, node=stored.get(t.node, table[t.node])) for t in graph.outputs)
    return replace(graph, outputs=outputs, names=names, rounding="eager")


def unrounded(graph: Graph) -> Graph:
    """The graph without what `rounded` brought."""
    table: dict[Node, Node] = {}
    names = {node: name for node, name in graph.names.items() if node in graph.users}
    for node in graph.nodes:
        if is_unfused(node):
            table[node] = made = table[node.inputs[0]]
        else:
            inputs = tuple(table[a] for a in node.inputs)
            table[node] = made = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node in names and made is not node:
            names[made] = names.pop(node)
    outputs = tuple(replace(t, node=table[t.node]) for t in graph.outputs)
    return replace(graph, outputs=outputs, names=names, rounding="fused")


def is_unfused(node: Node) -> bool:
    """Is it the rounding of an operator that is stored when it is unfused? A cast is an operator of its own."""
    return node.op.name in HALVES.values() and node.operator == node.inputs[0].operator


def is_widened(node: Node) -> bool:
    """Is it a cast of what goes on as f32 already? It says that later operators store f32, and no more."""
    return node.op.name == "to_f32" and node.inputs[0].dtype is f32


def is_exact(node: Node, types: Mapping[Node, DType | None]) -> bool:
    """Is it a value of its type without being rounded to it?"""
    own = types[node]
    assert own is not None

    def has(argument: Node) -> bool:
        if types[argument] is None and argument.literal is not None:
            return holds(own, float(argument.literal))
        return types[argument] in (own, b8)

    return node.op.name in EXACT and all(map(has, node.inputs))


def holds(dtype: DType, number: float) -> bool:
    """Is the number one of the type's, f16 or bf16?"""
    try:
        if dtype is f16:
            return bool(math.isnan(number) or struct.unpack("e", struct.pack("e", number))[0] == number)
        (single,) = struct.unpack("f", struct.pack("f", number))
        return math.isnan(number) or (single == number and not struct.unpack("I", struct.pack("f", number))[0] & 0xFFFF)
    except OverflowError:
        return False


def eager_types(graph: Graph) -> Mapping[Node, DType | None]:
    """The type that each value has unfused; None of numbers, which have that of what they meet."""
    arrays = {t.node: t.dtype for t in graph.inputs if t.shape}
    table: dict[Node, DType | None] = {}
    for node in graph.nodes:
        if node.op.kind is Kind.INPUT:
            table[node] = arrays.get(node)
        elif node.op.kind is Kind.LEAF:
            table[node] = node.dtype if node.shape else None
        elif node.op.name in CASTS:
            table[node] = CASTS[node.op.name]
        elif node.dtype is not f32:
            table[node] = node.dtype
        elif node.op.name == "to_f32":
            table[node] = f32
        elif node.op.kind is Kind.GATHER:
            table[node] = table[node.inputs[0]]
        else:
            table[node] = promoted([table[a] for a in node.inputs])
    return table


def promoted(types: list[DType | None]) -> DType | None:
    """Of several types the one that holds all of them, as torch has it; whole numbers become what they meet."""
    floats = {t for t in types if t is not None and t.kind == "float"}
    if not floats:
        return None if all(t is None for t in types) else f32
    (first, *others) = floats
    return f32 if others or first.narrow else first
