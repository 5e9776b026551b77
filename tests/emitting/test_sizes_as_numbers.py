"""Sizes as numbers in a chain's body: of any axis, and what is computed of them, which may be 0 and less."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import chain, dims, f16, f32
from fusegen import ops as F
from fusegen.errors import ArgumentError
from fusegen.planner.ranges import at_least_one

M, S, T, K = dims("M S T K")
SIZES = {"M": 5, "S": 6, "T": 8, "K": 16}


def every_axis(x: f32[M, S, T]) -> f32[M, S, T]:
    return x * S + 1.0 / M


def softmax(x: f32[M, S, T]) -> f32[M, S, T]:
    return F.softmax(x / F.sqrt(S))


def mean_of_others(x: f32[M, T]) -> f32[T]:
    return F.sum(x, axis=0, keepdims=False) / (M - 1)


def row_sum(x: f32[M, T]) -> f32[M, 1]:
    return F.sum(x) * (M - T)


def best(x: f32[M, T]) -> f32[M, 4]:
    return F.topk(x * M, 4)[0]


def running(x: f32[M, T]) -> f32[M, T]:
    return F.cumsum(x) / M


def view(x: f32[M, S, T]) -> f32[M, T, S]:
    return F.rearrange(x * (S - T), "m s t -> m t s")


def exp(x: np.ndarray) -> Any:
    found = np.exp(x / math.sqrt(x.shape[1]))
    return found / found.sum(-1, keepdims=True)


LAWS: dict[Callable[..., Any], Callable[[np.ndarray], np.ndarray]] = {
    every_axis: lambda x: x * x.shape[1] + 1 / x.shape[0],
    softmax: exp,
    mean_of_others: lambda x: x.sum(0) / (x.shape[0] - 1),
    row_sum: lambda x: x.sum(1, keepdims=True) * (x.shape[0] - x.shape[1]),
    best: lambda x: -np.sort(-x * x.shape[0], 1)[:, :4],
    running: lambda x: x.cumsum(1) / x.shape[0],
    view: lambda x: (x * (x.shape[1] - x.shape[2])).transpose(0, 2, 1),
}


def at(function: Callable[..., Any], shape: tuple[Any, ...], **more: int) -> Any:
    return chain(**{str(dim): more.get(str(dim), SIZES[str(dim)]) for dim in shape})(function)


@pytest.mark.parametrize("target", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("function", LAWS, ids=lambda function: function.__name__)
def test_the_size_of_any_axis_is_a_number(function: Callable[..., Any], target: str) -> None:
    shape = (M, S, T) if function in (every_axis, softmax, view) else (M, T)
    kernel = fusegen.compile(at(function, shape), target=target, on="emulator")
    x = np.random.default_rng(0).standard_normal([SIZES[str(dim)] for dim in shape]).astype(np.float32)
    np.testing.assert_allclose(kernel(x), LAWS[function](x.astype(np.float64)), rtol=1e-5, atol=1e-5)


def test_it_is_compiled_in_and_a_call_with_another_one_is_refused() -> None:
    kernel = fusegen.compile(at(softmax, (M, S, T)), target="cuda:h200", on="emulator")
    x = np.random.default_rng(0).standard_normal((7, 6, 8)).astype(np.float32)
    np.testing.assert_allclose(kernel(x), exp(x.astype(np.float64)), rtol=1e-5, atol=1e-6)  # M is no number there
    with pytest.raises(ArgumentError, match="compiled for S=6, and x on axis 1 has 9"):
        kernel(np.zeros((5, 9, 8), np.float32))


def causal(x: f32[S, T]) -> f32[S, T]:
    """The last query sees the last key, whatever S and T are."""
    return F.softmax(F.where(F.col_index(x) <= F.row_index(x) + (T - S), x, -math.inf))


@pytest.mark.parametrize("keys", [9, 6, 4])
def test_a_difference_of_sizes_may_be_0_and_less(keys: int) -> None:
    kernel = fusegen.compile(at(causal, (S, T), T=keys), target="cuda:h200", on="emulator")
    x = np.random.default_rng(1).standard_normal((6, keys)).astype(np.float32)
    seen = np.arange(keys) <= np.arange(6)[:, None] + (keys - 6)
    some = seen.any(1)
    weights = np.where(seen, np.exp(x.astype(np.float64)), 0)[some]
    got = kernel(x)
    np.testing.assert_allclose(got[some], weights / weights.sum(1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert not got[~some].any()  # a row that sees nothing


def scaled_product(x: f16[M, K], w: f16[T, K]) -> f32[M, T]:
    return (x @ w.T) * (K - 2 * T) + 1.0 / M


def test_a_product_by_a_difference_that_is_0() -> None:
    kernel = fusegen.compile(at(scaled_product, (M, T, K)), target="cuda:h200", on="emulator")
    random = np.random.default_rng(2)
    x, w = (random.standard_normal((rows, 16)).astype(np.float16) for rows in (5, 8))
    np.testing.assert_allclose(kernel(x, w), np.full((5, 8), 1 / 5), rtol=1e-6)


def test_a_quotient_by_a_number_that_may_be_0_has_its_infinity() -> None:
    def by_difference(x: f32[S, T]) -> f32[S, T]:
        return F.abs(x) / (T - S)

    kernel = fusegen.compile(at(by_difference, (S, T), T=6), target="cuda:h200", on="emulator")
    assert np.isposinf(kernel(np.full((6, 6), 2, np.float32))).all()


def test_which_sizes_are_surely_at_least_1() -> None:
    assert all(map(at_least_one, (M, 3, 2 * M * K, M + K)))
    assert not any(map(at_least_one, (M - K, M // 2, 2 * M - 2)))
