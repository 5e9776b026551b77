"""What a selection orders by: `top_columns(x)` goes by the *key* of x, found through steps that keep the order.

    key(f(x, r)) = key(x)      where f is strictly increasing in x and r is the same all along the row

So the k best of a softmax are the k best of its logits: probabilities that round to the same number, or to 0, keep the
order of their logits, and no exponential is needed to find them. This is the meaning of a selection, not a liberty of
the planner: reference and kernel both go by the key.

A step counts only where it is increasing for every finite x, and where the masked stays masked: -inf must go to -inf
(x + r, x * s, log) or to the 0 of something that is positive otherwise (exp, sigmoid). tanh takes -inf to -1, an
ordinary number, so a selection from a softcap goes by the capped values. What can't be shown is not assumed, and where
the steps together leave -inf as anything else (softmax + r), the key is x itself. So the key of a key is that key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum

from fusegen.graph import Graph, Kind, Node, behind

INF = math.inf


class Sign(IntEnum):
    """What is known of a value's sign wherever it is a number."""

    UNKNOWN = 0
    NONNEGATIVE = 1
    POSITIVE = 2


def key_of(x: Node) -> tuple[Node, float]:
    """What a selection from `x` orders by, and what `x` is where that key is -inf: -inf or 0."""
    signs = signs_of(x)
    path = [x]
    while (below := step_below(path[-1], signs)) is not None:
        path.append(below)
    limit = limit_of(path)
    return (x, -INF) if limit is None else (path[-1], limit)


def order_by_keys(graph: Graph) -> Graph:
    """top_columns(x)  ->  top_columns(key(x))

    Exact, by what `top_columns` means. Any order is wanted only where the columns are returned with it: without them
    nobody could tell which values are right, so those come largest first.
    """
    returned = {t.node for t in graph.outputs}
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs, ordered = tuple(made[a] for a in node.inputs), node.ordered
        if node.op.name == "top_columns":
            inputs, ordered = (key_of(inputs[0])[0],), ordered or node not in returned
        made[node] = (
            node if (inputs, ordered) == (node.inputs, node.ordered) else replace(node, inputs=inputs, ordered=ordered)
        )
    return with_nodes(graph, made)


def with_nodes(graph: Graph, made: Mapping[Node, Node]) -> Graph:
    """The graph with every node replaced by what was made of it; names stay with their values."""
    names: dict[Node, str] = {}
    for node, name in graph.names.items():
        if node in made:
            names.setdefault(made[node], name)
    outputs = tuple(replace(t, node=made[t.node]) for t in graph.outputs)
    return replace(graph, outputs=outputs, names=names)


# ---------------------------------------------------------------- steps that keep the order


def step_below(node: Node, signs: Mapping[Node, Sign]) -> Node | None:
    """The argument that `node` is strictly increasing in while all else is the same along the row; None without one."""
    name = node.op.name
    if node.op.kind is not Kind.MAP:
        return None
    if name in ("exp", "sigmoid"):
        return node.inputs[0]
    if name in ("log", "sqrt"):
        return node.inputs[0] if signs[node.inputs[0]] is Sign.POSITIVE else None
    if name not in ("add", "sub", "mul", "div"):
        return None
    for place, other in ((0, 1), (1, 0)) if name in ("add", "mul") else ((0, 1),):
        x, r = node.inputs[place], node.inputs[other]
        if along_row(r) or not along_row(x):
            continue
        if name in ("add", "sub") or signs[r] is Sign.POSITIVE:
            return x
    return None


def along_row(node: Node) -> bool:
    """Does a value vary along the row?"""
    return bool(node.shape) and node.shape[-1] != 1


def limit_of(path: list[Node]) -> float | None:
    """What `path[0]` is where `path[-1]`, its key, is -inf: -inf or 0; None where that hangs on other values."""
    limit: float | None = -INF
    for node in reversed(path[:-1]):
        name = node.op.name
        if limit == -INF:
            limit = 0.0 if name in ("exp", "sigmoid") else -INF
        elif name in ("log", "mul", "div", "sqrt"):
            limit = -INF if name == "log" else 0.0
        else:  # exp(0), 0 + r: no longer nothing
            return None
    return limit


# ---------------------------------------------------------------- signs


def signs_of(x: Node) -> dict[Node, Sign]:
    """The sign of everything that `x` is computed from.

    exp and sigmoid count as positive: they are 0 only of a masked -inf, and a row of nothing else has no order.
    """
    signs: dict[Node, Sign] = {}
    for node in behind([x]):
        rule = SIGNS.get(node.op.name)
        if node.literal is not None:
            signs[node] = Sign.POSITIVE if node.literal > 0 else Sign(node.literal == 0)
        elif node.op.name == "where":
            signs[node] = sign_of_where(node, signs)
        elif node.op.name == "mul" and node.inputs[0] is node.inputs[1]:
            signs[node] = max(Sign.NONNEGATIVE, signs[node.inputs[0]])
        else:
            signs[node] = rule(*(signs[a] for a in node.inputs)) if rule else Sign.UNKNOWN
    return signs


def sign_of_where(node: Node, signs: Mapping[Node, Sign]) -> Sign:
    """That of both branches, or of the second alone where the first stands for what can't be: a positive that is 0."""
    test, yes, no = node.inputs
    never = test.op.name == "eq" and test.inputs[1].literal == 0 and signs[test.inputs[0]] is Sign.POSITIVE
    return signs[no] if never else min(signs[yes], signs[no])


def lesser(*signs: Sign) -> Sign:
    return min(signs)


def greater(*signs: Sign) -> Sign:
    return max(signs)


def total(a: Sign, b: Sign) -> Sign:
    return max(a, b) if min(a, b) else Sign.UNKNOWN


def at_least_zero(*signs: Sign) -> Sign:
    return max(Sign.NONNEGATIVE, min(signs))


def zero_at_most(a: Sign) -> Sign:
    return min(a, Sign.NONNEGATIVE)


SIGNS: Mapping[str, Callable[..., Sign]] = {
    **dict.fromkeys(("exp", "sigmoid", "rsqrt", "size"), lambda *_: Sign.POSITIVE),
    **dict.fromkeys(("abs", "square", "sqrt", "relu"), at_least_zero),
    **dict.fromkeys(("col_index", "row_index", "to_b8"), lambda *_: Sign.NONNEGATIVE),
    **dict.fromkeys(("sum", "max", "min", "to_f32", "minimum", "mul", "div", "log1p"), lesser),
    **dict.fromkeys(("round_f16", "round_bf16", "to_i32"), zero_at_most),  # a small positive number may become 0
    "add": total,
    "maximum": greater,
    **dict.fromkeys(("pow", "small_pow"), lambda base, _: base),
}
"""The sign of each op's result from those of its arguments; what is not here is unknown."""
