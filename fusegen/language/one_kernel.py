"""What no one kernel holds of a chain: several iteration spaces, a second selection, whole rows behind a selection.

These are no mistakes of the chain's author. `obstacle(graph)` names the first of them in the spec's words, with the
value that has to be in memory before the way is free; the planner refuses one kernel for its reason, and cuts the chain
there (`fusegen.planner.programs`). What only rules of products mind is said by `fusegen.language.products.split`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.errors import Where
from fusegen.language.axes import over_rows, reduced_axes
from fusegen.language.graph import Extent, Graph, Kind, Node, behind, broadcast, once_per_graph, whole_rows
from fusegen.language.ordering import along_row
from fusegen.language.types import Shape, shape_text


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no one kernel holds a chain. `cut` is the value to write to memory first; None where that would not do."""

    reason: str
    where: Where
    cut: Node | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@once_per_graph
def obstacle(graph: Graph) -> Obstacle | None:
    """The first thing of `graph` that no one kernel holds; None where rules may look at it."""
    shape: Shape = graph.products[0].shape if graph.products else gathered_shape(graph)
    for tensor in graph.iterated:
        own = tensor.shape
        if own[-1:] and own[-1] in graph.widths:  # products side by side
            own = (*own[:-1], shape[-1])
        try:
            shape = broadcast(shape, own)
        except ValueError as error:
            reason = (
                f"{tensor.name} {shape_text(tensor.shape)} does not fit {shape_text(shape)}: {error} differ; "
                "a kernel has one shape, which every operand has, or sizes of 1 and missing leading axes instead"
            )
            return Obstacle(reason, graph.where)
    return (
        of_ends(graph)
        or of_repeats(graph)
        or of_orders(graph)
        or of_gathers(graph)
        or of_scatters(graph)
        or of_scans(graph, shape)
        or of_columns(graph, shape)
        or of_selection(graph, shape)
        or of_outputs(graph, shape)
        or of_rows(graph, shape)
    )


def gathered_shape(graph: Graph) -> Shape:
    """The shape of rows that an index names, where nothing else may be as long: of a norm of embeddings, say."""
    rows = (n.shape for n in graph.gathers if n.inputs[0] in graph.tables)
    return next(rows, ())


def of_ends(graph: Graph) -> Obstacle | None:
    """Ends of groups that are computed: each block of a product walks over all of them."""
    for node in graph.products:
        if node.any_ends is not None and shown(node.any_ends).op.kind is not Kind.INPUT:
            reason = f"{node.operator} takes groups whose ends are computed: a program cuts here"
            return Obstacle(reason, node.where, node.any_ends)
    for node in graph.nodes:
        if node.op.kind is Kind.BIAS and not any(product.ends is node.ends for product in graph.products):
            return Obstacle(f"{node.operator}: a group's vector meets its rows where they are multiplied", node.where)
    return None


def of_repeats(graph: Graph) -> Obstacle | None:
    """One row or column of a product, of which elements elsewhere are made: tiles are of what is multiplied."""
    made = set(graph.products)
    for node in graph.nodes:
        if node.op.kind is not Kind.MAP:
            continue
        for source in made.intersection(node.inputs):
            own, whole = ((1, *shape)[-2:] for shape in (source.shape, node.shape))
            if any(a == 1 != b for a, b in zip(own, whole, strict=True)):
                what = f"{shape_text(source.shape)} of a product, and is {shape_text(node.shape)}"
                return Obstacle(f"{node.operator} repeats {what}: a program cuts here", node.where, source)
        if made.intersection(node.inputs):
            made.add(node)
    return None


def of_orders(graph: Graph) -> Obstacle | None:
    """Slots that are sorted beside anything else, or by what is computed: their kernel places all of them, and has
    nothing but their groups to go by."""
    for node in graph.orders:
        said = f"{node.operator} sorts slots by the groups that they name"
        ids = node.inputs[0]
        if shown(ids).op.kind is not Kind.INPUT:
            return Obstacle(f"{said}, which are computed: a program cuts here", node.where, ids)
        if ids is not graph.orders[0].inputs[0]:
            first = graph.orders[0]
            return Obstacle(f"{said}, and {first.operator} at {first.where} sorts others", node.where, node)
        if any(a.op.kind is not Kind.ORDER for a in node.inputs[1:]):
            return Obstacle(f"{said}, and counts them for itself", node.where)
    allowed = {*graph.orders, *(n for n in graph.nodes if n.op.kind is Kind.VIEW)}
    for other in graph.nodes if graph.orders else ():
        if other.inputs and other not in allowed:
            made = next((shown(a) for a in other.inputs if shown(a).op.kind is Kind.ORDER), other)
            said = f"{other.operator} at {other.where} needs another kernel than what sorts slots by their groups"
            return Obstacle(f"{said}: a program cuts here", other.where, made)
    return None


def of_gathers(graph: Graph) -> Obstacle | None:
    """Rows and columns at computed places, other than one at a time of an operand for each row, in kernels of whole
    rows."""
    beside: list[Node] = [*graph.products, *graph.selections, *over_rows(graph)]
    behind_them = set(beside)
    for node in graph.nodes:
        if any(a in behind_them for a in node.inputs):
            behind_them.add(node)
    for node in graph.gathers:
        if node.op.name == "paged_rows":  # read by attention, as it reads other keys and values
            continue
        source, index = shown(node.inputs[0]), node.inputs[1]
        said = f"{node.operator} reads {'rows' if node.op.name == 'gather' else 'columns'} that an index names"
        made = computed_source(node)
        if made is not None:
            return Obstacle(f"{said}, of a value that is computed: a program cuts here", made.where, made)
        if multiplied_alone(graph, node):
            known = {Kind.INPUT, Kind.MAP, Kind.VIEW, Kind.LEAF}
            inside = behind([index])
            if all(n.op.kind in known and n.op.name not in ("row_index", "col_index") for n in inside):
                continue
            made = next((n for n in reversed(inside) if n.op.kind not in known), node)
            return Obstacle(f"{said}, which is computed by {made.operator}: a program cuts here", node.where, made)
        if beside:
            cut = next((a for a in node.inputs if a in behind_them), node)
            what = f"{beside[0].operator} at {beside[0].where}"
            return Obstacle(f"{said}, and {what} needs a kernel without that: a program cuts here", node.where, cut)
        if node.op.name == "gather" and not graph.viewed and source not in graph.tables:
            reason = f"{said}, of {graph.tensor_of[source].name}, which is read as the chain's rows too"
            return Obstacle(f"{reason}: a program cuts here", node.where, node)
        if graph.extents[index] is Extent.ELEMENT and (whole_rows(node) or node.op.name == "take_at"):
            reason = f"{said}, and each element of a row has an index of its own; a kernel takes one index a row"
            return Obstacle(reason, node.where)
    return None


def multiplied_alone(graph: Graph, node: Node) -> bool:
    """Are rows at an index left factors of products, as they lie, and nothing else? A product's kernel then finds them
    on their way in."""
    rows = node.op.name == "gather" and len(node.shape) == 2 and whole_rows(node)
    users = graph.users[node]
    lefts = all(u.op.kind is Kind.PRODUCT and u.inputs[0] is node and node not in u.inputs[1:] for u in users)
    plain = all(len(u.shape) == 2 and not u.scales and not u.inner_ends for u in users)
    return rows and bool(users) and lefts and plain and not any(t.node is node for t in graph.outputs)


def of_scatters(graph: Graph) -> Obstacle | None:
    """Rows that are written where an index names some, in kernels of whole rows."""
    beside: list[Node] = [*graph.products, *graph.selections, *over_rows(graph)]
    for node in graph.scatters:
        values = node.inputs[-1]
        if beside:
            what = f"{beside[0].operator} at {beside[0].where}"
            reason = f"{node.operator} writes rows that an index names, and {what} needs a kernel without that"
            return Obstacle(f"{reason}: a program cuts here", node.where, shown(values))
        if node.op.name == "put" and graph.extents[node.inputs[0]] is Extent.ELEMENT:
            reason = f"{node.operator} writes single values at an index of each; a kernel writes rows at one a row"
            return Obstacle(reason, node.where)
        if graph.extents[values] is Extent.GROUP:
            reason = f"{node.operator} writes rows that an index names, and its values are one a group: cut here"
            return Obstacle(reason, node.where, shown(values))
    return None


def computed_source(node: Node) -> Node | None:
    """What a gather reads, where that is no operand; a column is also taken of elementwise steps on operands."""
    stack = [shown(node.inputs[0])]
    for value in stack:
        if value.op.kind in (Kind.INPUT, Kind.LEAF):
            continue
        if node.op.name == "gather" or (value.op.kind is not Kind.MAP and along_row(value)):
            return value
        if along_row(value):
            stack += [a for a in map(shown, value.inputs) if a not in stack]
    return None


def shown(node: Node) -> Node:
    """What a view is of."""
    while node.op.kind is Kind.VIEW:
        (node,) = node.inputs
    return node


def of_scans(graph: Graph, shape: Shape) -> Obstacle | None:
    """Running sums beside what no pass over whole rows makes, or of other rows."""
    other = next((n for n in graph.nodes if n.op.kind in (Kind.PRODUCT, Kind.SELECT) or n.over), None)
    for node in graph.scans:
        if node.over:  # as reductions over rows are: see of_columns
            continue
        source = node.inputs[0]
        if source.shape[-1] != shape[-1]:
            reason = f"{node.operator} runs along {source.shape[-1]}, but the rows run over {shape[-1]}"
            return Obstacle(reason, node.where, node)
        if other is not None:
            does = {Kind.PRODUCT: "multiplies matrices", Kind.SELECT: "chooses columns"}
            over = "runs over rows" if other.op.kind is Kind.SCAN else "reduces over rows"
            does_it = does.get(other.op.kind, over)
            behind_it = other in behind([source])
            reason = (
                f"{node.operator} runs along whole rows, and {other.operator} at {other.where} {does_it}: "
                "a program cuts here"
            )
            return Obstacle(reason, node.where, source if behind_it else node)
    return None


def of_columns(graph: Graph, shape: Shape) -> Obstacle | None:
    """Reductions and running sums over axes of rows beside others, or of values that have not the chain's rows."""
    columns = over_rows(graph)
    if not columns:
        return None
    said = f"{columns[0].operator} at {columns[0].where} {over_text(columns[0])}"
    behind = set(columns)
    for node in graph.nodes:
        if any(a in behind for a in node.inputs):
            behind.add(node)
        if node.op.kind in (Kind.PRODUCT, Kind.SELECT) or (node.op.kind is Kind.REDUCE and not node.over):
            does = {Kind.PRODUCT: "multiplies matrices", Kind.SELECT: "chooses columns"}.get(
                node.op.kind, f"reduces over {node.inputs[0].shape[-1]}"
            )
            cut = next((a for a in node.inputs if a in behind), None) or node
            first = columns[0] if columns[0] in behind and cut is not node else cut
            return Obstacle(f"{node.operator} {does}, and {said}: a program cuts here", node.where, first)
    for node in columns:
        own = (1,) * (len(shape) - len(node.inputs[0].shape)) + node.inputs[0].shape
        if node.over != columns[0].over:
            reason = f"{node.operator} {over_text(node)}, and {said}: a program cuts here"
            return Obstacle(reason, node.where, node)
        if own != shape:
            reason = (
                f"{node.operator} is of {shape_text(node.inputs[0].shape)}, but the chain's shape is "
                f"{shape_text(shape)}: a program cuts here"
            )
            return Obstacle(reason, node.where, node)
    return None


def over_text(node: Node) -> str:
    """The axes of rows that are taken: `reduces over B and S`, `runs over S`."""
    axes = " and ".join(str(node.inputs[0].shape[axis]) for axis in node.over)
    return f"{'runs' if node.op.kind is Kind.SCAN else 'reduces'} over {axes}"


def of_outputs(graph: Graph, shape: Shape) -> Obstacle | None:
    """An output that has not the chain's rows."""
    for tensor in graph.outputs:
        if tensor.node.op.kind is Kind.PART:
            continue
        own = tensor.node.shape if tensor.node in graph.written_at else tensor.shape
        leading = (1,) * (len(shape) - len(own)) + own
        if reduced_axes(graph) and leading[-1:] == shape[-1:]:  # one value a column
            gone = reduced_axes(graph)
            whole = tuple(s if a in gone and leading[a] == 1 else leading[a] for a, s in enumerate(shape))
            leading = whole if all(leading[a] == 1 for a in gone) else leading
        if tensor.node in graph.orders:
            continue
        k = [graph.selection.shape[-1]] if graph.selection and tensor.node in graph.picked else []
        if tensor.node in graph.grouped:
            k = [tensor.shape[-1]]
        if leading[:-1] != shape[:-1] or leading[-1] not in (*(k or (shape[-1:] + graph.widths)), 1):
            what = "one value a group" if tensor.node in graph.grouped else "what was chosen"
            last = f"a last axis of {k[0]} ({what})" if k else "the chain's whole shape"
            reason = (
                f"output {tensor.name} {shape_text(tensor.shape)} does not span the rows of {shape_text(shape)}; "
                f"in one kernel it has {last}, or a last axis of size 1 (one value a row)"
            )
            return Obstacle(reason, tensor.node.where, tensor.node)
    return None


def of_rows(graph: Graph, shape: Shape) -> Obstacle | None:
    """Sizes and reductions of other axes than the rows' own."""
    if graph.products:
        return None
    for node in graph.nodes:
        if (
            node.op.kind is Kind.REDUCE
            and not node.over
            and node not in graph.picked
            and node.inputs[0].shape[-1] != shape[-1]
        ):
            length = node.inputs[0].shape[-1]
            return Obstacle(f"{node.op.name} reduces {length}, but the rows run over {shape[-1]}", node.where, node)
    return None


def of_selection(graph: Graph, shape: Shape) -> Obstacle | None:
    """More than one selection, one of other rows, and whole rows behind one."""
    first, more = graph.selection, graph.selections[1:]
    if first is None:
        return None
    if more:
        reason = (
            f"{more[0].operator} chooses columns, and {first.operator} at {first.where} has done so: "
            "a kernel chooses once"
        )
        return Obstacle(reason, more[0].where, more[0].inputs[0])
    cols = first.inputs[0].shape[-1]
    if shape[-1:] != (cols,):
        reason = f"{first.operator} chooses from {cols}, but the rows run over {shape[-1]}"
        return Obstacle(reason, first.where, first.inputs[0])
    for node in graph.nodes:
        if node in graph.picked and graph.extents[node] is Extent.ELEMENT:
            chosen = next((a for a in node.inputs if a in graph.picked), first)
            reason = (
                f"{node.operator} is of the whole row and needs what was chosen of it: behind {first.operator} "
                f"a kernel has only the {first.shape[-1]} columns chosen"
            )
            return Obstacle(reason, node.where, chosen)
    return None
