"""How a kernel of attention reads and writes each tensor: matrices of queries, keys and values, and what lies by rows.

Rows are those of the queries. A tensor of the scores or the result lies by rows, whatever its own columns; keys and
values have rows of their own, a leading dimension apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fusegen.language.graph import Graph, Node, Tensor, once_per_graph
from fusegen.language.naming import value_names
from fusegen.language.products import is_computed
from fusegen.language.types import size_of
from fusegen.planner.attention.codes import beside_codes, element_steps, read_rows, step_of
from fusegen.planner.attention.parts import CHUNK, ElementBody, Matrix, Pages
from fusegen.planner.attention.recognition import MOST_DEPTH, Recognized, inputs_of, of_launch, of_row, recognized
from fusegen.planner.attention.written import Written
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Access, Layout, Load, Param, RowDim
from fusegen.planner.parts import Gathered, Transport
from fusegen.planner.pieces import VECTOR_BYTES, argument, named_dims, params_of, statements, stride_name
from fusegen.planner.products.factors import Use
from fusegen.targets.base import Target
from fusegen.targets.compute_unit import unit_of

BANK_BYTES = 4


@once_per_graph
def attention_uses(graph: Graph) -> tuple[Use, ...]:
    """Every use of every operand and output, each once."""
    found = recognized(graph)
    made = {
        (found.query.name, "left"): Use(found.query, "left"),
        (found.key.name, "right"): Use(found.key, "right", transposed=True),
        (found.value.name, "values"): Use(found.value, "right"),
    }
    for pages in found.paged.values():
        names = found.lowered.tensor_of[pages.inputs[1]]
        made.setdefault((names.name, "pages"), Use(names, "pages"))
    for tensor in found.beside_codes:
        made.setdefault((tensor.name, "scales"), Use(tensor, "scales"))
    for tensor in by_rows(found):
        made.setdefault((tensor.name, "tile"), Use(tensor, "tile"))
    return tuple(made.values())


def weights_uses(found: Written) -> tuple[Use, ...]:
    """Every use of every operand and result of written weights, each once."""
    made = {
        (found.query.name, "left"): Use(found.query, "left"),
        (found.key.name, "right"): Use(found.key, "right", transposed=True),
    }
    for tensor in (*inputs_of(found.lowered, (*found.score_body, *found.behind)), *found.lowered.outputs):
        made.setdefault((tensor.name, "tile"), Use(tensor, "tile"))
    return tuple(made.values())


def by_rows(found: Recognized) -> Iterator[Tensor]:
    """What is read or written by rows of scores or of the result."""
    bodies = (*found.score_body, *found.weight_body, *found.pivot_body, *found.epilogue)
    yield from inputs_of(found.lowered, bodies)
    yield from found.lowered.outputs


def axis_of(graph: Graph, use: Use, axis: int) -> int | None:
    """The tensor's own axis, counted from the right, that moves along `axis` of the chain's leading ones; None where
    the tensor is the same all along it."""
    rank = len(graph.shape)
    if axis == rank - 2 and use.place in ("right", "pages", "scales"):
        return None
    own = axis - rank
    if use.tensor.node in graph.tables and own == -len(use.tensor.shape):
        return None  # the axis along which its pages lie
    if -own > len(use.tensor.shape) or use.tensor.shape[own] != graph.shape[axis]:
        return None
    return own


def dims_of(graph: Graph, uses: tuple[Use, ...], layout: Layout) -> tuple[RowDim, ...]:
    """The leading axes, the rows of queries last and alone; others are one where every tensor moves along both or
    neither."""
    leading = range(len(graph.shape) - 1)
    groups: list[list[int]] = []
    for axis in leading:
        apart = layout.split or axis == leading[-1]
        last = groups[-1][-1] if groups and not apart else None
        if last is not None and all(
            (axis_of(graph, u, axis) is None) == (axis_of(graph, u, last) is None) for u in uses
        ):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return named_dims(graph, groups)


def width_of(graph: Graph, layout: Layout, tensor: Tensor, most: int) -> int:
    """Elements that move together, of up to `most` bytes; 1 where the layout promises nothing."""
    if tensor.name in layout.unaligned:
        return 1
    width = max(1, most // tensor.dtype.bytes)
    while size_of(tensor.shape[-1], graph.sizes) % width:
        width //= 2
    return width


def behind_products(found: Recognized) -> frozenset[str]:
    """The tensors that lie by rows and are not read element by element as scores are: results and what meets them."""
    graph = found.lowered
    behind = {t.name for t in (*inputs_of(graph, found.epilogue), *graph.outputs)}
    return frozenset(behind - {t.name for t in inputs_of(graph, (*found.score_body, *found.weight_body))})


def accesses_of(
    graph: Graph, uses: tuple[Use, ...], dims: tuple[RowDim, ...], layout: Layout, together: Mapping[str, int],
    coded: tuple[str, ...] = (),
) -> Mapping[tuple[str, str], Access]:  # fmt: skip
    """Each use of each tensor, by its name and place. Of what lies by rows, `together` elements move at a time, one
    where it says nothing; of factors 16 bytes, or eight numbers where they are `coded`."""
    made = dict[tuple[str, str], Access]()
    names = value_names(graph)
    results = {t.name for t in graph.outputs}
    often = {u.tensor.name for u in uses if sum(o.tensor.name == u.tensor.name for o in uses) > 1}
    for use, place in places(uses):
        tensor = use.tensor
        output = tensor.name in results
        name = tensor.name if output else names[tensor.node]
        if tensor.name in often and place != "tile":
            name = f"{name}_{place}"
        chunk = CHUNK * tensor.dtype.bytes if tensor.name in coded else VECTOR_BYTES
        most = chunk if use.place in ("left", "right") else together.get(tensor.name, 0) * tensor.dtype.bytes
        width = width_of(graph, layout, tensor, most) if most else 1
        made[tensor.name, place] = access_of(graph, dims, use, name, output, width)
    return made


def places(uses: tuple[Use, ...]) -> Iterator[tuple[Use, str]]:
    """Each use with the word that tells it from others of its tensor."""
    for use in uses:
        if use.place != "right":
            yield use, use.place
        else:
            yield use, "right" if use.transposed else "values"


def access_of(graph: Graph, dims: tuple[RowDim, ...], use: Use, name: str, output: bool, width: int) -> Access:
    tensor = use.tensor
    table = tensor.node in graph.tables
    moving = []
    for place, dim in enumerate(dims):
        own = tuple(a for a in (axis_of(graph, use, axis) for axis in dim.axes) if a is not None)
        if own:
            moving.append((place, own))
    by_column = not of_row(tensor.node) and bool(tensor.shape)
    vector = by_column and width > 1
    return Access(
        tensor=tensor.name,
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        output=output,
        by_column=by_column,
        strided=tuple(place for place, _ in moving),
        mode="vector" if vector else "element",
        vector=width,
        vector_bytes=min(VECTOR_BYTES, width * tensor.dtype.bytes) if vector else tensor.dtype.bytes,
        ld_axis=-2 if use.place == "right" or (use.place == "scales" and is_by_key(tensor)) else None,
        axes=tuple(own for _, own in moving),
        right=use.place == "right" and not table,
        gathered=gathered_pages(graph, tensor, name) if table else None,
    )


def is_by_key(tensor: Tensor) -> bool:
    """Has each key one of its own?"""
    return len(tensor.shape) > 1 and tensor.shape[-2] != 1


def gathered_pages(graph: Graph, tensor: Tensor, name: str) -> Gathered:
    """How the pages that hold keys or values are found."""
    (node,) = (n for n in graph.gathers if n.inputs[0] is tensor.node)
    return Gathered(argument(node.inputs[1], graph), f"{name}_count", f"{name}_stride_page", ())


def params_by_rows(
    graph: Graph, dims: tuple[RowDim, ...], accesses: Mapping[tuple[str, str], Access]
) -> Iterator[Param]:
    """The kernel's arguments: operands in the spec's order, outputs, sizes of `dims`, strides of each access."""
    yield from params_of(graph, dims)
    for access in accesses.values():
        for place, own in zip(access.strided, access.axes, strict=True):
            yield Param("stride", stride_name(access, dims, place), access.tensor, dim=place, axes=own)
        if access.gathered is not None:
            yield Param("size", access.gathered.count, access.tensor, axes=(-len(access.shape),))
            yield Param("stride", access.gathered.stride, access.tensor, axes=(-len(access.shape),))
        if access.ld_axis is not None:
            yield Param("stride", f"{access.name}_ld", access.tensor, axes=(access.ld_axis,))


def pages_of(
    found: Recognized, tensor: Tensor, accesses: Mapping[tuple[str, str], Access]
) -> Pages | None:  # fmt: skip
    """The pages in which keys or values lie; None of those that lie row behind row."""
    node = found.paged.get(tensor.name)
    if node is None:
        return None
    names = found.lowered.tensor_of[node.inputs[1]]
    sizes = found.lowered.sizes
    return Pages(accesses[names.name, "pages"], size_of(tensor.shape[-2], sizes), size_of(names.shape[-1], sizes))


def scaled(found: Recognized, factor: Node, accesses: Mapping[tuple[str, str], Access]) -> ElementBody | None:
    """What is made of each code of keys or values, and of what it meets; None where codes alone are widened."""
    graph = found.lowered
    steps = element_steps(factor, found.dtype)
    if not steps or (given := step_of(steps[0])) is None:
        return None
    names = value_names(graph)
    beside = beside_codes(factor, found.dtype)
    reads = {node: graph.tensor_of[read_rows(node)] for node in beside if read_rows(node) in graph.tensor_of}
    return ElementBody(
        given=names[given],
        value=names[steps[-1]],
        row_loads=tuple(Load(accesses[t.name, "scales"], names[node]) for node, t in reads.items() if t.shape),
        row_body=statements(graph, [n for n in beside if is_computed(n) and not of_launch(n)]),
        body=statements(graph, steps),
    )


def need_uncoded(found: Recognized) -> None:
    """Raises NoMatch for keys or values of 8 bits, in kernels that multiply them as they lie."""
    if found.coded:
        raise NoMatch(
            f"{found.coded[0]} lies in memory as numbers of 8 bits; attention makes {found.dtype} of such on their way "
            f"where several warps share 16 queries, of rows of up to {MOST_DEPTH} numbers"
        )


def matrix(
    access: Access, target: Target, columns: int, lines: int, unit: int, values: bool = False,
    pages: Pages | None = None, banks: int = 0, coded: bool = False, scaled: ElementBody | None = None,
) -> Matrix:  # fmt: skip
    """Rows on their way to shared memory, `columns` long there but for what fills the last `unit` of a fragment;
    `banks`, `coded` and `scaled`: as a Matrix has them."""
    copied = target.async_copies and access.mode == "vector" and not coded
    transport: Transport = "cp.async" if copied else "plain"
    return Matrix(
        access=access,
        transport=transport,
        width=access.vector if access.mode == "vector" else 1,
        columns=columns,
        lines=lines,
        padded=-(-columns // unit) * unit,
        across=values and not target.async_copies,
        pages=pages,
        banks=banks,
        coded=coded,
        scaled=scaled,
    )


def banks_of(target: Target) -> int:
    """Of the LDS, from which lanes of an MFMA's wave read 16 bytes each; 0 of others."""
    unit = unit_of(target)
    return unit.lds_read_bytes // BANK_BYTES if unit else 0
