"""A right factor that is computed, and read elsewhere as well, is rounded for its product by a step of its own.

    y = f(x);  s = x @ y.T;  d = sum(x * y)   ->   z = round_bf16(y);  s = x @ z.T;  d = sum(x * y)

A product reads its right factor from memory, in the type that it multiplies. What else reads the value has it in f32,
so that neither type in memory serves both: with a step that rounds there is a value for each. Exact: the product rounds
its factor anyhow.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.language.graph import FITTED, ROUNDS, Graph, Kind, Node, once_per_graph, plain, shown_by
from fusegen.language.ordering import with_nodes
from fusegen.language.types import DType, f32
from fusegen.planner.programs.cutting import made_of_arrays, rounded_to, storage_types


@once_per_graph
def rounded_factors(graph: Graph) -> Graph:
    """The graph with such steps; the same graph where no factor needs one."""
    apart = {product: dtype for product in graph.products if (dtype := rounded_as(graph, product)) is not None}
    if not apart:
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        if node in apart:
            inputs = (inputs[0], rounded_below(apart[node], inputs[1]), *inputs[2:])
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
    return replace(with_nodes(graph, made), origin=graph.written)


def rounded_as(graph: Graph, product: Node) -> DType | None:
    """The type that a product's right factor needs a step for."""
    right, dtype = product.factors[1], graph.factor_types[product]
    value = shown_by(right)
    computed = not plain(right) and value in made_of_arrays(graph) and value.op.name not in FITTED
    return dtype if computed and dtype in ROUNDS and storage_types(graph)[value] is f32 else None


def rounded_below(dtype: DType, factor: Node) -> Node:
    """The factor, rounded before its views."""
    if factor.op.kind is Kind.VIEW:
        return replace(factor, inputs=(rounded_below(dtype, factor.inputs[0]),))
    return rounded_to(dtype, factor)
