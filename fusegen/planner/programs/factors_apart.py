"""A factor that is used in another way as well becomes a tensor of its own in the step, which lies in the same memory.

    x @ x.T                  x [M, K] and x_right [M, K]: both are the chain's x
    a * x + b * (x @ x)      x, x_left and x_right

Kernels of tensor copies have a map for each tensor, and move it in one way: as slices of a left factor, those of a
right one, or boxes beside the sums. So Newton and Schulz's steps (`a = x @ x.T`, `a @ a`), Gram matrices and
similarities are multiplied by wgmma and tcgen05 too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fusegen.errors import NoPlan
from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.ordering import with_nodes
from fusegen.language.trace import OPS
from fusegen.planner.model import Plan
from fusegen.planner.programs.steps import Bound, Lowered
from fusegen.targets.base import Target

SIDES = ("left", "right")

Way = tuple[str, bool]  # the side of a product, and whether the operand is turned round there


def with_plan(step: Lowered, target: Target, plan_of: Callable[[Lowered], Plan]) -> tuple[Lowered, Plan]:
    """The step with its cheapest plan, with factors apart where that takes less."""
    plan = plan_of(step)
    if copies_tensors(target) and (apart := factors_apart(step)) is not None:
        with suppress(NoPlan):
            other = plan_of(apart)
            if other.cost.time_us < plan.cost.time_us:
                return apart, other
    return step, plan


def copies_tensors(target: Target) -> bool:
    """Are there kernels that move factors by tensor copies?"""
    return target.wgmma or target.tcgen05


def factors_apart(step: Lowered) -> Lowered | None:
    """The step with a tensor for each way that a factor is used in; None where each is used in one."""
    graph = step.graph
    found: dict[tuple[Node, Way], Tensor] = {}
    names = {t.name for t in (*graph.inputs, *graph.outputs)} | set(graph.sizes)
    for tensor in graph.inputs:
        ways = ways_of(graph, tensor.node)
        for side, turned in ways[0 if used_otherwise(graph, tensor.node) else 1 :]:
            name = next(n for n in (f"{tensor.name}_{side}", f"{tensor.name}_{side}_factor") if n not in names)
            names.add(name)
            operator = Operator(min(n.operator.index for n in graph.nodes) - 1, name, tensor.node.where)
            found[tensor.node, (side, turned)] = replace(
                tensor, name=name, node=Node(OPS["input"], (), tensor.shape, tensor.dtype, operator)
            )
    if not found:
        return None
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made[a] for a in node.inputs)
        if node.op.kind is Kind.PRODUCT:
            inputs = tuple(
                factor_of(found, written, side, made) for written, side in zip(node.inputs, SIDES, strict=False)
            ) + inputs[len(SIDES) :]  # fmt: skip
        made[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
    own: dict[str, str] = {}
    tensors: list[Tensor] = []
    for tensor in graph.inputs:
        others = [other for (node, _), other in found.items() if node is tensor.node]
        own.update((other.name, tensor.name) for other in others)
        tensors += [tensor] * is_read(graph, tensor.node, len(others)) + others
    bounds = {bound.tensor: bound for bound in step.bounds}
    more = tuple(Bound(name, bounds[of].base, bounds[of].view) for name, of in own.items())
    kept = {t.name for t in (*tensors, *graph.outputs)}
    return replace(
        step,
        graph=replace(with_nodes(graph, made), inputs=tuple(tensors)),
        bounds=(*(b for b in step.bounds if b.tensor in kept), *more),
    )


def ways_of(graph: Graph, operand: Node) -> list[Way]:
    """How products use an operand as it lies, each way once."""
    found: dict[Way, None] = {}
    for product in graph.products:
        for factor, side in zip(product.inputs, SIDES, strict=False):
            turned = factor.op.kind is Kind.TRANSPOSE
            if (factor.inputs[0] if turned else factor) is operand:
                found[side, turned] = None
    return list(found)


def used_otherwise(graph: Graph, operand: Node) -> bool:
    """Does anything but a product's factor use it?"""
    if not ways_of(graph, operand):
        return False
    others = [n for n in graph.nodes if operand in n.inputs and n.op.kind not in (Kind.PRODUCT, Kind.TRANSPOSE)]
    return bool(others) or any(t.node is operand for t in graph.outputs)


def is_read(graph: Graph, operand: Node, apart: int) -> bool:
    """Is the operand still read by its own name, with so many ways apart?"""
    return not apart or len(ways_of(graph, operand)) > apart or used_otherwise(graph, operand)


def factor_of(found: dict[tuple[Node, Way], Tensor], factor: Node, side: str, made: dict[Node, Node]) -> Node:
    turned = factor.op.kind is Kind.TRANSPOSE
    tensor = found.get((factor.inputs[0] if turned else factor, (side, turned)))
    if tensor is None:
        return made[factor]
    return replace(factor, inputs=(tensor.node,)) if turned else tensor.node
