"""Quotients by what a row shares: by its reciprocal, for every number that it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f8e4m3, f32, i8, i32
from fusegen import ops as F
from fusegen.language.spec import Chain
from fusegen.planner.rewrites import simplify
from fusegen.targets import A100, H200
from tests.tools import needs_compiler

M, N = dims("M N")
EXTREME = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3e-42, 2.0**-127 * 1.5, 2.0**-126, 2.0**-65 * 1.7, 2.0**-64,
           2.0**64, 2.0**65 * 1.3, 2.0**126, 2.0**127 * 1.9, 3.4e38, 1.0, -3.0, 0.1)  # fmt: skip


@chain(M=len(EXTREME), N=64)
def divided(x: f32[M, N], y: f32[M, 1]) -> f32[M, N]:
    return x / y


@needs_compiler
@pytest.mark.parametrize("target", ["cuda:h200", "hip:mi300x"])
def test_quotients_are_off_by_two_ulp_at_most(target: str) -> None:
    """Where y has no reciprocal, or one of few bits, too; and what is no number is what x / y is."""
    rng = np.random.default_rng(2)
    drawn = rng.standard_normal(64 - len(EXTREME)) * 10.0 ** rng.integers(-38, 38, 64 - len(EXTREME))
    y = np.array(EXTREME, np.float32)[:, None]
    x = np.broadcast_to(np.array([*EXTREME, *drawn], np.float32), (len(EXTREME), 64)).copy()
    got = fusegen.compile(divided, target, on="emulator")(x, y)
    with np.errstate(all="ignore"):
        wanted, exact = x / y, x.astype(np.float64) / y
        off = np.abs(got - exact) / np.spacing(np.abs(wanted))
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    assert np.array_equal(np.isinf(got), np.isinf(wanted))
    assert np.array_equal(np.signbit(got[wanted == 0]), np.signbit(wanted[wanted == 0]))
    assert off[np.isfinite(wanted)].max() < 2


def ops_of(spec: Chain) -> list[str]:
    """Of what is computed for each element."""
    return [n.op.name for n in simplify(spec.graph).nodes if n.shape[-1:] == spec.graph.shape[-1:]]


def traced(body: Callable[..., Any], out: Any, **how: Any) -> Chain:
    def spec(x, t):  # type: ignore[no-untyped-def]
        return body(x, t)

    spec.__annotations__ = {"x": bf16[M, N], "t": f32, "return": out}
    return chain(M=8, N=64, **how)(spec)


DIVIDES: dict[str, Callable[..., Any]] = {
    "a run-time scalar": lambda x, t: x / t,
    "a sum of the row": lambda x, t: x / F.sum(x) + t,
    "what is surely no extreme": lambda x, t: F.sqrt(t * t) + x / F.sqrt(F.clip(F.mean(F.square(x)), 1e-6, 1e6)),
    "a power of 2": lambda x, t: x / 4.0 + t,
}


@pytest.mark.parametrize("name", DIVIDES)
def test_rows_are_divided_by_products(name: str) -> None:
    assert "div" not in ops_of(traced(DIVIDES[name], f32[M, N]))


STAYS: dict[str, tuple[Callable[..., Any], Any]] = {
    "of elements": (lambda x, t: t / (x * x + 1.0), f32[M, N]),
    "rounded to a whole number": (lambda x, t: F.round(x / t), f32[M, N]),
    "clipped and rounded": (lambda x, t: F.cast(F.clip(F.round(x / t), -128, 127), i8), i8[M, N]),
    "stored in 8 bits": (lambda x, t: F.cast(F.clip(x / t, -448.0, 448.0), f8e4m3), f8e4m3[M, N]),
    "by a number": (lambda x, t: x / 3.0 + t, f32[M, N]),
    "cut off": (lambda x, t: F.cast(x / t, i32), i32[M, N]),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_rounded_is_divided(name: str) -> None:
    body, out = STAYS[name]
    assert "div" in ops_of(traced(body, out))


def test_what_is_rounded_as_torch_does_is_divided() -> None:
    assert "div" in ops_of(traced(lambda x, t: F.exp(x / t), f32[M, N], rounding="eager"))


@pytest.mark.parametrize("target", [H200, A100], ids=str)
def test_a_temperature_costs_little(target: Any) -> None:
    """Of long rows, which are computed for longer than they are read: as two exponentials, it cost a third more."""

    @chain(M=4096, N=128256)
    def by_quotient(x: bf16[M, N], t: f32) -> f32[M, 1]:
        return F.logsumexp(x / t)

    @chain(M=4096, N=128256)
    def by_product(x: bf16[M, N], t: f32) -> f32[M, 1]:
        return F.logsumexp(x * t)

    times = [fusegen.plan(spec, target, tuned=False).cost.time_us for spec in (by_quotient, by_product)]
    assert times[0] < 1.15 * times[1]


@needs_compiler
def test_a_column_of_quotients_has_the_bits_of_the_row() -> None:
    """So that a token is among those that are as likely as it is: its rank is 1 at least."""

    @chain(M=40, N=100)
    def rank(x: bf16[M, N], t: f32, token: i32[M]) -> tuple[i32[M, 1], i32[M, 1]]:
        z = x / t
        log_p = F.log_softmax(z)
        equal = F.sum(F.cast(z == F.take(z, token), i32))
        return F.sum(F.cast(log_p >= F.take(log_p, token), i32)), equal

    rng = np.random.default_rng(1)
    x, token = rng.standard_normal((40, 100)).astype(bf16.numpy), np.arange(40, dtype=np.int32)
    order, equal = fusegen.compile(rank, "cuda:h200", on="emulator")(x, np.float32(0.7), token)
    assert order.min() >= 1
    assert equal.min() >= 1
