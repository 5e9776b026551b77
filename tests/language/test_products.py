"""Chains with matrix products: how they are declared, what they mean, how they come apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fusegen import Chain, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import NoPlan, SpecError
from fusegen.language.graph import Graph
from fusegen.language.products import Unsplittable, split
from fusegen.language.reference import reference
from fusegen.language.types import Dim, TensorType, size_of
from fusegen.planner import candidates, plan
from fusegen.planner.rewrites import hoist_scales, simplify
from fusegen.targets import H200

Array = npt.NDArray[Any]

B, M, N, K, L = dims("B M N K L")


@chain(M=6, N=10, K=7)
def bias_gelu(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    return F.gelu(x @ w.T + bias)


@chain(M=6, N=10, K=7)
def norm_swiglu(x: bf16[M, K], gain: bf16[K], w_gate: bf16[K, N], w_up: bf16[K, N]) -> bf16[M, N]:
    h = F.rmsnorm(x, gain)
    return F.silu(h @ w_gate) * (h @ w_up)


@chain(B=2, M=6, N=10, L=4, K=7)
def qkv(
    x: f16[B, M, K], wq: f16[K, N], wk: f16[K, L], wv: f16[K, L], bias: f16[N]
) -> tuple[f16[B, M, N], f16[B, M, L], f16[B, M, L]]:
    return x @ wq + bias, x @ wk, x @ wv


@chain(M=6, N=10, K=7)
def scaled(x: bf16[M, K], row: f32[M, 1], w: bf16[K, N], col: f32[N], a: f32) -> f32[M, N]:
    """By what is surely finite."""
    return (x * F.sigmoid(row) * F.clip(a, 0.0, 8.0)) @ (w * F.tanh(col) / 3.0)


@chain(M=6, N=10, K=7)
def unbounded(x: bf16[M, K], row: f32[M, 1], w: bf16[K, N], a: f32) -> f32[M, N]:
    return (x * row * a * 0.5 / F.exp(row)) @ w


@chain(M=6, K=7)
def gram(x: f16[M, K]) -> f32[M, M]:
    return x @ x.T


@chain(M=6, N=10, K=7)
def turned(x: f16[K, M], w: f16[K, N], residual: f16[M, N]) -> tuple[f32[M, N], f16[M, N]]:
    y = x.T @ w
    return y, F.relu(y) + residual


@chain(M=6, N=10, K=7)
def with_tf32(x: f32[M, K], w: f32[K, N]) -> f32[M, N]:
    return F.matmul(x, w, precision="tf32")


@chain(M=6, K=7)
def square(x: bf16[M, K], w: bf16[K, K]) -> bf16[M, K]:
    return x + x @ w


ALL = (bias_gelu, norm_swiglu, qkv, scaled, unbounded, gram, turned, with_tf32, square)


def draw(graph: Graph, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal([size_of(s, graph.sizes) for s in t.shape]) for t in graph.inputs]


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def test_the_reference_is_the_textbook_product() -> None:
    x, w, bias = draw(bias_gelu.graph)
    y = x @ w.T + bias
    assert np.allclose(
        reference(bias_gelu.graph)(x, w, bias), 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    )
    x, gain, gate, up = draw(norm_swiglu.graph)
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain
    assert np.allclose(reference(norm_swiglu.graph)(x, gain, gate, up), silu(h @ gate) * (h @ up))
    x, wq, wk, wv, bias = draw(qkv.graph)
    for got, want in zip(reference(qkv.graph)(x, wq, wk, wv, bias), (x @ wq + bias, x @ wk, x @ wv), strict=True):
        assert np.allclose(got, want)


def test_the_iteration_space_is_that_of_the_products() -> None:
    assert bias_gelu.graph.shape == (M, N)
    assert norm_swiglu.graph.shape == (M, N), "what only makes factors has a space of its own"
    assert (qkv.graph.shape, qkv.graph.widths, qkv.graph.rows) == ((B, M, N), (N, L), 12)
    assert square.graph.shape == (M, K)
    assert gram.graph.shape == (M, M)
    assert {t.name for t in norm_swiglu.graph.inputs if t.node in norm_swiglu.graph.inner} == {
        "x", "gain", "w_gate", "w_up",
    }  # fmt: skip
    assert not {t.node for t in square.graph.inputs if t.name == "x"} & square.graph.inner, "x is a residual too"
    assert bias_gelu.graph.fixed == {N, K}
    assert gram.graph.fixed == {M, K}


def test_rows_may_be_none_and_contracted_axes_may_not() -> None:
    assert bias_gelu.at(M=0).graph.rows == 0
    with pytest.raises(SpecError, match="at least 1"):
        bias_gelu.at(K=0)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_hoisting_scales_changes_no_meaning(spec: Chain) -> None:
    graph = simplify(spec.graph)
    operands = draw(graph)
    for got, want in zip(
        as_tuple(reference(hoist_scales(graph))(*operands)), as_tuple(reference(graph)(*operands)), strict=True
    ):
        assert np.allclose(got, want, rtol=1e-12)


def as_tuple(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_a_row_scale_rides_in_the_epilogue() -> None:
    before, after = (split(graph) for graph in (norm_swiglu.graph, hoist_scales(norm_swiglu.graph)))
    (left,) = before.lefts
    assert [n.op.name for n in left.body] == ["mul", "mul"]
    assert [n.op.name for n in left.rows] == ["rsqrt"]
    (left,) = after.lefts
    assert [n.op.name for n in left.body] == ["mul"], "x * gain is left, once for both products"
    assert (left.rows, left.dtype) == ((), bf16)
    assert [n.op.name for n in after.epilogue] == ["mul", "silu", "mul", "mul"]
    assert [s.node.op.name for s in after.statistics] == ["sum"]
    assert [n.op.name for n in after.row_body] == ["div", "add", "rsqrt"]


def test_scales_of_rows_columns_and_all_leave_plain_factors() -> None:
    found = split(hoist_scales(scaled.graph))
    (product,) = found.products
    assert product.left.operand
    assert product.right.operand
    assert (product.left.operand.name, product.right.operand.name) == ("x", "w")
    assert [n.op.name for n in found.epilogue] == ["tanh", "mul", "mul", "mul", "div"]
    assert [t.name for t in found.inputs] == ["row", "col", "a"]


def test_a_scale_that_may_be_infinite_stays_where_it_is() -> None:
    """inf * x @ w is NaN where signs differ, and the product times inf is none; 1 / exp(row) may be infinite, too."""
    (product,) = split(hoist_scales(simplify(unbounded.graph))).products
    assert [n.op.name for n in product.left.body] == ["mul", "mul", "div"], "0.5 alone has moved"


def test_factors_say_how_they_lie() -> None:
    (product,) = split(turned.graph).products
    assert (product.left.transposed, product.right.transposed) == (True, False)
    (product,) = split(gram.graph).products
    assert product.left.operand is product.right.operand
    assert (product.left.transposed, product.right.transposed) == (False, True)
    assert [p.width for p in split(qkv.graph).products] == [N, L, L]
    assert len(split(qkv.graph).lefts) == 1
    assert [t.name for t in split(qkv.graph).outputs(L)] == ["out1", "out2"]


def test_scales_of_another_type_leave_the_factors_theirs() -> None:
    assert set(scaled.graph.factor_types.values()) == {bf16}

    @chain(M=6, N=10, K=7)
    def mixed(x: bf16[M, K], gain: f32[K], w: bf16[K, N]) -> bf16[M, N]:
        return F.rmsnorm(x, gain) @ w

    assert set(mixed.graph.factor_types.values()) == {bf16}
    assert set(hoist_scales(mixed.graph).factor_types.values()) == {bf16}

    @chain(M=6, N=10, K=7)
    def cast(x: f32[M, K], w: f16[K, N]) -> f16[M, N]:
        return F.cast(x, f16) @ w

    assert set(cast.graph.factor_types.values()) == {f16}


# ---------------------------------------------------------------- what is refused


def spec(function: Callable[..., object], **annotations: TensorType) -> Chain:
    function.__name__, function.__annotations__ = "product", annotations
    sizes = {d.name: 8 for t in annotations.values() for d in t.shape if isinstance(d, Dim)}
    return chain(**sizes)(function)


WRONG = {
    "inner sizes": (
        lambda x, w: x @ w, {"x": f16[M, K], "w": f16[N, K]},
        r"inner sizes differ: f16\[M, K\] @ f16\[N, K\]\n"
        r"  the left operand's last dim is K, the right operand's first dim is N\n  did you mean `x @ w.T`\?",
    ),
    "the left one": (lambda x, w: x @ w, {"x": f16[K, M], "w": f16[K, N]}, r"did you mean `x.T @ w`\?"),
    "one transposed too many": (lambda x, w: x @ w.T, {"x": f16[M, K], "w": f16[K, N]}, r"did you mean `x @ w`\?"),
    "computed": (lambda x, w: F.relu(x) @ w, {"x": f16[M, K], "w": f16[N, K]}, r"did you mean `... @ w.T`\?"),
    "f32": (lambda x, w: x @ w, {"x": f32[M, K], "w": f32[K, N]}, 'only by way of tf32.*\n.*precision="tf32"'),
    "types": (lambda x, w: x @ w, {"x": f16[M, K], "w": bf16[K, N]}, r"different types\n.*F.cast\(x, bf16\)"),
    "types, one of them f32": (
        lambda x, w: F.matmul(x, w, precision="tf32"), {"x": bf16[M, K], "w": f32[K, N]},
        r"bf16\[M, K\] @ f32\[K, N\]: the factors have different types\n.*F.cast\(x, bf16\)",
    ),
    "integers": (lambda x, w: x @ w, {"x": i32[M, K], "w": bf16[K, N]}, "found i32 where a factor of floats, of i8"),
    "a number": (lambda x, w: (x + w) @ 2.0, {"x": f16[M, N], "w": f16[M, N]}, "found a scalar where a matrix"),
    "three axes": (lambda x, w: x @ w.T, {"x": f16[M, K], "w": f16[B, N, K]}, r"write .mT"),
    "batches": (lambda x, w: x @ w, {"x": f16[B, M, K], "w": f16[L, K, N]}, "leading axes .* do not broadcast"),
    "precision": (
        lambda x, w: F.matmul(x, w, precision="f64"), {"x": f16[M, K], "w": f16[K, N]}, "precision='f64'; it is None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_product_is_a_sentence(name: str) -> None:
    function, operands, said = WRONG[name]
    with pytest.raises(SpecError, match=said):
        spec(function, **operands, **{"return": f16[M, N]})


def test_another_storage_type_is_checked_too() -> None:
    assert bias_gelu.with_dtype(f16).graph.factor_types
    with pytest.raises(SpecError, match="only by way of tf32"):
        bias_gelu.with_dtype(f32)


def test_what_one_kernel_cannot_hold_is_said() -> None:
    x, w, v = ("x", bf16[M, K]), ("w", bf16[K, N]), ("v", bf16[N, L])
    chained = spec(lambda x, w, v: x @ w @ v, **dict((x, w, v)), **{"return": bf16[M, L]})
    with pytest.raises(Unsplittable, match="takes what another one gives"):
        split(chained.graph)
    reduced = spec(lambda x, w: F.softmax(x @ w), **dict((x, w)), **{"return": bf16[M, N]})
    with pytest.raises(Unsplittable, match=r"softmax at .* reduces rows of a product"):
        split(reduced.graph)
    with pytest.raises(
        NoPlan,
        match=r"on cuda:h200\n  gemm: softmax at .* reduces rows of a product.*\n    write .*\n  `fusegen explain",
    ):
        plan(reduced.graph, H200)
    refusals = {r.rule: r.reason for r in candidates(reduced.graph, H200).refusals}
    assert "matmul at" in refusals["rowwise"]
    assert "multiplies matrices; rowwise has no products" in refusals["rowwise"]
    beside = spec(lambda x, w, r: x @ w + F.sum(r), **dict((x, w, ("r", f32[M, N]))), **{"return": bf16[M, N]})
    with pytest.raises(Unsplittable, match=r"sum at .* reduces rows of N, .* the rows of K that it multiplies"):
        split(beside.graph)
