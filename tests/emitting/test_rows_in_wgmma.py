"""Rows that an index names, which the threads of wgmma's producer copy: every schedule, and kernels that are broken."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f16, f32, i32, i64
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import KernelFault
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.runtime import Kernel
from fusegen.runtime.finding import find
from fusegen.targets import H200
from fusegen.validation import validate
from fusegen.validation.few_parts import no_variant
from tests.emitting.test_rows_in_products import embedded, gated, slots
from tests.emitting.test_wgmma import kernel_of, plans
from tests.grouped import by_definition
from tests.tools import needs_check

pytestmark = [pytest.mark.usefixtures("emulated_only"), needs_check]

T, V, N, M, K, E = dims("T V N M K E")
FEW = replace(H200, sms=2)  # whose blocks take several tiles
SIZES = {"T": 300, "V": 50, "N": 264, "K": 456, "E": 5}  # 8 slices, the last one filled up


@chain(T=150, V=40, N=128, K=144, E=3)
def narrow(x: f8e4m3[V, K], ids: i32[T, 1], w: f8e4m3[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """Pieces of 16 elements, and sums that are promoted."""
    return F.grouped_matmul(F.gather(x, ids), w.mT, ends)


@chain(T=150, V=40, N=128, K=136, E=3)
def wide(x: bf16[V, K], ids: i64[T, 1], other: i32[T, 1], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    """An index of 64 bits, and of two operands."""
    return F.grouped_matmul(F.gather(x, ids + other // 8), w.mT, ends)


@chain(T=150, V=40, N=128, K=136, M=96)
def side_by_side(x: f16[V, K], ids: i32[T, 1], w: f16[N, K], v: f16[M, K]) -> tuple[f16[T, N], f16[T, M]]:
    """Output groups of one left factor."""
    rows = F.gather(x, ids)
    return F.relu(rows @ w.T), rows @ v.T


def need(spec: Chain, schedule: str = "pingpong", cluster: int = 1, split_k: int = 1) -> WgmmaPlan:
    """On two SMs, where blocks go on from a tile to another one; on all of them where blocks share one."""
    found = plans(spec.graph, target=FEW if split_k == 1 else H200)
    of = (schedule, cluster, split_k)
    return next(p for p in found if (p.tile.schedule, p.tile.cluster, p.tile.split_k) == of)


# ---------------------------------------------------------------- kernels that are right


@pytest.mark.pairwise("spec", "schedule", "cluster")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("spec", [slots.at(**SIZES), gated, embedded, side_by_side], ids=lambda spec: spec.name)
def test_every_chain_is_right(spec: Chain, schedule: str, cluster: int) -> None:
    report = validate(kernel_of(need(spec, schedule, cluster)), cases=("normal", "rows", "malice"))
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("split_k", [2, 4])
def test_blocks_that_share_a_tile_find_rows_for_their_part_of_k(split_k: int) -> None:
    plan = need(embedded.at(T=200, K=1096), "cooperative", 1, split_k)
    report = validate(kernel_of(plan), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("k", [8, 64, 72, 128])
def test_few_slices_are_right(k: int) -> None:
    """Fewer than are on their way at a time, of several tiles."""
    report = validate(kernel_of(need(slots.at(T=300, K=k))), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("spec", [narrow, wide], ids=lambda spec: spec.name)
def test_other_types_are_right(spec: Chain) -> None:
    report = validate(kernel_of(need(spec, "cooperative")), quick=True)
    assert report.ok, str(report)[:2000]


def test_short_rings_are_right() -> None:
    plan = need(slots.at(**SIZES))
    plan = replace(plan, tile=replace(plan.tile, stages=3))
    assert validate(kernel_of(plan), quick=True).ok


def test_any_layout_is_right() -> None:
    assert validate(kernel_of(need(gated)), cases=("layout",)).ok


@cache
def large(schedule: str, check: bool) -> Kernel:
    source = render(need(slots.at(**SIZES), schedule))
    return Kernel(source, None, find(H200, "emulator", check=check), no_variant)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
def test_rows_are_those_that_the_index_names(schedule: str, check: bool) -> None:
    """Some twice, some never, some of none; of groups of any length, empty ones and a single row among them."""
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((50, 456), (5, 264, 456)))
    ids = rng.integers(-20, 120, (300, 1)).astype(np.int32)
    ids[:2, 0] = 2**31 - 1, -(2**31)
    known = (ids[:, 0] >= 0) & (ids[:, 0] // 2 < 50)
    rows = np.where(known[:, None], x[np.where(known, ids[:, 0] // 2, 0)].astype(float), 0.0)
    for ends in ([0, 40, 41, 290, 290], [300, 5, 7, -1, 300], [-5, 12, 12, 100, 2**31 - 1]):
        wanted = by_definition(rows, w.swapaxes(1, 2), np.array(ends))
        made = large(schedule, check)(x, ids, w, np.array(ends, np.int32))
        assert np.array_equal(made, wanted.astype(bf16.numpy))


# ---------------------------------------------------------------- kernels that are broken

BROKEN = {
    "wgmma may not see what was copied": (
        'wait_at(full + 8 * stage, parity);\n        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
        "wait_at(full + 8 * stage, parity);",
    ),
    "wgmma may not see what comes behind the fence": (
        'wait_at(full + 8 * stage, parity);\n        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n        wait_at(full + 8 * stage, parity);',
    ),
    "a warp does not tell": ("arrive_with_copies(arrived);", "if (m >= 4) arrive_with_copies(arrived);"),
    "three warps are waited for": ("start_barrier(full + 8 * stage, 129);", "start_barrier(full + 8 * stage, 97);"),
    "rows are told of before they are there": ("arrive_with_copies(arrived);", "arrive_at(arrived);"),
    "rows of another slice": ("arrive_with_copies(arrived);", "arrive_with_copies(full + 8 * (stages - 1 - stage));"),
    "places are taken before they are free": ("wait_at(empty + 8 * stage, parity);\n        if", "if"),
    "the row beside": ("inside ? ids_ahead[v] : 0", "inside ? ids_ahead[v ^ 1] : 0"),
    "indices of the same tile again": ("look_ahead(tile + gridDim.x)", "look_ahead(tile)"),
    "pieces lie as they are not swizzled": ("threadIdx.x % 8 ^ m % 8", "threadIdx.x % 8 ^ m % 4"),
    "pieces of one line lie in the next": ("v * (16 * line_bytes)", "v * (15 * line_bytes)"),
    "no test for rows below 0": ("x_found[v] >= 0", "x_found[v] != -1"),
    "no test for rows behind the last": (" && floor_div < x_count", ""),
    "row 0 for one that is not there": ("x_found[v] >= 0 && k_at", "k_at"),
    "indices behind the last": ("x_row < ahead.segment_end", "x_row < (1 << 30)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_caught(what: str) -> None:
    old, new = BROKEN[what]

    def edit(text: str) -> str:
        first = text.index("setmaxnreg.dec") if "start_barrier" not in old else 0
        assert old in text[first:]
        return text[:first] + text[first:].replace(old, new)

    kernel = kernel_of(need(slots.at(**SIZES)), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, cases=("normal", "rows", "malice")).ok


def test_nothing_behind_a_row_is_read() -> None:
    """A slice reaches beyond K, where it is zeros; the last row has nothing behind it."""
    plan, rng = need(slots.at(**SIZES)), np.random.default_rng(1)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((50, 456), (5, 264, 456)))
    given = x, np.full((300, 1), 99, np.int32), w, np.full(5, 300, np.int32)
    assert np.isfinite(kernel_of(plan)(*given).astype(float)).all()
    with pytest.raises(KernelFault, match="x"):
        kernel_of(plan, lambda text: text.replace(" && k_at < 456 ? 16", " ? 16"))(*given)


# ---------------------------------------------------------------- what is planned


@chain(T=64, V=48, N=96, K=64)
def rounded(x: f32[V, K], ids: i32[T], w: f32[N, K]) -> f32[T, N]:
    return F.matmul(F.gather(x, ids), w.T, precision="tf32")


def test_what_wgmma_leaves_to_mma_sync() -> None:
    with pytest.raises(NoMatch, match=r"names the left factor's rows at .*, of f32; tensor copies alone round that"):
        plans(rounded.graph)
    with pytest.raises(NoMatch, match="x has an address or a stride that is no multiple of 16 bytes"):
        plans(slots.graph, Layout(unaligned=frozenset({"x"})))


def test_a_layers_tokens_are_not_copied() -> None:
    """What costs say: the products' kernel finds them, and no kernel writes them first."""
    plan: Any = fusegen.plan(slots.at(T=16384, V=4096, N=2048, K=2048, E=64), H200)
    assert plan.rule == "wgmma"
