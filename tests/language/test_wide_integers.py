"""Whole numbers of 64 bits, which arrays hold: read as the nearest i32, computed with as i32, and written whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f32, i32, i64
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import ArgumentError, MissingError, SpecError
from fusegen.language.spec import Chain
from fusegen.planner import plan
from fusegen.runtime.arrays import view
from fusegen.runtime.cache import compiled
from fusegen.targets import H200, Target, target
from fusegen.validation import validate

M, N, V = dims("M N V")
BEYOND = np.array([2**32, 2**32 + 3, -(2**32) + 3, 2**40, -(2**63), 2**63 - 1, 2**31, -(2**31) - 1])
"""What no i32 is: cut to its low 32 bits, some would be small numbers."""


@chain(M=24, N=37)
def computed(x: i64[M, N], y: i32[M, N]) -> tuple[i64[M, N], i64[M], i32[M, N], f32[M, N]]:
    """Beside each other, in rows of a length that no vector divides."""
    return x + y, F.sum(x)[..., 0], F.minimum(x, 7), x * 0.5


@chain(M=24, N=64)
def chosen(x: f32[M, N]) -> tuple[i64[M], i64[M, 4]]:
    """Columns as torch has them."""
    _, columns = F.topk(x, 4)
    return columns[..., 0], columns


@chain(V=20, M=24, N=64)
def looked_up(table: bf16[V, N], ids: i64[M]) -> bf16[M, N]:
    return F.gather(table, ids)


@chain(M=24)
def moved_on(positions: i64[M]) -> i64[M]:
    return positions + 1


@chain(M=24, N=64)
def running(x: i64[M, N]) -> i64[M, N]:
    return F.cumsum(x)


ALL = {spec.name: spec for spec in (computed, chosen, looked_up, moved_on, running)}


def clipped(x: Any) -> Any:
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


def made(spec: Chain, where: str = "cuda:h200") -> Any:
    return fusegen.compile(spec, target=where, on="emulator", validate=False)


def numbers(*shape: int) -> Any:
    rng = np.random.default_rng(0)
    found = rng.integers(-20, 20, shape)
    found.reshape(-1)[: len(BEYOND)] = BEYOND
    return rng.permutation(found.reshape(-1)).reshape(shape)


@pytest.mark.parametrize("where", ["cuda:h200", "hip:mi300x"])
def test_what_is_beyond_i32_is_read_as_the_nearest_one(where: str) -> None:
    x, y = numbers(24, 37), np.ones((24, 37), np.int32)
    total, row, least, half = made(computed, where)(x, y)
    with np.errstate(over="ignore"):
        assert np.array_equal(total, (clipped(x) + y).astype(np.int64))
        assert np.array_equal(row, clipped(x).sum(-1, dtype=np.int32).astype(np.int64))
    assert total.dtype == row.dtype == np.int64
    assert np.array_equal(least, np.minimum(clipped(x), 7))
    np.testing.assert_allclose(half, clipped(x) * 0.5)


@pytest.mark.parametrize("where", ["cuda:h200", "hip:mi300x"])
def test_ids_beyond_i32_name_nothing(where: str) -> None:
    """Though the low 32 bits of some would name a row."""
    table = np.random.default_rng(0).standard_normal((20, 64)).astype(bf16.numpy)
    ids = np.concatenate([BEYOND, np.arange(-3, 13)])
    found = made(looked_up, where)(table, ids)
    wanted = np.array([table[i] if 0 <= i < 20 else np.zeros(64, bf16.numpy) for i in ids])
    assert np.array_equal(found, wanted)


def test_columns_and_positions_come_as_torch_has_them() -> None:
    x = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    best, columns = made(chosen)(x)
    assert best.dtype == columns.dtype == np.int64
    assert np.array_equal(columns, np.argsort(-x, -1)[:, :4])
    assert np.array_equal(best, columns[:, 0])
    assert np.array_equal(made(moved_on)(np.arange(24)), np.arange(1, 25))
    assert np.array_equal(made(running)(numbers(24, 64) % 5), (numbers(24, 64) % 5).cumsum(-1))


@pytest.mark.parametrize("where", ["cuda:h200", "hip:gfx90a"])
@pytest.mark.parametrize("name", ALL)
def test_validation_passes(name: str, where: str) -> None:
    report = validate(made(ALL[name], where))
    assert report.ok, report


@pytest.mark.parametrize("chosen_target", [H200, target("hip:mi300x")], ids=str)
@pytest.mark.parametrize("spec", [moved_on, running], ids=lambda spec: spec.name)
def test_compilers_take_the_kernels(spec: Chain, chosen_target: Target) -> None:
    try:
        assert compiled(render(plan(spec.graph, chosen_target))).code
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])


def test_arrays_of_64_bits_are_known() -> None:
    assert view(np.arange(3), "x").dtype == i64
    with pytest.raises(ArgumentError, match="ids holds i32, and looked_up takes i64"):
        made(looked_up)(np.zeros((20, 64), bf16.numpy), np.zeros(24, np.int32))


def refused(said: str, body: Callable[[], Any]) -> None:
    with pytest.raises(SpecError, match=said):
        body()


def test_refusals() -> None:
    def cast() -> None:
        @chain(M=4, N=16)
        def wrong(x: f32[M, N]) -> i64[M, N]:
            return F.cast(x, i64)

    def scalar() -> None:
        @chain(M=4, N=16)
        def wrong(x: f32[M, N], n: i64) -> f32[M, N]:
            return x + n

    def seed() -> None:
        @chain(M=4, N=16)
        def wrong(x: f32[M, N], seed: i64[1]) -> f32[M, N]:
            return F.dropout(x, 0.5, seed, 0)

    refused("i64 is for arrays, and values between ops are i32; cast to i32, and declare the output i64", cast)
    refused("is a run-time scalar of i64; scalars are f32, i32 or u32", scalar)
    refused("found a seed of i64, which is read as the nearest i32: large ones would be alike", seed)
