"""Masks of a row's largest elements: kernels against plain numpy, their refusals, and the share that is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import b8, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.errors import NoPlan, SpecError
from fusegen.language.spec import Chain
from fusegen.planner import candidates, plan
from fusegen.runtime import Kernel
from fusegen.targets import H200
from fusegen.validation import validate
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N = dims("M N")
NONE = -float("inf")
Array = np.ndarray[Any, np.dtype[Any]]


@chain(M=6, N=50)
def by_sum(p: f32[M, N], limit: f32[M, 1]) -> tuple[b8[M, N], b8[M, N], f32[M, N]]:
    """Each row's own limit, a number, and what is made of the mask."""
    keep = F.top_p(p, limit)
    return keep, F.top_p(p, 0.5), F.where(keep, p, 0.0) / F.sum(F.where(keep, p, 0.0))


@chain(M=6, N=50)
def by_count(x: bf16[M, N], k: i32[M, 1], most: i32) -> tuple[b8[M, N], b8[M, N], bf16[M, N]]:
    return F.top_k(x, k), F.top_k(x, most), F.where(F.top_k(x, 3), x, NONE)


@chain(M=6, N=50)
def by_share(p: f32[M, N], share: f32) -> b8[M, N]:
    return F.min_p(p, share)


@chain(M=6, N=50)
def sampled(x: f32[M, N], k: i32[M, 1], p: f32) -> tuple[b8[M, N], b8[M, N]]:
    """One behind the other."""
    z = F.where(F.top_k(x, k), x, NONE)
    q = F.softmax(z)
    return F.top_p(q, p), F.min_p(q, 0.1)


SPECS = {spec.name: spec for spec in (by_sum, by_count, by_share, sampled)}


def summing_to(p: Array, limit: float) -> Array:
    """One element at a time, as no vectorized text is written."""
    return np.array([one > 0 and p[p > one].sum(dtype=np.float64) < limit for one in p])


def in_number(x: Array, k: int) -> Array:
    return np.array([one > NONE and int((x > one).sum()) < k for one in np.asarray(x, np.float64)])


def made(spec: Chain, where: str = "cuda:h200") -> Any:
    return fusegen.compile(spec, target=where, on="emulator", validate=False)


def rows(seed: int, *special: Array) -> Array:
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((6, 50))
    for place, row in enumerate(special):
        found[place] = row
    return found


@pytest.mark.parametrize("where", ["cuda:h200", "hip:mi300x"])
def test_the_largest_that_sum_up_to_a_limit(where: str) -> None:
    """Numbers whose sums are exact: ties, zeros, negative ones, NaN, and limits from nothing to more than all."""
    rng = np.random.default_rng(0)
    p = rng.integers(-2, 9, (6, 50)).astype(np.float32) / 64
    p[1] = 1 / 64
    p[2, ::3] = np.nan
    p[3] = 0.0
    limit = np.array([0.5, 0.3, 1.0, 0.5, 0.0, 99.0], np.float32)[:, None]
    keep, half, shares = made(by_sum, where)(p, limit)
    for row, line in enumerate(p):
        assert np.array_equal(keep[row], summing_to(line, limit[row, 0])), row
        assert np.array_equal(half[row], summing_to(line, 0.5)), row
    for row in (0, 1, 5):
        own = np.where(keep[row], p[row], 0.0)
        np.testing.assert_allclose(shares[row], own / own.sum(), rtol=1e-6)


@pytest.mark.parametrize("where", ["cuda:h200", "hip:gfx90a"])
def test_the_largest_in_number(where: str) -> None:
    x = np.random.default_rng(1).integers(-9, 9, (6, 50)).astype(bf16.numpy)
    x[1] = 0.0
    x[1, ::2] = -0.0
    x[2, :47] = NONE
    x[3, ::2] = np.nan
    x[4, :5] = np.inf
    k = np.array([7, 3, 9, 20, 2, 0], np.int32)[:, None]
    own, most, three = made(by_count, where)(x, k, 99)
    for row, line in enumerate(np.asarray(x, np.float64)):
        assert np.array_equal(own[row], in_number(line, k[row, 0])), row
        assert np.array_equal(most[row], line > NONE), row
        assert np.array_equal(three[row] > NONE, in_number(line, 3)), row


def test_what_is_a_share_of_the_largest() -> None:
    p = np.abs(rows(2)).astype(np.float32)
    assert np.array_equal(made(by_share)(p, 0.5), p >= p.max(-1, keepdims=True) * np.float32(0.5))


@pytest.mark.parametrize("cols", [1000, 40000])
def test_long_rows(cols: int) -> None:
    """A block's, and a cluster's."""
    x = np.random.default_rng(3).standard_normal((2, cols)).astype(np.float32)
    first, _ = made(sampled.at(N=cols))(x, np.array([[30], [cols]], np.int32), 0.7)
    for row, k in enumerate((30, cols)):
        z = np.where(in_number(x[row], k), np.float64(x[row]), NONE)
        p = np.exp(z - z.max())
        wanted = summing_to(p / p.sum(), 0.7)
        assert int((first[row] != wanted).sum()) <= 1  # the last one may be off by rounding
    assert ("cluster" in plan(sampled.at(N=cols).graph, H200).regime) is (cols > 32768)


@pytest.mark.parametrize("where", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("name", SPECS)
def test_validation_passes(name: str, where: str) -> None:
    report = validate(made(SPECS[name], where), quick=where != "cuda:h200")
    assert report.ok, report


BROKEN = {
    "the bit is left out of the number": (
        "number_in_order(bits | 1u << step)",
        "number_in_order(bits | 1u << step >> 1)",
    ),
    "one element too few": (">= to_f32", "> to_f32"),
    "the last bits are not looked at": ("step >= 0;", "step >= 17;"),
    "the least is left out": (">= least ? largest", "> least ? largest"),
    "partial sums share a place": ("step % 2 == 0 ? part[0] : part[1]", "part[0]"),
}


@pytest.mark.parametrize("models", BROKEN)
def test_validation_catches(models: str) -> None:
    kernel = made(by_count.at(N=2000))
    old, new = BROKEN[models]
    text = kernel.source.text.replace(old, new)
    assert text != kernel.source.text
    broken = replace(kernel.source, text=text)
    assert not validate(Kernel(broken, None, kernel.device, lambda _: (broken, None)), quick=True).ok


def test_the_sampler_draws_what_it_may() -> None:
    """By a sampler that is written out: the same noise, sorted probabilities, a loop."""
    spec = SHIPPED["top_p_sample"].at(V=300)
    rng = np.random.default_rng(4)
    x = (4 * rng.standard_normal((16, 300))).astype(bf16.numpy)
    heat = rng.uniform(0.5, 2, (16, 1)).astype(np.float32)
    k, p = rng.integers(1, 60, (16, 1)).astype(np.int32), rng.uniform(0.2, 1, (16, 1)).astype(np.float32)
    tokens = made(spec)(x, heat, k, p, np.array([3], np.int32), np.array([7], np.int32))
    assert tokens.dtype == np.int64
    for row in range(16):
        z = np.float64(x[row]) / heat[row]
        z = np.where(in_number(z, k[row, 0]), z, NONE)
        q = np.exp(z - z.max())
        assert summing_to(q / q.sum(), p[row, 0] + 1e-6)[tokens[row]]
    again = made(spec)(x, heat, k, p, np.array([3], np.int32), np.array([7], np.int32))
    other = made(spec)(x, heat, k, p, np.array([3], np.int32), np.array([8], np.int32))
    assert np.array_equal(tokens, again)
    assert not np.array_equal(tokens, other)


def refused(said: str, body: Callable[[], Any]) -> None:
    with pytest.raises((SpecError, NoPlan), match=said):
        body()


def test_refusals() -> None:
    def limit() -> None:
        @chain(M=4, N=16)
        def wrong(x: f32[M, N], limit: f32[M]) -> b8[M, N]:
            return F.top_p(x, limit)

    refused(r"found a limit of \[M\]; it is a number, a scalar or one value a row", limit)
    refused("the registers of a cluster of blocks hold at most", candidates(by_share_of_many(), H200).need)


def by_share_of_many() -> Any:
    @chain(M=4, N=2000000)
    def long(x: f32[M, N]) -> b8[M, N]:
        return F.top_p(x, 0.5)

    return long.graph
