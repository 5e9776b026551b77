"""What lowering makes of a chain, or of a piece of one: the graph of one kernel, and a view for each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.errors import Where
from fusegen.language.graph import Graph, Node, Tensor
from fusegen.language.sizes import Size
from fusegen.language.views import View
from fusegen.planner.model import Plan
from fusegen.planner.programs.model import Binding, Step


class NotOneStep(Exception):
    """One kernel can't take this view of a value; with `node` in memory it can. The text says why."""

    def __init__(self, node: Node, reason: str) -> None:
        self.node = node
        self.where: Where = node.where
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Bound:
    """A tensor of the step: the graph's tensor `base` through `view`."""

    tensor: str
    base: str
    view: View


@dataclass(frozen=True, slots=True)
class Lowered:
    """The graph of one kernel, whose tensors are bound to those of a chain. `sizes`: each dim of it in the chain's
    sizes; of dims with names of their own that is what they are computed from."""

    graph: Graph
    bounds: tuple[Bound, ...]
    sizes: Mapping[str, Size]

    @property
    def shapes(self) -> int:
        """How many kinds of rows its results have."""
        return len({t.node.shape for t in self.graph.outputs})

    @property
    def plain(self) -> bool:
        """Is every tensor that of the chain, as it is?"""
        return all(b.tensor == b.base and b.view.is_identity for b in self.bounds)


def whole(graph: Graph) -> Lowered:
    """A graph without views as a step: every tensor as it is."""
    arrays = (t for t in (*graph.inputs, *graph.outputs) if t.shape)
    return Lowered(graph, tuple(Bound(t.name, t.name, View.identity(t.shape)) for t in arrays), {})


def step_of(own: Lowered, plan: Plan) -> Step:
    """The step of a program that runs `plan`."""
    bound = {b.tensor: b for b in own.bounds}

    def binding(tensor: Tensor) -> Binding:
        found = bound[tensor.name]
        return Binding(found.tensor, found.base, None if found.view.is_identity else found.view)

    graph = own.graph
    return Step(
        graph=graph,
        plan=plan,
        reads=tuple(binding(t) for t in graph.inputs if t.shape),
        writes=tuple(map(binding, graph.outputs)),
        values=tuple(t.name for t in graph.inputs if not t.shape),
        sizes=own.sizes,
    )
