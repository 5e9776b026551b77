"""Sums over groups of K on Hopper's tensor cores: every tile, whatever the ends are, and kernels that are broken."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import Chain, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.planner import candidates
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.rewrites import simplify
from fusegen.runtime import Kernel
from fusegen.targets import H200
from fusegen.validation import validate
from tests.emitting.test_inner_groups import as_they_lie, by_definition
from tests.emitting.test_wgmma import kernel_of, plans
from tests.specs import SHIPPED
from tests.tools import needs_check

pytestmark = [pytest.mark.usefixtures("emulated_only"), needs_check]

T, M, N, L, E = dims("T M N L E")
FEW = replace(H200, sms=2)  # whose blocks take several tiles, of one group and of others


@chain(T=300, M=264, N=136, E=4)
def weights(x: bf16[T, M], dy: bf16[T, N], ends: i32[E]) -> bf16[E, M, N]:
    return F.grouped_matmul(x.mT, dy, ends)


@chain(T=300, M=264, N=136, E=4)
def scaled(
    x: f16[T, M], dy: f16[T, N], ends: i32[E], old: f32[E, M, N], scale: f32
) -> tuple[f32[E, M, N], f16[E, M, N]]:
    """Added to what was there: of an empty group that alone."""
    new = old + scale * F.grouped_matmul(x.mT, dy, ends)
    return new, F.relu(new)


@chain(T=300, M=264, N=136, L=72, E=4)
def side_by_side(
    x: bf16[T, M], dy: bf16[T, N], dz: bf16[T, L], ends: i32[E]
) -> tuple[f32[E, M, N], bf16[E, M, L]]:  # fmt: skip
    """Of two widths."""
    return F.grouped_matmul(x.mT, dy, ends), F.grouped_matmul(x.mT, dz, ends)


@chain(T=300, M=136, N=136, E=4)
def product_of_two(x: bf16[T, M], dy: bf16[T, N], dz: bf16[T, N], ends: i32[E]) -> bf16[E, M, N]:
    """Both in one tile."""
    return F.grouped_matmul(x.mT, dy, ends) * F.grouped_matmul(x.mT, dz, ends)


CHAINS = (weights, scaled, side_by_side, product_of_two)
SCHEDULES = [("pingpong", 1), ("pingpong", 2), ("cooperative", 1), ("cooperative", 2)]


def need(spec: Chain, schedule: str, cluster: int) -> WgmmaPlan:
    of = (schedule, cluster)
    return next(p for p in plans(simplify(spec.graph), target=FEW) if (p.tile.schedule, p.tile.cluster) == of)


def factors(rng: np.random.Generator, rows: int, *widths: int) -> list[np.ndarray]:
    """Of small whole numbers, whose sums are exact."""
    return [rng.integers(-2, 3, (rows, width)).astype(bf16.numpy) for width in widths]


@pytest.mark.by_values("spec", "of")
@pytest.mark.parametrize("of", SCHEDULES, ids=str)
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_every_chain_is_right(spec: Chain, of: tuple[str, int]) -> None:
    if spec is product_of_two and of == ("pingpong", 2):
        return  # a block would bring half a line of each right factor
    report = validate(kernel_of(need(spec, *of)), cases=("normal", "rows", "malice"))
    assert report.ok, str(report)[:2000]


def test_every_tile_is_right() -> None:
    """Of as many rows as there are, and of fewer; on two SMs, and where tiles are few for all."""
    seen = set()
    for target, sizes in (FEW, {"M": 264}), (H200, {"M": 264}), (H200, {"M": 72}):
        for plan in plans(weights.at(**sizes).graph, target=target):
            if (tile := replace(plan.tile, group=8)) in seen:
                continue
            seen.add(tile)
            report = validate(kernel_of(plan), cases=("normal",))
            assert report.ok, f"{plan.configuration}: {report}"[:2000]
    assert len(seen) >= 8
    assert min(tile.rows for tile in seen) < 128


@cache
def made(schedule: str, cluster: int) -> Kernel:
    return kernel_of(need(weights, schedule, cluster))


@pytest.mark.parametrize("of", SCHEDULES, ids=str)
def test_of_other_groups_nothing_is_added(of: tuple[str, int]) -> None:
    """NaN and infinity in all rows but a group's own, whether it ends with a slice, before or behind, or has no row."""
    lengths = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
    for i in range(0, len(lengths) - 3, 4):
        counts = np.array(lengths[i : i + 4])
        rows = int(counts.sum()) + 5  # behind all groups
        ends = counts.cumsum().astype(np.int32)
        x, dy = factors(np.random.default_rng(i), rows, 264, 136)
        want = by_definition(x, dy, ends).astype(bf16.numpy)
        assert np.array_equal(made(*of)(x, dy, ends), want)
        for group, (end, count) in enumerate(zip(ends, counts, strict=True)):
            others = np.ones(rows, bool)
            others[end - count : end] = False
            lost, infinite = x.copy(), dy.copy()
            lost[others], infinite[others] = np.nan, np.inf
            for left, right in (lost, infinite), (lost, dy), (x, infinite):
                assert np.array_equal(made(*of)(left, right, ends)[group], want[group]), (counts, group)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(data=st.data(), of=st.sampled_from(SCHEDULES))
def test_any_ends(of: tuple[str, int], data: st.DataObject) -> None:
    """Of any number of rows, by one kernel: empty groups and single rows, ends that descend, and those far beyond."""
    rows = data.draw(st.sampled_from([1, 63, 64, 65, 128, 500]) | st.integers(1, 500))
    near = st.integers(-2, rows + 2) | st.sampled_from([64, 128, 129])
    ends = data.draw(st.lists(near | st.sampled_from([-(2**31), 2**31 - 1]), min_size=4, max_size=4))
    ends = sorted(ends) if data.draw(st.booleans()) else ends
    x, dy = factors(np.random.default_rng(data.draw(st.integers(0, 99))), rows, 264, 136)
    x[max(0, min(max(ends), rows)) :] = np.nan  # what is of no group is read by none
    want = by_definition(x, dy, np.array(ends, np.int64)).astype(bf16.numpy)
    assert np.array_equal(made(*of)(x, dy, np.array(ends, np.int32)), want)


@pytest.mark.parametrize("of", SCHEDULES, ids=str)
def test_a_groups_sum_has_the_same_bits_wherever_it_lies(of: tuple[str, int]) -> None:
    """And whatever the others have, and however many there are."""
    rng = np.random.default_rng(4)
    x, dy = (rng.standard_normal((500, width)).astype(bf16.numpy) for width in (264, 136))
    among = made(*of)(x, dy, np.array([131, 131, 407, 500], np.int32))
    alone = made(*of)(x[131:407], dy[131:407], np.array([0, 0, 276, 276], np.int32))
    first = made(*of)(x[131:], -dy[131:], np.array([276, 277, 277, 300], np.int32))
    assert np.array_equal(among[2].view(np.uint16), alone[2].view(np.uint16))
    assert np.array_equal(among[2].view(np.uint16), (-first[0]).view(np.uint16))


@pytest.mark.parametrize("groups", [33, 64, 257])
def test_lanes_find_where_any_group_begins(groups: int) -> None:
    plan = need(weights.at(M=64, N=64, E=groups), "pingpong", 1)
    rng = np.random.default_rng(groups)
    x, dy = factors(rng, 300, 64, 64)
    for ends in (np.sort(rng.integers(0, 301, groups)), rng.integers(-9, 340, groups)):
        want = by_definition(x, dy, ends).astype(bf16.numpy)
        assert np.array_equal(kernel_of(plan)(x, dy, ends.astype(np.int32)), want)


# ---------------------------------------------------------------- kernels that are broken

LEFT = "for (int i = 0; i < 2; ++i) zeros[(stage * left_bytes"
RIGHT = "zeros[(right_at + stage * right_bytes"
BROKEN = {
    "nothing is cleared": ("if (line < (depth", "if (false && line < (depth"),
    "the left factor is not cleared": (LEFT, LEFT.replace("i < 2", "i < 0")),
    "the right factor is not cleared": (RIGHT, f"if (false) {RIGHT}"),
    "the first line behind is not cleared": ("line = depth + ", "line = depth + 1 + "),
    "the group's last line is cleared": ("line = depth + ", "line = depth - 1 + "),
    "one line less is cleared": ("if (line < (depth + 15)", "if (line + 1 < (depth + 15)"),
    "another stage is cleared": ("shared + line * line_bytes", "shared + (stage > 0 ? -1 : 1) * line * line_bytes"),
    "products begin before all threads have cleared": ('asm volatile("bar.sync', '// ("bar.sync'),
    "what is cleared is not told to wgmma": (
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma', "// wgmma"
    ),
    "the last slice is left out": ("if (depth > 0)", "if (depth > 64)"),
    "the last slice ends with its first instruction": ("k * 16 >= depth", "k >= 1"),
    "short groups go on from the sums before": ("(at.full_k / tile_k | k) != 0", "true"),
    "long groups begin anew": ("(at.full_k / tile_k | k) != 0", "k != 0"),
    "groups that begin at 0": ("at.k_begin = summed.begin", "at.k_begin = 0"),
    "all rows in each group": ("summed.end - summed.begin, 0", "static_cast<int>(total_k) - summed.begin, 0"),
    "ends beyond the rows": ("own < most ? own : most", "own"),
    "the group before alone is seen": ("s = threadIdx.x % 32; s < number", "s = number - 1; s < number && s >= 0"),
    "empty groups have the sums before": ("at.steps > 0 ? sums", "true ? sums"),
    "slices are rounded down": ("(at.full_k + tile_k - 1) / tile_k", "at.full_k / tile_k"),
}  # fmt: skip
OF_TURNS = {
    "the other consumer's tile has as many slices": ("stage += place_of(tile,", "stage += place_of(tile - tile,"),
    "ends that descend": ("own < begin ? begin :", ""),  # slices below 0 pass by
}
SHARED = {"empty groups give a place back": ("if (at.steps > 0 && ", "if (")}


@pytest.mark.parametrize("of", [("pingpong", 1), ("cooperative", 1)], ids=str)
@pytest.mark.parametrize("what", [*BROKEN, *OF_TURNS, *SHARED])
def test_what_is_broken_is_caught(what: str, of: tuple[str, int]) -> None:
    found = BROKEN | (OF_TURNS if of[0] == "pingpong" else SHARED)
    if what not in found:
        return  # wrong in the other one
    old, new = found[what]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(need(weights, *of), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, cases=("normal", "rows", "malice")).ok


# ---------------------------------------------------------------- what is planned

# us on an H200: sizes, ping-pong in 128 x 128, cooperative in 128 x 256, the latter in clusters of two (wgmma_cost.py)
MEASURED = (
    ({"T": 16384, "N": 2048, "K": 4096, "E": 16}, 465.8, 400.3, 395.9),
    ({"T": 8192, "N": 4096, "K": 7168, "E": 8}, 858.8, 772.1, 769.3),
    ({"T": 65536, "N": 2048, "K": 2048, "E": 64}, 910.0, 882.9, 874.2),
)
WRITTEN = {"T": 4096, "N": 1024, "K": 2048, "E": 64}  # which takes as long as its results take to be written


@pytest.mark.parametrize(("sizes", "turns", "shared", "clusters"), MEASURED, ids=["16", "8", "64"])
def test_costs_are_those_measured(sizes: dict[str, int], turns: float, shared: float, clusters: float) -> None:
    found = candidates(SHIPPED["grouped_weight_grad"].at(**sizes).graph, H200).need()
    said = {plan.configuration: plan.cost.time_us for plan in found}
    assert found[0].configuration == "wgmma cooperative 128x256 4 cluster=2"
    assert said["wgmma pingpong 128x128 6"] == pytest.approx(turns, rel=0.06)
    assert said["wgmma cooperative 128x256 4"] == pytest.approx(shared, rel=0.02)
    assert said["wgmma cooperative 128x256 4 cluster=2"] == pytest.approx(clusters, rel=0.02)


def test_few_tokens_of_each_group_are_a_matter_of_writing() -> None:
    found = candidates(SHIPPED["grouped_weight_grad"].at(**WRITTEN).graph, H200).need()
    assert found[0].configuration.startswith("wgmma pingpong 128x128 6")
    assert found[0].cost.time_us == pytest.approx(93.0, rel=0.07)


def test_what_lies_along_what_is_summed_over_is_left_to_mma_sync() -> None:
    """Groups of it begin anywhere, and tensor copies at a multiple of 16 bytes."""
    with pytest.raises(NoMatch, match="lies along what is summed over, and groups of that begin anywhere"):
        plans(as_they_lie.graph)
    turned = Layout(transposed=frozenset({"dy"}))
    with pytest.raises(NoMatch, match="dy lies along what is summed over"):
        plans(weights.graph, turned)
    assert candidates(weights.at(T=9000, M=1024, N=1024).graph, H200).need()[0].rule == "wgmma"
    assert candidates(weights.at(T=9000, M=1024, N=1024).graph, H200, turned).need()[0].rule == "gemm"
    report = validate(made("pingpong", 1), cases=("layout",))
    assert report.ok, str(report)[:2000]
