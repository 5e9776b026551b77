"""A chain with products in a kernel's terms: its prologue, and its output groups: products with their epilogue.

`fusegen.language.products.split` says what a chain is made of; this says in which thread's hands each part is,
statement by statement, or raises NoMatch for what tiles of products can't hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fusegen.language.graph import Extent, Graph, Kind, Node, Tensor, behind
from fusegen.language.naming import value_names
from fusegen.language.products import Factor, Split, Unsplittable, is_computed, split
from fusegen.language.types import DType, Size, f32, size_of
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Access, Body, Layout, Load, Reduction, RowDim, Store
from fusegen.planner.pieces import statements
from fusegen.planner.products.parts import Contraction, InnerSegments, OutputGroup, Prologue, RowsAt, Segments
from fusegen.planner.ranges import fits
from fusegen.planner.rewrites import hoist_scales
from fusegen.targets.atoms import F32_BITS, Atom
from fusegen.targets.base import Target

PROMOTED = 128
"""Of K, after which sums of few bits are added in f32: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 3.3.2."""


def need_one_scaling(draft: ProductDraft) -> None:
    """Raises NoMatch for scales of blocks where a loop has no place for them."""
    product = draft.parts.products[0]
    if len(draft.groups) > 1 or len(draft.dims) > 1 or not all(p.scales for p in draft.parts.products):
        raise NoMatch(f"the product at {product.node.where} has scales for its blocks, and others beside it have not")
    if len({(p.scales[0].operand, p.scales[0].transposed) for p in draft.parts.products}) > 1:
        raise NoMatch("products of one tile have one left factor, with one set of scales")


@dataclass(frozen=True, slots=True)
class Group:
    """Products that are used together, of one width, and the outputs that are made of them."""

    products: tuple[Node, ...]
    width: Size
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class ProductDraft:
    """What all candidates of one rule share. `graph` is the chain as written, `hoisted` as the kernel computes it."""

    graph: Graph
    hoisted: Graph
    target: Target
    layout: Layout
    parts: Split
    groups: tuple[Group, ...]
    dims: tuple[RowDim, ...]
    spans: dict[tuple[int, int, bool], tuple[OutputGroup, ...]] = field(default_factory=dict, init=False, compare=False)
    """What `spans_of` drew, by the columns of a tile and of a thread, and where sums are: candidates share it."""

    @property
    def dtype(self) -> DType:
        """Of the factors; of the left ones, where right ones are of another type."""
        return self.parts.products[0].left.dtype

    @property
    def scaled(self) -> bool:
        """Are sums of blocks scaled?"""
        return any(product.scales for product in self.parts.products)

    @property
    def right_dtype(self) -> DType:
        return self.parts.products[0].right.dtype

    def promote(self, atom: Atom) -> int:
        """How many of K are summed apart by that instruction, and then added in f32: what the author says, or what an
        instruction needs that keeps few bits of its sums. The fewest of all products that are summed together."""
        usual = PROMOTED if atom.sum_bits < F32_BITS else 0
        found = [usual if p.node.promote is None else p.node.promote for p in self.parts.products]
        least = min((each for each in found if each), default=0)
        whole = self.k <= least and not (self.scaled or self.inner_segments)  # of which nothing is added
        return 0 if whole else least

    @cached_property
    def k(self) -> int:
        """K; of groups of it as much as one has in the mean."""
        whole = size_of(self.parts.products[0].contracted, self.graph.sizes)
        return whole if self.inner_segments is None else max(1, -(-whole // self.inner_segments.count))

    @property
    def together(self) -> int:
        """Products of a tile."""
        return len(self.groups[0].products)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Of the row dimensions, at the default sizes."""
        return tuple(math.prod(size_of(self.graph.shape[axis], self.graph.sizes) for axis in d.axes) for d in self.dims)

    @property
    def rows(self) -> int:
        """Of one product, at the default sizes; of a grouped one as many as a group has in the mean."""
        return self.extents[-1] if self.segments is None else -(-self.extents[-1] // self.segments.count)

    @cached_property
    def segments(self) -> Segments | None:
        """The groups of rows of grouped products."""
        return segments_of(self.hoisted, self.parts)

    @cached_property
    def inner_segments(self) -> InnerSegments | None:
        """The groups of K that products are summed over."""
        ends = self.parts.products[0].node.inner_ends
        if ends is None:
            return None
        access = ends_access(self.hoisted, ends)
        count = size_of(access.shape[0], self.graph.sizes)
        return InnerSegments(access, count, TOTAL_K, self.dims[0].index)


TOTAL_K = "total_k"  # the kernel's argument for how much the groups of K have together, at most


def segments_of(graph: Graph, parts: Split) -> Segments | None:
    """The groups of rows of grouped products; each block reads all of where they end, one number after another."""
    ends = parts.products[0].node.ends
    if ends is None:
        return None
    access = ends_access(graph, ends)
    return Segments(access, size_of(access.shape[0], graph.sizes))


def ends_access(graph: Graph, ends: Node) -> Access:
    tensor, name = graph.tensor_of[ends], value_names(graph)[ends]
    return Access(tensor.name, name, tensor.dtype, tensor.shape, output=False, by_column=True, strided=(),
                  mode="element", vector=1, vector_bytes=tensor.dtype.bytes)  # fmt: skip


def need_plain_groups(draft: ProductDraft) -> None:
    """Raises NoMatch for grouped products beside what has axes of its own."""
    where = draft.parts.products[0].node.where
    if draft.segments and len(draft.dims) > 1:
        raise NoMatch(f"the grouped product at {where} has rows of one axis, and meets what has more")


def need_operands(parts: Split) -> None:
    """Raises NoMatch for what is computed on its way to products over groups of K."""
    for product in parts.products:
        if product.left.operand is None or product.left.index or product.right.operand is None or product.right.scaled:
            where = f"the product at {product.node.where}"
            raise NoMatch(f"{where} sums over groups of {product.contracted}, and its factors are no operands")
    if parts.statistics:
        raise NoMatch(f"{parts.statistics[0].node.where} is reduced beside products over groups")


def taken_apart(graph: Graph) -> tuple[Graph, Split]:
    """The chain as kernels compute it, and its parts. Raises NoMatch for what one kernel can't hold."""
    hoisted = hoist_scales(graph)
    try:
        return hoisted, split(hoisted)
    except Unsplittable as reason:
        raise NoMatch(str(reason)) from None


def groups(graph: Graph, parts: Split) -> tuple[Group, ...]:
    """Products whose results meet in an output, in the order they were written."""
    joined: list[set[Node]] = [{p.node} for p in parts.products]
    reached = {t: set(graph.ancestors(t.node)) for t in graph.outputs}
    for nodes in reached.values():
        meeting = [g for g in joined if g & nodes]
        if len(meeting) > 1:
            joined = [g for g in joined if not g & nodes] + [set().union(*meeting)]
    order = [p.node for p in parts.products]
    joined.sort(key=lambda g: min(map(order.index, g)))
    found = []
    for members in joined:
        products = tuple(n for n in order if n in members)
        widths = {n.shape[-1] for n in products}
        if len(widths) > 1:
            first, other = products[0], next(n for n in products if n.shape[-1] != products[0].shape[-1])
            raise NoMatch(f"the products at {first.where} and {other.where} are used together and differ in width")
        outputs = tuple(t for t in graph.outputs if reached[t] & members)
        found.append(Group(products, products[0].shape[-1], outputs))
    alone = tuple(t for t in graph.outputs if not any(t in g.outputs for g in found))
    for tensor in alone:  # what needs no product goes with one as wide
        place = next((i for i, g in enumerate(found) if tensor.shape[-1] in (g.width, 1)), None)
        if place is None:
            raise NoMatch(f"{tensor.name} needs no product and is as wide as none")
        found[place] = replace(found[place], outputs=(*found[place].outputs, tensor))
    if len({len(g.products) for g in found}) > 1:
        counts = list(dict.fromkeys(len(g.products) for g in found))
        raise NoMatch(
            f"the outputs need {counts[0]} and {counts[1]} products each; one kernel's tiles sum equally many"
        )
    return tuple(found)


def load(graph: Graph, access: Access, tensor: Tensor) -> Load:
    return Load(access, value_names(graph)[tensor.node])


def rows_at(graph: Graph, left: Factor, access: Access, accesses: Mapping[str, Access]) -> RowsAt:
    """How a thread finds the rows of a left factor that an index names; `accesses`: of what the index is made of."""
    assert left.index is not None
    assert access.gathered is not None
    made = [n for n in behind([left.index]) if n.op.kind is Kind.MAP]
    tensors = [graph.tensor_of[n] for n in left.index_operands if n.shape]
    loads = tuple(load(graph, accesses[t.name], t) for t in tensors)
    return RowsAt(loads, statements(graph, made), access.gathered.index, access.gathered.count)


def within(graph: Graph, *roots: Node, without: Iterable[Node] = ()) -> set[Node]:
    """What `roots` need, back to products and reductions and `without`."""
    stop = set(without)
    found = set(roots)
    for node in reversed(graph.nodes):
        if node in found and node.op.kind not in (Kind.PRODUCT, Kind.REDUCE, Kind.INPUT) and node not in stop:
            found.update(node.inputs[:2] if node.op.kind is Kind.BIAS else node.inputs)
    return found


def need_plain_rights(parts: Split, codes: bool = False) -> None:
    """Raises NoMatch for a right factor that is computed, and for right factors of codes, unless a rule has them."""
    for product in parts.products:
        if product.right.scaled is not None and not codes:
            raise NoMatch(
                f"the right factor of the product at {product.node.where} is codes of {product.right.scaled.code}, "
                "which kernels widen on their way to mma.sync, or to wgmma in a rule of its own"
            )
        if product.right.operand is None:
            raise NoMatch(
                f"the right factor of the product at {product.node.where} is computed element by element, which "
                "kernels do to left factors only\n  compute it beforehand; in place of x @ (w * s), with one s a "
                "column, write (x @ w) * s"
            )


def prologue_of(
    graph: Graph, parts: Split, matrices: Iterable[str], accesses: Mapping[str, Access], scale: Tensor | None = None
) -> Prologue:
    """What is computed of the left factor's elements; of the tensors in `matrices` a thread sees each element."""
    names, left = value_names(graph), parts.products[0].left
    tiles = set(matrices)
    summed = [s.node.inputs[0] for s in parts.statistics]
    needed = within(graph, left.node, *summed)
    inputs = [t for t in graph.inputs if t.node in needed and t.shape]
    computed = within(graph, *summed) if scale else needed
    listed = [n for n in graph.nodes if n in computed and is_computed(n)]
    # an operand is held as one of three: what a thread brings of a slice, of a vector along it, or of its rows
    elements = [t for t in inputs if graph.extents[t.node] is Extent.ELEMENT]
    values = [t for t in inputs if graph.extents[t.node] is not Extent.ELEMENT]
    vectors = tuple(load(graph, accesses[t.name], t) for t in elements if t.name not in tiles)
    return Prologue(
        loads=(*(load(graph, accesses[t.name], t) for t in elements if t.name in tiles), *vectors),
        vectors=vectors,
        row_loads=tuple(load(graph, accesses[t.name], t) for t in values),
        row_body=statements(graph, [n for n in listed if graph.extents[n] is not Extent.ELEMENT]),
        body=statements(graph, [n for n in listed if graph.extents[n] is Extent.ELEMENT]),
        value=names[left.node],
        changes=left.operand is None,
        reductions=tuple(
            Reduction("sum", names[s.node.inputs[0]], (names[s.node],)) for s in parts.statistics
        ),
        scale=load(graph, accesses[scale.name], scale) if scale else None,
    )  # fmt: skip


def need_whole_groups(found: Sequence[Group], graph: Graph) -> int:
    """How many columns a group has that a tile is to reduce; 0 where tiles reduce none. Raises NoMatch for one value a
    row, which such a kernel does not write."""
    if not graph.grouped:
        return 0
    for tensor in (t for group in found for t in group.outputs):
        if tensor.node not in graph.grouped and graph.extents[tensor.node] is not Extent.ELEMENT:
            raise NoMatch(f"{tensor.name} has one value a row and is written beside what tiles reduce")
    for node in (n for n in graph.nodes if n in graph.grouped and n.op.kind is Kind.MAP):
        for argument in node.inputs:
            if argument not in graph.grouped and graph.extents[argument] is Extent.ELEMENT:
                raise NoMatch(
                    f"{node.op.name} at {node.where} takes what tiles reduce together with values of the groups' own"
                )
    return max(node.group for node in graph.nodes)


def stages_of(graph: Graph) -> Mapping[Node, int]:
    """Behind how many reductions of a tile's columns each value is."""
    stage: dict[Node, int] = {}
    for node in graph.nodes:
        stage[node] = max((stage[a] for a in node.inputs), default=0) + (node.op.kind is Kind.GROUP)
    return stage


def held_value(graph: Graph, group: Group) -> Node | None:
    """An element's value that the first step makes, and that is all that later ones need of the sums and of operands:
    it can take the place of a sum. The last such; None where there is none."""
    stage = stages_of(graph)
    needed = within(graph, *(t.node for t in group.outputs))
    reduced = [n for n in graph.nodes if n in needed and n.op.kind is Kind.GROUP]
    later = [n.inputs[0] for n in reduced if stage[n] > 1]
    later += [t.node for t in group.outputs if t.node not in graph.grouped]
    first = within(graph, *(n.inputs[0] for n in reduced if stage[n] == 1))
    spread = [n for n in graph.nodes if n.op.kind is Kind.SPREAD]
    for node in reversed(graph.nodes):
        if node not in first or node.op.kind is not Kind.MAP or node.dtype is not f32:
            continue
        rest = within(graph, *later, without=[node, *spread])
        if node in rest and not any(
            n.op.kind is Kind.PRODUCT or (n.op.kind is Kind.INPUT and graph.extents[n] is Extent.ELEMENT) for n in rest
        ):
            return node
    return None


def steps_of(graph: Graph, group: Group, accesses: Mapping[str, Access], held: Node | None) -> tuple[Body, ...]:
    """What is made of a tile's columns, step by step: a later one takes results of those before it, and makes each
    element's values anew, or of the one that is held."""
    stage = stages_of(graph)
    names, found = value_names(graph), list[Body]()
    needed = within(graph, *(t.node for t in group.outputs))
    for number in range(1, max(stage[t.node] for t in group.outputs) + 1):
        reduced = [n for n in graph.nodes if n in needed and n.op.kind is Kind.GROUP and stage[n] == number]
        stop = [n for n in graph.nodes if n in graph.grouped or n.op.kind is Kind.SPREAD]
        stop += [held] if held and number > 1 else []
        made = within(graph, *(n.inputs[0] for n in reduced), without=stop)
        elements = [n for n in graph.nodes if n in made and is_computed(n) and graph.extents[n] is Extent.ELEMENT]
        elements = [n for n in elements if n is not held or number == 1]
        behind = [n for n in graph.nodes if n in graph.grouped and n.op.kind is Kind.MAP and stage[n] == number]
        found.append(
            Body(
                body=statements(graph, elements),
                reductions=tuple(
                    Reduction(
                        n.op.name.removeprefix("group_"),  # type: ignore[arg-type]
                        names[n.inputs[0]], (names[n],), dtype=n.dtype,
                    )
                    for n in reduced
                ),
                row_body=statements(graph, behind),
                row_stores=tuple(
                    Store(accesses[t.name], names[t.node], fits=fits(t, graph))
                    for t in group.outputs
                    if t.node in graph.grouped and stage[t.node] == number
                ),
            )
        )  # fmt: skip
    return tuple(found)


def spans_of(
    draft: ProductDraft, contractions: Mapping[Node, Contraction], accesses: Mapping[str, Access], tile_cols: int,
    widest: int, in_registers: bool,
) -> Iterator[OutputGroup]:  # fmt: skip
    """One a group, side by side in tiles of so many columns, of which a thread takes up to `widest` at a time.
    `in_registers`: sums stay in those of the threads that made them."""
    key = tile_cols, widest, in_registers
    if key not in draft.spans:
        draft.spans[key] = drawn_spans(draft, accesses, *key)
    for group, span in zip(draft.groups, draft.spans[key], strict=True):
        yield replace(span, contractions=tuple(contractions[n] for n in group.products))


def drawn_spans(
    draft: ProductDraft, accesses: Mapping[str, Access], tile_cols: int, widest: int, in_registers: bool
) -> tuple[OutputGroup, ...]:
    """The groups of `spans_of` without their contractions."""
    graph, found = draft.hoisted, list[OutputGroup]()
    names, extents = value_names(graph), graph.extents
    for group in draft.groups:
        cols = size_of(group.width, graph.sizes)
        needed = within(graph, *(t.node for t in group.outputs))
        parted = any(n.op.kind is Kind.GROUP for n in needed)
        inputs = [t for t in graph.inputs if t.node in needed and t.shape]
        listed = [n for n in graph.nodes if n in needed and is_computed(n)]
        outputs = tuple(t for t in group.outputs if t.node not in graph.grouped)
        stores = [(Store(accesses[t.name], names[t.node], fits=fits(t, graph)), extents[t.node]) for t in outputs]
        floats = all(n.dtype is f32 for n in group.products)
        held = held_value(graph, group) if parted and in_registers and floats else None
        if parted:  # an element's values are made anew behind each step, as far as they are needed there
            stop = [n for n in graph.nodes if n.op.kind is Kind.SPREAD] + ([held] if held else [])
            last = within(graph, *(t.node for t in outputs), without=stop)
            rows = [n for n in listed if graph.extents[n] is not Extent.ELEMENT and n not in graph.grouped]
            listed = [n for n in listed if n in rows or (n in last and n is not held and n not in graph.grouped)]
        found.append(OutputGroup(
            contractions=(),
            cols=cols,
            first_tile=found[-1].first_tile + found[-1].tiles if found else 0,
            tiles=-(-cols // tile_cols),
            vector=next(v for v in (8, 4, 2, 1) if v <= widest and cols % v == 0 and tile_cols % v == 0),
            loads=tuple(load(graph, accesses[t.name], t) for t in inputs if extents[t.node] is Extent.ELEMENT),
            row_loads=tuple(load(graph, accesses[t.name], t) for t in inputs if extents[t.node] is not Extent.ELEMENT),
            row_body=statements(graph, [n for n in listed if extents[n] is not Extent.ELEMENT]),
            row_stores=tuple(store for store, extent in stores if extent is not Extent.ELEMENT),
            body=statements(graph, [n for n in listed if extents[n] is Extent.ELEMENT]),
            stores=tuple(store for store, extent in stores if extent is Extent.ELEMENT),
            steps=steps_of(graph, group, accesses, held) if parted else (),
            held=names[held] if held else "",
        ))  # fmt: skip
    return tuple(found)
