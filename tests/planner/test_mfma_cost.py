"""What products by MFMA are planned to take: by the facts of a compute unit, each of which counts where it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusegen.language.types import bf16
from fusegen.planner.products.gemm import GemmTile
from fusegen.planner.products.mfma_cost import feed, fill_share, lds_cycles, mfma_us, slice_cycles, wave_cycles
from fusegen.planner.products.product_work import ProductWork
from fusegen.targets import MI300X, Target
from fusegen.targets.compute_unit import ComputeUnit, unit_of

UNIT = unit_of(MI300X)
assert UNIT is not None
LARGE = GemmTile(128, 128, 32, 2, 2, 2, bands=4)
SMALL = GemmTile(64, 64, 32, 2, 2, 2)
BYTES = 3 * 4096 * 4096 * 2


def work(tile: GemmTile = LARGE, **changes: Any) -> ProductWork:
    """Of x @ w.T at 4096 columns and K."""
    made = ProductWork(
        tile, MI300X.atoms_of("warp", bf16)[0], bf16, products=1, across=4096 // tile.cols, k=4096, along=True,
        prepared=False, statistics=0, evict_first=False, askew=1.0, narrow=1.0, elements=0, counted=0,
    )  # fmt: skip
    return replace(made, **changes)


def took(own: ProductWork, unit: ComputeUnit | None = UNIT, target: Target = MI300X, rows: int = 4096) -> float:
    assert unit is not None
    blocks = -(-rows // own.tile.rows) * own.across
    return mfma_us(target, unit, own, blocks, 2 if own.tile is LARGE else 3, BYTES)


def test_cycles_of_a_slice_are_those_that_are_counted() -> None:
    assert UNIT is not None
    assert wave_cycles(UNIT, work()) == (16 * 32, 16 * 4)
    # 16 KiB are stored, and each of 4 waves reads 64 rows and 64 columns of 32
    assert lds_cycles(UNIT, work()) == 16384 / 128 + 4 * 128 * 32 * 2 / 128
    assert feed(MI300X, UNIT, work(), 1024) == (UNIT.l2_bytes, UNIT.cache_latency)
    few = work(GemmTile(16, 16, 64, 2, 1, 1, slice_k=4, group=1))
    rate, latency = feed(MI300X, UNIT, few, 256)
    assert latency == UNIT.dram_latency
    assert rate == pytest.approx(UNIT.dram_bytes * 304 / 256 * 2 / (1 + 1 / 256), rel=1e-6)


def test_no_limit_of_a_slice_is_undercut() -> None:
    assert UNIT is not None
    for tile in (LARGE, SMALL):
        for held in (1, 2, 3):
            own = work(tile)
            cycles = slice_cycles(MI300X, UNIT, own, 1024, held)
            assert cycles >= held * wave_cycles(UNIT, own)[0]
            assert cycles >= held * lds_cycles(UNIT, own)
            assert cycles >= UNIT.cache_latency


def test_each_fact_counts_where_it_should() -> None:
    assert UNIT is not None
    base, small, row = took(work()), took(work(SMALL)), took(work(SMALL), rows=64)
    assert base < small
    assert took(work(), replace(UNIT, passes={16: 8, 32: 16})) > 1.7 * base
    assert took(work(SMALL), replace(UNIT, lds_read_bytes=64)) > 1.3 * small
    assert took(work(), replace(UNIT, lds_read_bytes=64)) < 1.3 * base
    assert took(work(SMALL), replace(UNIT, cache_ns=400.0)) > 1.1 * small
    assert took(work(SMALL), replace(UNIT, dram_ns=700.0), rows=64) > 1.5 * row
    assert took(work(prepared=True)) > 1.3 * base
    assert took(work(along=False)) > base
    slow = replace(MI300X, dram_gbs=MI300X.dram_gbs / 16)
    assert took(work(), unit_of(slow), slow) > 1.5 * base


def test_dies_fill_with_factors_of_their_own() -> None:
    """Eight dies take in more than one would, and neighbouring tiles less than a line of them."""
    assert fill_share(MI300X, work(), 2) > 1.5 * fill_share(replace(MI300X, dies=1), work(), 2)
    assert fill_share(MI300X, work(replace(LARGE, group=1)), 2) > 2 * fill_share(MI300X, work(), 2)
    assert UNIT is not None
    assert took(work(), replace(UNIT, cache_bytes=0.5)) > 1.5 * took(work())
