"""What a selection orders by: `top_columns(x)` goes by the *key* of x, found through steps that keep the order.

    key(f(x, r)) = key(x)      where f rises with x, and r is the same all along the row and a finite number

So the k best of a softmax are the k best of its logits: probabilities that round to the same number, or to 0, keep the
order of their logits, and no exponential is needed to find them. This is the meaning of a selection, not a liberty of
the planner: reference and kernel both go by the key.

Of which rows a term r is finite is found by a small calculus of what a value may be (`Is`), for every kind of row that
a key may make (`ROWS`):

- The largest key is a number: every r must be finite, and positive where it scales. Then f rises, NaN is not there, and
  what is masked must end in -inf (x + r, x * s, log) or in the 0 of something positive otherwise (exp, sigmoid). A
  reduction of the keys themselves can be shown to be finite, as the maximum and the sum of a softmax are. An operand
  can't: it may hold inf or NaN, and `softmax(x + r)` goes by x + r. Nor can the mean of a row, which is -inf where
  anything is masked.
- The largest is +inf or NaN: every r is finite all the same, or those keys become NaN and all others NaN or 0, as in a
  softmax. Of such equals, too, the columns come by their keys: those come first that made it so.
- All are -inf: the row ends as what is masked, and nothing is chosen; or all of it is NaN, as of a softmax without a
  guard. Then its columns are chosen in their order (`Key.bare`), since NaN comes before every number.

tanh takes -inf to -1, an ordinary number, so a selection from a softcap goes by the capped values. What can't be shown
is not assumed, and where the steps together leave -inf as anything else (softmax + 1), the key is x itself. So the key
of a key is that key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from itertools import pairwise, product

from fusegen.language.graph import CASTS, Graph, Kind, Node, behind
from fusegen.language.types import DType, b8, f32, i32

INF = math.inf
MASKED: Mapping[DType, float] = {f32: -INF, i32: -(2**31)}
"""The key that is never chosen, by the keys' type: the least that there is."""


class Sign(IntEnum):
    """What is known of a value's sign wherever it is a number."""

    UNKNOWN = 0
    NONNEGATIVE = 1
    POSITIVE = 2


@dataclass(frozen=True, slots=True)
class Key:
    """What a selection orders by."""

    node: Node
    limit: float  # what is selected from is this where its key is -inf: -inf or 0
    bare: bool = False  # of a row of nothing but -inf it makes NaN, which is chosen


def key_of(x: Node) -> Key:
    """What a selection from `x` orders by: the lowest value to which all steps keep the order."""
    path = [x]
    while (below := step_below(path[-1])) is not None:
        path.append(below)
    for number in reversed(range(1, len(path))):
        key = key_at(path[: number + 1])
        if key is not None:
            return key if key_of(key.node).node is key.node else Key(x, -INF)
    return Key(x, -INF)


def order_by_keys(graph: Graph) -> Graph:
    """top_columns(x)  ->  top_columns(key(x))

    Exact, by what `top_columns` means. Any order is wanted only where the columns are returned with it: without them
    nobody could tell which values are right, so those come largest first.
    """
    returned = {t.node for t in graph.outputs}
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs, ordered, bare = tuple(made[a] for a in node.inputs), node.ordered, node.bare
        if node.op.name == "top_columns":
            key = Key(inputs[0], -INF) if node.limit else key_of(inputs[0])
            inputs, ordered, bare = (key.node,), ordered or node not in returned, bare or key.bare
        same = (inputs, ordered, bare) == (node.inputs, node.ordered, node.bare)
        made[node] = node if same else replace(node, inputs=inputs, ordered=ordered, bare=bare)
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


def step_below(node: Node) -> Node | None:
    """The argument that `node` may rise with while all else is the same along the row; None without one."""
    name = node.op.name
    if node.dtype is i32:  # whose sums wrap
        return None
    if name in ("exp", "sigmoid", "log", "sqrt"):
        return node.inputs[0]
    if name not in ("add", "sub", "mul", "div"):
        return None
    x, r = node.inputs
    if name in ("add", "mul") and along_row(r):
        x, r = r, x
    return x if along_row(x) and not along_row(r) else None


def along_row(node: Node) -> bool:
    """Does a value vary along the row?"""
    return bool(node.shape) and node.shape[-1] != 1


def key_at(path: list[Node]) -> Key | None:
    """The last of `path` as the key of the first, by steps from each to the next; None where an order may be lost."""
    of_numbers, *of_others, of_nothing = ROWS
    numbers = row_values(path, of_numbers)
    if not rises(path, numbers):
        return None
    if not all(rises(path, row) or spoiled(row[path[0]]) for row in (row_values(path, keys) for keys in of_others)):
        return None
    left = numbers[path[0]].masked
    if left == {Is.NEGATIVE_INF}:
        limit = -INF
    elif left == {Is.ZERO} and numbers[path[0]].unmasked == {Is.POSITIVE}:
        limit = 0.0
    else:
        return None
    alone = row_values(path, of_nothing)[path[0]].masked
    return Key(path[-1], limit, bare=alone == {Is.NAN}) if alone in (left, {Is.NAN}) else None


def rises(path: list[Node], row: Mapping[Node, Values]) -> bool:
    """Does each step of `path` rise with the next one in such a row?"""
    for node, x in pairwise(path):
        name = node.op.name
        if name in ("log", "sqrt"):
            if (row[x].unmasked | row[x].masked) & {Is.NEGATIVE_INF, Is.NEGATIVE}:
                return False
        elif name in ("add", "sub", "mul", "div"):
            [r] = (a for a in node.inputs if a is not x)
            if not row[r].unmasked <= ({Is.POSITIVE} if name in ("mul", "div") else FINITE):
                return False
    return True


def spoiled(value: Values) -> bool:
    """Is it NaN where the largest key is, and the same everywhere else: NaN or 0?"""
    return value.top == {Is.NAN} and value.others in ({Is.NAN}, {Is.ZERO})


# ---------------------------------------------------------------- what a value may be


class Is(IntEnum):
    """One kind of number, in the order of numbers; NaN is the largest, as a selection and a maximum have it."""

    NEGATIVE_INF = 0
    NEGATIVE = 1
    ZERO = 2
    POSITIVE = 3
    POSITIVE_INF = 4
    NAN = 5


May = frozenset[Is]
ANY: May = frozenset(Is)
FINITE: May = frozenset((Is.NEGATIVE, Is.ZERO, Is.POSITIVE))
TRUE: May = frozenset((Is.POSITIVE,))  # of masks
FALSE: May = frozenset((Is.ZERO,))


@dataclass(frozen=True, slots=True)
class Values:
    """What a value may be where the key is the row's largest, where it is a lesser one, and where it is -inf."""

    top: May
    others: May
    masked: May

    @property
    def unmasked(self) -> May:
        return self.top | self.others


def everywhere(may: Iterable[Is]) -> Values:
    one = frozenset(may)
    return Values(one, one, one)


NOTHING: May = frozenset((Is.NEGATIVE_INF,))
ROWS = (
    Values(FINITE, FINITE, NOTHING),
    Values(frozenset((Is.POSITIVE_INF,)), FINITE, NOTHING),
    Values(frozenset((Is.NAN,)), FINITE | {Is.POSITIVE_INF}, NOTHING),
    everywhere(NOTHING),
)
"""The keys of a row, by what their largest is: a number, +inf, NaN, -inf."""


def row_values(path: list[Node], keys: Values) -> dict[Node, Values]:
    """What everything that `path[0]` is made from may be, where `path[-1]` is `keys`."""
    found: dict[Node, Values] = {}
    for node in behind([path[0]], until=path[-1]):
        of = [found[a] for a in node.inputs if a in found]
        if node is path[-1]:
            found[node] = keys
        elif node.op.kind is Kind.REDUCE and node.op.name in ("max", "sum") and not node.over:
            found[node] = everywhere(reduced(node.op.name, of[0]))
        else:
            parts = ([getattr(value, part) for value in of] for part in ("top", "others", "masked"))
            found[node] = Values(*(values_of(node, part) for part in parts))
    return found


def reduced(name: str, row: Values) -> May:
    """Of the elements where the largest key is, at least one, and any number of others."""
    rest = row.unmasked | row.masked
    if name == "max":
        return frozenset(max(one, other) for one in row.top for other in (one, *rest))
    found: May = row.top
    while (more := found | result(added, found, rest)) != found:
        found = more
    return found


def values_of(node: Node, of: list[May]) -> May:
    """What an element of `node` may be, by what those of its arguments may."""
    name = node.op.name
    if node.literal is not None:
        return frozenset((kind_of(float(node.literal)),))
    if name == "size":
        return TRUE
    if name == "where":
        return frozenset().union(*(of[1] if Is.POSITIVE in of[0] else (), of[2] if Is.ZERO in of[0] else ()))
    if name == "to_f32":
        return of[0]
    if name in RESULTS:
        return result(RESULTS[name], *of)
    if node.dtype is b8:
        return FALSE | TRUE
    return FINITE if node.dtype is i32 else ANY


def kind_of(number: float) -> Is:
    if number != number:
        return Is.NAN
    if number in (INF, -INF):
        return Is.POSITIVE_INF if number > 0 else Is.NEGATIVE_INF
    return Is((number > 0) - (number < 0) + Is.ZERO)


@cache
def result(of: Callable[..., Iterable[Is]], *arguments: May) -> May:
    """Of every way to take one kind of each argument; of NaN it is NaN, and nothing equals it."""
    of_nan = (Is.ZERO,) if of is equal else (Is.NAN,)
    return frozenset(kind for kinds in product(*arguments) for kind in (of_nan if Is.NAN in kinds else of(*kinds)))


def signed(positive: bool, size: Is) -> Is:
    return size if positive else Is(Is.POSITIVE + Is.NEGATIVE - size)


def is_infinite(a: Is) -> bool:
    return a in (Is.NEGATIVE_INF, Is.POSITIVE_INF)


def added(a: Is, b: Is) -> Iterable[Is]:
    if is_infinite(a) or is_infinite(b):
        return (Is.NAN,) if is_infinite(a) and is_infinite(b) and a is not b else (a if is_infinite(a) else b,)
    if Is.ZERO in (a, b) or a is b:
        return (b if a is Is.ZERO else a,)
    return FINITE


def subtracted(a: Is, b: Is) -> Iterable[Is]:
    return added(a, signed(False, b))


def multiplied(a: Is, b: Is) -> Iterable[Is]:
    if Is.ZERO in (a, b):
        return (Is.NAN if is_infinite(a) or is_infinite(b) else Is.ZERO,)
    return (signed((a > Is.ZERO) == (b > Is.ZERO), max(signed(a > Is.ZERO, a), signed(b > Is.ZERO, b))),)


def divided(a: Is, b: Is) -> Iterable[Is]:
    if is_infinite(b):
        return (Is.NAN if is_infinite(a) else Is.ZERO,)
    if b is Is.ZERO:  # of either sign
        return (Is.NAN,) if a is Is.ZERO else (Is.NEGATIVE_INF, Is.POSITIVE_INF)
    return (Is.ZERO if a is Is.ZERO else signed(b > Is.ZERO, a),)


def exponential(a: Is) -> Iterable[Is]:
    return ({Is.NEGATIVE_INF: Is.ZERO, Is.POSITIVE_INF: Is.POSITIVE_INF}.get(a, Is.POSITIVE),)


def logistic(a: Is) -> Iterable[Is]:
    return (Is.ZERO if a is Is.NEGATIVE_INF else Is.POSITIVE,)


def logarithm(a: Is) -> Iterable[Is]:
    if a is Is.POSITIVE:
        return FINITE
    return ({Is.ZERO: Is.NEGATIVE_INF, Is.POSITIVE_INF: Is.POSITIVE_INF}.get(a, Is.NAN),)


def root(a: Is) -> Iterable[Is]:
    return (a if a >= Is.ZERO else Is.NAN,)


def equal(a: Is, b: Is) -> Iterable[Is]:
    if a is not b:
        return FALSE
    return FALSE | TRUE if a in (Is.NEGATIVE, Is.POSITIVE) else TRUE


RESULTS: Mapping[str, Callable[..., Iterable[Is]]] = {
    "add": added, "sub": subtracted, "mul": multiplied, "div": divided, "exp": exponential, "sigmoid": logistic,
    "log": logarithm, "sqrt": root, "eq": equal,
}  # fmt: skip
"""What each op makes of the kinds of its arguments, none of which is NaN: exactly, before anything is rounded."""


# ---------------------------------------------------------------- signs


def signs_of(x: Node) -> dict[Node, Sign]:
    """The sign of everything that `x` is computed from.

    exp and sigmoid count as positive: they are 0 only of a masked -inf, and a row of nothing else has no order.
    """
    signs: dict[Node, Sign] = {}
    for node in behind([x]):
        rule = None if node.dtype is i32 and node.op.name in WRAP else SIGNS.get(node.op.name)
        if node.literal is not None:
            signs[node] = Sign.POSITIVE if node.literal > 0 else Sign(node.literal == 0)
        elif node.op.name == "where":
            signs[node] = sign_of_where(node, signs)
        elif node.op.name == "mul" and node.inputs[0] is node.inputs[1] and node.dtype is f32:
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
    **dict.fromkeys(("exp", "exp2", "sigmoid", "rsqrt", "size"), lambda *_: Sign.POSITIVE),
    **dict.fromkeys(("abs", "square", "sqrt", "relu"), at_least_zero),
    **dict.fromkeys(("col_index", "row_index", "to_b8", "to_unit"), lambda *_: Sign.NONNEGATIVE),
    **dict.fromkeys(("sum", "max", "min", "to_f32", "minimum", "mul", "div", "log1p"), lesser),
    **dict.fromkeys((*CASTS, "round_f4e2m1"), zero_at_most),  # a small positive number may become 0
    **dict.fromkeys(("to_i32", "to_i8", "to_u8", "to_i4", "to_u4"), zero_at_most),
    "add": total,
    "maximum": greater,
    **dict.fromkeys(("pow", "small_pow"), lambda base, _: base),
}
"""The sign of each op's result from those of its arguments; what is not here is unknown."""
WRAP = frozenset({"add", "mul", "square", "abs", "sum"})
"""Those that may take positive i32 below 0."""
