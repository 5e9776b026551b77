"""Grouped products: each group of rows times a matrix of its own, as the experts of a mixture take their tokens."""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.factor_words import factor_text, inner_sizes_differ, need_one_kind
from fusegen.language.graph import OPS, Node, Operator, shown_by
from fusegen.language.trace import Transposed, Value, caller, current, factor
from fusegen.language.types import Shape, bf16, f16, f32, i32, shape_text

WANTED = "rows [T, K], a matrix for each group [E, K, N], and ends [E] of i32; or [M, T], [T, N] and ends"


def grouped_matmul(x: Value | Transposed, w: Value | Transposed, ends: Value, bias: Value | None = None) -> Value:
    """Each group of rows of x [T, K] times a matrix of its own of w [E, K, N], summed in f32: [T, N].

    The groups lie one behind the other, and may be empty: i32 `ends` [E] says behind which row each of them ends, as
    `offs` of torch's grouped_mm. A row is of the first group whose end lies behind it. So rows of group e are
    ends[e - 1] up to ends[e], rows behind all ends are of no group, where the result is 0, and no end, however wrong,
    makes a kernel read or write elsewhere. Weights [E, N, K] are taken as `w.mT`; factors are f16 or bf16. A bias, an
    operand [E, N], is added to the rows of its groups; rows of no group stay 0.

    Of x [M, T] and w [T, N] the groups are those of T, which is summed over: a product for each group, [E, M, N], 0 of
    an empty one, as weights' gradients are, `F.grouped_matmul(x.mT, dy, ends)` of x [T, M] and dy [T, N].
    """
    for what, value in (("rows", x), ("matrices", w), ("ends", ends)):
        if not isinstance(value, Value | Transposed):
            raise SpecError(f"grouped_matmul: the {what} are {value!r:.80}, not a traced value", caller())
    need_ends(ends)
    with current().operator("grouped_matmul") as operator:
        op, operands = OPS["grouped_matmul"], current().operands
        a, b = factor(op, x, operator, right=False), factor(op, w, operator, right=True)
        if len(a.shape) == len(b.shape) == 2 and bias is None:
            return over_groups(a, b, ends.node, operator)
        if len(a.shape) != 2 or len(b.shape) != 3 or b.shape[0] != ends.shape[0]:
            raise SpecError(
                f"grouped_matmul: found {factor_text(a, operands)}, {factor_text(b, operands)} and ends "
                f"{shape_text(ends.shape)}; wanted {WANTED}",
                operator.where,
            )
        if a.shape[-1] != b.shape[-2]:
            raise SpecError(inner_sizes_differ(a, b, operands), operator.where)
        need_one_kind(a, b, operands)
        if a.dtype is i32:
            raise SpecError("grouped_matmul: found factors of whole numbers; wanted f16 or bf16", operator.where)
        product = Node(op, (a, b, ends.node), (a.shape[0], b.shape[-1]), a.dtype, operator)
        if bias is None:
            return Value(product)
        need_bias(bias, (b.shape[0], b.shape[-1]))
        return Value(Node(OPS["add_group_rows"], (product, bias.node, ends.node), product.shape, f32, operator))


def over_groups(a: Node, b: Node, ends: Node, operator: Operator) -> Value:
    """A product for each group of what is summed over. Raises SpecError."""
    operands = current().operands
    if a.shape[-1] != b.shape[-2]:
        raise SpecError(inner_sizes_differ(a, b, operands), operator.where)
    need_one_kind(a, b, operands)
    if a.dtype is i32:
        raise SpecError("grouped_matmul: found factors of whole numbers; wanted f16 or bf16", operator.where)
    shape = (ends.shape[0], a.shape[0], b.shape[-1])
    return Value(Node(OPS["matmul_over_groups"], (a, b, ends), shape, a.dtype, operator))


def need_bias(bias: Value, wanted: Shape) -> None:
    """Raises SpecError for what is no floating-point operand, or view of one, of that shape."""
    if not isinstance(bias, Value):
        raise SpecError(f"grouped_matmul: the bias is {bias!r:.80}, not a traced value", caller())
    tensor = current().operands.get(shown_by(bias.node))
    if tensor is None or bias.shape != wanted or tensor.dtype not in (f16, bf16, f32):
        found = f"{tensor.dtype if tensor else bias.dtype}{shape_text(bias.shape)}"
        found += "" if tensor else " that is computed"
        raise SpecError(
            f"grouped_matmul: found a bias {found}; wanted an operand of f32, f16 or bf16, "
            f"{shape_text(wanted)}: a vector for each group",
            caller(),
        )


def need_ends(ends: Value) -> None:
    """Raises SpecError for what is not i32 [E], an operand or computed."""
    tensor = current().operands.get(ends.node)
    dtype = tensor.dtype if tensor else ends.dtype
    if dtype is not i32 or len(ends.shape) != 1:
        found = str(tensor.type) if tensor else f"{ends.dtype}{shape_text(ends.shape)} that are computed"
        raise SpecError(f"grouped_matmul: found ends {found}; wanted i32[E], where each group ends", caller())
