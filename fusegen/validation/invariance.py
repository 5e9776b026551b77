"""One order of sums: what a chain is compiled to at other numbers of rows, or for other layouts, gives the same bits.

Of a chain that asks for it (`batch_invariant`) other numbers of rows may have another plan, and where the number of
rows is a constant of kernels, other kernels. Those that validation compares with are compiled for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fusegen.language.sizes import dims_in
from fusegen.language.types import Dim
from fusegen.planner.invariant import ROWS, row_dims, with_rows
from fusegen.planner.programs.model import ProgramPlan
from fusegen.validation.inputs import Operands, take
from fusegen.validation.judging import failing
from fusegen.validation.memory import read_output

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "batch"
REFUSED = "NoPlan: no rule can plan"
FEW = 3  # rows, of chains whose kernels are for one number of them: these are compiled anew


def other_batches(checks: Any, made: Any, text: Callable[[Mapping[str, int]], Callable[..., Any]], quick: bool) -> None:
    """The normal launch of a validation once more, by what the chain is compiled to for other numbers of rows: bitwise
    the same. `quick`: for the most rows, or the fewest, where these are other kernels. `text`: the chain's reference at
    some sizes."""
    graph = checks.graph.written
    if not graph.batch_invariant or made.elsewhere is None or checks.normal is None or not checks.wants(NAME):
        return
    operands, first = checks.normal
    if constant := constants(made) & set(row_dims(graph)):
        few_alone(checks, made, text, operands, first, constant)
        return
    seen: set[Hashable] = set()
    for rows in (ROWS[-1], *ROWS[:-1]):
        at = with_rows(graph, rows).sizes
        sizes = {name: at[name] for name in row_dims(graph)}
        other = made.elsewhere(sizes, seen)
        if other is None:
            continue
        outputs, problem = called(checks, other, operands)
        if refused(problem):
            continue
        checks.same(f"{NAME}: {rows}", f"as it is compiled at {said(sizes)}", operands, outputs, first, problem)
        if quick:
            break


def few_alone(
    checks: Any, made: Any, text: Callable[[Mapping[str, int]], Callable[..., Any]], operands: Operands,
    first: Sequence[Array], constant: set[str],
) -> None:  # fmt: skip
    """Some of the rows, by what the chain is compiled to for so few. Only where the reference has the same values for
    them as among the others: rows may count one another."""
    graph = checks.graph
    picks = {name: range(operands.sizes[name])[:: -max(1, operands.sizes[name] // FEW)] for name in constant}
    shapes = [t.shape for t in (*graph.inputs, *graph.outputs)]
    odd = {dim.name for shape in shapes for size in shape if not isinstance(size, Dim) for dim in dims_in(size)}
    if odd & constant or all(len(rows) == operands.sizes[name] for name, rows in picks.items()):
        return
    few = replace(take(graph, operands, picks), labels=operands.labels)
    among, alone = (as_tuple(text(given.sizes)(*given.values)) for given in (operands, few))
    wanted = [rows_at(array, t.shape, picks) for t, array in zip(graph.outputs, among, strict=True)]
    if not all(np.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True) for a, b in zip(wanted, alone, strict=True)):
        return
    sizes = {name: few.sizes[name] for name in sorted(constant)}
    other = made.elsewhere(sizes, set())
    if other is None:
        return
    outputs, problem = called(checks, other, few)
    before = [rows_at(array, t.shape, picks) for t, array in zip(graph.outputs, first, strict=True)]
    checks.same(f"{NAME}: few", f"some rows alone, as compiled at {said(sizes)}", few, outputs, before, problem)


def constants(made: Any) -> set[str]:
    """The dims that are constants of a kernel, or of some kernel of a program."""
    plan = made.plan
    return set(plan.fixed) if isinstance(plan, ProgramPlan) else {d.name for d in dims_in(tuple(plan.graph.fixed))}


def said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def as_tuple(values: Any) -> tuple[Array, ...]:
    return values if isinstance(values, tuple) else (values,)


def called(checks: Any, made: Any, operands: Operands) -> tuple[list[Array], str]:
    """The outputs of a call of another kernel or program of the chain."""
    inputs, outputs, values = checks.placed(operands)
    arguments = checks.arguments(inputs, values)

    def run() -> None:
        made(*arguments, out=tuple(o.view for o in outputs))
        made.device.synchronize()

    if problem := failing(run):
        return [], problem
    return [read_output(o, 0, t.name)[0] for t, o in zip(checks.graph.outputs, outputs, strict=True)], ""


def same_as_contiguous(checks: Any, name: str, operands: Operands, outputs: Sequence[Array] | None) -> None:
    """Arrays that lie otherwise: the bits of the same operands lying next to one another, or refused."""
    if not checks.graph.written.batch_invariant:
        return
    last = checks.found[-1]
    if outputs is None:
        if refused(last.problem):
            said = f"{last.reason}: refused, since no kernel for it sums in the order that serves every number of rows"
            checks.found[-1] = replace(last, reason=said, sizes="refused", problem="")
        return
    first, problem = checks.launch(operands)
    checks.same(f"{NAME}: {name}", "the same operands next to one another", operands, outputs, first, problem)


def refused(problem: str) -> bool:
    """Is it that arrays which lie so are summed in no such order?"""
    return problem.startswith(REFUSED) and "batch_invariant" in problem


def rows_at(value: Any, shape: Sequence[Any], picks: Mapping[str, Sequence[int]]) -> Array:
    for axis, size in enumerate(shape):
        if isinstance(size, Dim) and size.name in picks:
            value = np.take(value, list(picks[size.name]), axis)
    return np.asarray(value)
