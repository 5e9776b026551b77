"""Estimates next to what was measured, or to what memory takes at the least, of chains as they are written by users."""

from __future__ import annotations

import pytest

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.planner import plan
from fusegen.targets import A100, H200, MI300X, Target

(N,) = dims("N")


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=str)
def test_one_long_row_in_tiles_reads_nothing_twice(target: Target) -> None:
    """Stochastic rounding of 2^27 weights took 193 us on an H200, and was expected to take a quarter of a second: each
    tile was taken to read the whole of what all rows share, of which there is one here."""

    @chain(N=2**27)
    def rounded(x: f32[N], seed: i32, step: i32) -> bf16[N]:
        low = F.cast(F.uniform(x, seed, step) * 65536.0, i32)
        return F.bitcast((F.bitcast(x, i32) + low) & ~0xFFFF, f32)

    cost = plan(rounded.graph, target).cost
    assert cost.time_us < 2 * cost.floor_us
