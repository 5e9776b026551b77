"""Grouped products: each group of rows times a matrix of its own, as the experts of a mixture take their tokens.

Which rows belong together is an operand of the product, or is computed: so the same rows may be in other groups for
another product, and what is before and behind it knows nothing of groups. A dim that is declared to be ragged says how
many there are, and its products are held to that.
"""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.factor_words import factor_text, inner_sizes_differ, need_one_kind
from fusegen.language.graph import OPS, Node, Operator, shown_by
from fusegen.language.trace import Transposed, Value, caller, current, factor
from fusegen.language.types import Dim, Shape, bf16, f16, f32, i32, shape_text

WANTED = "rows [T, K], a matrix for each group [E, K, N], and ends [E] of i32; or [M, T], [T, N] and ends"

WHOLE_TEXT = (  # sums of whole numbers below 2^53 are exact in float64
    "matmul_by_group({0}.astype(np.float64), {1}.astype(np.float64), {2}).astype(np.int64).astype(np.int32)"
)


def grouped_matmul(
    x: Value | Transposed, w: Value | Transposed, ends: Value, bias: Value | None = None, scale: Value | None = None
) -> Value:
    """Each group of rows of x [T, K] times a matrix of its own of w [E, K, N], summed in f32: [T, N].

    The groups lie one behind the other, and may be empty: i32 `ends` [E] says behind which row each of them ends, as
    `offs` of torch's grouped_mm. A row is of the first group whose end lies behind it. So rows of group e are
    ends[e - 1] up to ends[e], rows behind all ends are of no group, where the result is 0, and no end, however wrong,
    makes a kernel read or write elsewhere. Weights [E, N, K] are taken as `w.mT`; factors are f16, bf16, or 8 bits as
    they are in memory, whole numbers among them with sums of i32. A scale, an operand [E, N], multiplies the columns of
    its group's rows, as those of quantized weights; a bias, an operand [E, N], is added to them behind that. Rows of no
    group stay 0.

    Of x [M, T] and w [T, N] the groups are those of T, which is summed over: a product for each group, [E, M, N], 0 of
    an empty one, as weights' gradients are, `F.grouped_matmul(x.mT, dy, ends)` of x [T, M] and dy [T, N].
    """
    for what, value in (("rows", x), ("matrices", w), ("ends", ends)):
        if not isinstance(value, Value | Transposed):
            raise SpecError(f"grouped_matmul: the {what} are {value!r:.80}, not a traced value", caller())
    need_ends(ends)
    need_declared(x, ends)
    found = x.multiplied(w, ends) if isinstance(x, Value) else None
    if found is None:
        with current().operator("grouped_matmul") as operator:
            found = product_of(x, w, ends, operator, alone=bias is None and scale is None)
    if scale is None and bias is not None and found.dtype is i32:
        raise SpecError(
            "grouped_matmul: found a bias beside factors of whole numbers, whose sums are i32; wanted a scale as well, "
            "or the sums without a bias",
            caller(),
        )
    found = with_vectors(found, w, scale, ends, "scale_group_rows")
    return with_vectors(found, w, bias, ends, "add_group_rows")


def product_of(x: Value | Transposed, w: Value | Transposed, ends: Value, operator: Operator, *, alone: bool) -> Value:
    """The product of groups of rows, or `alone` of groups of what is summed over. Raises SpecError."""
    op, operands = OPS["grouped_matmul"], current().operands
    a, b = factor(op, x, operator, right=False), factor(op, w, operator, right=True)
    if len(a.shape) == len(b.shape) == 2 and alone:
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
    text = WHOLE_TEXT if a.dtype is i32 else ""
    return Value(Node(op, (a, b, ends.node), (a.shape[0], b.shape[-1]), a.dtype, operator, text=text))


def need_declared(x: Value | Transposed, ends: Value) -> None:
    """Raises SpecError for another number of groups than a ragged dim has. Operands say how many that are: shapes of
    views are kept from chain to chain, and dims of one name are the same there."""
    sizes = [size for tensor in current().operands.values() for size in tensor.shape if isinstance(size, Dim)]
    declared = {size: size.groups for size in sizes if size.groups is not None}
    for size in x.shape:
        if isinstance(size, Dim) and size in declared and ends.shape != (declared[size],):
            raise SpecError(
                f"grouped_matmul: found ends {shape_text(ends.shape)} of rows {size}, which are ragged in "
                f"{declared[size]} groups; wanted ends {shape_text((declared[size],))}",
                caller(),
            )


def with_vectors(product: Value, w: Value | Transposed, table: Value | None, ends: Value, name: str) -> Value:
    """A grouped product whose rows meet their group's vector [N] of the table [E, N]. Raises SpecError."""
    if table is None:
        return product
    need_vectors(table, (w.shape[0], w.shape[-1]), "bias" if name == "add_group_rows" else "scale")
    node, operator = product.node, product.node.operator
    if node.dtype is i32:
        node = Node(OPS["to_f32"], (node,), node.shape, f32, operator)
    return Value(Node(OPS[name], (node, table.node, ends.node), node.shape, f32, operator))


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


def need_vectors(table: Value, wanted: Shape, what: str) -> None:
    """Raises SpecError for what is no floating-point operand, or view of one, of that shape."""
    if not isinstance(table, Value):
        raise SpecError(f"grouped_matmul: the {what} is {table!r:.80}, not a traced value", caller())
    tensor = current().operands.get(shown_by(table.node))
    if tensor is None or table.shape != wanted or tensor.dtype not in (f16, bf16, f32):
        found = f"{tensor.dtype if tensor else table.dtype}{shape_text(table.shape)}"
        found += "" if tensor else " that is computed"
        raise SpecError(
            f"grouped_matmul: found a {what} {found}; wanted an operand of f32, f16 or bf16, "
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
