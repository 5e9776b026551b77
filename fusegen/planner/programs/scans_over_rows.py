"""Running sums along an axis that is not the last one run over rows, of which a kernel has columns.

    y = swapaxes(cumsum(swapaxes(x, 1, 2)), 1, 2) of x [B, S, H]     # rows of S elements, which lie H apart
    y = cumsum over S of x [B, S, H]                                 # columns, neighbours side by side

Exact but for the order of sums. Whether it takes less time is for the cost model to say: of few columns and a long axis
rows may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from fusegen.language.graph import Graph, Node, once_per_graph
from fusegen.language.one_kernel import obstacle
from fusegen.language.ordering import with_nodes
from fusegen.language.scans import SCANS, ScanWay
from fusegen.language.trace import OPS
from fusegen.language.views import View
from fusegen.planner.programs.lowering import step_for
from fusegen.planner.programs.steps import Lowered, NotOneStep


def over_rows(graph: Graph) -> Iterator[Lowered]:
    """The step whose running sums are over axes of rows, where there is one."""
    over = scans_over_rows(graph)
    with suppress(NotOneStep):
        if over is not graph and obstacle((found := step_for(over)).graph) is None:
            yield found


@once_per_graph
def scans_over_rows(graph: Graph) -> Graph:
    """The graph whose running sums are over axes of rows; the graph as it is where it has none, or some that are not
    seen along another axis alone, or for arrays whose columns do not lie side by side (`axes_apart`)."""
    axes = {} if graph.axes_apart else {node: axis_seen(graph, node) for node in graph.scans}
    if not axes or None in axes.values():
        return graph
    made_of: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs = tuple(made_of[a] for a in node.inputs)
        made_of[node] = node if inputs == node.inputs else replace(node, inputs=inputs)
        (scan,) = node.inputs if len(node.inputs) == 1 else (None,)
        axis = axes.get(scan) if scan is not None else None
        if scan is not None and axis is not None:
            made_of[node] = over_axis(scan, axis, made_of[scan.inputs[0]])
    return with_nodes(graph, made_of)


def axis_seen(graph: Graph, node: Node) -> int | None:
    """The axis, counted from the right, that every user of a running sum sees its rows along; None without one."""
    rank, users = len(node.shape), graph.users.get(node, ())
    if not isinstance(SCANS[node.op.name], ScanWay) or not users or any(t.node is node for t in graph.outputs):
        return None
    for axis in range(rank - 1):
        swap = swapped(node, axis)
        if all(user.view == swap for user in users):
            return axis - rank
    return None


def swapped(node: Node, axis: int) -> View:
    """The view in which that axis and the last one have changed places."""
    order = list(range(len(node.shape)))
    order[axis], order[-1] = order[-1], order[axis]
    return View.identity(node.shape).transposed(tuple(order))


def over_axis(scan: Node, axis: int, source: Node) -> Node:
    """The running sum along `axis` of what shows `source` with that axis and the last one changed."""
    view = swapped(source, len(source.shape) + axis)
    if source.view is not None and source.view.inverse() == view:
        (shown,) = source.inputs
    else:
        shown = Node(OPS["view"], (source,), view.shape, source.dtype, scan.operator, view=view)
    meaning = scan.ref.format(f"np.swapaxes({{0}}, {axis}, -1)")
    return replace(scan, inputs=(shown,), shape=shown.shape, over=(axis,), text=f"np.swapaxes({meaning}, {axis}, -1)")
