"""A chain that writes out the softmax of a product's rows, taken apart: what two passes over the keys can hold.

    found = written_weights(graph)
    found.logits     # the value whose rows are softmaxed, made element by element from `found.scores`
    found.results    # outputs with an element for each score

The first pass leaves a row's largest logit and the sum of its exponentials. The second one makes the scores again, and
of each the results: whatever elements can be made of, beside what is one value a row. Scores are never in memory.

Where a mask leaves nothing of a tile, no score is made, if results are made of exponentials and row values alone
(`is_by_row`): they are those of an exponential of -inf, 0 as a rule, and NaN in a row that has a NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.language.graph import Graph, Kind, Node, Tensor, once_per_graph, plain
from fusegen.language.products import Unsplittable, is_computed
from fusegen.language.sharing import share_common
from fusegen.planner.attention.hiding import kept_instead
from fusegen.planner.attention.recognition import (
    Scored,
    Softmax,
    constants_folded,
    need_drawn_for_scores,
    of_row,
    softmax_of,
)
from fusegen.planner.rewrites import hoist_scales


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Written(Scored):
    """`results`: outputs with an element for each score; the other outputs are one value a row."""

    results: tuple[Tensor, ...]

    @property
    def behind(self) -> tuple[Node, ...]:
        """What results are made of behind the scores and what is carried, in order: elements and row values."""
        return self.above_outputs(frozenset({self.scores, *self.carried}))

    @property
    def row_values(self) -> tuple[Node, ...]:
        """Of those, what is computed once a row, of what is carried among others."""
        return tuple(n for n in self.behind if of_row(n) and is_computed(n))


@once_per_graph
def written_weights(graph: Graph) -> Written:
    """The parts of a chain that writes weights out. Raises Unsplittable for what two passes can't hold."""
    if len(graph.products) != 1:
        raise Unsplittable(f"{len(graph.products)} products; written weights are of one")
    lowered = constants_folded(hoist_scales(constants_folded(kept_instead(share_common(graph)))))
    (first,) = lowered.products
    return parts_of(lowered, first, softmax_of(lowered, first))


def is_written(graph: Graph) -> bool:
    """Are exponentials of a product's rows, or what is made of them, written out?"""
    if len(graph.products) != 1 or graph.selection or not any(n.op.name == "max" for n in graph.reductions):
        return False
    try:
        written_weights(graph)
    except Unsplittable:
        return False
    return True


def parts_of(graph: Graph, first: Node, softmax: Softmax) -> Written:
    for side, factor in zip(("left", "right"), first.inputs, strict=False):
        if not plain(factor):
            raise Unsplittable(
                f"the {side} factor of the product at {first.where} is computed; written weights are of queries and "
                "keys as they lie in memory"
            )
    if first.inputs[0].op.kind is Kind.TRANSPOSE or first.inputs[1].op.kind is not Kind.TRANSPOSE:
        raise Unsplittable(
            f"the product at {first.where}: written weights are of rows of queries and rows of keys, q @ k.mT"
        )
    results = tuple(t for t in graph.outputs if not of_row(t.node))
    if not results:
        raise Unsplittable("no output has an element for each score; written weights are such outputs")
    found = Written(
        lowered=graph,
        scores=first,
        logits=softmax.logits,
        softmax=softmax,
        query=graph.tensor_of[first.inputs[0]],
        key=graph.tensor_of[first.inputs[1].inputs[0]],
        dtype=graph.factor_types[first],
        results=results,
    )
    carried = {found.exps, *found.carried}
    if not any(carried.intersection(graph.ancestors(t.node)) for t in results):
        raise Unsplittable("no output with an element for each score is made of the softmax; products have kernels")
    need_elements(found)
    return found


def need_elements(found: Written) -> None:
    """Raises Unsplittable for what is neither made element by element nor one value a row."""
    graph = found.lowered
    if len(found.scores.shape) != len(graph.shape) or found.scores.shape[:-1] != graph.shape[:-1]:
        raise Unsplittable(f"the product at {found.scores.where} has not the chain's rows")
    for tensor in found.results:
        if tensor.node.shape != found.scores.shape:
            raise Unsplittable(f"{tensor.name} has not the shape of the scores, which written weights have")
    need_drawn_for_scores(found, ())
    for node in (*found.score_body, *found.behind):
        if node is not found.scores and node.op.kind not in (Kind.MAP, Kind.INPUT, Kind.LEAF):
            raise Unsplittable(f"{node.operator} at {node.where}: written weights are made of single elements")


def is_by_row(found: Written) -> bool:
    """Are results made of exponentials and row values alone? Then they are the same wherever a logit is -inf."""
    stop = {found.exps, *found.carried}
    stack = [t.node for t in found.results]
    while stack:
        node = stack.pop()
        if node in stop or of_row(node):
            continue
        if node is found.scores or node.op.kind is not Kind.MAP or not node.inputs:
            return False
        stack.extend(node.inputs)
    return True
