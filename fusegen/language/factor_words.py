"""The factors of a matrix product in words, for errors about their shapes. `operands` are those of the spec."""

from __future__ import annotations

from collections.abc import Mapping

from fusegen.language.graph import Kind, Node, Tensor
from fusegen.language.types import shape_text

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
