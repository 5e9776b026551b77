"""Grouped products on Hopper's tensor cores: every schedule, whatever the ends are, and kernels that are broken."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen import Chain, bf16, chain, dims, f8e4m3, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator.errors import KernelFault
from fusegen.errors import MissingError
from fusegen.exporting.collecting import argument_of
from fusegen.exporting.facts import Argument
from fusegen.pipeline import gate
from fusegen.planner import candidates
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Layout
from fusegen.planner.products import in_step as waiting
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.programs.lowering import lowered
from fusegen.runtime import Kernel
from fusegen.runtime.cache import compiled
from fusegen.runtime.gpu import Arguments
from fusegen.targets import H200
from fusegen.validation import validate
from tests import grouped
from tests.emitting.test_quantized_products import one_kernel
from tests.emitting.test_row_parts import built
from tests.emitting.test_wgmma import kernel_of, plans
from tests.specs import SHIPPED
from tests.tools import needs_check

pytestmark = [pytest.mark.usefixtures("emulated_only"), needs_check]

T, S, N, K, E = dims("T S N K E")
FEW = replace(H200, sms=2)  # whose blocks take several tiles


@chain(T=150, N=136, K=136, E=3)
def weighed(
    x: f16[T, K], w: f16[E, K, N], ends: i32[E], weight: f32[T, 1], bias: f16[N], residual: f16[T, N]
) -> tuple[f16[T, N], f32[T, N]]:
    """By row, by column and by both on its way out; of two results tensor copies could store one."""
    y = F.grouped_matmul(x, w, ends) * weight + bias
    return F.relu(y) + residual, y


@chain(T=144, N=136, K=136, E=3)
def by_columns(x: bf16[K, T], w: bf16[E, N, K], ends: i32[E]) -> bf16[T, N]:
    return F.grouped_matmul(x.T, w.mT, ends)


@chain(T=150, N=256, K=72, E=3)
def quantized(x: bf16[T, K], w: bf16[E, N, K], ends: i32[E]) -> tuple[f8e4m3[T, N], f32[T, N // 128]]:
    """What groups of columns are reduced to, and quads of lanes store."""
    values, scale = F.quantize(F.relu(F.grouped_matmul(x, w.mT, ends)), f8e4m3, per="block", block=128)
    return values, scale


@chain(T=256, N=256, K=128, E=64)
def by_index(x: bf16[T, K], gate: bf16[E, N, K], up: bf16[E, N, K], ids: i32[T], ends: i32[E]) -> bf16[T, N]:
    rows = F.gather(x, ids)
    return F.silu(F.grouped_matmul(rows, gate.mT, ends)) * F.grouped_matmul(rows, up.mT, ends)


CHAINS = (
    grouped.plain, grouped.across, grouped.gated, grouped.gated_biased, grouped.normed, grouped.side_by_side, weighed
)  # fmt: skip


def plan_of(spec: Chain, schedule: str, cluster: int, cols: int = 0) -> WgmmaPlan | None:
    """On two SMs, where blocks go on from a group's tiles to another's."""
    of = (schedule, cluster)
    found = (p for p in plans(spec.graph, target=H200 if cols else FEW) if (p.tile.schedule, p.tile.cluster) == of)
    return next((p for p in found if cols in (0, p.tile.cols)), None)


def need(spec: Chain, schedule: str, cluster: int) -> WgmmaPlan:
    plan = plan_of(spec, schedule, cluster)
    assert plan is not None
    return plan


@pytest.mark.pairwise("spec", "schedule", "cluster")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_every_chain_is_right(spec: Chain, schedule: str, cluster: int) -> None:
    plan = plan_of(spec, schedule, cluster)
    if plan is None:  # nobody multiplies while a group prepares
        assert (spec, schedule) == (grouped.normed, "pingpong")
        return
    report = validate(kernel_of(plan), cases=("normal", "rows", "malice"))
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("start", ["wgmma pingpong 128x128 6", "wgmma pingpong 128x128 6 cluster=2"])
def test_columns_are_quantized_in_the_kernel(start: str) -> None:
    report = validate(built(one_kernel(quantized, "cuda:h200", start)), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("name", ["cuda:a100", "hip:mi300x"])
def test_columns_of_a_group_are_quantized_by_its_own_tiles(name: str) -> None:
    """A tile's rows end where its group does: what lies behind is another tile's."""
    report = validate(built(one_kernel(quantized, name, "gemm")), cases=("normal", "rows"))
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("cols", [64, 128, 160, 192])
def test_every_width_is_right(cols: int) -> None:
    plan = plan_of(grouped.plain.at(T=330), "cooperative", 1, cols)
    assert plan is not None
    assert plan.tile.rows == 128  # though a group has 66 in the mean
    assert validate(kernel_of(plan), quick=True).ok


@pytest.mark.parametrize("spec", [grouped.plain, grouped.across, weighed], ids=lambda spec: spec.name)
def test_any_layout_is_right(spec: Chain) -> None:
    assert validate(kernel_of(need(spec, "pingpong", 1)), cases=("layout",)).ok


SIZES = {"T": 700, "N": 264, "K": 136, "E": 5}


@cache
def large(schedule: str, cluster: int) -> Kernel:
    return kernel_of(need(grouped.plain.at(**SIZES), schedule, cluster))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(data=st.data(), of=st.sampled_from([("pingpong", 1), ("cooperative", 1), ("cooperative", 2)]))
def test_any_ends(of: tuple[str, int], data: st.DataObject) -> None:
    """Whatever they are: a row belongs to the first group whose end lies behind it, by which it is judged here."""
    rows = data.draw(st.sampled_from([1, 127, 128, 129, 300, 700]) | st.integers(1, SIZES["T"]))
    near = st.integers(-2, rows + 2) | st.sampled_from([128, 256, 257])
    ends = data.draw(st.lists(near | st.sampled_from([-(2**31), 2**31 - 1]), min_size=5, max_size=5))
    ends = sorted(ends) if data.draw(st.booleans()) else ends
    made, rng = large(*of), np.random.default_rng(data.draw(st.integers(0, 99)))
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in
            ((rows, SIZES["K"]), (5, SIZES["N"], SIZES["K"])))  # fmt: skip
    want = grouped.by_definition(x, w.swapaxes(1, 2), np.array(ends)).astype(bf16.numpy)
    assert np.array_equal(made(x, w, np.array(ends, np.int32)), want)
    w[:] = np.nan  # of which rows of no group have nothing
    alone = made(x, w, np.array(ends, np.int32))
    none = grouped.group_of(rows, np.array(ends)) < 0
    assert (alone[none] == 0).all()
    assert np.isnan(alone[~none].astype(float)).all()


@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
def test_biases_are_those_of_each_rows_group(schedule: str) -> None:
    grouped.check_biases(kernel_of(need(grouped.biased.at(T=300, N=64, K=64), schedule, 1)))


@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("groups", [1, 33, 64, 257, 512])
def test_lanes_find_any_group(groups: int, schedule: str) -> None:
    """Several groups a lane: ends that ascend, and any."""
    plan = need(grouped.plain.at(T=700, N=64, K=64, E=groups), schedule, 1)
    assert plan.groups_a_lane == -(-groups // 32)
    made, rng = kernel_of(plan), np.random.default_rng(groups)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((700, 64), (groups, 64, 64)))
    anywhere = rng.integers(-9, 760, groups)
    for ends in (np.sort(rng.integers(0, 701, groups)), anywhere):
        want = grouped.by_definition(x, w.swapaxes(1, 2), ends.astype(np.int32)).astype(bf16.numpy)
        assert np.array_equal(made(x, w, ends.astype(np.int32)), want)


# ---------------------------------------------------------------- kernels that are broken

BROKEN = {
    "a box is stored as if its group went on": ("row < at.segment_end", "row < rows"),
    "the next group's weights": ("at.segment)", "(at.segment + 1) % segments)"),
    "the first group's weights": ("at.segment)", "0)"),
    "the producer is a tile ahead": (
        "place_of(tile, tiles_down",
        "place_of(tile + gridDim.x < tiles ? tile + gridDim.x : tile, tiles_down",
    ),
    "rows of no group have sums": ("if (!at.of_group) {", "if (false) {"),
    "a whole box is stored where a group ends in it": ("const bool whole =", "const bool whole = true ||"),
    "a box is filled before it is stored": ("whole ? wait_stores<1>()", "whole ? wait_stores<7>()"),
    "lanes fill a box before it is stored": (": wait_stores<0>()", ": wait_stores<7>()"),
    "rows of no group have no tiles": (" + static_cast<unsigned>((rows", " + 0 * static_cast<unsigned>((rows"),
    "the last group's rows are of none": ("s < segments ?", "s < segments - 1 ?"),
    "a lane's first group begins at 0": ("own.begin = lane > 0 ? others_end : 0", "own.begin = 0"),
    "tiles of the groups before are not counted": ("if (lane >= step) own.behind += other;", ""),
    "the lane behind the tile's": ("own.begin, owner, 32", "own.begin, (owner + 1) % 32, 32"),
    "a tile's place is told where another's is read": (
        "wait_at(empty + 8 * stage, parity);\n          tile_places", "tile_places"
    ),
    "a place is read before it is told": ("wait_at(full + 8 * stage, parity);\n      const Place", "const Place"),
    "a place is given back before all lanes have read it": ("__syncwarp();  // all lanes have read\n", ""),
    "a box lies as it is not swizzled": ("piece % 8) ^ r % 8", "piece % 8) ^ r % 4"),
    "half of a box": ("piece < 128", "piece < 64"),
    "a box is stored before all lanes are there": ("__syncwarp();  // all", "// all"),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_caught(what: str, schedule: str) -> None:
    old, new = BROKEN[what]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    # as many slices as the ring has, so that all tiles have one place
    sizes = SIZES | ({"K": 64 * (4 if schedule == "cooperative" else 6)} if "place" in what else {})
    kernel = kernel_of(need(grouped.plain.at(**sizes), schedule, 1), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, cases=("normal", "rows", "malice")).ok


BROKEN_LANES = {
    "a lane's groups are those of the first tile's": ("owner != known.owner", "known.owner < 0"),
    "groups of one lane are others'": ("if (lane < 2) one.end", "if (lane < 1) one.end"),
    "they begin at 0": ("lane > 0 ? others_end : first", "lane > 0 ? others_end : 0"),
    "tiles before them are not counted": ("one.behind += __shfl", "one.behind += 0 * __shfl"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_LANES)
def test_what_is_broken_among_many_groups_is_caught(what: str) -> None:
    old, new = BROKEN_LANES[what]

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    kernel = kernel_of(need(grouped.plain.at(T=250, N=64, K=64, E=40), "cooperative", 1), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert not validate(kernel, cases=("normal", "rows", "malice")).ok


def test_of_many_groups_a_warp_walks_for_each_tile() -> None:
    plan = need(grouped.plain.at(T=60, N=64, K=64, E=1100), "cooperative", 1)
    assert not plan.keeps_groups
    assert plan.place_bytes
    assert validate(kernel_of(plan), cases=("normal",)).ok


def test_a_clusters_tiles_are_of_one_group() -> None:
    """Tiles one below the other share what they bring of the right factor."""

    def edit(text: str) -> str:
        assert "cluster_rows - 1) / cluster_rows" in text
        return text.replace("cluster_rows - 1) / cluster_rows", "tile_rows - 1) / tile_rows").replace(
            "from, 32)) * cluster_rows", "from, 32)) * tile_rows"
        )

    plan = need(grouped.plain.at(**SIZES), "cooperative", 2)
    assert not validate(kernel_of(plan, edit), cases=("normal", "rows")).ok


# ---------------------------------------------------------------- blocks that wait for one another


def short(monkeypatch: pytest.MonkeyPatch, schedule: str, spec: Chain = grouped.plain) -> WgmmaPlan:
    """Blocks with a few short tiles that wait after every second one."""
    monkeypatch.setattr(waiting, "LEAST_SLICES", 0)
    monkeypatch.setattr(waiting, "TILES", 2)
    plan = need(spec.at(T=700, N=256, K=64), schedule, 1)
    assert plan.tiles_in_step == 2
    return plan


@pytest.mark.parametrize("spec", [grouped.plain, grouped.gated_biased], ids=lambda spec: spec.name)
@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
def test_blocks_that_wait_for_one_another_are_right(
    spec: Chain, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(short(monkeypatch, schedule, spec))
    assert "all_begun(min(tile - blockIdx.x + gridDim.x" in kernel.source.text
    report = validate(kernel, cases=("normal", "rows", "malice"))
    assert report.ok, str(report)[:2000]


def test_what_others_never_begin_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block lacks an SM, the others go on without it."""

    def edit(text: str) -> str:
        assert "< 512; ++look" in text
        return text.replace(">= wanted", ">= wanted + (1u << 30)").replace("< 512; ++look", "< (1 << 16); ++look")

    kernel = kernel_of(short(monkeypatch, "cooperative"), edit)
    kernel.device.timeout_s = 5.0  # type: ignore[attr-defined]
    assert validate(kernel, cases=("normal",)).ok


@pytest.mark.parametrize("broken", [False, True])
def test_the_last_block_leaves_the_counts_at_zero(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "bool together = true;"
    asked = f"{first} if (blockIdx.x == 0 && threadIdx.x == 0 && atomicAdd(&begun_tiles, 0u) != 0) __trap();"

    def edit(text: str) -> str:
        assert first in text
        assert "  atomicExch(&begun_tiles, 0u);" in text
        text = text.replace(first, asked)
        return text.replace("  atomicExch(&begun_tiles, 0u);", "") if broken else text

    kernel = kernel_of(short(monkeypatch, "cooperative"), edit)
    x, w, ends = np.ones((700, 64), bf16.numpy), np.ones((5, 256, 64), bf16.numpy), np.full(5, 700, np.int32)
    kernel(x, w, ends)
    if broken:
        with pytest.raises(KernelFault, match="trap"):
            kernel(x, w, ends)
    else:
        kernel(x, w, ends)


@pytest.mark.parametrize(
    ("rows", "sizes", "schedule", "waits"),
    [
        (2048, {"N": 4096, "K": 6144}, "cooperative", True),
        (1024, {"N": 4096, "K": 6144}, "cooperative", False),
        (4096, {"N": 6144, "K": 2048}, "pingpong", True),
        (2048, {"N": 6144, "K": 2048}, "pingpong", False),
    ],
)
def test_blocks_of_long_launches_wait(rows: int, sizes: dict[str, int], schedule: str, waits: bool) -> None:
    """As measured on an H200, from launches of some 40 ms on."""
    spec = SHIPPED["grouped_gemm"].at(T=rows * 256, E=256, **sizes)
    plan = candidates(spec.graph, H200).need()[0]
    assert isinstance(plan, WgmmaPlan)
    assert (plan.tile.schedule, bool(plan.tiles_in_step)) == (schedule, waits)
    assert ("in step after each 16 tiles" in plan.regime) == waits


# ---------------------------------------------------------------- what is planned


def rule_of(spec: Chain, layout: Layout | None = None, **sizes: int) -> str:
    return candidates(spec.at(**sizes).graph, H200, layout or Layout()).need()[0].rule


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_swiglu"])
def test_few_rows_of_each_group_stay_with_mma_sync(name: str) -> None:
    """Weights are streamed then: every group's tile of 128 rows would be of zeros but for a few."""
    assert rule_of(SHIPPED[name]) == "wgmma"
    assert rule_of(SHIPPED[name], T=128) == "gemm"
    assert rule_of(SHIPPED[name], T=16 * 16) == "gemm"
    assert rule_of(SHIPPED[name], T=16 * 64) == "wgmma"


def test_what_wgmma_leaves_to_mma_sync() -> None:
    with pytest.raises(NoMatch, match="is computed from x, y; wgmma prepares one matrix"):
        plans(grouped.weighed.graph)
    assert rule_of(grouped.plain, Layout(unaligned=frozenset({"w"}))) == "gemm"


def test_rows_next_to_each_other_are_left_to_mma_sync() -> None:
    """Copies of boxes that begin at any of them stopped an H200, with an illegal instruction; w may lie either way."""
    turned = Layout(transposed=frozenset({"x"}))
    for spec in (grouped.plain, grouped.normed):
        with pytest.raises(NoMatch, match="x has rows next to each other, and those of a group begin anywhere"):
            plans(spec.graph, turned)
    with pytest.raises(NoMatch, match="x has rows next to each other"):
        plans(by_columns.graph)
    assert rule_of(grouped.plain, turned) == "gemm"
    assert plans(grouped.plain.graph, Layout(transposed=frozenset({"w"})))
    kernel = kernel_of(need(grouped.plain.at(T=144), "pingpong", 1))
    assert kernel.variant(turned).source.plan.rule == "gemm"
    report = validate(kernel, cases=("layout",))
    assert report.ok, str(report)[:2000]
    assert "layout: transposed" in {case.name for case in report.cases}


def test_blocks_are_as_many_as_take_whatever_tiles_there_are() -> None:
    """How many tiles the groups need is known on the device: at most so many as each of them begins, and more."""
    plan = need(grouped.plain.at(T=16384, N=4096, K=2048, E=16), "pingpong", 1)
    plan = replace(plan, target=H200)
    assert plan.tiles(16384) == (17 + (16384 - 17) // 128) * 32
    assert [plan.blocks(rows) for rows in (1, 2, 5, 16384)] == [32, 64, 132, 132]
    assert not plan.slices_ahead  # ends may be what the kernel before wrote
    assert need(grouped.plain.at(N=2**28), "pingpong", 1).max_rows == ((2**31 - 1) // 2**21 - 6) * 128


def test_boxes_that_groups_end_in_are_stored_sixteen_bytes_a_lane() -> None:
    """A tensor copy would store rows of the next group, which another block may have written by then."""
    plan = need(grouped.plain, "pingpong", 1)
    of_out = [(p.kind, p.name) for p in plan.params if p.tensor == "out"]
    assert of_out == [("map", "out_map"), ("address", "out_ptr"), ("stride", "out_stride")]
    text = render(plan).text
    assert "if (whole) {" in text
    assert "store_box(out_map" in text
    assert "store<8>(out_ptr" in text


def test_the_results_address_is_that_of_its_map() -> None:
    """An argument of its own, in the launch block and an export's; behind another map, and a pointer."""
    plan = need(grouped.plain, "pingpong", 1)
    tensors = [p.tensor for p in plan.params if p.kind in ("pointer", "map")]
    kinds = {p.tensor: p.kind for p in plan.params if p.kind in ("pointer", "map")}
    assert kinds == {"x": "map", "w": "map", "ends": "pointer", "out": "map"}
    given = [16 * (i + 1) for i in range(len(tensors))]
    at = {tensor: 10 + place for place, tensor in enumerate(tensors)}
    block = Arguments(plan.params, lead=40)
    numbers = range(100, 100 + len(block.codes) - len(given))
    block.pack_into(block.block, 40, *given, *numbers)
    held = dict(zip((p.name for p in plan.params), (block.table[i] or 0 for i in range(len(plan.params))), strict=True))
    assert ctypes.c_uint64.from_address(held["out_ptr"]).value == given[tensors.index("out")]
    assert ctypes.c_uint64.from_address(held["ends_ptr"]).value == given[tensors.index("ends")]
    assert held["out_map"] in block.maps, "the map lies behind the slots"
    assert [ctypes.c_int64.from_address(held[name]).value for name in ("rows", "out_stride")] == list(numbers)
    (address,) = (p for p in plan.params if p.kind == "address")
    assert argument_of(plan, 0, address, at) == Argument("pointer", at["out"])


def test_a_prepared_call_says_where_the_result_lies() -> None:
    kernel = kernel_of(need(grouped.plain.at(**SIZES), "pingpong", 1))
    sizes = kernel.plan.graph.sizes
    x, w = np.zeros((sizes["T"], sizes["K"]), bf16.numpy), np.zeros((sizes["E"], sizes["N"], sizes["K"]), bf16.numpy)
    out = np.zeros((sizes["T"], sizes["N"]), bf16.numpy)
    numbers = kernel.prepare(x, w, np.zeros(sizes["E"], np.int32), out=out).numbers
    assert numbers["out_ptr"] == numbers["out_map"] == out.ctypes.data


@pytest.mark.parametrize(("name", "sizes", "best"), [
    ("grouped_gemm", {"T": 524288, "N": 2048, "K": 4096, "E": 512}, "cooperative 128x256"),
    ("grouped_gemm", {"T": 262144, "N": 6144, "K": 2048, "E": 256}, "cooperative 128x256"),
    ("grouped_gemm", {"T": 524288, "N": 6144, "K": 2048, "E": 256}, "pingpong 128x128"),
    ("grouped_gemm", {"T": 2097152, "N": 6144, "K": 2048, "E": 256}, "pingpong 128x128"),
    ("grouped_gemm", {"T": 524288, "N": 4096, "K": 1024, "E": 512}, "pingpong 128x128"),
    ("grouped_gemm", {"T": 2097152, "N": 4096, "K": 6144, "E": 256}, "cooperative 128x256"),
    ("grouped_gemm", {"T": 131072, "N": 5120, "K": 8192, "E": 128}, "cooperative 128x256"),
    ("grouped_gemm", {"T": 32768, "N": 4096, "K": 4096, "E": 8}, "pingpong 128x128"),
    ("grouped_swiglu", {"T": 262144, "N": 2048, "K": 6144, "E": 256}, "cooperative 128x256"),
])  # fmt: skip
def test_the_choice_is_the_best_one_measured(name: str, sizes: dict[str, int], best: str) -> None:
    """On an H200, groups 0.7 to 1.3 times as long as the mean."""
    found = [p for p in plans(SHIPPED[name].graph.at(**sizes)) if p.tile.cluster == 1]
    first = min(found, key=lambda p: p.cost.time_us)
    assert f"{first.tile.schedule} {first.tile.rows}x{first.tile.cols}" == best
    assert first.tile.group == 8
    orders = [p for p in found if (p.tile.schedule, p.tile.cols) == (first.tile.schedule, first.tile.cols)]
    assert [p.tile.group for p in sorted(orders, key=lambda p: p.cost.time_us)] == [8, 16]


@pytest.mark.parametrize(("spec", "width"), [
    (SHIPPED["grouped_gemm"], {"N": 4096}), (SHIPPED["grouped_swiglu"], {"N": 2048}), (by_index, {"N": 2048})
], ids=["one", "two", "by index"])  # fmt: skip
def test_what_is_known_of_many_groups_fits_registers(spec: Chain, width: dict[str, int]) -> None:
    """A plan that spills is passed over: two products of 256 groups had ping-pong tiles, half as slow again."""
    graph = spec.graph.at(T=262144, K=6144, E=256, **width)
    found = sorted(plans(lowered(graph).graph if graph.viewed else graph), key=lambda p: -p.cost.time_us)
    first = {(p.tile.schedule, p.tile.cluster): p for p in found}  # the cheapest of each
    assert all(p.keeps_groups for p in first.values())
    for plan in (first["cooperative", 1], first["cooperative", 2], first["pingpong", 1]):
        try:
            resources = compiled(render(plan)).resources
        except MissingError as missing:
            pytest.skip(str(missing))
        assert not gate(resources), f"{plan.configuration}: {gate(resources)}"
        assert plan.producer_registers + 2 * plan.consumer_registers == 3 * 168


def test_tiles_of_one_long_group_share_more_by_16_rows_of_them() -> None:
    """As those of a product without groups: lines of the right factor are read for twice as many rows."""
    graph = SHIPPED["grouped_gemm"].graph.at(T=32768, N=6144, K=7168, E=4)
    found = {p.tile.group: p.cost.time_us for p in plans(graph) if (p.tile.cols, p.tile.cluster) == (256, 1)}
    assert found[16] < found[8]


@chain(T=16384, N=4096, K=2048, E=16)
def beside_a_residual(
    x: bf16[T, K], w: bf16[E, N, K], bias: bf16[E, N], ends: i32[E], residual: bf16[T, N], weight: f32[T, 1]
) -> bf16[T, N]:
    return (F.gelu(F.grouped_matmul(x, w.mT, ends, bias)) + residual) * weight


@chain(T=4096, S=16384, N=4096, K=2048, E=16)
def biased_of_named_rows(x: bf16[T, K], ids: i32[S, 1], w: bf16[E, N, K], bias: bf16[E, N], ends: i32[E]) -> bf16[S, N]:
    return F.gelu(F.grouped_matmul(F.gather(x, ids), w.mT, ends, bias))


@chain(T=4096, S=16384, N=2048, K=2048, E=16)
def gated_of_named_rows(
    x: bf16[T, K], ids: i32[S, 1], gate: bf16[E, N, K], up: bf16[E, N, K], ends: i32[E]
) -> bf16[S, N]:
    rows = F.gather(x, ids)
    return F.silu(F.grouped_matmul(rows, gate.mT, ends)) * F.grouped_matmul(rows, up.mT, ends)


@pytest.mark.parametrize("experts", [16, 64])
@pytest.mark.parametrize(
    "spec", [beside_a_residual, biased_of_named_rows, gated_of_named_rows], ids=lambda spec: spec.name
)
def test_what_is_made_of_sums_fits_registers(spec: Chain, experts: int) -> None:
    """A bias that was read before the products took a consumer's, up to 64 bytes; in clusters rows that are named took
    20 bytes of a producer's."""
    found = {(p.tile.schedule, p.tile.cluster): p for p in reversed(plans(spec.graph.at(E=experts)))}
    for plan in (found["cooperative", 1], found["cooperative", 2], found["pingpong", 1]):
        try:
            resources = compiled(render(plan)).resources
        except MissingError as missing:
            pytest.skip(str(missing))
        assert not gate(resources), f"{plan.configuration}: {gate(resources)}"


SMALL = {"N": 264, "K": 136, "E": 3}


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (beside_a_residual, {**SMALL, "T": 150}), (biased_of_named_rows, {**SMALL, "T": 40, "S": 150}),
        (gated_of_named_rows, {**SMALL, "T": 40, "S": 150}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_what_is_made_of_sums_is_right_in_every_tile(spec: Chain, sizes: dict[str, int]) -> None:
    for plan in plans(spec.at(**sizes).graph):
        if plan.tile.group == 8 and plan.tile.cols >= 128:
            assert validate(kernel_of(plan), quick=True).ok, plan.configuration
