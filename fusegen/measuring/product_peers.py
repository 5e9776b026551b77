"""What chains with matrix products are timed against beside torch's own ways: the vendor's library.

*bare*: the products alone, as one call of the library for each left factor, with the weights of products that share it
side by side: what is left of a chain when everything around its products costs nothing. *epilogue*: bias and activation
in the library's own epilogue (cuBLASLt, hipBLASLt), where it has that one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fusegen.language.graph import Graph, Node
from fusegen.language.products import Factor, Product, Split, Unsplittable, split
from fusegen.language.torch_source import DTYPES
from fusegen.language.types import DType, f32
from fusegen.measuring.operands import shape_of
from fusegen.measuring.timing import Stopwatch

Run = Callable[[], object]
RATE_SIZE = 8192  # of the square matrices whose product says what the matrix units reach
ACTIVATIONS = {"gelu_tanh": True, "relu": False}  # of the epilogue; True: use_gelu


def product_ways(torch: Any, graph: Graph, tensors: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Sequence[Run]]]:
    """(name, what is timed over each set of operands); nothing for a chain without products."""
    try:
        parts = split(graph)
    except Unsplittable:
        return
    if any(left.index for left in parts.lefts):  # no library finds rows on their way
        return
    library = "hipBLAS" if torch.version.hip else "cuBLAS"
    if parts.products[0].node.ends:
        library = "grouped_mm"
    sets = [dict(zip((t.name for t in graph.inputs), row, strict=True)) for row in tensors]
    yield f"{library}, products alone", [bare(torch, graph, parts, one) for one in sets]
    if (found := with_epilogue(parts)) is not None:
        bias, gelu = found
        what = "GELU" if gelu else "ReLU"
        yield f"{library}Lt, bias and {what}", [epilogue(torch, parts, one, bias, gelu) for one in sets]


@contextlib.contextmanager
def same_precision(torch: Any, graph: Graph) -> Iterator[None]:
    """Torch multiplies f32 by way of tf32 where the chain asks for it; afterwards as before."""
    before = torch.get_float32_matmul_precision()
    if f32 in graph.factor_types.values():
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bare(torch: Any, graph: Graph, parts: Split, operands: dict[str, Any]) -> Run:
    """Every product, those of one left factor by one call."""
    calls: list[Run] = []
    if parts.products[0].node.ends:
        calls = [grouped(torch, graph, product, operands) for product in parts.products]
    for left in parts.lefts if not calls else ():
        products = [p for p in parts.products if p.left.node is left.node]
        x = matrices(torch, graph, left, operands)
        weights = [matrices(torch, graph, p.right, operands) for p in products]
        if all(p.right.transposed for p in products):  # as nn.Linear has them: K lies together
            w = torch.cat([one.mT for one in weights], -2).mT if len(weights) > 1 else weights[0]
        else:
            w = torch.cat(weights, -1) if len(weights) > 1 else weights[0]
        calls.append(multiplying(torch, x, w))

    def run() -> None:
        for call in calls:
            call()

    return run


def grouped(torch: Any, graph: Graph, product: Product, operands: dict[str, Any]) -> Run:
    """A grouped product by torch's own, which is CUTLASS's on Hopper."""
    x, w = (matrices(torch, graph, factor, operands) for factor in (product.left, product.right))
    assert product.node.ends is not None
    ends = operands[graph.tensor_of[product.node.ends].name]
    return lambda: torch.nn.functional.grouped_mm(x, w, offs=ends)


def multiplying(torch: Any, x: Any, w: Any) -> Run:
    """x @ w by the library; of 8 bits its own product, with one scale for each factor, or of whole numbers none."""
    if x.dtype == torch.int8:
        return lambda: torch._int_mm(x, w)
    if x.element_size() == 1:
        one = torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=False)
    out = torch.matmul(x, w)
    return lambda: torch.matmul(x, w, out=out)


def matrices(torch: Any, graph: Graph, factor: Factor, operands: dict[str, Any]) -> Any:
    """The factor's operand; noise in place of one that is computed."""
    if factor.operand is not None:
        found = operands[factor.operand.name]
        return found.mT if factor.transposed else found
    place = next(o.device for o in operands.values() if hasattr(o, "device"))
    return noise(torch, shape_of(factor.node.shape, graph.sizes), dtype_of(torch, factor.dtype), place)


def noise(torch: Any, shape: Sequence[int], kind: Any, place: Any) -> Any:
    """Of a type that may be of 8 bits."""
    if not kind.is_floating_point:
        return torch.randint(0, 127, tuple(shape), dtype=kind, device=place)
    if kind.itemsize == 1:
        return torch.randn(shape, device=place).to(kind)
    return torch.randn(shape, dtype=kind, device=place)


def dtype_of(torch: Any, dtype: DType) -> Any:
    return getattr(torch, DTYPES[dtype.name].removeprefix("torch."))


def with_epilogue(parts: Split) -> tuple[str, bool] | None:
    """The bias's name, and whether the activation is GELU: of gelu(x @ w + bias) or relu(x @ w + bias), else None."""
    if len(parts.products) != 1 or len(parts.epilogue) != 2 or len(parts.graph.outputs) != 1:
        return None
    product = parts.products[0]
    if product.node.ends:
        return None
    add, activation = parts.epilogue
    if add.op.name != "add" or activation.op.name not in ACTIVATIONS or product.left.operand is None:
        return None
    bias = other(add, product.node)
    matrix = len(product.node.shape) == 2 and product.right.operand is not None
    if bias is None or len(bias.shape) != 1 or bias not in parts.graph.tensor_of or not matrix:
        return None
    return parts.graph.tensor_of[bias].name, ACTIVATIONS[activation.op.name]


def other(node: Node, one: Node) -> Node | None:
    rest = [a for a in node.inputs if a is not one]
    return rest[0] if len(rest) == 1 else None


def epilogue(torch: Any, parts: Split, operands: dict[str, Any], bias: str, gelu: bool) -> Run:
    product = parts.products[0]
    x, w = (matrices(torch, parts.graph, factor, operands) for factor in (product.left, product.right))
    return lambda: torch._addmm_activation(operands[bias], x, w, use_gelu=gelu)


def matrix_rate(torch: Any, watch: Stopwatch, dtype: DType, place: Any) -> float:
    """Flop per µs of the library's product of two large square matrices of noise, cold: what rates are shares of."""
    kind = dtype_of(torch, dtype)
    x, w = (noise(torch, (RATE_SIZE, RATE_SIZE), kind, place) for _ in range(2))
    call = multiplying(torch, x, w.mT)
    timing = watch.time([lambda stream: call()])
    return 2 * math.prod((RATE_SIZE,) * 3) / timing.median
