"""The factors of a matrix product in words, for errors about their shapes and types. `operands` are the spec's."""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.errors import SpecError
from fusegen.language.graph import FITTED, Kind, Node, Tensor
from fusegen.language.types import f32, i8, i32, shape_text, u8

Operands = Mapping[Node, Tensor]


def inner_sizes_differ(a: Node, b: Node, operands: Operands) -> str:
    first = "first dim" if len(b.shape) == 2 else "dim before the last"
    lines = [
        f"matmul: inner sizes differ: {factor_text(a, operands)} @ {factor_text(b, operands)}",
        f"  the left operand's last dim is {a.shape[-1]}, the right operand's {first} is {b.shape[-2]}",
    ]
    x, w = operand_name(a, operands), operand_name(b, operands)
    if w and a.shape[-1] == b.shape[-1]:
        lines.append(f"  did you mean `{x or '...'} @ {transposed(w)}`?")
    elif x and a.shape[-2] == b.shape[-2]:
        lines.append(f"  did you mean `{transposed(x)} @ {w or '...'}`?")
    return "\n".join(lines)


def need_type(node: Node, operands: Operands, right: bool) -> Node:
    """The factor, which must be of floats, or of whole numbers that are i8 or u8 in memory. Raises SpecError."""
    if node.dtype is f32 or (node.dtype is i32 and fits_8_bits(node, operands)):
        return node
    advice = (
        "declare it as f16, bf16, f32 or i8: it is read as it lies in memory"
        if right
        else "convert it with F.cast(x, f16), or F.cast(x, i8)"
    )
    raise SpecError(
        f"matmul: found {node.dtype} where a factor of floats, of i8 or of u8 is wanted\n  {advice}", node.where
    )


def fits_8_bits(node: Node, operands: Operands) -> bool:
    """Is it an operand of i8 or u8, seen in whatever way, or cast to one?"""
    while node.op.kind in (Kind.VIEW, Kind.TRANSPOSE):
        (node,) = node.inputs
    tensor = operands.get(node)
    return tensor.dtype in (i8, u8) if tensor else node.op.name in FITTED


def need_one_kind(a: Node, b: Node, operands: Operands) -> None:
    """Raises SpecError where one factor is of whole numbers, and the other one is not."""
    if a.dtype is not b.dtype:
        raise SpecError(
            f"matmul: {factor_text(a, operands)} @ {factor_text(b, operands)}: whole numbers and others\n"
            "  convert the left one, as in F.cast(x, i8) or F.cast(x, f16)",
            a.where if a.dtype is not f32 else b.where,
        )


def transposed(name: str) -> str:
    return name.removesuffix(".T") if name.endswith(".T") else f"{name}.T"


def factor_text(node: Node, operands: Operands) -> str:
    """`f16[M, K]` of an operand or its view, `[M, K]` of a computed value."""
    source = node.inputs[0] if node.op.kind is Kind.TRANSPOSE else node
    tensor = operands.get(source)
    return f"{tensor.dtype if tensor else ''}{shape_text(node.shape)}"


def operand_name(node: Node, operands: Operands) -> str:
    """`w`, `w.T`; empty for a computed value."""
    if node.op.kind is Kind.TRANSPOSE:
        return transposed(operand_name(node.inputs[0], operands))
    tensor = operands.get(node)
    return tensor.name if tensor else ""
