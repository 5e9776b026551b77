"""A program whose reductions over rows go by few parts: the same kernels, launched with a few blocks.

A kernel that takes rows in turn has a block for each SM or more, and of as many rows as a validation has time for each
block would take one at most. How many blocks there are is a launch's own matter: the text knows none but those it runs
with. So its turns are seen by two blocks, which take many rows each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusegen.language.graph import Graph, Kind, Node, Tensor
from fusegen.language.types import TensorType
from fusegen.planner.model import RowPlan
from fusegen.planner.programs.model import ProgramPlan, Step
from fusegen.runtime import Kernel, Program
from fusegen.runtime.joined import Joined

BLOCKS = 2
MORE_TURNS = 3  # of a block, beside those whose rows are asked for at first


def in_turn(plan: ProgramPlan) -> tuple[RowPlan, ...]:
    """The steps' plans that take rows in turn."""
    return tuple(s.plan for s in plan.steps if isinstance(s.plan, RowPlan) and s.plan.in_turn is not None)


def turns_of(plan: ProgramPlan) -> int:
    """Rows with which each of a few blocks takes several turns, the last of them not whole."""
    return max(
        BLOCKS * own.tile.rows_per_block * ((own.in_turn.ring if own.in_turn else 0) + MORE_TURNS) + 1
        for own in in_turn(plan)
    )


def with_few_parts(program: Program) -> Program:
    """The program whose kernels make as few parts as two blocks do."""
    counts: dict[str, int] = {}
    for step in program.plan.steps:
        plan = step.plan
        if isinstance(plan, RowPlan) and plan.in_turn is not None:
            written = zip(step.writes, step.graph.outputs, strict=True)
            parts = [b.base for b, t in written if t.node.op.kind is Kind.PART]
            counts |= dict.fromkeys(parts, BLOCKS * plan.tile.rows_per_block)
    steps: list[Step] = []
    kernels: list[Kernel | Joined] = []
    for together, kernel in zip(program.plan.launches, program.kernels, strict=True):
        step = together[0]
        own = {b.tensor: counts[b.base] for b in step.bindings if b.base in counts}
        if not own or isinstance(kernel, Joined):  # whose steps take no rows in turn, and add up no parts
            steps += together
            kernels.append(kernel)
            continue
        graph, plan = few(step.graph, own), replace(kernel.plan, graph=few(kernel.plan.graph, own))
        if isinstance(plan, RowPlan) and plan.in_turn is not None:
            plan = replace(plan, in_turn=replace(plan.in_turn, count=BLOCKS * plan.tile.rows_per_block))
        accesses = tuple(
            replace(a, shape=shape_of(a.shape, own[a.tensor])) if a.tensor in own else a for a in plan.accesses
        )
        plan = replace(plan, accesses=accesses)
        steps.append(replace(step, graph=graph, plan=plan))
        kernels.append(Kernel(replace(kernel.source, plan=plan), kernel.binary, program.device, no_variant))
    between = tuple(
        replace(s, type=TensorType(s.type.dtype, shape_of(s.type.shape, counts[s.name]))) if s.name in counts else s
        for s in program.plan.between
    )
    return Program(replace(program.plan, steps=tuple(steps), between=between), kernels, program.device)


def no_variant(layout: Any) -> Any:
    raise AssertionError(f"tensors between kernels, and what validation passes, lie as the plan expects: {layout}")


def shape_of(shape: Any, count: int) -> Any:
    return (*shape[:-2], count, shape[-1])


def few(graph: Graph, counts: dict[str, int]) -> Graph:
    """The graph with so many rows in each of these tensors."""
    table: dict[Node, Node] = {}
    sized = {t.node: counts[t.name] for t in (*graph.inputs, *graph.outputs) if t.name in counts}
    for tensor in graph.inputs:
        node = tensor.node
        table[node] = replace(node, shape=shape_of(node.shape, sized[node])) if node in sized else node
    for node in graph.nodes:
        if node in table:
            continue
        made = replace(node, inputs=tuple(table[a] for a in node.inputs))
        if node in sized:
            made = replace(made, shape=shape_of(node.shape, sized[node]), count=sized[node])
        table[node] = made

    def sides(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            replace(
                t, node=table[t.node],
                type=TensorType(t.dtype, shape_of(t.shape, counts[t.name])) if t.name in counts else t.type,
            )
            for t in tensors
        )  # fmt: skip

    names = {table[node]: name for node, name in graph.names.items() if node in table}
    return replace(graph, inputs=sides(graph.inputs), outputs=sides(graph.outputs), names=names, origin=None)
