"""A chain of two products, most often with a softmax between them, taken apart: what a pass over the keys can hold.

    found = recognized(graph)
    found.logits          # the value whose rows are softmaxed, made element by element from `found.scores`
    found.lowered         # the chain as a kernel computes it: 1 / sum stands behind the second product

The softmax is found by its structure, whoever wrote it: a maximum along the keys, exponentials of what is left when a
row value made of that maximum is subtracted, and their sum. Sums of exponentials are *carried*: made against the
largest logit so far, and multiplied by exp(old - new) where that grows (Milakov & Gimelshein 2018). The second product
is such a sum as well (Dao et al. 2022), as long as what it multiplies is the exponential times what does not depend on
the row's other elements; factors that are one value a row are moved behind it:

    (e * r) @ v  ->  (e @ v) * r

Exact but for rounding: e, which is at most 1, is rounded to the factors' type in place of e * r. Where r is not finite,
the row's maximum or its sum was not, and the whole row is NaN either way; but that a condition may have put zeros in
the place of all e * r, as dropout does: such a row with a NaN is 0 as written, and NaN here.

Weights may also be made of scores one by one, with no softmax: as retention and sigmoid attention have it. Then nothing
is carried but the second product, and a weight is left out where a condition makes it 0 (`conditions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fusegen.language.graph import CASTS, Graph, Kind, Node, Tensor, behind, once_per_graph
from fusegen.language.ordering import with_nodes
from fusegen.language.products import Unsplittable, is_computed
from fusegen.language.sharing import share_common
from fusegen.language.trace import OPS
from fusegen.language.types import DType, Size, b8, bf16, f16, f32, shape_text, size_of
from fusegen.planner.attention.codes import (
    beside_codes,
    element_steps,
    is_turned,
    lies,
    need_same_pages,
    paged,
    read_of,
    read_rows,
    rounded_last,
)
from fusegen.planner.attention.conditions import conditions_last, result_of
from fusegen.planner.attention.hiding import kept_instead
from fusegen.planner.attention.shared_scores import of_all_rows
from fusegen.planner.matching import drawn
from fusegen.planner.rewrites import hoist_scales, hoist_scales_of
from fusegen.targets.atoms import Fragment

EXPONENTIALS = ("exp", "exp2")
LARGEST_LOGIT = 2.0**29  # neighbours among larger ones differ by 64 or more, and e^-64 is nothing beside 1
MOST_DEPTH = 256  # numbers of a key or a value, of which a warp has the sums of 16 rows


@dataclass(frozen=True, slots=True)
class Softmax:
    """Of the rows of `logits`: `top`, the largest of a row; `pivot`, the row value that is subtracted from them;
    `exps`, their exponentials; `total`, the sum of these, None where nothing asks for it."""

    logits: Node
    top: Node
    pivot: Node
    exps: Node
    total: Node | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scored:
    """A chain that makes something of rows of scores, all nodes of `lowered`.

    `scores` = query @ key^T; `logits`, made of its elements one by one, whose rows have a `softmax`. Where they have
    none, they are the weights that are multiplied.
    """

    lowered: Graph
    scores: Node
    logits: Node
    softmax: Softmax | None
    query: Tensor
    key: Tensor
    dtype: DType  # of all factors

    @property
    def paged(self) -> Mapping[str, Node]:
        """The operands of pages, by their names, with their rows."""
        factors = [factor for product in self.lowered.products for factor in product.inputs]
        pages = (node for node in map(paged, factors) if node is not None)
        return {self.lowered.tensor_of[node.inputs[0]].name: node for node in pages}

    @property
    def keys(self) -> Size:
        """T."""
        return self.scores.shape[-1]

    @property
    def depth(self) -> Size:
        """D, of queries and keys."""
        return self.scores.inputs[0].shape[-1]

    @property
    def top(self) -> Node:
        return self.of_softmax.top

    @property
    def pivot(self) -> Node:
        return self.of_softmax.pivot

    @property
    def exps(self) -> Node:
        return self.of_softmax.exps

    @property
    def total(self) -> Node | None:
        return self.of_softmax.total

    @property
    def of_softmax(self) -> Softmax:
        assert self.softmax is not None
        return self.softmax

    @property
    def carried(self) -> tuple[Node, ...]:
        """What passes over the keys leave behind, beside the second product."""
        if self.softmax is None:
            return ()
        return (self.top,) if self.total is None else (self.top, self.total)

    @property
    def pivot_body(self) -> tuple[Node, ...]:
        """From the largest logit to what is subtracted."""
        return self.between(self.pivot, (self.top,)) if self.softmax else ()

    @property
    def score_body(self) -> tuple[Node, ...]:
        """From an element of the scores to its logit, in order; what is one value a row among it."""
        return self.between(self.logits, (self.scores,))

    @property
    def extreme(self) -> bool:
        """May an operand or a number along the keys take all logits of a tile to where f32 has no exponential of their
        differences, as masks that add -1e30 do?"""
        if self.softmax is None or self.exps.op.name == "exp2":  # its pivot is a logit
            return False
        along = [node for node in self.score_body if node.op.kind in (Kind.INPUT, Kind.GATHER)]
        if any(node.dtype is not b8 and node.shape[-1:] not in ((), (1,)) for node in along):
            return True
        numbers = (node.literal for node in self.score_body if node.literal is not None)
        return any(LARGEST_LOGIT < abs(number) < math.inf for number in numbers)

    @property
    def plain_pivot(self) -> bool:
        """Is it the largest logit, or 0 where that is -inf, as a kernel carries it?"""
        return self.softmax is None or is_guarded(self.pivot, self.top)

    def between(self, last: Node, first: tuple[Node, ...]) -> tuple[Node, ...]:
        found = {last} - set(first)
        for node in reversed(self.lowered.nodes):
            if node in found:
                found.update(a for a in node.inputs if a not in first)
        return tuple(n for n in self.lowered.nodes if n in found)

    def above_outputs(self, stop: frozenset[Node]) -> tuple[Node, ...]:
        """What results are made of, in order, as far as `stop`."""
        found = {t.node for t in self.lowered.outputs}
        for node in reversed(self.lowered.nodes):
            if node in found and node not in stop:
                found.update(node.inputs)
        return tuple(n for n in self.lowered.nodes if n in found and n not in stop)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Recognized(Scored):
    """Attention: `weights`, the exponentials or the logits as they are multiplied; `product` = weights @ value."""

    weights: Node
    product: Node
    value: Tensor

    @property
    def coded(self) -> tuple[str, ...]:
        """Of keys and values those that lie in memory as numbers of 8 bits, by their names."""
        return tuple(t.name for t in (self.key, self.value) if t.dtype is not self.dtype)

    @property
    def widened(self) -> tuple[tuple[Tensor, int, int], ...]:
        """Those with the numbers that each row has of them, and how many steps are made of one before it is rounded."""
        sides = (self.key, self.depth, self.scores), (self.value, self.width, self.product)
        return tuple(
            (tensor, size_of(size, self.lowered.sizes), len(element_steps(product.inputs[1], self.dtype)))
            for tensor, size, product in sides
            if tensor.name in self.coded
        )

    @property
    def beside_codes(self) -> tuple[Tensor, ...]:
        """What codes of keys and values meet on their way that has one value a key, in the spec's order."""
        factors = (self.scores.inputs[1], self.product.inputs[1])
        found = {read_rows(node) for factor in factors for node in beside_codes(factor, self.dtype)}
        return tuple(t for t in self.lowered.inputs if t.node in found and t.shape)

    @property
    def parts(self) -> int:
        """To how many parts, the first axis of all results, the keys are dealt; 0 where each row has all."""
        return self.product.count

    @property
    def dealt(self) -> int:
        """Keys that are dealt at a time."""
        return self.product.group

    @property
    def width(self) -> Size:
        """D of the values."""
        return self.product.shape[-1]

    @property
    def weight_body(self) -> tuple[Node, ...]:
        """From an exponential to what is multiplied."""
        if self.softmax is None:
            return ()
        return self.between(self.weights, (self.exps, self.scores, *self.carried))

    @property
    def epilogue(self) -> tuple[Node, ...]:
        """Behind the second product and beside it."""
        return self.above_outputs(frozenset({self.product, *self.carried}))


def of_row(node: Node) -> bool:
    """Has it one value for all elements of a row?"""
    return not node.shape or node.shape[-1] == 1


def of_launch(node: Node) -> bool:
    """Is it the same in all blocks: made of numbers and run-time scalars alone?"""
    return all(not n.shape and n.op.name != "row_index" for n in behind([node]))


def kind_of(reduction: Node) -> str:
    """`max` or `sum`, of whole rows or of what each part is dealt of them."""
    return reduction.op.name.removeprefix("deal_")


def is_attention(graph: Graph) -> bool:
    """Does a product take what another one gives, by way of a maximum along rows?"""
    if len(graph.products) != 2 or not any(kind_of(n) == "max" for n in (*graph.reductions, *graph.deals)):
        return False
    first, second = graph.products
    return first in set(behind(second.inputs))


@once_per_graph
def has_plain_weights(graph: Graph) -> bool:
    """Does a product take as its left factor what is made of another one's results, one by one?"""
    if len(graph.products) != 2 or is_attention(graph) or graph.selection:
        return False
    if any(len(product.inputs) > 2 for product in graph.products):
        return False
    if not {graph.factor_types[product] for product in graph.products} <= {f16, bf16}:
        return False
    try:
        return recognized(graph).softmax is None
    except Unsplittable:
        return False


def is_wide(found: Recognized) -> bool:
    """Has a key or a value more numbers than a warp's registers have room for sums of?"""
    return any(size_of(size, found.lowered.sizes) > MOST_DEPTH for size in (found.depth, found.width))


@once_per_graph
def recognized(graph: Graph) -> Recognized:
    """The parts of a chain that is attention. Raises Unsplittable for what one pass over the keys can't hold."""
    if len(graph.products) != 2:
        raise Unsplittable(f"{len(graph.products)} products; attention has two, one of what the other one gives")
    kept = constants_folded(kept_instead(share_common(graph)))
    hoisted = rounded_last(hoist_scales_of(kept, kept.products[:1]) if keeps_scales(kept) else hoist_scales(kept))
    first, second = hoisted.products
    above = set(behind(second.inputs))
    if first not in above or first in behind([second.inputs[1]]):
        raise Unsplittable("neither product's left factor is made of the other product")
    if not is_attention(hoisted):
        whole = of_all_rows(hoisted)
        return parts_of(conditions_last(whole, whole.products[1]), None)
    softmax = softmax_of(hoisted, first, second)
    lowered = scales_behind(hoisted, second, softmax)
    return parts_of(lowered, softmax_of(lowered, *lowered.products))


def constants_folded(graph: Graph) -> Graph:
    """f(literals and sizes)  ->  a literal, as of D**-0.5

    Rounds once, where a kernel's function might be off by more."""
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node.op.kind is Kind.MAP and node.dtype is f32 and all(a.op.name in ("literal", "size") for a in inputs):
            numbers = [size_of(a.size, graph.sizes) if a.size is not None else a.literal for a in inputs]
            made[node] = Node(OPS["literal"], (), (), f32, node.operator, literal=result_of(node, numbers))
    return graph if all(made[n] is n for n in graph.nodes) else with_nodes(graph, made)


def keeps_scales(graph: Graph) -> bool:
    """Are weights of no softmax multiplied as f16, whose numbers a scale behind the product may come too late for?"""
    return not is_attention(graph) and graph.factor_types[graph.products[1]] is f16


# ---------------------------------------------------------------- the softmax


def softmax_of(graph: Graph, first: Node, second: Node | None = None) -> Softmax:
    """The one softmax of a product, and between two of them, if there is a second."""
    above = set(behind([*(second.inputs if second else ()), *(t.node for t in graph.outputs)]))
    reductions = [n for n in (*graph.reductions, *graph.deals) if n in above]
    for node in reductions:
        if node.over or first not in behind(node.inputs) or second in behind(node.inputs):
            kernel = "two products has one softmax between them" if second else "written weights has one softmax"
            raise Unsplittable(
                f"{node.operator} at {node.where} reduces something else than the scores; the kernel of {kernel}, and "
                "no other reduction"
            )
    tops = [n for n in reductions if kind_of(n) == "max"]
    if len(tops) != 1:
        raise Unsplittable(f"{len(tops)} maxima along the keys; attention subtracts one")
    (top,) = tops
    logits = top.inputs[0]
    found = [n for n in graph.nodes if n.op.name in EXPONENTIALS and (p := subtracted(n, logits)) and made_of(p, top)]
    if len(found) != 1:
        raise Unsplittable(
            f"{len(found)} exponentials of {top.operator}'s argument less its maximum; attention has one"
        )
    (exps,) = found
    sums = [n for n in reductions if n is not top]
    if len(sums) > 1 or any(kind_of(n) != "sum" or n.inputs[0] is not exps for n in sums):
        wrong = next((n for n in sums if kind_of(n) != "sum" or n.inputs[0] is not exps), sums[-1])
        raise Unsplittable(
            f"{wrong.operator} at {wrong.where}: {wrong.op.name} of something else than the exponentials that are "
            "multiplied; a pass over the keys carries their sum alone"
        )
    pivot = subtracted(exps, logits)
    assert pivot is not None
    return Softmax(logits, top, pivot, exps, sums[0] if sums else None)


def subtracted(node: Node, logits: Node) -> Node | None:
    """p of exp(logits - p), one a row or one for each part of it."""
    (inner,) = node.inputs
    if inner.op.name != "sub" or inner.inputs[0] is not logits:
        return None
    return inner.inputs[1].inputs[0] if inner.inputs[1].op.name == "deal_back" else inner.inputs[1]


def made_of(pivot: Node, top: Node) -> bool:
    """A row value, of the maximum among others."""
    return of_row(pivot) and top in behind([pivot])


def is_guarded(pivot: Node, top: Node) -> bool:
    if pivot.op.name != "where":
        return False
    test, zero, other = pivot.inputs
    return (
        test.op.name == "eq" and test.inputs[0] is top and test.inputs[1].literal == -math.inf
        and zero.literal == 0 and other is top
    )  # fmt: skip


# ---------------------------------------------------------------- scales of whole rows


Scale = tuple[str, Node]


def scales_behind(graph: Graph, second: Node, softmax: Softmax) -> Graph:
    """The chain with every factor that is one value a row behind the second product."""
    dtype = graph.factor_types[second]
    inner, scales = stripped(second.inputs[0], softmax.exps, dtype)
    if inner is second.inputs[0]:
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        if node is second:
            result = replace(node, inputs=(moved(inner, made), inputs[1]))
            for op, scale in scales:
                result = replace(node, op=OPS[op], inputs=(result, moved(scale, made)))
            made[node] = result
    return with_nodes(graph, made)


def moved(node: Node, made: Mapping[Node, Node]) -> Node:
    """A node that stripping may have made, of nodes of the graph."""
    if node in made:
        return made[node]
    return replace(node, inputs=tuple(moved(a, made) for a in node.inputs))


def stripped(node: Node, exps: Node, dtype: DType) -> tuple[Node, tuple[Scale, ...]]:
    """A factor without what is one value a row; and without a last cast to the factors' type, to which it is rounded
    anyway."""
    if node is exps:
        return node, ()
    if CASTS.get(node.op.name) is dtype:
        return stripped(node.inputs[0], exps, dtype)
    if node.op.name in ("mul", "div"):
        a, b = node.inputs
        if of_row(b):
            inner, scales = stripped(a, exps, dtype)
            return inner, (*scales, (node.op.name, b))
        if of_row(a) and node.op.name == "mul":
            inner, scales = stripped(b, exps, dtype)
            return inner, (*scales, ("mul", a))
        place = 0 if exps in behind([a]) else 1
        if place == 0 or node.op.name == "mul":
            inner, scales = stripped(node.inputs[place], exps, dtype)
            inputs = (inner, b) if place == 0 else (a, inner)
            return (replace(node, inputs=inputs), scales) if inner is not node.inputs[place] else (node, ())
    if node.op.name == "where" and node.inputs[2].literal == 0:
        test, x, zero = node.inputs
        inner, scales = stripped(x, exps, dtype)
        for op, scale in scales:
            if not makes_nan_of_row(scale):
                inner = replace(x, op=OPS[op], inputs=(inner, scale))
        moved = tuple(each for each in scales if makes_nan_of_row(each[1]))
        return (replace(node, inputs=(test, inner, zero)), moved) if moved else (node, ())
    return node, ()


def makes_nan_of_row(scale: Node) -> bool:
    """Is it finite, or all of its row NaN? Then it may stand behind zeros that a condition put in its elements' place:
    1 / (1 - p) of a run-time p may be infinite where all weights are dropped, and 0 times that is NaN."""
    if scale.op.name == "literal":
        return math.isfinite(float(scale.literal or 0.0))
    return any(node.op.kind is Kind.REDUCE or node.op.kind is Kind.DEAL for node in behind([scale]))


def need_linear(node: Node, softmax: Softmax) -> None:
    """Raises Unsplittable where the weights are not the exponentials times what needs nothing else of the row."""
    carried = {softmax.exps, softmax.top, *([softmax.total] if softmax.total else [])}
    while node is not softmax.exps:
        others: tuple[Node, ...]
        name, of = node.op.name, node.inputs
        if name in ("mul", "div") and softmax.exps in behind([of[0]]):
            node, others = of[0], of[1:]
        elif (name == "mul" and softmax.exps in behind([of[1]])) or (name == "where" and of[2].literal == 0):
            node, others = of[1], of[:1]
        else:
            raise Unsplittable(
                f"{node.operator} at {node.where}: the second product's left factor is not the softmax's exponentials "
                "times something; only that can be rescaled while the maximum grows"
            )
        if carried.intersection(behind(others)):
            raise Unsplittable(f"{node.operator} at {node.where} meets the row's maximum or sum before the product")


# ---------------------------------------------------------------- what one kernel holds


def parts_of(graph: Graph, softmax: Softmax | None) -> Recognized:
    first, second = graph.products
    if softmax:
        need_linear(second.inputs[0], softmax)
    for product in (first, second):
        for side, factor in zip(("left", "right"), product.inputs, strict=True):
            if product is second and side == "left":
                continue
            if not lies(graph, factor, side, graph.factor_types[product]):
                raise Unsplittable(
                    f"the {side} factor of the product at {product.where} is computed; attention reads queries, keys "
                    "and values as they lie in memory"
                )
            need_same_pages(graph, factor, graph.factor_types[product])
    if is_turned(first.inputs[0]) or not is_turned(first.inputs[1]):
        raise Unsplittable(f"the product at {first.where}: attention takes rows of queries and rows of keys, q @ k.mT")
    if is_turned(second.inputs[1]):
        raise Unsplittable(f"the product at {second.where}: attention takes rows of values, softmax(..) @ v")
    types = {graph.factor_types[n] for n in graph.products}
    if len(types) > 1:
        raise Unsplittable(f"the products have factors of {' and '.join(map(str, types))}")
    found = Recognized(
        lowered=graph,
        scores=first,
        logits=softmax.logits if softmax else second.inputs[0],
        softmax=softmax,
        weights=second.inputs[0],
        product=second,
        query=graph.tensor_of[first.inputs[0]],
        key=graph.tensor_of[read_of(first.inputs[1])],
        value=graph.tensor_of[read_of(second.inputs[1])],
        dtype=types.pop(),
    )
    need_elements(found)
    return found


def need_elements(found: Recognized) -> None:
    """Raises Unsplittable for what is neither made element by element nor one value a row."""
    graph = found.lowered
    for tensor in graph.outputs:
        above = set(graph.ancestors(tensor.node))
        if not of_row(tensor.node) and found.scores in above and found.product not in above:
            raise Unsplittable(f"{tensor.name} has a value for each key, and the kernel of two products writes none")
    bodies: Iterable[Node] = (*found.score_body, *found.weight_body, *found.epilogue)
    for node in bodies:
        if node.op.kind not in (Kind.MAP, Kind.INPUT, Kind.LEAF) or node in (found.scores, found.logits.op):
            raise Unsplittable(f"{node.operator} at {node.where}: the kernel of two products takes single elements")
    if found.softmax is None and any(n.dtype is b8 and found.product in behind([n]) for n in found.epilogue):
        raise Unsplittable("a condition on the second product's results could tell a NaN that masked weights hide")
    need_drawn_for_scores(found, found.epilogue)
    first, behind_it = found.scores, set(found.epilogue)
    elements = (*found.score_body, *found.weight_body, *([found.exps] if found.softmax else []), first)
    inside = {n for n in elements if n.op.kind is not Kind.LEAF}
    for node in inside & behind_it:
        if node.op.kind is not Kind.INPUT and not of_row(node):
            raise Unsplittable(
                f"{node.operator} at {node.where} is asked for behind the second product too, of each key: the kernel "
                "of two products has it for a tile of keys alone"
            )
    for node in (found.scores, found.product):
        leading = graph.shape[1:-1] if found.parts and node is found.scores else graph.shape[:-1]
        if node.shape[:-1] != leading:
            raise Unsplittable(f"the product at {node.where} has not the chain's rows")


def need_drawn_for_scores(found: Scored, others: Iterable[Node]) -> None:
    """Raises Unsplittable for random numbers of anything but the scores; `others`: what is made of no tile of them."""
    beside = set(others)
    for node in drawn(found.lowered):
        if node in beside or node.shape != found.scores.shape:
            raise Unsplittable(
                f"{node.operator} at {node.where} draws random numbers for {shape_text(node.shape)}; a kernel of tiles "
                f"of scores draws them for these alone, {shape_text(found.scores.shape)}"
            )


def drawn_by_fours(found: Recognized, fragment: Fragment) -> tuple[Node, ...]:
    """Random bits of the weights, where a lane or two hold whole fours of neighbours in a row: of four that begin at a
    multiple of 4 one call of Philox makes all bits."""
    if not fragment.lanes_of_four or size_of(found.keys, found.lowered.sizes) % 4:
        return ()
    own = ["element_low", "element_high"]
    bits = [n for n in found.weight_body if n.op.name == "philox" and all(map(of_row, n.inputs[2:]))]
    return tuple(n for n in bits if [a.op.name for a in n.inputs[:2]] == own)


def rows_before(found: Recognized, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Of those nodes, what is computed and one value a row."""
    return tuple(n for n in nodes if is_computed(n) and of_row(n))


def computed_elements(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(n for n in nodes if is_computed(n) and not of_row(n))


def inputs_of(graph: Graph, nodes: Iterable[Node]) -> tuple[Tensor, ...]:
    """The operands in memory among those nodes, in the spec's order."""
    wanted = set(nodes)
    return tuple(t for t in graph.inputs if t.node in wanted and t.shape)
