"""What a chain with matrix products is made of: factors, products, row statistics, and the epilogue over them.

    found = split(hoist_scales(graph))
    found.products[0].left.body       # the prologue of the left factor, statement by statement
    found.epilogue                    # what is done with the products' elements, up to the outputs

`split` says what one kernel can hold, in the user's words, or raises Unsplittable; how it is computed is a rule's
business. Types and sizes were checked before, when the chain was traced: `check_products`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusegen.errors import SpecError
from fusegen.language.codes import in_kernel
from fusegen.language.graph import (
    COUNT_ELEMENTS,
    Extent,
    Graph,
    Kind,
    Node,
    Tensor,
    behind,
    factor_kind,
    has_type,
    once_per_graph,
    plain,
    shown_by,
)
from fusegen.language.types import F8, DType, Size, bf16, f16, f32, shape_text


class Unsplittable(Exception):
    """What one kernel can't hold of a chain with products; the text says what and where."""


APART = "write it as two chains, the product in one and this in the other"


@dataclass(frozen=True, slots=True)
class Factor:
    """One side of a product.

    `node` is its value, which meets the other side as `dtype`. An operand has no `body`; `transposed` says that its
    tensor is declared with the last two axes the other way round: [.., K, M] on the left, [.., N, K] on the right.
    Else `body` computes it in f32, element by element, from `inputs` (operands of the factor's shape or broadcast to
    it) and `rows` (what is one value along the contracted axis: operands, statistics, and what is made from them).
    `index`: the factor's rows are those of the operand that these values name, one a row, and 0 where it names none.
    """

    node: Node
    dtype: DType
    operand: Tensor | None
    transposed: bool
    body: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    rows: tuple[Node, ...]
    scaled: Scaled | None = None
    index: Node | None = None

    @property
    def index_operands(self) -> tuple[Node, ...]:
        """What the index is made of."""
        found = behind([self.index]) if self.index else ()
        return tuple(n for n in found if n.op.kind is Kind.INPUT)


@dataclass(frozen=True, slots=True)
class Scaled:
    """An operand of codes, which stand for (code - zero) * scale: with a scale, and perhaps a zero, for each `group` of
    K, or for all of it where that is 0."""

    code: DType
    scales: Tensor
    zeros: Tensor | None
    zero: DType | None
    group: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.scales, *([self.zeros] if self.zeros else []))


@dataclass(frozen=True, slots=True)
class Product:
    """`node` = left @ right, summed in f32, or of whole numbers in i32."""

    node: Node
    left: Factor
    right: Factor
    scales: tuple[Factor, ...] = ()  # of blocks of the left factor and of the right one

    @property
    def contracted(self) -> Size:
        """K."""
        return self.node.inputs[0].shape[-1]

    @property
    def width(self) -> Size:
        """N."""
        return self.node.shape[-1]


@dataclass(frozen=True, slots=True)
class Statistic:
    """A reduction along the rows of operands: of `body`, made element by element from `inputs` and `rows`, as a factor
    is; `body` ends with the value that is reduced, and is empty where that is an operand itself."""

    node: Node
    body: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    rows: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A chain with products, taken apart. Every tuple of nodes is in an order in which it can be computed.

    `row_body`: values that are one a row and need no product, made from statistics and operands; `epilogue`: all that
    is made from products, or returned beside them; `inputs`: the operands that it reads.
    """

    graph: Graph
    products: tuple[Product, ...]
    statistics: tuple[Statistic, ...]
    row_body: tuple[Node, ...]
    epilogue: tuple[Node, ...]
    inputs: tuple[Tensor, ...]

    @property
    def lefts(self) -> tuple[Factor, ...]:
        """The left factors, each once: products that share one read it once."""
        return tuple({(p.left.node, p.left.dtype): p.left for p in self.products}.values())

    def outputs(self, width: Size) -> tuple[Tensor, ...]:
        """The outputs of that many columns."""
        return tuple(t for t in self.graph.outputs if t.shape[-1] == width)


# ---------------------------------------------------------------- what the author is told while the chain is traced


def check_products(graph: Graph) -> None:
    """Factors of types that can't meet, or of f32 without leave for tf32. Raises SpecError."""
    for node, dtype in graph.factor_types.items():
        left, right = (factor_kind(a, graph.storage) for a in node.factors)
        text = " @ ".join(f"{t}{shape_text(a.shape)}" for t, a in zip((left, right), node.factors, strict=True))
        if node.any_ends and dtype not in (f16, bf16) and not (node.ends and dtype.narrow):
            found = " and ".join(dict.fromkeys((str(left), str(right))))
            wanted = "f16, bf16 or 8 bits" if node.ends else "f16 or bf16"
            wanted += ", both of one type" if left is not right else ""
            raise SpecError(f"grouped_matmul: found factors of {found}; wanted {wanted}", node.where)
        if dtype is f32 and left is not right and sum(map(has_type, node.factors)) != 1:
            kinds = [kind for kind in (right, left) if kind is not f32]  # a value is f32 without a cast
            said = f"  convert one of them, as in F.cast(x, {kinds[0]})"
            if f32 in (left, right) and kinds[0] in (f16, bf16):  # twice the bits: the rest is exact in f32
                said += f"; for more bits add up two products, of F.cast(x, {kinds[0]}) and of what that leaves of x"
            raise SpecError(f"matmul: {text}: the factors have different types\n{said}", node.where)
        scaled = "F.grouped_matmul(x, w.mT, ends, scale=scale) * scale_of_x" if node.ends else "(x @ w.T) * scale"
        if dtype.narrow and not all(has_type(a) or has_type(shown_by(a)) for a in node.factors):
            raise SpecError(
                f"{node.op.name}: {text}: a factor of 8 bits meets one that is computed\n"
                f"  multiply 8 bits as they are and scale what comes of it, {scaled}, or F.cast(x, {dtype})",
                node.where,
            )
        if node.promote is not None and dtype not in F8:
            raise SpecError(f"matmul: {text}: promote={node.promote} is of factors of 8-bit floats alone", node.where)
        if dtype is f32 and node.op.name != "matmul_tf32":
            raise SpecError(
                f"matmul: {text}: tensor cores multiply f32 only by way of tf32, which keeps 11 significant bits\n"
                '  ask for it, F.matmul(x, w, precision="tf32"), or store the factors as f16 or bf16',
                node.where,
            )


# ---------------------------------------------------------------- taking apart


@once_per_graph
def split(graph: Graph) -> Split:
    """The parts of a chain that has products. Raises Unsplittable."""
    if not graph.products:
        raise Unsplittable("the chain multiplies no matrices")
    products = tuple(product_of(graph, node) for node in graph.products)
    refuse(graph, products)
    made = from_products(graph)
    statistics = tuple(statistic(graph, node) for node in graph.reductions)
    outputs = {t.node for t in graph.outputs}
    wanted = outputs | {row for p in products for f in (p.left, p.right) for row in f.rows}
    wanted |= {row for s in statistics for row in s.rows}
    alone = closure(graph, wanted | {a for n in made for a in n.inputs}, made)
    return Split(
        graph=graph,
        products=products,
        statistics=statistics,
        row_body=tuple(n for n in alone if is_computed(n) and graph.extents[n] is not Extent.ELEMENT),
        epilogue=epilogue_of(graph),
        inputs=tuple(t for t in graph.inputs if t.node in reached(graph)),
    )


def from_products(graph: Graph) -> tuple[Node, ...]:
    """What is computed from a product, the products left out."""
    found: set[Node] = set(graph.products)
    for node in graph.nodes:
        if any(a in found for a in node.inputs):
            found.add(node)
    return tuple(n for n in graph.nodes if n in found and n.op.kind is not Kind.PRODUCT)


def refuse(graph: Graph, products: tuple[Product, ...]) -> None:
    made = set(from_products(graph))
    behind_them = made | set(graph.products)
    for node in graph.nodes:
        if node.op.kind is Kind.PRODUCT and any(a in behind_them for a in node.inputs):
            raise Unsplittable(
                f"the product at {node.where} takes what another one gives: each needs a kernel of its own"
            )
        if node in made and node.op.kind is Kind.REDUCE:
            raise Unsplittable(
                f"{node.operator} at {node.where} reduces rows of a product, which tiles of columns hold only a part "
                f"of\n  {APART}"
            )
        if node.op.kind is Kind.SELECT:
            of = "of a product, which tiles hold only a part of" if node in made else "beside a product"
            raise Unsplittable(f"{node.operator} at {node.where} chooses columns {of}\n  {APART}")
    first = products[0]
    beside = next((n for n in graph.reductions if n not in made), None)
    if beside is not None and any(p.left.index for p in products):
        raise Unsplittable(
            f"the product at {first.node.where} finds its rows by an index, and {beside.operator} at {beside.where} is "
            "reduced beside it"
        )
    for product in products:
        if product.scales and not all(map(plain, (*product.node.factors, *product.node.scales))):
            raise Unsplittable(
                f"the product at {product.node.where} scales the sums of blocks, of codes and scales that lie in memory"
            )
    for node in graph.reductions:
        if (length := node.inputs[0].shape[-1]) != first.contracted:
            raise Unsplittable(
                f"{node.operator} at {node.where} reduces rows of {length}, and the product's kernel takes the rows of "
                f"{first.contracted} that it multiplies"
            )
    for other in products[1:]:
        if other.node.any_ends is not first.node.any_ends or other.node.op is not first.node.op:
            raise Unsplittable(
                f"the products at {first.node.where} and {other.node.where} are not of the same groups of rows"
            )
        if other.node.shape[:-1] != first.node.shape[:-1] or other.contracted != first.contracted:
            raise Unsplittable(
                f"the products at {first.node.where} and {other.node.where} are of {shape_text(first.node.shape)} over "
                f"{first.contracted} and {shape_text(other.node.shape)} over {other.contracted}: "
                "one kernel makes products of the same rows over the same axis"
            )
        one, two = (" and ".join(dict.fromkeys((str(p.left.dtype), str(p.right.dtype)))) for p in (first, other))
        if one != two:
            raise Unsplittable(
                f"the products at {first.node.where} and {other.node.where} have factors of {one} and of {two}"
            )


def product_of(graph: Graph, node: Node) -> Product:
    dtype = graph.factor_types[node]
    left, right = node.factors
    other = factor_kind(right, graph.storage) if dtype.narrow else dtype
    scales = tuple(factor_of(graph, scale, f32) for scale in node.scales)
    return Product(node, factor_of(graph, left, dtype), factor_of(graph, right, other), scales)


def factor_of(graph: Graph, node: Node, dtype: DType) -> Factor:
    if (codes := in_kernel(node)) is not None:
        tensor, scales = graph.tensor_of[codes.codes.node], graph.tensor_of[codes.scales.node]
        zeros = graph.tensor_of[codes.zeros.node] if codes.zeros else None
        zero = (codes.zeros.packed or graph.tensor_of[codes.zeros.node].dtype) if codes.zeros else None
        scaled = Scaled(codes.codes.packed or tensor.dtype, scales, zeros, zero, codes.group)
        return Factor(node, dtype, tensor, True, (), (tensor,), (), scaled)
    if plain(node):
        source = node
        while source.op.kind in (Kind.TRANSPOSE, Kind.VIEW):
            (source,) = source.inputs
        tensor = graph.tensor_of[source]
        return Factor(node, dtype, tensor, node.op.kind is Kind.TRANSPOSE, (), (tensor,), ())
    if node.op.name == "gather":  # `language.one_kernel` has let it pass
        table, index = node.inputs
        tensor = graph.tensor_of[table]
        return Factor(node, dtype, tensor, False, (), (tensor,), (), index=index)
    return Factor(node, dtype, None, False, *made_of(graph, node))


def statistic(graph: Graph, node: Node) -> Statistic:
    return Statistic(node, *made_of(graph, node.inputs[0]))


def made_of(graph: Graph, node: Node) -> tuple[tuple[Node, ...], tuple[Tensor, ...], tuple[Node, ...]]:
    """What an element is computed by, from which elements of operands, and from which values of its row."""
    body: list[Node] = []
    inputs: list[Tensor] = []
    rows: list[Node] = []
    for inside in elements(graph, node):
        if graph.extents[inside] is not Extent.ELEMENT:
            if inside.op.kind is not Kind.LEAF:
                rows.append(inside)
        elif inside.op.kind is Kind.INPUT:
            inputs.append(graph.tensor_of[inside])
        elif is_computed(inside):
            body.append(inside)
    return tuple(body), tuple(inputs), tuple(rows)


def elements(graph: Graph, node: Node) -> list[Node]:
    """`node` and what it needs, back to operands and to values that are one a row."""
    found = {node}
    for inside in reversed(graph.nodes):
        if inside in found and graph.extents[inside] is Extent.ELEMENT:
            found.update(inside.inputs)
    return [n for n in graph.nodes if n in found]


def closure(graph: Graph, wanted: Iterable[Node], without: Iterable[Node]) -> list[Node]:
    """`wanted` and what it needs, but for `without` and products, and what only those need."""
    left_out = {*without, *graph.products}
    found = set(wanted) - left_out
    for node in reversed(graph.nodes):
        if node in found:
            found.update(a for a in node.inputs if a not in left_out)
    return [n for n in graph.nodes if n in found]


def reached(graph: Graph) -> set[Node]:
    """What the epilogue needs, back to operands, products and statistics."""
    found = {t.node for t in graph.outputs}
    for node in reversed(graph.nodes):
        if node in found and node.op.kind not in (Kind.PRODUCT, Kind.REDUCE):
            found.update(node.inputs[:2] if node.op.kind is Kind.BIAS else node.inputs)
    return found


def epilogue_of(graph: Graph) -> tuple[Node, ...]:
    """What varies by element behind the products: made from them, or beside them."""
    inside = reached(graph)
    return tuple(n for n in graph.nodes if n in inside and is_computed(n) and graph.extents[n] is Extent.ELEMENT)


def is_computed(node: Node) -> bool:
    """By a statement of its own: literals and sizes are written out where they are used."""
    return node.op.kind in (Kind.MAP, Kind.BIAS) or node.op.name in (*COUNT_ELEMENTS, "row_index")


@once_per_graph
def group_vectors(graph: Graph) -> frozenset[Node]:
    """The operands of which each group of rows has a vector of its own: biases, and scales of columns."""
    return frozenset(n.inputs[1] for n in graph.nodes if n.op.kind is Kind.BIAS)
