"""Where a chain can be cut, and the graph of each piece: what one kernel makes of operands and of values in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.language.graph import FITTED, ROUNDS, Graph, Kind, Node, Operator, Tensor, once_per_graph, plain, shown_by
from fusegen.language.naming import free_name, value_names
from fusegen.language.nodes import size_number
from fusegen.language.sizes import dims_in
from fusegen.language.trace import OPS
from fusegen.language.types import DType, TensorType, f32
from fusegen.planner.attention.codes import widens_codes
from fusegen.planner.attention.recognition import is_attention
from fusegen.planner.programs.model import Stored

WORTH_STORING = (Kind.MAP, Kind.REDUCE, Kind.SCAN, Kind.PRODUCT, Kind.BIAS, Kind.SELECT, Kind.GATHER,
                 Kind.ORDER, Kind.SCATTER)  # fmt: skip


def with_vectors(product: Node, graph: Graph) -> Node:
    """A product; of a grouped one what comes of its scale and its bias, which its own kernel applies."""
    node = product
    while users := [u for u in graph.users[node] if u.op.kind is Kind.BIAS or u.op.name == "to_f32"]:
        node = users[0]
    return product if node.op.name == "to_f32" else node


def widened_factors(graph: Graph) -> frozenset[Node]:
    """Of attention, the casts of keys and values of 8 bits: in memory, all of them are factors as they lie."""
    if not is_attention(graph):
        return frozenset()
    rights = (shown_by(factor) for product in graph.products for factor in product.inputs[1:2])
    return frozenset(factor for factor in rights if widens_codes(graph, factor))


def to_begin_with(graph: Graph) -> Iterator[frozenset[Node]]:
    """What may well be in memory together: all joins that are repeated, and what is around products."""
    if joins := frozenset(n for n in candidates(graph) if n.op.kind is Kind.JOIN):
        yield joins
    yield from around_products(graph)


def around_products(graph: Graph) -> Iterator[frozenset[Node]]:
    """All that is computed before the first products and used by them or behind them: quantized rows and their scales,
    say. The same of products that take what others give, behind the chain's casts, say. First as it is computed, which
    lies as kernels write it best and is read through its views, then as each of those views shows it. And what products
    are reduced to, as the views behind show it."""
    depths: dict[Node, int] = {}  # how many products there are one behind the other, up to a value
    for node in graph.nodes:
        depths[node] = max((depths[a] for a in node.inputs), default=0) + (node.op.kind is Kind.PRODUCT)
    reduced = {as_shown(graph, n) for n in graph.nodes if n.op.kind is Kind.REDUCE and depths[n]}
    if any(n.op.kind is Kind.VIEW for n in reduced):
        yield frozenset(reduced)
    for depth in range(1, max(depths.values()) + 1):
        behind = [node for node in graph.nodes if depths[node] >= depth]
        read = {lying(a) for node in behind for a in node.inputs if depths[a] < depth}
        shown = [views_of(node) for node in read]
        for level in range(max(map(len, shown), default=0)):
            made = {views[min(level, len(views) - 1)] for views in shown}
            if computed := frozenset(a for a in made if a.inputs):
                yield computed


def as_shown(graph: Graph, node: Node) -> Node:
    """The last of the views through which alone a value is read."""
    while len(users := graph.users.get(node, ())) == 1 and users[0].op.kind is Kind.VIEW:
        (node,) = users
    return node


def views_of(node: Node) -> list[Node]:
    """What a view shows, the views between, and the view."""
    found = [node]
    while found[0].op.kind is Kind.VIEW:
        found.insert(0, found[0].inputs[0])
    return found


def lying(factor: Node) -> Node:
    """A factor as it is computed, which the product takes turned round."""
    return factor.inputs[0] if factor.op.kind is Kind.TRANSPOSE else factor


@once_per_graph
def candidates(graph: Graph) -> tuple[Node, ...]:
    """The values worth writing to memory, in order: products, computed factors, what is reduced or chosen from and what
    comes of it, casts, what several steps read, and joins that these repeat."""
    wanted: set[Node] = set()
    for node in graph.nodes:
        if node.op.kind is Kind.PRODUCT:
            computed = [a for a in node.inputs if not plain(a)]
            wanted.update((with_vectors(node, graph), *computed, *map(shown_by, computed)))
        elif node.op.kind in (Kind.REDUCE, Kind.SCAN, Kind.SELECT, Kind.GATHER, Kind.ORDER):
            wanted.update((node, node.inputs[0]))
        elif node.op.kind is Kind.SCATTER:
            wanted.update((node, node.inputs[-1]))
        if node.op.name in FITTED:
            wanted.add(node)
        if len(graph.users[node]) > 1 or node in graph.names:
            wanted.add(node)
    arrays = made_of_arrays(graph)
    joins = {n for n in wanted if is_repeated(n, graph)}
    return tuple(
        n for n in graph.nodes if n in wanted and n in arrays and n.shape and (n.op.kind in WORTH_STORING or n in joins)
    )


def is_repeated(node: Node, graph: Graph) -> bool:
    """Is a join repeated along other axes by all who read it, as cosines of sections are by heads? It is little then
    beside what they write, and in memory its rows are read in vectors."""
    sizes = [size for size in node.shape if size != 1]
    users = graph.users.get(node, ())
    return (
        node.op.kind is Kind.JOIN
        and bool(users)
        and all(
            user.op.kind is Kind.MAP and len([size for size in user.shape if size != 1]) > len(sizes) for user in users
        )
    )


def made_of_arrays(graph: Graph) -> frozenset[Node]:
    """What is computed from arrays, and not from numbers and indices alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op.kind is Kind.INPUT:
            if node.shape:
                found.add(node)
        elif any(a in found for a in node.inputs):
            found.add(node)
    return frozenset(n for n in found if n.op.kind is not Kind.INPUT)


@once_per_graph
def storage_types(graph: Graph) -> Mapping[Node, DType]:
    """As what each value is stored between kernels: as what it was cast to, as what every product that reads it rounds
    it to, else as it is, f32."""
    outputs = {t.node for t in graph.outputs}
    table: dict[Node, DType] = {}
    for node in graph.nodes:
        cast = FITTED.get(node.op.name)
        if cast is not None or node.dtype is not f32:
            table[node] = cast or node.dtype
            continue
        if node.op.kind is Kind.INPUT:
            table[node] = graph.tensor_of[node].dtype
            continue
        one = node.op.kind in (Kind.GATHER, Kind.SCATTER)
        if one or node.op.kind in (Kind.VIEW, Kind.JOIN):  # what it shows, as that is
            shown = {table[a] for a in (node.inputs[:1] if one else node.inputs)}
            table[node] = next(iter(shown)) if len(shown) == 1 else f32
            continue
        readers = behind_views(graph, node)
        kinds = {graph.factor_types[user] for user in readers if user.op.kind is Kind.PRODUCT}
        factor = readers and len(kinds) == 1 and all(u.op.kind is Kind.PRODUCT for u in readers) and node not in outputs
        table[node] = next(iter(kinds)) if factor else f32
    return table


def behind_views(graph: Graph, node: Node) -> list[Node]:
    """What reads a value, be it by way of views."""
    return [
        reader
        for user in graph.users[node]
        for reader in (behind_views(graph, user) if user.op.kind is Kind.VIEW else [user])
    ]


@once_per_graph
def rearranged(graph: Graph) -> tuple[Node, ...]:
    """Views and joins, in order: worth writing to memory only where a kernel can't take them where they are."""
    arrays = made_of_arrays(graph)
    return tuple(n for n in graph.nodes if n.op.kind in (Kind.VIEW, Kind.JOIN) and n in arrays and n.shape)


@once_per_graph
def stored_values(graph: Graph) -> Mapping[Node, Stored]:
    """Every value but single numbers, which have no axis, first the candidates, as it would lie in memory; one that is
    an output in that type lies there."""
    names = value_names(graph)
    taken = {t.name for t in (*graph.inputs, *graph.outputs)}
    types = storage_types(graph)
    homes = {(t.node, t.dtype): t.name for t in reversed(graph.outputs)}
    found: dict[Node, Stored] = {}
    arrays = made_of_arrays(graph)
    for node in dict.fromkeys((*candidates(graph), *(n for n in graph.nodes if n in arrays and n.shape))):
        type = TensorType(types[node], node.shape)
        if (own := homes.get((node, type.dtype))) is not None:
            found[node] = Stored(own, type, "output", node)
            continue
        name = names[node]
        name = free_name(f"{name}value" if name.endswith("_") else name, taken)
        taken.add(name)
        found[node] = Stored(name, type, "workspace", node)
    return found


def cone(graph: Graph, makes: Iterable[Node], memory: Iterable[Node]) -> tuple[list[Node], list[Node]]:
    """What has to be computed for `makes`, and what of `memory` is read for it, both in the graph's order.

    A take is made where its columns are chosen: a kernel gathers nothing that it did not choose.
    """
    known = set(memory)
    computed: set[Node] = set(makes)
    read: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in computed:
            continue
        for place, argument in enumerate(node.inputs):
            own_choice = node.op.name == "take" and place == 1
            if argument in known and argument not in computed and not own_choice:
                read.add(argument)
            else:
                computed.add(argument)
    return [n for n in graph.nodes if n in computed], [n for n in graph.nodes if n in read - computed]


class Cones:
    """The cones of one graph, each worked out once: those of a search are asked for again and again."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: dict[tuple[frozenset[Node], frozenset[Node]], tuple[list[Node], list[Node]]] = {}
        self.above: dict[Node, frozenset[Node]] = {}  # each node, and what it is computed from
        for node in graph.nodes:
            self.above[node] = frozenset((node,)).union(*(self.above[argument] for argument in node.inputs))

    def of(self, makes: Iterable[Node], memory: frozenset[Node]) -> tuple[list[Node], list[Node]]:
        """`cone` of the graph; not to be changed. Of `memory` only what is above `makes` tells cones apart."""
        made = frozenset(makes)
        known = memory.intersection(frozenset().union(*(self.above[node] for node in made)))
        if (made, known) not in self.found:
            self.found[made, known] = cone(self.graph, made, known)
        return self.found[made, known]


@dataclass(frozen=True, slots=True)
class Piece:
    """The graph of a part of a chain; `origins`: the chain's node behind each of its nodes."""

    graph: Graph
    origins: Mapping[Node, Node]


def piece(graph: Graph, makes: Sequence[tuple[Node, str, DType]], memory: Mapping[Node, Stored]) -> Piece:
    """The graph that computes `makes` (value, name, type) from operands and from values of `memory`."""
    computed, read = cone(graph, [node for node, _, _ in makes], memory)
    made: dict[Node, Node] = {}
    inputs: list[Tensor] = []
    for place, node in enumerate(read):
        stored = memory[node]
        index = graph.nodes[0].operator.index - len(read) + place  # before every other operator
        made[node] = Node(OPS["input"], (), node.shape, node.dtype, Operator(index, stored.name, node.where))
        inputs.append(Tensor(stored.name, stored.type, made[node]))
    operands = [t for t in graph.inputs if t.node in set(computed)]

    def is_stored(node: Node, dtype: DType) -> bool:
        return any(n in read and memory[n].type.dtype is dtype for n in views_of(node))

    own = {size for t in (*operands, *inputs) for size in t.shape[-1:]}
    counted = {n.inputs[0].shape[axis] for n in computed for axis in n.over}
    loose = set(read)
    for node in computed:
        if node.op.kind is Kind.INPUT:
            made[node] = node
            continue
        if any(a in loose for a in (node.inputs[:1] if node.op.kind is Kind.GATHER else node.inputs)):
            loose.add(node)
        if node.size is not None and node.size not in own and node.size not in counted:
            number = size_number(node, graph.sizes)
            made[node] = Node(OPS["literal"], (), (), node.dtype, node.operator, literal=number)
            continue
        arguments = [made[a] for a in node.inputs]
        if node.op.kind is Kind.PRODUCT:
            wanted = graph.factor_types[node]
            arguments = [
                m
                if a not in loose or a is node.any_ends or is_stored(a, wanted) or wanted.narrow
                else rounded_to(wanted, m)
                for a, m in zip(node.inputs, arguments, strict=True)
            ]
        made[node] = replace(node, inputs=tuple(arguments))
    outputs = tuple(Tensor(name, TensorType(dtype, node.shape), made[node]) for node, name, dtype in makes)
    shapes = [t.shape for t in (*operands, *inputs, *outputs)] + [n.shape for n in made.values()]
    sizes = tuple(n.size for n in made.values() if n.size is not None)
    used = {dim.name for shape in (*shapes, sizes) for dim in dims_in(shape)}
    whole = not read and {name for _, name, _ in makes} == {t.name for t in graph.outputs}
    step = Graph(
        name=graph.name if whole else f"{graph.name}_{makes[0][1]}",
        doc=graph.doc if whole else f"{', '.join(name for _, name, _ in makes)} of {graph.name}.",
        body=graph.body if whole else "",
        where=graph.where,
        inputs=(*operands, *inputs),
        outputs=outputs,
        names={made[n]: name for n, name in graph.names.items() if n in made and n not in read},
        sizes={name: size for name, size in graph.sizes.items() if name in used},
        axes_apart=graph.axes_apart,
    )
    return Piece(step, {own: node for node, own in made.items()})


def rounded_to(dtype: DType, node: Node) -> Node:
    """A factor as the product multiplies it; f32 becomes tf32 on its way by itself."""
    if dtype not in ROUNDS or node.op.name == ROUNDS[dtype]:
        return node
    return Node(OPS[ROUNDS[dtype]], (node,), node.shape, f32, node.operator)
