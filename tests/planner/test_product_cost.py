"""Bytes, flops and floors of chains with matrix products."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fusegen import Chain, bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.database.keys import graph_digest
from fusegen.measuring.entries import Judge, work_of
from fusegen.measuring.profiling import checklist
from fusegen.measuring.timing import Timing
from fusegen.planner import plan
from fusegen.planner.cost import decisions
from fusegen.planner.model import Layout
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.products.product_cost import filled, floors, product_rounding, product_traffic, wave_text
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.rewrites import simplify
from fusegen.reporting.explaining import products
from fusegen.targets import H200, MI300X, Target
from tests.language.test_products import bias_gelu, norm_swiglu, qkv, scaled, unbounded, with_tf32
from tests.products import NOTHING, sketch

M, N, K = dims("M N K")
MIB = 2**20
TILE, GROUP = 128, 8  # rows of a tile, and rows of tiles that run together


@chain(M=16384, N=4096, K=4096)
def gemm_bias_gelu(x: f16[M, K], w: f16[K, N], bias: f16[N]) -> f16[M, N]:
    return F.gelu(x @ w + bias)


def test_bytes_of_a_product_with_bias_and_gelu() -> None:
    """s(MK + KN + 3MN) with the product apart, s(MK + KN + MN + N) fused; the first leaves the bias's N out."""
    found = product_traffic(gemm_bias_gelu.graph, H200, TILE, GROUP)
    m, n, k, s = 16384, 4096, 4096, 2
    assert found.per_element_unfused == s * (m * k + k * n + 3 * m * n + n)
    assert found.ideal == found.moved == found.per_element_fused == s * (m * k + k * n + m * n + n)
    assert (round(found.per_element_unfused / MIB), round(found.ideal / MIB)) == (544, 288)
    assert found.product_flops == 2 * m * n * k
    # the document has 963.9 and 1819.2 flop/B; its own formulas give these, and not the second by 0.07 %
    assert found.intensity_apart == pytest.approx(963.9, rel=2e-4)
    assert found.intensity == pytest.approx(1819.2, rel=7e-4)
    assert f"{found.intensity_apart:.1f} {found.intensity:.1f}" == "963.8 1820.4"


def test_factors_that_the_cache_cannot_hold_come_again_for_each_group_of_tile_rows() -> None:
    """8192 x 8192 weights are 128 MiB: no L2 holds them, and 64 rows of tiles are 8 groups."""
    found = product_traffic(gemm_bias_gelu.at(M=8192, N=8192, K=8192).graph, H200, TILE, GROUP)
    by_name = {t.tensor: t for t in found.tensors}
    assert (by_name["w"].times, by_name["w"].moved) == (8, 8 * by_name["w"].ideal)
    assert by_name["x"].moved == by_name["x"].ideal
    assert found.moved == found.ideal + 7 * by_name["w"].ideal
    assert product_traffic(gemm_bias_gelu.at(M=1024, N=8192, K=8192).graph, H200, TILE, GROUP).moved < found.moved / 6
    smaller = product_traffic(gemm_bias_gelu.graph, MI300X, TILE, GROUP)
    assert smaller.moved - smaller.ideal == 15 * 4096 * 4096 * 2, "32 MiB of L2 do not hold 32 MiB and more"


def test_a_decode_step_saves_128_kib() -> None:
    found = product_traffic(gemm_bias_gelu.at(M=8).graph, H200, TILE, GROUP)
    assert found.per_element_unfused - found.ideal == 128 * 1024


def test_unfused_every_operator_is_a_kernel() -> None:
    found = product_traffic(gemm_bias_gelu.graph, H200, TILE, GROUP)
    m, n, k, s = 16384, 4096, 4096, 2
    assert found.launches_unfused == 3
    assert found.unfused == s * (m * k + k * n + m * n) + s * (2 * m * n + n) + s * 2 * m * n
    assert {d.subject: d.bytes_saved for d in decisions(simplify(gemm_bias_gelu.graph))} == {
        "matmul": 2 * s * m * n,
        "add": 2 * s * m * n,
    }


def test_computed_factors_are_written_and_read_when_apart() -> None:
    graph = norm_swiglu.graph.at(M=100, N=30, K=50)
    m, n, k, s = 100, 30, 50, 2
    before = s * (m * k + k + m * k)
    products = 2 * s * (m * k + k * n + m * n)
    behind = s * 3 * m * n
    assert product_traffic(graph, H200, TILE, GROUP).per_element_unfused == before + products + behind
    assert product_traffic(graph, H200, TILE, GROUP).product_flops == 2 * 2 * m * n * k


def test_products_that_are_returned_need_no_kernel_behind_them() -> None:
    found = product_traffic(qkv.graph, H200, TILE, GROUP)
    b, m, n, width, k = (qkv.graph.sizes[name] for name in ("B", "M", "N", "L", "K"))
    products = 3 * b * m * k + k * (n + 2 * width) + b * m * (n + 2 * width)
    assert found.per_element_unfused == 2 * (products + b * m * (n + 2 * width) + n + b * m * n)
    assert found.product_flops == 2 * b * m * k * (n + 2 * width)


def test_the_floor_is_the_products_or_the_bytes() -> None:
    large = floors(H200, product_traffic(gemm_bias_gelu.graph, H200, TILE, GROUP), f16)
    assert max(large, key=large.__getitem__) == "products"
    assert large["products"] == pytest.approx(555.6, abs=0.1), "at 989.4 TFLOP/s"
    small = floors(MI300X, product_traffic(gemm_bias_gelu.at(M=8).graph, H200, TILE, GROUP), f16)
    assert max(small, key=small.__getitem__) == "memory"
    assert all(us > 0 for us in (*large.values(), *small.values()))


def test_a_wave_more_is_half_empty() -> None:
    assert (filled(132, 132), filled(264, 132), filled(0, 132)) == (1, 1, 1)
    assert filled(133, 132) == pytest.approx(0.504, abs=1e-3)
    assert wave_text(512, 132) == "512 tiles in 3.9 waves, 97% full"
    assert wave_text(1, 132) == "1 tile in 0.0 waves, 1% full"


ROUNDED = {
    "plain": (bias_gelu, ("out to bf16 when stored",)),
    "a gain": (
        norm_swiglu,
        ("x * gain to bf16 before it is multiplied, and only then scaled by rrms", "out to bf16 when stored"),
    ),
    "scales alone": (
        scaled,
        ("factors as they are, and only their products scaled by sigmoid, clip, tanh_, 1 / 3.0",),
    ),
    "a scale that stays": (unbounded, ("quotient to bf16 before it is multiplied, and only then scaled by 0.5",)),
    "tf32": (with_tf32, ("factors to the nearest tf32, 11 significant bits",)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_is_listed_where_it_happens(name: str) -> None:
    spec, lines = ROUNDED[name]
    assert isinstance(spec, Chain)
    assert product_rounding(simplify(spec.graph), H200) == lines


def test_a_narrow_range_before_a_scale_is_listed() -> None:
    @chain(M=8, N=8, K=8)
    def half(x: f16[M, K], gain: f16[K], w: f16[K, N]) -> f32[M, N]:
        return F.rmsnorm(x, gain) @ w

    before = "x * gain to f16 before it is multiplied, and only then scaled by rrms"
    said = "(in f16 what is beyond 65504 is an infinity, and below 6.1e-5 bits are lost)"
    assert product_rounding(half.graph, H200) == (f"{before} {said}",)


def test_a_prologue_without_a_name_is_called_by_its_op() -> None:
    @chain(M=8, N=8, K=8)
    def activated(x: bf16[M, K], w: bf16[K, N]) -> f32[M, N]:
        return F.relu(x) @ w

    assert product_rounding(activated.graph, H200)[0] == "relu to bf16 before it is multiplied"


def test_the_heading_has_products_apart_and_what_is_needed() -> None:
    graph = simplify(norm_swiglu.graph.at(M=4096, N=14336, K=4096))
    plan = replace(
        sketch(graph),
        cost=replace(NOTHING, traffic=product_traffic(graph, H200, TILE, GROUP), floor_us=972.5, bound="compute"),
    )
    text = " ".join(str(plan).split())
    assert "4.8 TB/s, 989 TFLOP/s for products" in text
    assert "MB with products apart, " in text
    assert "972.5 us at 989 TFLOP/s for products; compute-bound at " in text
    assert "K=4096, N=14336; rows of all operands next to each other" in text
    turned = sketch(graph, Layout(transposed=frozenset({"w_up"})))
    assert "w_up: its elements along K next to each other" in " ".join(str(turned).split())


def test_products_are_explained_in_the_authors_words() -> None:
    graph = simplify(norm_swiglu.graph)
    lines = products(sketch(graph))
    assert lines[0] == "matmul_w_gate = (x * gain) @ w_gate: [M, N] over K, factors of bf16, summed in f32"
    assert "2 products share a left factor, which is read once for all of them" in lines
    assert any(line.startswith("rrms: the same all along K, and surely finite, so applied behind") for line in lines)
    assert any(line.startswith("sum_of_squares: a row's sum over x") for line in lines)
    assert products(sketch(simplify(bias_gelu.graph)))[0].startswith("matmul = x @ w.T: [M, N] over K")


def test_measurements_are_kept_apart_by_what_is_summed_over() -> None:
    graph = bias_gelu.graph
    assert graph_digest(graph) == graph_digest(graph.at(M=99)) == graph_digest(graph.at(N=99))
    assert graph_digest(graph) != graph_digest(graph.at(K=99))
    assert graph_digest(qkv.graph) != graph_digest(qkv.graph.at(L=99))


def test_shares_are_of_the_products_floor_and_no_rate_beats_the_data_sheet() -> None:
    traffic = product_traffic(gemm_bias_gelu.graph, H200, TILE, GROUP)
    plan: Any = SimpleNamespace(cost=SimpleNamespace(traffic=traffic), matrix_tflops=H200.matrix_tflops, target=H200)
    judge = Judge(work_of(plan), rate=4.2e6, matrix_rate=750e6)
    assert judge.floor_us == pytest.approx(traffic.product_flops / 750e6)
    entry = judge.entry("fusegen", "fusegen", Timing((800.0,)))
    assert entry.share == pytest.approx(judge.floor_us / 800)
    assert entry.rate == pytest.approx(traffic.ideal / 800)
    assert "TFLOP/s, and the data sheet has 989" in judge.entry("fusegen", "fusegen", Timing((400.0,))).refused


def test_f32_has_a_rate_of_its_own() -> None:
    tf32 = plan(with_tf32.at(M=4096, N=4096, K=4096).graph, H200)
    assert tf32.matrix_tflops == H200.f32_tflops == H200.matrix_tflops / 2
    assert plan(bias_gelu.graph, H200).matrix_tflops == H200.matrix_tflops
    assert tf32.cost.floor_us == pytest.approx(2 * 4096**3 / (H200.f32_tflops * 1e6))
    assert "495 TFLOP/s for products" in str(tf32)


@pytest.mark.parametrize(("gpu", "counter"), [(H200, "sm__pipe_tensor_cycles"), (MI300X, "MfmaUtil")], ids=str)
def test_a_profile_of_products_looks_at_the_matrix_units(gpu: Target, counter: str) -> None:
    graph = simplify(gemm_bias_gelu.graph)
    cost = replace(
        NOTHING, traffic=product_traffic(graph, H200, TILE, GROUP), floor_us=555.6, time_us=2 * 555.6, blocks_per_sm=1
    )
    found = checklist(replace(sketch(graph, target=gpu), cost=cost), None, "gemm.py")
    (one,) = [c for c in found.counters if c.name.startswith(counter)]
    assert one.expect.startswith("50%" if gpu is H200 else "38%")
    assert not any("sectors_per_request" in c.name or "VMEM" in c.name for c in found.counters)


@pytest.mark.parametrize("target", [H200, MI300X])
def test_waves_are_explained(target: Target) -> None:
    made = plan(bias_gelu.at(M=4096, N=4096, K=4096).graph, target)
    assert isinstance(made, (GemmPlan, WgmmaPlan))
    tiles = 4096 * 4096 // (made.tile.rows * made.tile.cols)
    assert products(made)[-1] == wave_text(tiles, target.sms * made.cost.blocks_per_sm)
