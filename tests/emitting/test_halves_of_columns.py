"""Tiles of 128 x 256 whose sums are promoted: halves of their columns, one after another, through one set of sums."""

from __future__ import annotations

import re
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest

from fusegen import Chain, chain, dims, f8e4m3, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator.errors import KernelFault
from fusegen.language.reference import reference
from fusegen.planner import candidates
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.targets import H200
from fusegen.validation import validate
from tests.emitting.test_narrow_products import by_rows, emulated, gated, powers, scaled, scaled_plans, turned
from tests.emitting.test_quantized_products import one_kernel
from tests.emitting.test_row_parts import built
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K = dims("M N K")


@chain(M=150, N=384, K=512)
def quantized(
    x: f8e4m3[M, K], sx: f32[M, K // 128], gate: f8e4m3[N, K], up: f8e4m3[N, K], s_gate: f32[N // 128, K // 128],
    s_up: f32[N // 128, K // 128],
) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:  # fmt: skip
    """Gate and up of 128 columns each, whose SwiGLU is quantized by as many."""
    h = F.dequantize(x, sx)
    made = F.silu(h @ F.dequantize(gate, s_gate).T) * (h @ F.dequantize(up, s_up).T)
    values, scale = F.quantize(made, f8e4m3, per="block", block=128)
    return values, scale


def in_halves(spec: Chain, cluster: int = 1) -> WgmmaPlan:
    """By tiles whose halves of columns go through one set of sums of a slice."""
    return next(p for p in scaled_plans(spec) if (p.tile.across, p.tile.cluster) == (2, cluster))


@needs_compiler
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("spec", [by_rows, turned, gated], ids=lambda spec: spec.name)
def test_halves_of_columns_are_summed_one_after_another(spec: Chain, cluster: int) -> None:
    """In a ring that a tile's slices fill, and in one that they don't."""
    for k in (512, 640):
        spec = spec.at(M=150, N=384, K=k)
        plan = in_halves(spec, cluster)
        assert (plan.tile.cols, plan.unrolled_slices) == (256, k == 512)
        operands = powers(spec, np.random.default_rng(5))
        assert np.array_equal(np.asarray(emulated(plan, render(plan).text)(*operands)), law(spec, operands))


@needs_compiler
@pytest.mark.parametrize(("k", "unrolled"), [(512, True), (528, False)])
def test_halves_of_columns_are_scaled_by_rows_and_channels(k: int, unrolled: bool) -> None:
    """Sums of a slice and of a tile, which are twice as many, are fenced by one function where loops are unrolled."""
    spec = scaled.at(M=150, N=264, K=k)
    plans = [p for p in candidates(spec.graph, H200).plans if isinstance(p, WgmmaPlan) and p.tile.across == 2]
    assert {p.fences_both for p in plans} == {unrolled}
    assert {p.tile.cluster for p in plans} == {1, 2}
    operands = powers(spec, np.random.default_rng(5))
    for plan in (next(p for p in plans if p.tile.cluster == cluster) for cluster in (1, 2)):
        assert np.array_equal(emulated(plan)(*operands), law(spec, operands).astype(ml_dtypes.bfloat16))


@needs_compiler
@pytest.mark.parametrize("cluster", ["", " cluster=2"])
def test_both_halves_of_a_group_are_quantized(cluster: str) -> None:
    report = validate(built(one_kernel(quantized, "cuda:h200", f"wgmma cooperative 128x256 4{cluster}")), quick=True)
    assert report.ok, str(report)[:2000]


def law(spec: Chain, operands: list[np.ndarray]) -> np.ndarray:
    return np.asarray(reference(spec.graph)(*operands)).astype(np.float32)


WRONG_COLUMNS = {
    "the other half's scales": (r"\* scale\[part\]", "* scale[1 - part]"),
    "the other half's sums": (r"sums\[0\]\[part \* 64 \+ j\]", "sums[0][(1 - part) * 64 + j]"),
    "the other half's columns": (r" \+ part \* \(part_cols", " + (1 - part) * (part_cols"),
    "the place of a slice is free behind its first half": (r"if \(part == 1 && ", "if (part == 0 && "),
}


@needs_compiler
@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_wrong_halves_of_columns_are_caught(name: str) -> None:
    spec = by_rows.at(M=140, N=512, K=1024)
    plan = in_halves(spec)
    operands = powers(spec, np.random.default_rng(5))
    broken, count = re.subn(*WRONG_COLUMNS[name], render(plan).text)
    assert count, name
    with suppress(KernelFault):  # a race
        assert not np.array_equal(np.asarray(emulated(plan, broken)(*operands)), law(spec, operands))
