"""Products of operands of 8 bits that have scales by blocks: `F.dequantize(x, sx) @ F.dequantize(w, sw).T`.

x [M, K] has a scale for each 128 of a row, w [N, K] one for each 128 x 128. A kernel multiplies the 8 bits, and scales
the sums of each 128 of K where it adds them up in f32, after DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 3.3.
The product has the scales as arguments of its own, behind its factors.
"""

from __future__ import annotations

from typing import Any

from fusegen.language.graph import FITTED, OPS, ROWS_AT, Kind, Node
from fusegen.language.nodes import shown_by
from fusegen.language.trace import Transposed, Value, current, factor
from fusegen.language.types import F8, DType, f32, multiply_together

BLOCK = 128  # of K, and of the columns that share a scale of the right factor
TEXT = (
    f"({{0}} * np.repeat({{2}}, {BLOCK}, axis=-1)) @ "
    f"({{1}} * np.repeat(np.repeat(np.swapaxes({{3}}, -1, -2), {BLOCK}, axis=-2), {BLOCK}, axis=-1))"
)

GROUPED_TEXT = (
    f"matmul_by_group({{0}} * np.repeat({{3}}, {BLOCK}, axis=-1), "
    f"{{1}} * np.repeat(np.repeat(np.swapaxes({{4}}, -1, -2), {BLOCK}, axis=-2), {BLOCK}, axis=-1), {{2}})"
)


class Dequantized(Value):
    """What F.dequantize gives of blocks, with what it was made of."""

    __slots__ = ("codes", "scales")

    def __init__(self, node: Node, codes: Value, scales: Value) -> None:
        super().__init__(node)
        self.codes = codes
        self.scales = scales

    def multiplied(self, other: Any, ends: Value | None = None) -> Value | None:
        """Its product with another one's transpose, or of groups of rows with those of many matrices, where a kernel
        can scale the sums of blocks; else None."""
        if not isinstance(other, Transposed) or not isinstance(other.value, Dequantized):
            return None
        x, w, sx, sw = self.codes, other.value.codes, self.scales, other.value.scales
        kinds = [kind_of(v.node) for v in (x, w)]
        rank = 2 if ends is None else 3
        if any(kind not in F8 for kind in kinds) or not multiply_together(*kinds) or x.shape[-1:] != w.shape[-1:]:
            return None
        if len(x.shape) != 2 or len(w.shape) != rank:
            return None
        (m, k), (*groups, n) = x.shape, w.shape[:-1]
        if ends is not None and ends.shape != tuple(groups):
            return None
        if sx.shape != (m, k // BLOCK) or sw.shape != (*groups, n // BLOCK, k // BLOCK):
            return None
        op = OPS["matmul" if ends is None else "grouped_matmul"]
        with current().operator(op.name) as operator:
            right = factor(op, w.mT, operator, right=True)
            scales = tuple(scale_of(scale) for scale in (sx, sw))
            if any(scale is None for scale in scales):
                return None
            behind = () if ends is None else (ends.node,)
            inputs = (x.node, right, *behind, *(scale for scale in scales if scale is not None))
            text = TEXT if ends is None else GROUPED_TEXT
            return Value(Node(op, inputs, (m, n), f32, operator, promote=BLOCK, text=text))


def kind_of(node: Node) -> DType:
    """The type of codes: of an operand, of rows of one, and of what the chain has rounded to it."""
    source = shown_by(node)
    if source.op.name in ROWS_AT:
        source = shown_by(source.inputs[0])
    if source in current().operands:
        return current().operands[source].dtype
    return FITTED.get(source.op.name, f32)


def scale_of(scales: Value) -> Node | None:
    """An operand of f32, or a transposed one, as it lies; what is computed is stored so by a kernel before."""
    turned = isinstance(scales, Transposed)
    node = scales.value.node if isinstance(scales, Transposed) else scales.node
    tensor = current().operands.get(node)
    if (tensor.dtype if tensor else node.dtype) is not f32:
        return None
    if not turned:
        return node
    shape = (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return Node(OPS["transpose"], (node,), shape, node.dtype, node.operator)


def blocked(node: Node) -> bool:
    """Is it a product whose sums of blocks are scaled?"""
    return node.op.kind is Kind.PRODUCT and bool(node.scales)
