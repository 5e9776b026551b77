"""Grouped products of 8-bit factors, by every unit that has them, scaled by rows, by experts' columns and by blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f32, i8, i32
from fusegen import ops as F
from fusegen.language.types import size_of
from fusegen.planner import candidates
from fusegen.planner.model import Layout
from fusegen.planner.programs.lowering import lowered
from fusegen.runtime import Program
from fusegen.targets import H200
from fusegen.validation import validate
from tests import grouped
from tests.emitting.test_quantized_products import one_kernel
from tests.emitting.test_row_parts import built
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

T, N, K, E = dims("T N K E")
H, A, L, B, AMD, CDNA4 = "cuda:h200", "cuda:a100", "cuda:l40s", "cuda:b200", "hip:mi300x", "hip:mi355x"
TILES, NARROW, WIDE = "gemm 64x64", "wgmma cooperative 128x64", "wgmma cooperative 256x128 4 cluster=2"
HALVES = "wgmma cooperative 128x256 4"  # of columns, one after the other
WAYS = [
    (grouped.by_rows, H, NARROW), (grouped.by_rows, H, WIDE), (grouped.by_rows, H, TILES), (grouped.by_rows, L, TILES),
    (grouped.by_rows, H, HALVES), (grouped.by_rows, CDNA4, TILES),
    (grouped.whole, H, "wgmma pingpong 128x128 6 cluster=2"), (grouped.whole, A, TILES), (grouped.whole, B, "tcgen05"),
    (grouped.by_channels, H, "wgmma pingpong"), (grouped.by_channels, A, TILES), (grouped.by_channels, B, "tcgen05"),
    (grouped.by_channels, AMD, TILES),
    (grouped.blocks, H, NARROW), (grouped.blocks, H, WIDE), (grouped.blocks, H, TILES), (grouped.blocks, L, "gemm"),
    (grouped.blocks, H, HALVES), (grouped.blocks, H, f"{HALVES} cluster=2"), (grouped.gated_blocks, H, HALVES),
    (grouped.gated_blocks, H, "gemm"), (grouped.gated_blocks, H, "wgmma cooperative 128x128"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "at", "start"), WAYS, ids=lambda value: getattr(value, "name", value))
def test_every_way_is_right(spec: Chain, at: str, start: str) -> None:
    report = validate(built(one_kernel(spec, at, start)), cases=("normal", "rows", "malice"))
    assert report.ok, str(report)[:2000]


@chain(T=130, N=128, K=144, E=3)
def layer(
    x: f8e4m3[T, K], sx: f32[T, 1], up: f8e4m3[E, N, K], s_up: f32[E, N], down: f8e4m3[E, K, N], s_down: bf16[E, K],
    ends: i32[E], bias: bf16[E, K],
) -> bf16[T, K]:  # fmt: skip
    """Quantized again in between."""
    h = F.relu(F.grouped_matmul(x, up.mT, ends, scale=s_up) * sx)
    codes, scale = F.quantize(h, f8e4m3, per="row")
    return F.grouped_matmul(codes, down.mT, ends, bias, s_down) * scale


def test_a_layer_is_quantized_in_between() -> None:
    """A scale and a bias stay with their product where a program is cut."""
    program: Any = fusegen.compile(layer, H, on="emulator", tuned=False)
    assert program.report.ok
    assert len(program.plan.steps) == 3


def operands(spec: Chain, rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Numbers whose products and sums are exact in any order: scales are powers of two."""
    found: dict[str, Any] = {}
    for tensor in spec.graph.inputs:
        sizes = {**spec.graph.sizes, "T": rows}
        shape = tuple(size_of(size, sizes) for size in tensor.shape)
        if tensor.dtype in (f8e4m3, i8):
            found[tensor.name] = rng.integers(-2, 3, shape).astype(tensor.dtype.numpy)
        else:
            found[tensor.name] = np.exp2(rng.integers(-2, 3, shape)).astype(tensor.dtype.numpy)
    return found


def law(spec: Chain, given: dict[str, Any]) -> np.ndarray:
    """By the definition, row by row, with scales spread over what they are for."""
    x, w = (given[name].astype(float) for name in ("x", "w"))
    if spec is grouped.blocks:
        x = x * given["sx"].repeat(128, 1)
        w = w * given["sw"].repeat(128, 1).repeat(128, 2)
    if spec is grouped.by_channels:
        w = w * given["columns"][..., None]
    y = grouped.by_definition(x, w.swapaxes(1, 2), given["ends"], given.get("bias"))
    return y * given["scale"].astype(float) if "scale" in given else y


SOME = [
    (grouped.by_rows, H, NARROW), (grouped.whole, A, TILES), (grouped.by_channels, H, "wgmma pingpong"),
    (grouped.by_channels, AMD, TILES), (grouped.blocks, H, NARROW), (grouped.blocks, H, TILES),
]  # fmt: skip


@cache
def made(number: int) -> Program:
    return built(one_kernel(*SOME[number]))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(data=st.data(), number=st.integers(0, len(SOME) - 1))
def test_any_ends(data: st.DataObject, number: int) -> None:
    """Ragged and empty groups, groups of one row, ends that are wrong: judged row by row."""
    rows = data.draw(st.sampled_from([1, 64, 65, 129]) | st.integers(1, 200))
    near = st.integers(-2, rows + 2) | st.sampled_from([-(2**31), 2**31 - 1])
    ends = data.draw(st.lists(near, min_size=3, max_size=3))
    ends = sorted(ends) if data.draw(st.booleans()) else ends
    spec = SOME[number][0]
    given = operands(spec, rows, np.random.default_rng(data.draw(st.integers(0, 99))))
    given["ends"] = np.array(ends, np.int32)
    (out,) = spec.graph.outputs
    assert np.array_equal(made(number)(*given.values()), law(spec, given).astype(out.dtype.numpy))


DEEP = grouped.whole.at(N=64, K=1072)


def of_deep(edit: tuple[str, str] | None, at: str, start: str) -> bool:
    """Are sums beyond 2^24 exact, an odd one, which is no f32, one of a single row, and 0 in rows of no group?"""
    x, w = np.full((70, 1072), 127, np.int8), np.full((3, 64, 1072), 127, np.int8)
    x[:, 0], w[1, :, 0], w[2] = 5, -128, -127
    got = built(one_kernel(DEEP, at, start), edit)(x, w, np.array([20, 21, 60], np.int32))
    most = 1071 * 127**2
    assert most > 2**24
    want = np.repeat([most + 5 * 127, most - 5 * 128, -most - 5 * 127, 0], [20, 1, 39, 10])
    return np.array_equal(got, np.broadcast_to(want[:, None], got.shape))


@pytest.mark.parametrize(("at", "start"), [(H, "wgmma"), (A, "gemm"), (B, "tcgen05"), (AMD, "gemm")])
def test_sums_of_whole_numbers_are_exact_beyond_f32(at: str, start: str) -> None:
    assert of_deep(None, at, start)


def test_sums_by_way_of_f32_are_not() -> None:
    assert not of_deep((r"= sums\[0\]\[sum_at", "= (float)sums[0][sum_at"), H, "wgmma")


MISTAKES = {
    "wgmma: the next expert's scales": (
        grouped.blocks, "wgmma", r"at\.segment \* sw_group", "(at.segment + 1) % segments * sw_group",
    ),
    "wgmma: the first expert's scales": (grouped.blocks, "wgmma", r"at\.segment \* sw_group", "0 * sw_group"),
    "wgmma: scales of the next columns": (
        grouped.blocks, "wgmma", r"at\.col0 / scaled_cols", "(at.col0 / scaled_cols + 1) % 2",
    ),
    "wgmma: a column's scale of the next block of K": (
        grouped.blocks, "wgmma", r"sw_ld \+ step, 4", "sw_ld + (step + 1) % steps, 4",
    ),
    "wgmma: a row's scale of the next block of K": (
        grouped.blocks, "wgmma", r"sx_stride \+ step :", "sx_stride + (step + 1) % steps :",
    ),
    "mma.sync: the next expert's scales": (
        grouped.blocks, TILES, r"sw_ptr\[segment \* sw_group", "sw_ptr[(segment + 1) % segments * sw_group",
    ),
    "mma.sync: scales of the next columns": (
        grouped.blocks, TILES, r"/ scaled_cols \* sw_ld", "/ scaled_cols % 1 * sw_ld",
    ),
    "mma.sync: the next expert's scales of two": (
        grouped.gated_blocks, "gemm", r"segment \* s_up_group", "(segment + 1) % segments * s_up_group",
    ),
    "wgmma: the next expert's columns": (
        grouped.by_channels, "wgmma", r"at\.segment \* columns_group", "(at.segment + 1) % segments * columns_group",
    ),
    "mma.sync: the first expert's columns": (
        grouped.by_channels, TILES, r"segment \* columns_group", "0 * columns_group",
    ),
    "mma.sync: a scale is added": (grouped.by_channels, TILES, r"to_f32 \* columns;", "to_f32 + columns;"),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "start", "wrong", "right"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_caught(spec: Chain, start: str, wrong: str, right: str) -> None:
    broken = built(one_kernel(spec, H, start), (wrong, right))
    assert not validate(broken, cases=("normal", "rows", "malice")).ok


@pytest.mark.parametrize("spec", [grouped.blocks, grouped.by_channels], ids=lambda spec: spec.name)
def test_what_begins_anywhere_is_right(spec: Chain) -> None:
    """A byte at a time, where tensor copies want multiples of 16 bytes."""
    made = fusegen.compile(spec, H, on="emulator", tuned=False, validate=False)
    report = validate(made, cases=("layout",))
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("rows", [1, 70, 300, 9000])
@pytest.mark.parametrize("spec", [SHIPPED["grouped_fp8_block_gemm"], grouped.gated_blocks], ids=lambda spec: spec.name)
def test_blocks_that_begin_anywhere_are_planned(spec: Chain, rows: int) -> None:
    graph = one_kernel(spec.at(T=rows), H, "gemm").steps[0].plan.graph
    everything = frozenset(tensor.name for tensor in (*graph.inputs, *graph.outputs))
    for names in ({"x"}, everything):
        assert candidates(graph, H200, Layout(unaligned=frozenset(names))).plans


@pytest.mark.parametrize("spec", [grouped.by_rows, grouped.whole, SHIPPED["fp8_gemm"]], ids=lambda spec: spec.name)
@pytest.mark.parametrize("rows", [1, 2, 33, 77])
def test_few_rows_that_lie_turned_round_have_a_plan(spec: Chain, rows: int) -> None:
    """Where w begins anywhere besides, deep tiles of 32 rows have no registers, and one or two rows had no others."""
    graph = lowered(spec.at(**{next(iter(spec.graph.sizes)): rows}).graph).graph
    assert candidates(graph, H200, Layout(unaligned=frozenset("w"), transposed=frozenset("xw"))).plans
