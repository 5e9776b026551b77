"""Products of operands of 8 bits that have scales by blocks: `F.dequantize(x, sx) @ F.dequantize(w, sw).T`.

x [M, K] has a scale for each 128 of a row, w [N, K] one for each 128 x 128. A kernel multiplies the 8 bits, and scales
the sums of each 128 of K where it adds them up in f32, after DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 3.3.
The product has the scales as arguments of its own, behind its factors.
"""

from __future__ import annotations

from typing import Any

from fusegen.language.graph import OPS, Kind, Node
from fusegen.language.trace import Transposed, Value, current, factor
from fusegen.language.types import F8, f32, multiply_together

BLOCK = 128  # of K, and of the columns that share a scale of the right factor
TEXT = (
    f"({{0}} * np.repeat({{2}}, {BLOCK}, axis=-1)) @ "
    f"({{1}} * np.repeat(np.repeat(np.swapaxes({{3}}, -1, -2), {BLOCK}, axis=-2), {BLOCK}, axis=-1))"
)


class Dequantized(Value):
    """What F.dequantize gives of blocks, with what it was made of."""

    __slots__ = ("codes", "scales")

    def __init__(self, node: Node, codes: Value, scales: Value) -> None:
        super().__init__(node)
        self.codes = codes
        self.scales = scales

    def multiplied(self, other: Any) -> Value | None:
        """Its product with another one's transpose, where a kernel can scale the sums of blocks; else None."""
        if not isinstance(other, Transposed) or not isinstance(other.value, Dequantized):
            return None
        x, w, sx, sw = self.codes, other.value.codes, self.scales, other.value.scales
        kinds = [current().operands[v.node].dtype if v.node in current().operands else f32 for v in (x, w)]
        if any(kind not in F8 for kind in kinds) or not multiply_together(*kinds) or x.shape[-1:] != w.shape[-1:]:
            return None
        (m, k), n = x.shape, w.shape[0]
        if sx.shape != (m, k // BLOCK) or sw.shape != (n // BLOCK, k // BLOCK):
            return None
        with current().operator("matmul") as operator:
            right = factor(OPS["matmul"], w.T, operator, right=True)
            scales = tuple(scale_of(scale) for scale in (sx, sw))
            if any(scale is None for scale in scales):
                return None
            inputs = (x.node, right, *(scale for scale in scales if scale is not None))
            return Value(Node(OPS["matmul"], inputs, (m, n), f32, operator, promote=BLOCK, text=TEXT))


def scale_of(scales: Value) -> Node | None:
    """An operand of f32, or a transposed one, as it lies."""
    turned = isinstance(scales, Transposed)
    node = scales.value.node if isinstance(scales, Transposed) else scales.node
    tensor = current().operands.get(node)
    if tensor is None or tensor.dtype is not f32:
        return None
    if not turned:
        return node
    shape = (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return Node(OPS["transpose"], (node,), shape, node.dtype, node.operator)


def blocked(node: Node) -> bool:
    """Is it a product whose sums of blocks are scaled?"""
    return node.op.kind is Kind.PRODUCT and bool(node.scales)
