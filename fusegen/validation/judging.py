"""One launch's outputs against the reference text, within the bounds that the analysis gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusegen.errors import KernelError, NoPlan
from fusegen.language.graph import CASTS, Graph, Kind, Node, Tensor, behind, once_per_graph
from fusegen.language.lookup import rows_at
from fusegen.language.ordering import along_row
from fusegen.language.selection import top_columns
from fusegen.language.types import f32
from fusegen.validation.accumulation import How
from fusegen.validation.bounded import Bounded, gap
from fusegen.validation.bounds import analyse_nodes, key_in_f32, selection_key
from fusegen.validation.columns import compare_columns
from fusegen.validation.compare import Compared, compare

Array = np.ndarray[Any, np.dtype[Any]]
UNLIKE = 0.1  # of the typical number: most are nearer, though what is rounded between kernels may choose other weights


def judge(
    graph: Graph, hows: Mapping[Node, How], operands: Sequence[Any], outputs: Sequence[Array],
    expected: Sequence[Any],
) -> tuple[list[Compared], str]:  # fmt: skip
    """Every output against `expected`, the reference text's, within the bounds of the analysis; and whether these two
    agree (empty: they do).

    A kernel that returns the columns it chose is held to the values at these columns, and the columns to their keys.
    """
    return judged(graph, hows, operands, outputs, expected)[:2]


def judged(
    graph: Graph, hows: Mapping[Node, How], operands: Sequence[Any], outputs: Sequence[Array],
    expected: Sequence[Any], held: Mapping[Node, Array] | None = None,
) -> tuple[list[Compared], str, Mapping[Node, Bounded]]:  # fmt: skip
    """The same, and every node's law. What is expected may be None: then the analysis says it. `held`: what the kernel
    read for operands that are not exact."""
    chosen = next((i for i, t in enumerate(graph.outputs) if t.node is graph.selection), None)
    columns = None if chosen is None else outputs[chosen]
    laws = analyse_nodes(graph, operands, hows, columns, outputs)
    alike = np.ones(1, bool)
    if chosen is not None and expected[chosen] is not None:
        alike = (np.asarray(expected[chosen]) == columns).all(-1, keepdims=True)
    compared, doubt = [], ""
    for tensor, got, wanted in zip(graph.outputs, outputs, expected, strict=True):
        law = laws[tensor.node]
        if graph.selection is not None and tensor.node is graph.selection:
            chosen_by, ordered = graph.selection.inputs[0], graph.selection.ordered
            key = selection_key(graph.selection, laws)
            alone = [laws[n].value for n in varied(chosen_by)]
            equals = [(held or {}).get(n, laws[n].value) for n in varied(chosen_by)]
            value = top_columns(key.value, got.shape[-1]) if wanted is None else np.asarray(wanted)
            compared.append(compare_columns(tensor, got, value, key_in_f32(graph.selection, laws), equals, ordered))
            agrees = wanted is None or not compare_columns(tensor, value, value, key, alone, ordered).wrong.any()
        elif tensor.node.op.kind is Kind.SCATTER:
            rows, law = rows_written(tensor.node, np.asarray(got), laws)
            value = law.value if wanted is None else np.where(named_by(tensor.node, laws, len(got)), wanted, 0)
            compared.append(compare(tensor, rows, law, value))
            agrees = agree(value, law, np.ones(1, bool))
        else:
            value = law.value if wanted is None else np.asarray(wanted)
            if zeroes_weights(graph):
                value = np.where(np.isnan(law.value) & (value == 0), np.nan, value)
            if hides_scores(graph):
                value = np.where(np.isnan(value), law.value, value)
            picked = columns is not None and tensor.node in graph.picked
            compared.append(compare(tensor, got, law, law.value if picked else value))
            agrees = agree(value, law, alike if picked else np.ones(1, bool))
        if not agrees:
            doubt = f"{tensor.name}: the reference text and the ops' table differ: it is not this graph's"
    return compared, doubt, laws


def named_by(put: Node, laws: Mapping[Node, Bounded], count: int) -> Array:
    """Which of the rows have a place among so many: as the index, with axes of one element for those of a row."""
    index = laws[put.inputs[0]].value
    return np.asarray((index >= 0) & (index < count))


def rows_written(put: Node, got: Array, laws: Mapping[Node, Bounded]) -> tuple[Array, Bounded]:
    """What is at the places that the index names, and its law; 0 where it names none."""
    law, named = laws[put], named_by(put, laws, len(got))
    shape = np.broadcast_shapes(law.value.shape, named.shape)
    rows = np.broadcast_to(rows_at(got, laws[put.inputs[0]].value), shape)
    value, error = (np.where(named, part, 0) for part in (law.value, law.error))
    return np.ascontiguousarray(rows), Bounded(np.broadcast_to(value, shape), np.broadcast_to(error, shape))


def unnamed_rows(put: Node, laws: Mapping[Node, Bounded], count: int) -> Array:
    """The places among so many that no index names."""
    index = np.asarray(laws[put.inputs[0]].value).reshape(-1)
    return np.setdiff1d(np.arange(count), index)


def overwritten(tensor: Tensor, got: Array, before: Array, rows: Array) -> str:
    """What is wrong with rows that were to stay as they were (empty: nothing)."""
    raw = f"u{tensor.dtype.bytes}"
    changed = (np.ascontiguousarray(got).view(raw) != np.ascontiguousarray(before).view(raw)).reshape(len(got), -1)
    wrong = [int(row) for row in rows if changed[row].any()]
    return f"{tensor.name}: {len(wrong)} rows that no index names were written, first row {wrong[0]}" if wrong else ""


def failing(launch: Callable[..., None], *arguments: Any) -> str:
    """What was wrong with a launch; empty if nothing."""
    try:
        launch(*arguments)
    except (KernelError, NoPlan) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def varied(key: Node) -> list[Node]:
    """The operands and indices that a key varies with along the row: where they are the same, so is the key."""
    found, stack = dict[Node, None](), [key]
    while stack:
        node = stack.pop()
        if node in found or not along_row(node):
            continue
        found[node] = None
        stack.extend(node.inputs)
    return [node for node in found if node.op.kind in (Kind.INPUT, Kind.LEAF)]


def agree(value: Any, law: Bounded, rows: Array) -> bool:
    """The text's value lies where the analysis says, give or take float64's own rounding, in those rows."""
    with np.errstate(all="ignore"):
        slack = law.error + 1e-10 * np.where(np.isfinite(law.value), gap(law.value, 0.0), 0.0)
        return bool(((gap(np.asarray(value), law.value) <= slack) | ~rows).all())


@once_per_graph
def zeroes_weights(graph: Graph) -> bool:
    """Does a condition put zeros in the place of a softmax's weights, which are divided by their sum behind the second
    product? A row that has a NaN is NaN then, though the chain gives 0 where all of its weights are zeros."""
    if len(graph.products) != 2:
        return False
    first, second = graph.products
    node = second.inputs[0]
    while first in behind([node]) and node.op.kind is Kind.MAP:
        if node.op.name == "where":
            return True
        node = next(a for a in node.inputs if first in behind([a]))
    return False


@once_per_graph
def hides_scores(graph: Graph) -> bool:
    """Has a product weights that a condition makes 0, and that are made of another one's results without a softmax? The
    condition hides a NaN of them, which the chain may have multiplied by 0 (planner.attention.conditions)."""
    if len(graph.products) != 2 or graph.reductions:
        return False
    first, second = graph.products
    weights = second.inputs[0]
    return weights.op.name == "where" and weights.inputs[2].literal == 0 and first in behind([weights])


def hides_nan(graph: Graph, laws: Mapping[Node, Bounded], expected: Sequence[Any]) -> bool:
    """Has a launch hidden a NaN that the text has?"""
    if not hides_scores(graph):
        return False
    wanted = [(t, value) for t, value in zip(graph.outputs, expected, strict=True) if value is not None]
    return any(bool((np.isnan(value) & ~np.isnan(laws[t.node].value)).any()) for t, value in wanted)


@np.errstate(all="ignore")
def unlike_text(graph: Graph, laws: Mapping[Node, Bounded], expected: Sequence[Any]) -> str:
    """Whether the steps up to here come to something else than the text of the whole chain, whatever the bounds are."""
    for tensor, text in zip(graph.outputs, expected, strict=True):
        if text is None or tensor.node is graph.selection:
            continue
        value, wanted = np.broadcast_arrays(laws[tensor.node].value, np.asarray(text, np.float64))
        known = np.isfinite(value) & np.isfinite(wanted)
        typical = np.sqrt(np.square(wanted[known]).mean()) if known.any() else 0.0
        if known.any() and np.median(np.abs(value - wanted)[known]) > UNLIKE * typical:
            return f"{tensor.name}: the reference text and the steps' own come to different numbers"
    return ""


def steps(graph: Graph) -> bool:
    """Is anything made of products a step, such as a comparison, a whole number or an explicit bf16? The least error
    may take it to the next one, which no promise of small errors survives. A chain without products promises so little
    error that whatever is rounded may cross a step, and that an explicit f16 is one. A test for one number is a guard,
    as a softmax has them, and none."""
    rounds = CASTS.keys() - ({"round_f16"} if graph.products else set())
    made: set[Node] = set()
    for node in graph.nodes:
        begins = node.op.kind is Kind.PRODUCT if graph.products else inexact(node)
        if begins or any(a in made for a in node.inputs):
            made.add(node)
    return any(n.op.name in rounds or (n.dtype is not f32 and not guards(n)) for n in made)


def inexact(node: Node) -> bool:
    """Whether the op itself may round its result."""
    return (
        node.op.name in ("sum", "prod")
        or node.op.kind is Kind.SCAN
        or (node.dtype is f32 and node.op.kind is Kind.MAP and node.op.ulps > 0)
    )


def guards(node: Node) -> bool:
    """Whether the node's value is judged by other means than its error: a test for one number, or chosen columns."""
    tested = node.op.name in ("eq", "ne") and any(a.literal is not None for a in node.inputs)
    return tested or node.op.kind is Kind.SELECT
