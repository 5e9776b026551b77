"""How the operands of a chain with products lie in memory, and which strides are run-time arguments.

The chain's rows are those of its products: the axis M and the batch axes before it. A factor's matrices have an axis
that is contracted (K), and another (M of a left factor, N of a right one). One of the two is
its *line*, along which elements are next to each other: as declared, or the other way round where the layout says so.
The stride along the other one is a run-time argument: of M as of any row dimension, of the others it is the leading
dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusegen.language.graph import Graph, Tensor, factor_kind, once_per_graph
from fusegen.language.products import Split, group_vectors, split
from fusegen.language.types import DType, f8e5m2, f8e5m2fnuz, size_of
from fusegen.planner.model import Access, Layout, Param, RowDim
from fusegen.planner.parts import Gathered
from fusegen.planner.pieces import (
    VECTOR_BYTES,
    argument,
    element_stride_name,
    named_dims,
    params_of,
    stride_name,
)
from fusegen.planner.products.halved import units
from fusegen.targets.base import Target


def lacking(graph: Graph, target: Target) -> str:
    """The types of the first product's factors that no kernel for the target multiplies, `f8e4m3 and f8e5m2`; "" where
    there are kernels for all."""
    both = without_unit(graph, target)
    return " and ".join(dict.fromkeys(map(str, both))) if both else ""


def without_unit(graph: Graph, target: Target) -> tuple[DType, DType] | None:
    """The types of the first product's factors for which the target has no matrix instruction; None where there are
    instructions for all."""
    for node in graph.products:
        left = right = graph.factor_types[node]
        if left.narrow:
            left, right = (factor_kind(a, graph.storage) for a in node.factors)
        if not units(target, left, right):
            return left, right
    return None


def no_unit(target: Target, what: str, left: DType, right: DType) -> str:
    """That there is no such instruction for those factors; of 8 bits, for which ones there is."""
    kinds = " and ".join(dict.fromkeys((str(left), str(right))))
    there = dict.fromkeys(str(a.factors) for a in target.atoms if a.factors.narrow)
    has = f"; of 8 bits it multiplies {', '.join(there)}" if left.narrow and there else ""
    then = ""
    if f8e5m2 in (left, right) and str(f8e5m2fnuz) in there:
        then = (
            f"\n  infinities of {f8e5m2} have no code in {f8e5m2fnuz}; make each factor F.cast(x, f16), which is exact"
        )
    return f"{target.arch} has no {what} for factors of {kinds}{has}{then}"


@dataclass(frozen=True, slots=True)
class Use:
    """One way in which a kernel reads or writes a tensor.

    `place`: "left" or "right" of a product, or "tile": by rows, with columns or one value each; or "scale": what a
    right factor's codes are scaled by, or begin at, by groups of K; or "left scale": the same of a left factor's.
    `transposed`: of a factor that is declared with its matrices' axes the other way round.
    """

    tensor: Tensor
    place: str
    transposed: bool = False

    @property
    def mn_axis(self) -> int:
        """The axis of the tensor, counted from the right, that is not contracted."""
        return -1 if (self.place in ("right", "scale")) != self.transposed else -2

    @property
    def k_axis(self) -> int:
        return -3 - self.mn_axis


@once_per_graph
def uses(graph: Graph) -> tuple[Use, ...]:
    """Every use of every operand and output, each once. What computes a factor is read as its own rows are."""
    found: dict[tuple[str, str, bool], Use] = {}
    parts = split(graph)

    def add(tensor: Tensor, place: str, transposed: bool = False) -> None:
        if tensor.shape:
            found.setdefault((tensor.name, place, transposed), Use(tensor, place, transposed))

    for product in parts.products:
        for place, factor in (("left", product.left), ("right", product.right)):
            for tensor in factor.inputs:
                add(tensor, place if factor.operand or place == "right" else "tile", factor.transposed)
            for tensor in factor.scaled.inputs if factor.scaled else ():
                add(tensor, "scale", factor.transposed)
        for place, scales in zip(("left scale", "scale"), product.scales, strict=False):
            for tensor in scales.inputs:  # those of the right factor are declared as [N, K] is
                add(tensor, place, scales.transposed if place == "left scale" else not scales.transposed)
        for node in product.left.index_operands:
            add(graph.tensor_of[node], "tile")
    for tensor in beside(graph, parts):
        add(tensor, "tile")
    return tuple(found.values())


def beside(graph: Graph, parts: Split) -> Iterator[Tensor]:
    """What is read or written by rows: operands of statistics, of row values and of the epilogue, and outputs."""
    yield from (t for statistic in parts.statistics for t in statistic.inputs)
    rows = {a for n in parts.row_body for a in n.inputs}
    rows.update(n for p in parts.products for f in (p.left, p.right) for n in f.rows)
    rows.update(n for statistic in parts.statistics for n in statistic.rows)
    yield from (t for t in graph.inputs if t.node in rows)
    yield from parts.inputs
    yield from graph.outputs


@once_per_graph
def transposable(graph: Graph) -> frozenset[str]:
    """The tensors that are factors as they lie in memory, and nothing else: either of their axes may be the line. Rows
    that are reduced on their way are read as rows, and so is the left factor beside them."""
    parts = split(graph)
    by_rows = {use.tensor.name for use in uses(graph) if use.place in ("tile", "scale", "left scale")}
    if any(p.right.scaled for p in parts.products):  # codes lie along K, and so does what they are multiplied with
        by_rows.update(t.name for p in parts.products for f in (p.left, p.right) for t in f.inputs)
    by_rows.update(p.left.operand.name for p in parts.products if p.left.operand and p.left.index)
    by_rows.update(tensor.name for statistic in parts.statistics for tensor in statistic.inputs)
    if parts.statistics:
        by_rows.update(tensor.name for left in parts.lefts for tensor in left.inputs)
    return frozenset(use.tensor.name for use in uses(graph)) - by_rows


def axis_of(graph: Graph, use: Use, axis: int) -> int | None:
    """The tensor's own axis, counted from the right, that moves along `axis` of the chain's leading ones; None where
    the tensor is the same all along it."""
    rank = len(graph.shape)
    if use.place == "tile" and use.tensor.node in group_vectors(graph):
        return None
    own = axis - rank
    if axis == rank - 2 and use.place != "tile":
        return use.mn_axis if use.place in ("left", "left scale") else None
    if -own > len(use.tensor.shape) or use.tensor.shape[own] != graph.shape[axis]:
        return None
    return own


def product_dims(graph: Graph, layout: Layout) -> tuple[RowDim, ...]:
    """The leading axes, the products' rows last; batch axes join them where every tensor moves along both or neither.

    Rows stay alone under `layout.split`, where an index counts them, and where they are the line of a left factor.
    """
    leading = range(len(graph.shape) - 1)
    found = uses(graph)
    alone = any(n.op.name == "row_index" for n in graph.nodes)
    alone |= any(u.place == "left" and line_of(u, layout) == u.mn_axis for u in found)
    groups: list[list[int]] = []
    for axis in leading:
        apart = layout.split or (alone and axis == leading[-1])
        last = groups[-1][-1] if groups and not apart else None
        if last is not None and all(
            (axis_of(graph, u, axis) is None) == (axis_of(graph, u, last) is None) for u in found
        ):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return named_dims(graph, groups)


def line_of(use: Use, layout: Layout) -> int:
    """The axis of a factor's tensor along which elements are next to each other."""
    return -2 if use.tensor.name in layout.transposed else -1


def widest(graph: Graph, layout: Layout, use: Use, most: int = VECTOR_BYTES) -> int:
    """Elements that move together: as many as `most` bytes hold and divide a line that is a constant of the kernel; 1
    where the layout promises nothing. What a run-time number has to be a multiple of, the launcher sees to."""
    if use.tensor.name in layout.unaligned:
        return 1
    width = max(1, most // use.tensor.dtype.bytes)
    line = use.tensor.shape[line_of(use, layout) if use.place != "tile" else -1]
    while line in graph.fixed and size_of(line, graph.sizes) % width:
        width //= 2
    return width


def access_of(graph: Graph, dims: tuple[RowDim, ...], layout: Layout, use: Use, name: str, vector: int) -> Access:
    """How one use of a tensor is read or written, `vector` elements at a time."""
    tensor = use.tensor
    line = line_of(use, layout) if use.place != "tile" else -1
    ld_axis = -3 - line if use.place != "tile" else None
    moving = []
    for place, dim in enumerate(dims):
        own = tuple(a for a in (axis_of(graph, use, axis) for axis in dim.axes) if a is not None)
        if own == (line,):  # a left factor whose rows are its lines' elements: nothing to multiply with
            continue
        if own:
            moving.append((place, own))
        if ld_axis in own:
            ld_axis = None
    by_column = tensor.shape[-1] != 1 or graph.shape[-1] == 1
    narrow = not by_column or vector == 1
    return Access(
        tensor=tensor.name,
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        output=any(tensor is t for t in graph.outputs),
        by_column=by_column,
        strided=tuple(place for place, _ in moving),
        mode="element" if narrow else "vector",
        vector=vector,
        vector_bytes=tensor.dtype.bytes if narrow else vector * tensor.dtype.bytes,
        line=line,
        ld_axis=ld_axis,
        group_axis=group_axis(graph, use),
        axes=tuple(own for _, own in moving) if use.place != "tile" else (),
        right=use.place == "right",
        transposable=tensor.name in transposable(graph),
        apart=tensor.name in layout.apart,
        gathered=gathered_rows(graph, dims, use, name),
    )


def gathered_rows(graph: Graph, dims: tuple[RowDim, ...], use: Use, name: str) -> Gathered | None:
    """How the rows of a left factor are found that an index names."""
    left = split(graph).products[0].left
    if use.place != "left" or left.index is None:
        return None
    return Gathered(argument(left.index, graph), f"{name}_count", f"{name}_stride", (len(dims) - 1,))


def group_axis(graph: Graph, use: Use) -> int | None:
    """The axis of a grouped product's right factor, of its scales, and of its bias, that counts groups."""
    if use.place in ("right", "scale") and graph.products[0].ends:
        return -3
    return -2 if use.place == "tile" and use.tensor.node in group_vectors(graph) else None


def product_params(
    graph: Graph, dims: tuple[RowDim, ...], accesses: Iterable[Access], total_k: str = ""
) -> tuple[Param, ...]:
    """The kernel's arguments: operands in the spec's order, outputs, sizes of `dims`, strides of each access; `total_k`
    is the size that is summed over, where that is no constant."""
    params = [*params_of(graph, dims)]
    if total_k:
        use = next(use for use in uses(graph) if use.place == "left")
        params.append(Param("size", total_k, use.tensor.name, axes=(use.k_axis,)))
    for access in accesses:
        if access.gathered:
            params.append(Param("size", access.gathered.count, access.tensor, axes=(-2,)))
            params.append(Param("stride", access.gathered.stride, access.tensor, axes=(-2,)))
        for place in access.walked:
            own = access.axes[access.strided.index(place)] if access.axes else ()
            params.append(Param("stride", stride_name(access, dims, place), access.tensor, dim=place, axes=own))
        if access.ld_axis is not None:
            params.append(Param("stride", f"{access.name}_ld", access.tensor, axes=(access.ld_axis,)))
        if access.group_axis is not None:
            params.append(Param("stride", f"{access.name}_group", access.tensor, axes=(access.group_axis,)))
        if access.apart:
            params.append(Param("stride", element_stride_name(access), access.tensor, axes=(-1,)))
    return tuple(params)
