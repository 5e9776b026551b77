"""How far a right kernel may be from its float64 reference: running error analysis over the graph.

Every node carries its value in float64 and a bound on the error of the kernel's own f32 value. A node's bound is what
its arguments' errors become (slope times error, the steepest slope within the errors, so nothing is dropped as second
order) plus the op's own rounding:

    error = sum_i sup |slope_i| * error_i  +  ulps * 2^-23 * |scale|  +  floor

An f32's unit in the last place is at most 2^-23 of it. The floor covers results below the smallest normal f32, which a
GPU may flush and whose exponentials may under- or overflow early. A fused multiply-add rounds once where the model
rounds twice, so contraction stays inside. A bound of 0 means exact; an infinite one that nothing is known.

A result beyond f32's range keeps its number and its bound: whatever stores it next makes an infinity of it, as the
kernel has. An op that computes with it reads an infinity where float64 has a number, and nothing is known of that.

After Wilkinson's running error analysis; see Higham, Accuracy and Stability of Numerical Algorithms (2002), 3.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fusegen.language.codes import in_kernel, unscaled
from fusegen.language.graph import CASTS, OPS, ROWS_AT, Graph, Kind, Node, Op, plain, shown_by
from fusegen.language.ordering import MASKED, signs_of
from fusegen.language.philox import flat_index, high_word, low_word
from fusegen.language.reference import PLACES
from fusegen.language.scans import SCANS, Sorted
from fusegen.language.selection import bare
from fusegen.language.sizes import measured
from fusegen.language.types import F8, b8, f4e2m1, f32, i32, i64, size_of, u32
from fusegen.planner.model import Plan
from fusegen.validation.accumulation import (
    Accumulation,
    ColumnSums,
    How,
    Multiplication,
    PartSums,
    RunningSums,
    accumulations,
)
from fusegen.validation.bounded import Bounded, bounded, exact, gap
from fusegen.validation.carried import (
    CarriedSum,
    Exponentials,
    carried_product,
    exponentials,
)
from fusegen.validation.columns import chosen_columns, in_best_groups, missing_places, taken
from fusegen.validation.formulas import apply, formula
from fusegen.validation.largest import in_order, largest_kept
from fusegen.validation.products import (
    block_product,
    by_group,
    factor_error,
    over_groups,
    product_error,
    unless_too_large,
    vectors_by_group,
    whole_error,
)
from fusegen.validation.rearranged import joined, looked_up, ordered_slots, unpacked, viewed
from fusegen.validation.reductions import (
    of_deals,
    of_groups,
    of_parts,
    over_rows,
    reduction,
    scanned,
    scanned_over_rows,
)
from fusegen.validation.regrouped import (
    columns_dealt,
    dealt_back,
    rows_dealt,
    spread_out,
)
from fusegen.validation.running import LARGEST_INTEGER

Array = np.ndarray[Any, np.dtype[Any]]

PACKED_CASTS = ("round_f4e2m1", "to_i4", "to_u4")
ULP = 2.0**-23  # of an f32, relative to it, at most
FLUSHED = 2.0**-126  # below it f32 results may become 0
# of a function: the fast quotient x / (1 + exp(-x)) is 0 once its divisor passes 2^126, where the true one is 2^-119.6
FLOOR = 2.0**-119
EXACT_INTEGERS = 2.0**24  # integers up to here are f32 values


def analyse(plan: Plan, operands: Sequence[Any]) -> tuple[Bounded, ...]:
    """Each output's value and bound, before it is rounded to its storage type; `operands` in the spec's order."""
    table = analyse_nodes(plan.lowered, operands, accumulations(plan))
    return tuple(table[tensor.node] for tensor in plan.lowered.outputs)


@np.errstate(all="ignore")
def analyse_nodes(
    graph: Graph, operands: Sequence[Any], hows: Mapping[Node, How], columns: Array | None = None,
    results: Sequence[Array] = (),
) -> dict[Node, Bounded]:  # fmt: skip
    """Every node's value and bound. An operand that an earlier kernel made is Bounded itself. `columns` are those that
    the kernel chose, where it says so: then what is taken at them is bounded there, whether they are right or not.
    Otherwise the bounds cover every choice that the errors of the keys allow. `results`: of a launch, whose shapes say
    what no operand's does.
    """
    given = [operand if isinstance(operand, Bounded) else exact(operand) for operand in operands]
    sizes = sizes_of(graph, [g.value for g in given], results)
    table: dict[Node, Bounded] = {}
    for tensor, operand in zip(graph.inputs, given, strict=True):
        wide = {f32: np.float64, i32: np.int32, u32: np.uint32, b8: np.bool_}[tensor.dtype.value]
        value = operand.value
        if tensor.dtype is i64:
            value = np.clip(value, int(i32.least), int(i32.largest))
        table[tensor.node] = Bounded(value.astype(wide), operand.error)
    for node in graph.nodes:
        if node in table:
            continue
        how = hows.get(node)
        if isinstance(how, Multiplication):
            args = [held(table[a]) for a in node.inputs]
            exps = table[how.carried.exps] if how.carried and how.carried.exps else None
            if node.count:
                args = [columns_dealt(node, args[0]), rows_dealt(node, args[1])]
                exps = exps and columns_dealt(node, exps)
            table[node] = product(node, how, args)
            if how.carried is not None:
                table[node] = carried_product(table[node], args, how.carried, exps)
            if in_kernel(node.inputs[1]):
                table[node] = unless_too_large(table[node], *(table[n].value for n in unscaled(node)))
        elif graph.selection and of_columns(node, graph.selection):
            table[node] = selected(node, graph.selection, table, sizes, columns)
        else:
            passes = node.op.name in PASSING or node.op.kind in SHOWING
            read = {a: table[a] if passes else held(table[a]) for a in node.inputs}
            table[node] = step(node, [read[a] for a in node.inputs], graph, sizes, how, table)
            if isinstance(how, Exponentials):
                table[node] = exponentials(table[node], how, table, table[node.inputs[0].inputs[0]])
    return table


def held(arg: Bounded) -> Bounded:
    """What an op reads of it: an f32, which may have become infinite where float64 has a number."""
    if arg.value.dtype != np.float64 or arg.value.size == 0:
        return arg
    if max(arg.value.max(), -arg.value.min()) + arg.error.max() <= f32.largest:  # of NaN and infinities that is false
        return arg
    left = (np.abs(arg.value) + arg.error > f32.largest) & np.isfinite(arg.value)
    return Bounded(arg.value, np.where(left, np.inf, arg.error)) if left.any() else arg


def of_columns(node: Node, selection: Node) -> bool:
    """The selection itself, a take at its columns, or `columns < 0`."""
    asks = node.op.name == "lt" and node.inputs[0] is selection and node.inputs[1].literal == 0
    return node.op.kind is Kind.SELECT or asks


def selected(
    node: Node, selection: Node, table: Mapping[Node, Bounded], sizes: Mapping[str, int], columns: Array | None
) -> Bounded:
    """The columns chosen, what is taken at them, and the mask of where there are none."""
    key = selection_key(selection, table)
    k = size_of(selection.shape[-1], sizes)
    if node is selection:
        return chosen_columns(key, k, columns)
    at, known = table[selection].value, columns is not None
    if node.op.name == "take":
        own = node.inputs[0] is selection.inputs[0]
        return taken(table[node.inputs[0]], at, node.missing, None if known else key, own)
    return missing_places(at, None if known else key)


def selection_key(selection: Node, table: Mapping[Node, Bounded]) -> Bounded:
    """What the selection orders by, in float64, which holds every i32; what is masked is -inf there."""
    key = selection.inputs[0]
    found = held(table[key])
    if key.dtype is i32:
        doubt = (found.error > 0) & (found.value - found.error <= MASKED[i32])  # one bit off it may be masked, or not
        value = np.where((found.value == MASKED[i32]) & ~doubt, -np.inf, found.value)
        return Bounded(value, np.where(doubt, np.inf, found.error))
    if selection.limit:
        return in_best_groups(found, selection.limit)
    return bounded(bare(found.value), found.error) if selection.bare else found


def key_in_f32(selection: Node, table: Mapping[Node, Bounded]) -> Bounded:
    """The same as a kernel has it: what is surely beyond f32's range is an infinity, and so ties with others, or is
    masked."""
    key = table[selection.inputs[0]]
    with np.errstate(invalid="ignore"):  # an infinity that may be anything
        beyond = (np.abs(key.value) - key.error > f32.largest) & np.isfinite(key.value)
    if not beyond.any():
        return selection_key(selection, table)
    infinite = Bounded(np.where(beyond, np.copysign(np.inf, key.value), key.value), np.where(beyond, 0.0, key.error))
    return selection_key(selection, {selection.inputs[0]: infinite})


def product(node: Node, how: Multiplication, args: Sequence[Bounded]) -> Bounded:
    """A matrix product, of factors as they are multiplied."""
    if node.any_ends:
        made = by_group if node.ends else over_groups
        if node.scales:
            return by_group(args, lambda *factors: block_product(factors, how.summed, how.bits))
        return made(args, lambda *factors: multiplied(node, how, factors))
    return block_product(args, how.summed, how.bits) if node.scales else multiplied(node, how, args)


def multiplied(node: Node, how: Multiplication, args: Sequence[Bounded]) -> Bounded:
    """A product of two factors; of a grouped one, that of one group."""
    value = apply(OPS["matmul"] if node.count or node.any_ends else node.op, [arg.value for arg in args])
    (a, b), errors = (arg.value for arg in args), [np.broadcast_to(arg.error, arg.value.shape) for arg in args]
    if node.dtype is i32:
        return bounded(value, whole_error(a, errors[0], b, errors[1]))
    a_error, b_error = (
        factor_error(how, arg.value, error, as_it_lies(factor), in_kernel(factor) is not None)
        for factor, arg, error in zip(node.factors, args, errors, strict=True)
    )
    return bounded(value, product_error(a, a_error, b, b_error, value, how.summed, how.bits))


def as_it_lies(factor: Node) -> bool:
    """Is a factor multiplied as it is in memory, be it in rows that an index names?"""
    return plain(factor) or shown_by(factor).op.name in ROWS_AT


def sizes_of(graph: Graph, arrays: Sequence[Array], results: Sequence[Array] = ()) -> Mapping[str, int]:
    """Every dim's size in one call; of those that no operand has, by the results."""
    made = (
        zip(t.shape, a.shape, strict=True)
        for t, a in zip(graph.outputs, results, strict=False)
        if a.ndim == len(t.shape)
    )
    axes = (
        axis
        for tensor, array in zip(graph.inputs, arrays, strict=True)
        for axis in zip(tensor.shape, array.shape, strict=True)
    )
    return {**graph.sizes, **measured(itertools.chain.from_iterable(made)), **measured(axes)}


def step(
    node: Node, args: list[Bounded], graph: Graph, sizes: Mapping[str, int], how: How | None,
    table: Mapping[Node, Bounded],
) -> Bounded:  # fmt: skip
    """One node."""
    if node.op.kind is Kind.LEAF:
        return place(node, args, graph, sizes) if node.op.name in PLACES else leaf(node, graph, sizes)
    if node.op.kind is Kind.TRANSPOSE:
        error = np.asarray(args[0].error)  # one number where all are exact
        if error.ndim:
            error = apply(node.op, [np.broadcast_to(error, args[0].value.shape)])
        return Bounded(apply(node.op, [args[0].value]), error)
    if node.op.kind is Kind.UNPACK:
        return unpacked(node, args[0])
    if node.op.kind is Kind.VIEW:
        return viewed(node, args[0], sizes)
    if node.op.kind is Kind.JOIN:
        return joined(node, args, sizes)
    if node.op.kind is Kind.GATHER:
        return looked_up(node, *args)
    if node.op.kind is Kind.ORDER:
        return ordered_slots(node, args, sizes)
    if node.op.kind is Kind.BIAS:
        rows = vectors_by_group(len(args[0].value), *args[1:])
        by = "add" if node.op.name == "add_group_rows" else "mul"
        return smooth(replace(node, op=OPS[by], inputs=node.inputs[:2]), [args[0], rows])
    if node.op.kind is Kind.SCATTER:  # of a kernel: the rows themselves
        return args[-1]
    if node.op.kind is Kind.GROUP:
        return of_groups(node, args[0], how if isinstance(how, Accumulation) else None)
    if node.op.kind is Kind.DEAL:
        return of_deals(node, args[0], how if isinstance(how, CarriedSum) else None)
    if node.op.kind is Kind.PART:
        return of_parts(node, args[0], how if isinstance(how, PartSums) else None)
    if node.op.kind is Kind.SPREAD:
        spread = dealt_back if node.count else spread_out
        return spread(node, args[0], size_of(node.shape[-1], sizes))
    if node.over and node.op.kind is Kind.SCAN:
        return scanned_over_rows(node, args[0], how if isinstance(how, RunningSums) else None)
    if node.over:
        return over_rows(node, args[0], how if isinstance(how, ColumnSums) else None)
    if node.op.kind is Kind.REDUCE:
        return reduction(node, args[0], how if isinstance(how, Accumulation | CarriedSum) else None, table)
    if node.op.kind is Kind.SCAN:
        own = how if isinstance(how, Accumulation) else None
        if isinstance(SCANS[node.op.name], Sorted):
            return in_order(node, args[0])
        return largest_kept(node, args[0], args[1], own) if len(args) > 1 else scanned(node, args[0], own)
    if node.dtype in (i32, u32) and node.op.name not in RULES:
        return whole(node, args)
    rule = RULES.get(node.op.name)
    if rule is not None:
        return bounded(*rule(node.op, args))
    if node.op.name == "sqrt" and signs_of(node.inputs[0])[node.inputs[0]]:
        return bounded(*rising(node.op, args[0], 0.0))
    return smooth(node, args)


# ---------------------------------------------------------------- rules


def leaf(node: Node, graph: Graph, sizes: Mapping[str, int]) -> Bounded:
    if node.op.name in ("col_index", "row_index"):
        last = node.op.name == "col_index"
        size = node.shape[-1 if last else -2] if graph.products else graph.shape[-1 if last else -2]
        index = np.arange(size_of(size, sizes))
        index = index.astype(np.int32)
        return exact(index if last else index[:, None])
    value: Any = node.literal
    if node.size is not None:
        value = float(size_of(node.size, sizes))
    if node.dtype in (i32, u32):
        return exact(node.dtype.numpy.type(value))
    if node.dtype is not f32:
        return exact(value)
    return bounded(np.float64(value), gap(np.float64(np.float32(value)), np.float64(value)))


def place(node: Node, args: list[Bounded], graph: Graph, sizes: Mapping[str, int]) -> Bounded:
    """A word of an element's or of a row's index; of chosen columns as sure as these are."""
    *outer, last = (size_of(size, sizes) for size in node.shape)
    word = low_word if node.op.name.endswith("low") else high_word
    if not args:
        return exact(word(flat_index(*outer, last)))
    index = flat_index(*outer, 1) * size_of(graph.shape[-1], sizes) + args[0].value
    return bounded(word(index), np.where(args[0].error > 0, np.inf, 0.0))


def smooth(node: Node, args: list[Bounded]) -> Bounded:
    """An op that has slopes."""
    op = node.op
    value = apply(op, [a.value for a in args])
    moved: Any = np.zeros(())
    for index, arg in enumerate(args):
        if not arg.exact:
            change = steepest(op, index, args) * arg.error
            moved = moved + np.where(arg.error == 0, 0.0, np.where(np.isnan(change), np.inf, change))
    error = moved
    if node.dtype is f32 and op.ulps:
        scale = np.abs(formula(op.scale, op.arity)(*(a.value for a in args), out=value))
        rounding: Any = op.ulps * ULP * (scale + moved) + (FLUSHED if op.ulps < 1 else FLOOR)
        if scales_exactly(node):
            rounding = np.where(np.abs(value) - moved < FLUSHED, FLUSHED, 0.0)
        error = moved + np.where((scale == 0) & (moved == 0), 0.0, rounding)  # what must be 0 is 0: exp(-inf), 0 * x
    return bounded(value, settle(op, args, value, error))


def whole(node: Node, args: list[Bounded]) -> Bounded:
    """An op on i32 or u32, exact where its arguments are. Errors move an i32 by its slopes, unless it may wrap
    meanwhile; those of an u32 are not followed."""
    value = apply(node.op, [a.value for a in args])
    if all(a.exact for a in args):
        return exact(value)
    wide = [Bounded(a.value.astype(np.float64), a.error) for a in args]
    moved: Any = np.zeros(())
    for index, arg in enumerate(wide):
        change = steepest(node.op, index, wide) * arg.error
        moved = moved + np.where(arg.error == 0, 0.0, np.where(np.isnan(change), np.inf, change))
    if not node.op.slopes or node.dtype is u32:  # bits
        return bounded(value, np.where(moved > 0, np.inf, 0.0))
    size = np.abs(formula(node.op.ref, node.op.arity)(*(a.value for a in wide)))
    return bounded(value, np.where((moved > 0) & (size + moved > LARGEST_INTEGER), np.inf, moved))


def rising(op: Op, arg: Bounded, least: float = -np.inf) -> tuple[Array, Array]:
    """A function that rises wherever it is defined, of what is nowhere below `least`: off by no more than its ends are.
    A square root is infinitely steep at 0, log(1 + x) at -1, tanh of that is steepest somewhere between."""
    value = apply(op, [arg.value])
    low, high = (apply(op, [np.maximum(end, least)]) for end in (arg.low, arg.high))
    moved = np.maximum(gap(low, value), gap(high, value))
    error = moved + np.where((value == 0) & (moved == 0), 0.0, op.ulps * ULP * (np.abs(value) + moved) + FLOOR)
    return value, settle(op, [arg], value, error)


def scales_exactly(node: Node) -> bool:
    """A product with a power of two, or a quotient by one, rounds nothing."""
    literals = {"mul": node.inputs, "div": node.inputs[1:]}.get(node.op.name, ())
    return any(a.literal and math.frexp(a.literal)[0] in (0.5, -0.5) for a in literals)


def steepest(op: Op, index: int, args: list[Bounded]) -> Array:
    """The largest slope of argument `index` while every argument stays within its error.

    Slopes are monotone, or rise or fall away from 0, so an interval's ends and its point nearest to 0 suffice.
    """
    if index >= len(op.slopes):
        return np.full((), np.inf)
    text = op.slopes[index]
    slope = formula(text, op.arity)
    depends = [i for i in range(op.arity) if f"{{{i}}}" in text or "{out}" in text]
    choices = [
        [a.low, a.high, np.clip(0.0, a.low, a.high)] if i in depends and not a.exact else [a.value]
        for i, a in enumerate(args)
    ]
    found: Any = np.zeros(())
    for point in itertools.product(*choices):
        out = apply(op, point) if "{out}" in text else None
        found = np.maximum(found, np.abs(slope(*point, out=out)))
    return np.asarray(found)


def settle(op: Op, args: list[Bounded], value: Array, error: Any) -> Array:
    """Infinities and NaN: certain where every corner of the arguments agrees."""
    special = ~np.isfinite(value)
    if not special.any():
        return np.asarray(error)
    few = [Bounded(*(np.broadcast_to(x, value.shape)[special] for x in (a.value, a.error))) for a in args]
    some = value[special]
    certain = np.zeros(some.shape, bool)
    for arg in few:  # a NaN comes out of every smooth op
        certain |= np.isnan(arg.value) & (arg.error == 0)
    # what may be anything may be NaN or lie between its ends, whose squares are both infinite
    agree = np.logical_and.reduce([np.isfinite(arg.error) for arg in few])
    for corner in itertools.product(*([a.value] if a.exact else [a.low, a.high] for a in few)):
        agree &= gap(apply(op, corner), some) == 0
    settled = np.broadcast_to(error, value.shape).copy()
    settled[special] = np.where(certain & np.isnan(some) | agree, 0.0, np.inf)
    return settled


def compared(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """A comparison is sure where its sides are further apart than their errors, or where one is NaN. Of one value with
    itself, whatever that is, it is sure where that can't be NaN by chance."""
    a, b = args
    value = apply(op, [a.value, b.value])
    if a is b:
        never = op.name in ("lt", "gt")
        return value, np.where(np.isinf(a.error) & (not never), 1.0, 0.0)
    margin = a.error + b.error
    apart = np.abs(a.value.astype(np.float64) - b.value.astype(np.float64)) > margin
    nan = (np.isnan(a.value) & ~a.unsure) | (np.isnan(b.value) & ~b.unsure)
    return value, np.where((margin > 0) & ~apart & ~nan, 1.0, 0.0)


def both(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    a, b = args
    sure_false = (~a.value & ~a.unsure) | (~b.value & ~b.unsure)
    return apply(op, [a.value, b.value]), np.where((a.unsure | b.unsure) & ~sure_false, 1.0, 0.0)


def either(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    a, b = args
    sure_true = (a.value & ~a.unsure) | (b.value & ~b.unsure)
    return apply(op, [a.value, b.value]), np.where((a.unsure | b.unsure) & ~sure_true, 1.0, 0.0)


def negated(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    return apply(op, [args[0].value]), args[0].error


def chosen(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """The branch taken; where the mask is unsure, whatever lies between both branches."""
    mask, yes, no = args
    error = np.where(mask.value, yes.error, no.error)
    other = gap(yes.value, no.value) + np.where(mask.value, no.error, yes.error)
    return apply(op, [a.value for a in args]), np.where(mask.unsure, np.maximum(error, other), error)


def extreme(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """The larger or smaller of two, or of one and 0, by intervals; a certain NaN wins for certain."""
    value = apply(op, [a.value for a in args])
    low, high = apply(op, [a.low for a in args]), apply(op, [a.high for a in args])
    nan: Any = np.zeros((), bool)
    for arg in args:
        nan = nan | (np.isnan(arg.value) & ~arg.unsure)
    return value, np.where(nan, 0.0, np.maximum(gap(low, value), gap(high, value)))


def stepped(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """Rounding: monotone, and done alike by the reference, so only an inexact argument may land on another step; where
    anything may stand there, NaN too, nothing is known."""
    arg = args[0]
    value = apply(op, [arg.value])
    error = np.maximum(gap(apply(op, [arg.low]), value), gap(apply(op, [arg.high]), value))
    return value, np.where(arg.error == 0, 0.0, np.where(np.isinf(arg.error), np.inf, error))


def recoded(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """The bits of a number: as far apart as those of its ends, which are of one sign."""
    arg = args[0]
    value, error = stepped(op, args)
    apart = (np.signbit(arg.low) != np.signbit(arg.high)) | ~np.isfinite(error)
    return value, np.where(apart & (arg.error != 0), np.inf, error)


def decoded(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """The number that has some bits: nothing is known of it where those are not sure."""
    return apply(op, [args[0].value]), np.where(args[0].error == 0, 0.0, np.inf)


def classified(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """Whether it is a number: sure unless anything may stand there."""
    return apply(op, [args[0].value]), np.where(np.isinf(args[0].error), 1.0, 0.0)


def remainder(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """x - n y with n the whole part of x / y: exact of exact numbers. Of others it moves with them as long as n stays
    what it is; where that may change, nothing is known."""
    x, y = args
    value = apply(op, [x.value, y.value])
    least, most = np.abs(y.value) - y.error, np.abs(y.value) + y.error
    turns = np.trunc(np.abs(x.value) / np.abs(y.value))
    low, high = (np.abs(x.value) - x.error) / most, (np.abs(x.value) + x.error) / least
    same = (least > 0) & (np.trunc(low) == turns) & (np.trunc(high) == turns)
    sure = (x.error == 0) & (y.error == 0)
    return value, np.where(sure, 0.0, np.where(same, x.error + turns * y.error, np.inf))


def widened(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    """i32, u32 or b8 as f32: exact up to 2^24."""
    value = apply(op, [args[0].value])
    size = np.abs(value) + args[0].error
    return value, args[0].error + np.where(size > EXACT_INTEGERS, ULP / 2 * size, 0.0)


def nonzero(op: Op, args: list[Bounded]) -> tuple[Array, Array]:
    arg = args[0]
    sure = (gap(arg.value, 0) > arg.error) | np.isnan(arg.value)
    return apply(op, [arg.value]), np.where(arg.unsure & ~sure, 1.0, 0.0)


SHOWING = (Kind.TRANSPOSE, Kind.VIEW, Kind.JOIN, Kind.SPREAD, Kind.GATHER, Kind.SCATTER)
PASSING = frozenset(
    ("neg", "abs", "relu", "maximum", "minimum", "max", "min", "group_max", "group_min", "deal_max", "where", *CASTS)
)
"""Ops that compute nothing: a number beyond f32's range and the infinity in its place give results alike."""

Rule = Callable[[Op, list[Bounded]], tuple[Array, Array]]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), compared),
    "logical_and": both,
    "logical_or": either,
    "logical_not": negated,
    "where": chosen,
    "maximum": extreme,
    "minimum": extreme,
    "relu": extreme,  # of something surely negative it is 0, and no root or quotient of that is in doubt
    **dict.fromkeys(("log1p", "tanh_log1p"), lambda op, args: rising(op, args[0])),
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "sign", "to_i32", "to_u32"), stepped),
    **dict.fromkeys(("isnan", "isinf", "isfinite"), classified),
    "fmod": remainder,
    **dict.fromkeys((*CASTS, *PACKED_CASTS, "to_i8", "to_u8", "power_of_2_above", "power_of_2_below"), stepped),
    **dict.fromkeys((*(f"code_of_{dtype}" for dtype in (*F8, f4e2m1)), "bits_of_f32"), recoded),
    **dict.fromkeys((*(f"{dtype}_of_code" for dtype in (*F8, f4e2m1)), "f32_of_bits"), decoded),
    "to_f32": widened,
    "to_b8": nonzero,
}
"""Ops whose result does not follow its arguments smoothly. Every other op goes by its slopes."""
