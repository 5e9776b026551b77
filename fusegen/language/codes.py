"""Right factors that lie in memory as codes of few bits: a chain's `x @ F.dequantize(w, scales).T`, and those of
grouped products, of which each group of rows has a matrix.

A kernel multiplies the codes themselves, as the whole numbers or floats that they are, and scales the sums of each
group of K. So the chain's nodes are taken apart here, into operands; in the graph of one kernel they stand again as

    transpose(mul(sub(codes, spread(zeros)), spread(scales)))        [K, N]; the zeros may be missing

without views, where `spread` repeats what belongs to a group at each of its places, and codes of 4 bits are one step,
`unpack_i4` and its like, behind the bytes that hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusegen.language.graph import Kind, Node
from fusegen.language.op_table import OPS
from fusegen.language.types import PACKED, DType, Shape, f4e2m1, f32, i4, i32, u4
from fusegen.language.views import View


@dataclass(frozen=True, slots=True)
class Codes:
    """(codes - zeros) * scales, transposed: operands [.., N, K], [.., N, K // group] and [.., N, K // group]. Where
    there is one scale a row, `group` is 0."""

    codes: Stored
    scales: Stored
    zeros: Stored | None
    group: int


@dataclass(frozen=True, slots=True)
class Stored:
    """An operand, and what its bytes are two of; its own numbers where that is None."""

    node: Node
    packed: DType | None = None

    @property
    def shape(self) -> Shape:
        *rows, cols = self.node.shape
        return (*rows, cols * 2) if self.packed else self.node.shape


def codes_of(node: Node) -> Codes | None:
    """What a chain's right factor is made of, if it is codes and scales, of one matrix or of several; None of any
    other."""
    whole = transposed(node)
    if whole is None:
        return None
    inner, group, rank = whole, 0, len(whole.shape)
    if whole.view is not None:
        (inner,) = whole.inputs
        if len(inner.shape) != rank + 1 or not isinstance(size := inner.shape[-1], int):
            return None
        if whole.view != View.identity(inner.shape).merged(rank - 1, 2):
            return None
        group = size
    if inner.op.name != "mul":
        return None
    value, scales = (unshown(a, group) for a in inner.inputs)
    zeros, less = None, value if not group else inner.inputs[0]
    plain = stored(value)
    if plain is None and less is not None and less.op.name == "sub":
        value, zeros = (unshown(a, group) for a in less.inputs)
        plain = stored(value)
        if zeros is None:
            return None
    codes, own, side = plain, stored(scales), stored(zeros)
    if codes is None or own is None or (zeros is None) != (side is None):
        return None
    if codes.shape != whole.shape or len(own.shape) != rank:
        return None
    each = (*codes.shape[:-1], codes.shape[-1] // group if group else 1)
    if any(part is not None and part.shape != each for part in (own, side)):
        return None
    return Codes(codes, own, side, group)


def transposed(node: Node) -> Node | None:
    """The matrices [.., N, K] of which a factor has the transposes."""
    if node.op.kind is not Kind.VIEW or len(node.shape) < 2:
        return None
    (source,), rank = node.inputs, len(node.shape)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    return source if len(source.shape) == rank and node.view == View.identity(source.shape).transposed(swap) else None


def unshown(node: Node, group: int) -> Node | None:
    """What a step on groups has of a matrix: as groups, or one value for each of them."""
    if not group:
        return node
    if node.op.kind is not Kind.VIEW:
        return None
    (source,) = node.inputs
    if len(node.shape) != len(source.shape) + 1:
        return None
    whole, last = View.identity(source.shape), len(source.shape) - 1
    groups = node.shape[-1] == group and node.view == whole.split(last, node.shape[last:])
    return source if groups or node.view == whole.sliced((..., None)) else None


def stored(node: Node | None) -> Stored | None:
    """The operand that a value is, as a number."""
    if node is not None and node.op.name == "to_f32":
        (node,) = node.inputs
    if node is None or not node.shape:
        return None
    return Stored(node) if node.op.kind is Kind.INPUT else unpacked(node)


def unpacked(node: Node) -> Stored | None:
    """The bytes that hold a value's numbers of 4 bits: as `fusegen.language.packing.unpack` takes them apart."""
    if node.op.kind is Kind.UNPACK:
        return Stored(node.inputs[0], PACKED[node.op.name.removeprefix("unpack_")])
    dtype, codes = u4, node
    if node.op.name == "f4e2m1_of_code":
        dtype, (codes,) = f4e2m1, node.inputs
    elif node.op.name == "sub" and node.inputs[0].op.name == "bit_xor" and node.inputs[1].literal == 8:
        dtype, codes = i4, node.inputs[0].inputs[0]
    if codes.op.kind is not Kind.VIEW or codes.inputs[0].op.kind is not Kind.JOIN:
        return None
    (join,) = codes.inputs
    low, high = join.inputs if len(join.inputs) == 2 else (join, join)
    (*_, source) = low.inputs[:1]
    nibbles = low.op.name == "bit_and" and high.op.name == "shift_right" and high.inputs[0] is source
    whole = codes.view == View.identity(join.shape).merged(len(join.shape) - 2, 2) and join.shape[-1] == 2
    numbers = nibbles and (low.inputs[1].literal, high.inputs[1].literal) == (15, 4)
    return Stored(source, dtype) if whole and numbers and source.op.kind is Kind.INPUT else None


def in_one_kernel(found: Codes, product: Node, seen: Callable[[Node, View], Node]) -> Node:
    """The factor as the graph of one kernel has it; `seen` gives its node of an operand."""
    operator = product.operator

    def number(side: Stored) -> Node:
        own = seen(side.node, View.identity(side.node.shape))
        if side.packed is not None:
            op = OPS[f"unpack_{side.packed}"]
            own = Node(op, (own,), side.shape, op.result or i32, operator)
        return own if own.dtype is f32 else Node(OPS["to_f32"], (own,), own.shape, f32, operator)

    codes = number(found.codes)
    group = found.group or 0

    def spread(side: Stored) -> Node:
        text = f"np.repeat({{0}}, {group}, axis=-1)" if group else "np.broadcast_to({0}, {0}.shape)"
        return Node(OPS["spread"], (number(side),), codes.shape, f32, operator, group=group or 1, text=text)

    value = codes
    if found.zeros is not None:
        value = Node(OPS["sub"], (codes, spread(found.zeros)), codes.shape, f32, operator)
    value = Node(OPS["mul"], (value, spread(found.scales)), codes.shape, f32, operator)
    return Node(OPS["transpose"], (value,), (*codes.shape[:-2], codes.shape[-1], codes.shape[-2]), f32, operator)


def in_kernel(node: Node) -> Codes | None:
    """What a right factor is made of, in the graph of one kernel."""
    if node.op.kind is not Kind.TRANSPOSE or node.inputs[0].op.name != "mul":
        return None
    value, scales = node.inputs[0].inputs
    zeros = None
    if value.op.name == "sub":
        value, zeros = value.inputs

    def source(side: Node) -> Stored | None:
        return stored(side.inputs[0] if side.op.kind is Kind.SPREAD else side)

    codes, own, side = stored(value), source(scales), source(zeros) if zeros is not None else None
    if codes is None or own is None or scales.op.kind is not Kind.SPREAD or (side is None) != (zeros is None):
        return None
    return Codes(codes, own, side, scales.group if scales.group > 1 else 0)


def unscaled(product: Node) -> tuple[Node, ...]:
    """The left factor [M, K] of a product of codes, the codes without their zeros [.., N, K], and the ends of groups of
    rows, where it has them."""
    left, right, *ends = product.inputs
    return left, right.inputs[0].inputs[0], *ends
