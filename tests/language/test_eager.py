"""Eager rounding: where a chain rounds, and that its kernel has the bits of operators that run one after another.

numpy's own bf16 and f16 (ml_dtypes) compute each operator in f32 and round its result, as torch does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.language.eager import is_unfused, unrounded
from fusegen.language.graph import Graph
from fusegen.language.types import DType
from fusegen.planner import candidates
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.targets import H200, Target

pytestmark = pytest.mark.usefixtures("emulated_only")
M, N, K = dims("M N K")


@chain(M=7, N=300, rounding="eager")
def steps(x: bf16[M, N], bias: bf16[N], residual: bf16[M, N], scale: f32) -> bf16[M, N]:
    h = x + bias
    return F.relu(h * scale) * 1.703125 + residual - h


def rounds(graph: Graph) -> list[str]:
    """Behind which operators, and to what."""
    return [f"{n.operator} {n.op.name.removeprefix('round_')}" for n in graph.nodes if is_unfused(n)]


def numbers(*shape: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def by_steps(x: Any, bias: Any, residual: Any, scale: float) -> Any:
    number = x.dtype.type
    h = x + bias
    scaled = (h.astype(np.float32) * np.float32(scale)).astype(x.dtype)
    return np.maximum(scaled, number(0)) * number(1.703125) + residual - h


def test_a_kernel_has_the_bits_of_its_operators(target: Target) -> None:
    for dtype in (bf16, f16):
        kernel = fusegen.compile(steps.with_dtype(dtype), target, on="emulator")
        x, residual = numbers(7, 300, dtype=dtype.numpy), numbers(7, 300, dtype=dtype.numpy, seed=2)
        bias = numbers(300, dtype=dtype.numpy, seed=1)
        np.testing.assert_array_equal(kernel(x, bias, residual, 1.7), by_steps(x, bias, residual, 1.7))


def test_a_fused_chain_has_others() -> None:
    """Else the test above would show nothing."""
    x, bias, residual = numbers(7, 300), numbers(300, seed=1), numbers(7, 300, seed=2)
    fused = fusegen.compile(Chain(unrounded(steps.graph)), H200, on="emulator", validate=False)
    assert (fused(x, bias, residual, 1.7) != by_steps(x, bias, residual, 1.7)).any()


STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # of a chain, and of numpy
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "half": (lambda a, b: a * 0.5 + b, lambda a, b: a * a.dtype.type(0.5) + b),
    "larger": (lambda a, b: F.maximum(a, b) + a, lambda a, b: np.maximum(a, b) + a),
    "turned": (lambda a, b: F.flip(a * b, -1) - a, lambda a, b: (a * b)[..., ::-1] - a),
    "chosen": (lambda a, b: F.where(a > b, a - b, b), lambda a, b: np.where(a > b, a - b, b)),
    "size": (lambda a, b: F.abs(a - b), lambda a, b: np.abs(a - b)),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6), st.sampled_from([bf16, f16]))
@settings(max_examples=12)
def test_random_chains_have_the_bits_of_their_operators(drawn: list[str], dtype: DType) -> None:
    def spec(x: Any, y: Any) -> Any:
        for name in drawn:
            x, y = STEPS[name][0](x, y), x
        return x + y

    spec.__annotations__ = {"x": dtype[M, N], "y": dtype[M, N], "return": dtype[M, N]}
    kernel = fusegen.compile(chain(M=5, N=72, rounding="eager")(spec), H200, on="emulator", validate=False)
    x, y = numbers(5, 72, dtype=dtype.numpy), numbers(5, 72, dtype=dtype.numpy, seed=1)
    found = kernel(x, y)
    for name in drawn:
        x, y = STEPS[name][1](x, y), x
    np.testing.assert_array_equal(found, x + y)


def test_where_it_rounds() -> None:
    assert rounds(steps.graph) == ["add bf16", "mul bf16", "mul bf16", "add bf16"]  # relu is exact, the end is stored
    assert rounds(unrounded(steps.graph)) == []
    assert rounds(steps.with_dtype(f16).graph) == [line.replace("bf16", "f16") for line in rounds(steps.graph)]
    assert rounds(steps.with_dtype(f32).graph) == []
    assert rounds(pickle.loads(pickle.dumps(steps.graph))) == rounds(steps.graph)
    assert "h to bf16 behind add, as when it is stored" in candidates(steps.graph, H200).plans[0].rounding


def traced(body: Callable[..., Any], out: DType, **operands: Any) -> Graph:
    def spec(x: Any, y: Any) -> Any:
        return body(x, y)

    spec.__annotations__ = {**operands, "return": out[M, N]}
    return chain(M=3, N=70, rounding="eager")(spec).graph


@pytest.mark.parametrize(
    ("body", "kinds", "found"),
    [
        (lambda x, y: (x + y) * 2, (bf16, f32), []),
        (lambda x, y: (x + y) * 2, (bf16, f16), []),
        (lambda x, y: F.cast(x, f32) * 3 + y, (bf16, bf16), []),
        (lambda x, y: F.cast(x * 3, f32) + y, (bf16, bf16), ["mul bf16"]),
        (lambda x, y: F.cast(x * y, bf16) + 1, (f32, f32), ["add bf16"]),
        (lambda x, y: F.softmax(x) + y, (bf16, bf16), ["softmax bf16"]),
        (lambda x, y: F.where(x > y, x * y, 1.0) - F.max(x), (f16, f16), ["mul f16"]),
        (lambda x, y: F.maximum(x * y, 0.1) + F.maximum(x, 0.5), (f16, f16), ["mul f16", "maximum f16"]),
        (lambda x, y: F.rearrange(x + y, "m (t n) -> m (n t)", t=2) + 1, (f16, f16), ["add f16"]),
    ],
)
def test_types_are_torchs(body: Callable[..., Any], kinds: tuple[DType, DType], found: list[str]) -> None:
    graph = traced(body, bf16 if kinds[0] is bf16 else kinds[0], x=kinds[0][M, N], y=kinds[1][M, N])
    assert rounds(graph) == found


def test_composites_and_products_are_validated(target: Target) -> None:
    """Each is one operator, whose inside goes on in f32; the reference rounds where the kernel does."""

    @chain(M=20, N=96, K=64, rounding="eager")
    def spec(x: bf16[M, K], w: bf16[N, K], bias: bf16[N], gamma: bf16[N]) -> tuple[bf16[M, N], bf16[M, N]]:
        h = F.silu(x @ w.T + bias)
        return F.rmsnorm(h, gamma), h * 0.3

    assert rounds(spec.graph) == ["matmul bf16", "add bf16", "silu bf16"]
    fusegen.compile(spec, target, on="emulator")


def test_attention_is_one_kernel_all_the_same(target: Target) -> None:
    @chain(M=40, N=70, K=32, rounding="eager")
    def attention(q: bf16[M, K], k: bf16[N, K], v: bf16[N, K]) -> bf16[M, K]:
        return F.softmax(q @ k.T * K**-0.5) @ v

    assert rounds(attention.graph) == ["matmul bf16", "mul bf16", "softmax bf16"]
    kernel = fusegen.compile(attention, target, on="emulator")
    assert isinstance(kernel.plan, AttentionPlan)


def test_other_words_are_refused() -> None:
    with pytest.raises(SpecError, match="rounding='torch': it is 'fused' or 'eager', and no dim may be called so"):
        chain(M=3, rounding="torch")
    with pytest.raises(SpecError, match="rounding=4: it is 'fused' or 'eager'"):
        chain(rounding=4)
