"""Chains with products through the planner, the template and the emulator: every kind of tile, every shape."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16
from fusegen.compiling import disassemble
from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError, MissingError, NoPlan
from fusegen.language.types import DTYPES
from fusegen.pipeline import gate
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.model import Layout
from fusegen.planner.products import mma_rule, mma_tiles
from fusegen.planner.products.gemm import GemmPlan, GemmTile, shared_bytes
from fusegen.runtime.cache import compiled
from fusegen.targets import H200, MI300X, TARGETS
from fusegen.validation import validate
from tests import gemms, specs
from tests.gemms import (
    FEW,
    Fits,
    any_plan,
    banded,
    clustered,
    clustered_tiles,
    gemm_plans,
    kernel,
    of_96,
    of_192,
    persistent,
    persistent_with_short_slices,
    plan_for,
    streamed,
    streamed_waves,
    tiled,
)

pytestmark = pytest.mark.usefixtures("emulated_only")

CUDA, AMD = "cuda:h200", "hip:gfx90a"


def can_emulate() -> bool:
    try:
        compiler()
    except FusegenError:
        return False
    return True


needs_emulator = pytest.mark.skipif(not can_emulate(), reason="no C++ compiler for the emulator")


# ---------------------------------------------------------------- what is computed


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("spec", gemms.ALL, ids=lambda spec: spec.name)
def test_every_chain_is_right_on_every_vendor(spec: Chain, name: str) -> None:
    report = validate(kernel(spec, name), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("spec", gemms.BY_ROWS, ids=lambda spec: spec.name)
def test_values_of_rows_are_told_from_elements(spec: Chain, name: str) -> None:
    """Each operand of the left factor and of its rows' sums is held once: as a matrix, a vector, or a value a row."""
    plan = plan_for(spec, name, any_plan)
    assert plan.prologue is not None
    held = [*plan.prologue.loads, *plan.prologue.row_loads]
    assert len({load.access.name for load in held}) == len(held)
    assert {f.access.name for f in plan.left} == {load.access.name for load in plan.prologue.matrices}
    report = validate(kernel(spec, name), cases=("normal",))
    assert report.ok, str(report)[:2000]


def formula(x: np.ndarray, w: np.ndarray, s: np.ndarray | float) -> Any:
    """x * s @ w in float64, term by term."""
    with np.errstate(all="ignore"):
        return np.sum((x.astype(float) * s)[:, :, None] * w.astype(float)[None], axis=1)


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, "cuda:a100", "hip:mi300x"])
def test_infinities_before_a_product_are_none_behind_it(name: str) -> None:
    """Where a scale, or the sum that it is made of, is infinite or NaN, and where signs are mixed or are not."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((8, 72), (72, 40)))
    w[:, 0] = abs(w[:, 0])
    x[1], x[2, 3], x[3, 5] = abs(x[1]), np.inf, np.nan
    rows = np.array([np.inf, np.inf, 0, 1, -np.inf, np.nan, 1e-30, 2], np.float32)[:, None]
    got = fusegen.compile(gemms.scaled, target=name, on="emulator")(x, rows, w)
    want = formula(x, w, rows)
    assert np.isnan(want[0]).all()
    assert want[1, 0] == np.inf
    assert np.isnan(want[1, 1:]).all()
    assert np.allclose(got, want, rtol=0.02, atol=0.05, equal_nan=True)
    by_one = fusegen.compile(gemms.scaled_by_one, target=name, on="emulator")
    for a in (0.0, 3.0, np.inf, -np.inf, np.nan):
        assert np.allclose(by_one(x, w, a), formula(x, w, a), rtol=0.02, atol=0.05, equal_nan=True)
    x[4], x[5] = 0.0, x[5] * 1e30
    over = fusegen.compile(gemms.over_a_sum, target=name, on="emulator")
    assert over.plan.rounding[0].endswith("scaled by 1 / add")
    sums = abs(x.astype(float)).sum(1, keepdims=True) + 1e-3
    assert np.allclose(over(x, w), formula(x, w, 1 / sums), rtol=0.02, atol=0.05, equal_nan=True)


ODD = (
    {"M": 1, "N": 1, "K": 1},
    {"M": 1, "N": 7, "K": 65},
    {"M": 65, "N": 129, "K": 7},
    {"M": 17, "N": 65, "K": 129},
    {"M": 7, "N": 36, "K": 34},  # rows of 8 and of 4 bytes: narrower copies
    {"M": 129, "N": 200, "K": 136},
)


@needs_emulator
@pytest.mark.pairwise("spec", "sizes", "name")
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("sizes", ODD, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize(
    "spec",
    [
        gemms.bias_gelu,
        gemms.residual,
        gemms.turned,
        gemms.norm_swiglu,
        gemms.tf32,
        gemms.tf32_across,
        gemms.tf32_turned,
    ],
    ids=lambda s: s.name,
)
def test_any_size(spec: Chain, sizes: dict[str, int], name: str) -> None:
    report = validate(kernel(spec, name, any_plan, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@settings(max_examples=8, derandomize=True)
@given(
    spec=st.sampled_from([gemms.tf32, gemms.tf32_across, gemms.tf32_turned]),
    name=st.sampled_from(["cuda:a100", CUDA, AMD]),
    sizes=st.fixed_dictionaries({"M": st.integers(1, 70), "N": st.integers(1, 140), "K": st.integers(1, 140)}),
)
def test_f32_of_any_size_in_every_layout(spec: Chain, name: str, sizes: dict[str, int]) -> None:
    report = validate(kernel(spec, name, any_plan, **sizes), cases=("normal", "below a tf32", "layout"))
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("spec", [gemms.qkv, gemms.tf32_qkv], ids=lambda spec: spec.name)
def test_a_single_column_beside_others_lies_as_they_do(spec: Chain, name: str) -> None:
    """Its elements are next to each other either way round."""
    report = validate(kernel(spec, name, any_plan, N=1), cases=("normal", "layout"))
    assert report.ok, str(report)[:2000]


KINDS = (
    (CUDA, tiled, {"M": 192, "N": 320, "K": 264}),
    (CUDA, streamed, {"M": 8, "N": 96, "K": 1032}),
    (CUDA, clustered, {"M": 8, "N": 96, "K": 1032}),
    (CUDA, clustered_tiles, {"M": 96, "N": 96, "K": 520}),  # twice around a ring of 4 slices of 64, and 8 more
    ("cuda:a100", streamed, {"M": 16, "N": 96, "K": 1032}),
    (AMD, banded, {"M": 192, "N": 320, "K": 104}),
    (AMD, streamed_waves, {"M": 8, "N": 96, "K": 1032}),
)


@needs_emulator
@pytest.mark.by_values("spec", "sizes")  # every chain meets every vendor above
@pytest.mark.parametrize(("name", "fits", "sizes"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize(
    "spec",
    [gemms.bias_gelu, gemms.norm_swiglu, gemms.norm, gemms.tf32, gemms.tf32_norm_swiglu],
    ids=lambda spec: spec.name,
)
def test_every_kind_of_tile(spec: Chain, name: str, fits: Fits, sizes: dict[str, int]) -> None:
    report = validate(kernel(spec, name, fits, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.by_values("spec", "fits")  # rows are counted alike whatever is made of them
@pytest.mark.parametrize(("fits", "sizes"), [
    (of_96, {"M": 100, "N": 320, "K": 264}), (of_192, {"M": 200, "N": 136, "K": 264}),
])  # fmt: skip
@pytest.mark.parametrize(
    "spec", [gemms.bias_gelu, gemms.residual, gemms.norm, gemms.prepared, gemms.tf32, gemms.tf32_across],
    ids=lambda spec: spec.name,
)  # fmt: skip
def test_rows_that_are_no_power_of_2(spec: Chain, fits: Fits, sizes: dict[str, int]) -> None:
    report = validate(kernel(spec, CUDA, fits, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("statistics", [0, 1])
def test_two_blocks_of_waves_fit_side_by_side(statistics: int) -> None:
    """Their sums go through shared memory in bands, so that they need little more room than slices, and large tiles
    come first where there are many rows."""
    for products, tiles in mma_tiles.WAVES.items():
        for tile in tiles:
            assert 2 * shared_bytes(tile, bf16, products, statistics) <= MI300X.shared_per_sm, tile
    best = candidates(gemms.bias_gelu.at(M=4096, N=4096, K=4096).graph, MI300X).plans[0]
    assert isinstance(best, GemmPlan)
    assert (best.tile.rows, best.tile.cols, best.tile.bands, best.cost.blocks_per_sm) == (128, 128, 4, 2)


@pytest.mark.parametrize("spec", [gemms.turned, gemms.tf32_turned], ids=lambda spec: spec.name)
def test_lines_along_the_rows_are_powers_of_2(spec: Chain) -> None:
    assert {p.tile.rows & (p.tile.rows - 1) for p in gemm_plans(spec.at(M=777, N=2880, K=2880).graph, CUDA)} == {0}


SIDES = {"B": 2, "M": 70, "N": 256, "L": 512, "K": 256}
PERSISTENT = (  # slices that go around the ring one to six times
    (gemms.bias_gelu, persistent, {"M": 160, "N": 256, "K": 512}),
    (gemms.bias_gelu, persistent, {"M": 300, "N": 512, "K": 256}),
    (gemms.bias_gelu, persistent_with_short_slices, {"M": 300, "N": 512, "K": 128}),
    (gemms.bias_gelu, persistent_with_short_slices, {"M": 290, "N": 512, "K": 768}),
    (gemms.gram, persistent, {"M": 512, "K": 768}),
    (gemms.side_by_side, persistent, SIDES),
    (gemms.side_by_side, persistent_with_short_slices, SIDES),
)


@needs_emulator
@pytest.mark.parametrize(("spec", "fits", "sizes"), PERSISTENT)
def test_copies_among_the_products(spec: Chain, fits: Fits, sizes: dict[str, int]) -> None:
    """By two blocks, which go on from tile to tile."""
    made = kernel(spec, FEW, fits, **sizes)
    assert made.plan.blocks(*(sizes[name] for name in ("B", "M") if name in sizes)) <= 2
    report = validate(made, quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
def test_blocks_of_one_tile_and_none_behind_it() -> None:
    assert validate(kernel(gemms.bias_gelu, CUDA, persistent, M=300, N=512, K=256), quick=True).ok


def test_blocks_stay_for_as_many_tiles_as_there_are_rounds() -> None:
    plan = plan_for(gemms.bias_gelu, CUDA, persistent, M=4096, N=4096, K=4096)
    assert [plan.blocks(rows) for rows in (1, 1000, 1024, 1152, 4096, 16384)] == [16, 128, 128, 72, 128, 128]
    assert plan.tiles(16384) == 2048
    plain = plan_for(gemms.bias_gelu, CUDA, lambda p: not p.tile.persistent, M=4096, N=4096, K=4096)
    assert plain.blocks(16384) == plain.tiles(16384)


@pytest.mark.parametrize(("name", "best"), [
    ("cuda:h200", "128x256x64 2x4 4"), ("cuda:a100", "128x256x32 2x4 4"), ("cuda:l40s", "128x256x32 2x4 4"),
])  # fmt: skip
def test_copies_are_interleaved_wherever_a_ring_has_room(name: str, best: str) -> None:
    plan = gemm_plans(gemms.bias_gelu.at(M=4096, N=4096, K=4096).graph, name)[0]
    assert plan.configuration == f"gemm {best} persistent"


@pytest.mark.parametrize("sizes", [{"K": 4104}, {"K": 4160}, {"N": 1000}], ids=str)
def test_copies_keep_apart_from_products_where_registers_would_not_do(sizes: dict[str, int]) -> None:
    def persistent(spec: Chain, **wanted: int) -> bool:
        return any(p.tile.persistent for p in gemm_plans(spec.at(M=4096, **wanted).graph, CUDA))

    whole = {"N": 1024, "K": 4096}
    assert persistent(gemms.bias_gelu, **whole)
    assert not persistent(gemms.bias_gelu, **{**whole, **sizes})
    assert not any(persistent(spec, **whole) for spec in (gemms.residual, gemms.norm, gemms.prepared, gemms.tf32))


@needs_emulator
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_either_type(dtype: str, name: str) -> None:
    report = validate(kernel(gemms.qkv.with_dtype(DTYPES[dtype]), name), quick=True)
    assert report.ok, str(report)[:2000]


@needs_emulator
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_halves_are_multiplied_as_they_are_where_tf32_is_asked_for(dtype: str) -> None:
    made = kernel(gemms.tf32_qkv.with_dtype(DTYPES[dtype]), CUDA)
    assert "nearest tf32" not in str(made.plan)
    assert validate(made, quick=True).ok


def test_what_becomes_of_f32_factors_is_said() -> None:
    said = {name: plan_for(gemms.tf32, name).rounding for name in (CUDA, "cuda:a100", AMD)}
    assert said[CUDA] == said["cuda:a100"] == ("factors to the nearest tf32, 11 significant bits",)
    assert said[AMD] == (), "MFMA multiplies f32 as it is"


@pytest.mark.parametrize(("name", "how"), [("cuda:a100", "rna"), ("cuda:h200", "rn"), ("cuda:sm_90", "rn")])
def test_f32_becomes_tf32_by_one_instruction_where_there_is_one(name: str, how: str) -> None:
    text = render(plan_for(gemms.tf32, name)).text
    assert f"cvt.{how}.tf32.f32" in text
    assert "cvt." not in render(plan_for(gemms.bias_gelu, name)).text


@needs_emulator
@pytest.mark.by_values("spec", "name")  # each meets each in a quick validation above
@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize(
    "spec", [gemms.residual, gemms.batched, gemms.tf32, gemms.tf32_turned], ids=lambda spec: spec.name
)
def test_a_full_validation(spec: Chain, name: str) -> None:
    report = validate(kernel(spec, name), quick=False)
    assert report.ok, str(report)[:2000]


# ---------------------------------------------------------------- what is planned


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 300, 4096])
@pytest.mark.parametrize("name", ["cuda:h200", "cuda:a100", "cuda:l40s", "hip:gfx90a", "hip:mi300x"])
def test_every_candidate_fits_its_target(name: str, rows: int) -> None:
    for spec in (gemms.bias_gelu, gemms.norm_swiglu, gemms.qkv, gemms.tf32, gemms.tf32_norm_swiglu):
        plans = gemm_plans(spec.at(M=rows, N=1000, K=4096).graph, name)
        assert plans
        assert len({p.configuration for p in plans}) == len(plans)
        for p in plans:
            assert p.shared_bytes <= p.target.shared_bytes
            assert p.threads <= p.target.threads_per_block
            assert p.cluster <= p.target.max_cluster
            assert p.steps * p.tile.split_k * p.tile.k >= p.k, "every slice is somebody's"
            assert (p.steps - 1) * p.tile.split_k * p.tile.k < p.k, "and nobody takes a step for nothing"
            for output_group in p.output_groups:
                assert output_group.cols % output_group.vector == 0
                assert output_group.tiles * p.tile.cols >= output_group.cols


def test_output_groups_are_products_that_meet_in_an_output() -> None:
    swiglu, qkv = plan_for(gemms.norm_swiglu, CUDA), plan_for(gemms.qkv, CUDA)
    assert [len(s.contractions) for s in swiglu.output_groups] == [2]
    assert [(len(s.contractions), s.cols) for s in qkv.output_groups] == [(1, 96), (1, 40), (1, 40)]
    assert [s.first_tile for s in qkv.output_groups] == [
        0,
        qkv.output_groups[0].tiles,
        qkv.output_groups[0].tiles + qkv.output_groups[1].tiles,
    ]
    assert qkv.blocks(120) == -(-120 // qkv.tile.rows) * qkv.tiles_across * qkv.cluster


def test_a_row_scale_is_taken_as_the_row_passes() -> None:
    found = plan_for(gemms.norm_swiglu, CUDA)
    assert found.prologue is not None
    assert [(s.op.name, sorted(s.uses)) for s in found.prologue.body] == [("mul", ["gain", "x"]), ("square", ["x"])]
    assert found.prologue.changes
    assert len(found.prologue.reductions) == 1
    plain = plan_for(gemms.norm, CUDA).prologue
    assert plain is not None
    assert not plain.changes, "what is multiplied is the operand itself"


def test_few_rows_stream_and_many_tile() -> None:
    sizes = {"N": 4096, "K": 4096}
    for name in ("cuda:h200", "cuda:a100"):
        few, many = (gemm_plans(gemms.bias_gelu.at(M=rows, **sizes).graph, name)[0] for rows in (8, 4096))
        assert few.tile.split_k > 1
        assert few.tile.rows <= 16
        assert many.tile.split_k == 1
        assert many.tile.rows * many.tile.cols >= 128 * 128


def test_copies_are_spread_where_a_step_has_products_enough() -> None:
    """A fragment is loaded, or a chunk copied, before each: what finds no product would never be brought."""
    drawn = mma_rule.draft(gemms.bias_gelu.graph, H200, CONTIGUOUS)
    persistent = [tile for tiles in mma_tiles.TILES.values() for tile in tiles if tile.persistent]
    assert persistent
    assert all(mma_tiles.finds_room(drawn, tile) for tile in persistent)
    assert not mma_tiles.finds_room(drawn, GemmTile(16, 32, 64, 4, 1, 1, persistent=True))


def test_what_a_thread_reads_ahead_of_its_sums() -> None:
    """Of few passes the elements of each, of more of them what they share; the others where they are used."""
    found: dict[tuple[bool, str], GemmPlan] = {}
    for p in gemm_plans(gemms.residual.graph, CUDA):
        for load in p.output_groups[0].loads:
            moving = len(p.row_dims) - 1 in load.access.strided
            found.setdefault((moving, load.when), p)
            if moving:
                assert (load.when == "ahead") == (p.output_groups[0].passes <= mma_rule.MOST_PASSES_AHEAD)
    assert set(found) >= {(True, "ahead"), (False, "now")}


@pytest.mark.parametrize(("spec", "rows", "once"), [
    (gemms.bias_gelu, 8, True), (gemms.bias_gelu, 64, True), (gemms.bias_gelu, 65, False),
    (gemms.batched, 8, True), (gemms.qkv, 8, True), (gemms.tf32, 8, True), (gemms.tf32, 65, False),
])  # fmt: skip
def test_right_factors_are_evicted_first_where_rows_are_few(spec: Chain, rows: int, once: bool) -> None:
    for p in gemm_plans(spec.at(M=rows, **({"B": 2} if spec is gemms.qkv else {})).graph, CUDA):
        assert {f.evict_first for f in p.factors if f.mn == "cols"} == {once}
        assert not any(f.evict_first for f in p.left), "each block reads the left operand"
        assert ("copy_evict_first(" in render(p).text) == once


def test_blocks_whose_weights_lie_near_together_read_fastest() -> None:
    assert gemm_plans(specs.ALL["gemm_swiglu"].at(M=8, N=14336, K=4096).graph, CUDA)[0].tile.cols == 16


@pytest.mark.parametrize("rows", [512, 4096])
def test_copies_are_spread_or_shared_where_rows_are_many(rows: int) -> None:
    first = gemm_plans(gemms.bias_gelu.at(M=rows, N=4096, K=4096).graph, CUDA)[0]
    assert first.tile.persistent or first.cluster > 1


@pytest.mark.parametrize("sizes", [(333, 1001, 1003), (2048, 4095, 4097)], ids=str)
def test_tiles_without_registers_for_elements_on_their_way_are_no_candidates(sizes: tuple[int, int, int]) -> None:
    """Of factors that no copy brings, whose lines are no multiple of 16 bytes: at 2048 x 4095 x 4097 128x256x64
    spilled on an H200, and took 714 us; the best took 534."""
    plans = gemm_plans(gemms.bias_gelu.at(**dict(zip("MNK", sizes, strict=True))).graph, CUDA)
    assert not any("256x64 " in p.configuration for p in plans)


def test_factors_that_pass_by_once_cost_less() -> None:
    """An address that is no multiple of 16 bytes takes copies that tell the L2 nothing."""
    graph = gemms.bias_gelu.at(M=8, N=4096, K=4096).graph
    told, untold = (gemm_plans(graph, CUDA, Layout(unaligned=names)) for names in (frozenset(), frozenset({"w"})))
    assert not any(f.evict_first for p in untold for f in p.factors)
    assert untold[0].cost.time_us > told[0].cost.time_us + 2
    silent = {p.configuration: p.cost.time_us for p in untold}
    assert all(silent[p.configuration] > p.cost.time_us for p in told if p.configuration in silent)


def test_what_several_products_share_is_not_evicted_first() -> None:
    """Batches that can't be taken as rows of one product take the same weights, one after another."""
    for p in gemm_plans(gemms.qkv.at(M=8).graph, CUDA, Layout(split=True)):
        assert not any(f.evict_first for f in p.factors)


@pytest.mark.parametrize(("spec", "said"), gemms.REFUSED, ids=lambda value: getattr(value, "name", ""))
def test_what_it_cannot_hold_is_a_sentence(spec: Chain, said: str) -> None:
    found = candidates(spec.graph, H200)
    (refusal,) = (r for r in found.refusals if r.rule == "gemm")
    assert re.search(said, refusal.reason), refusal.reason
    if not found.plans:
        with pytest.raises(NoPlan, match="gemm") as refused:
            found.need()
        assert str(refused.value).count(refusal.reason.splitlines()[0]) == 1, "each reason once"


@pytest.mark.parametrize("spec", gemms.BEHIND, ids=lambda spec: spec.name)
def test_what_takes_whole_rows_of_a_product_has_no_plan(spec: Chain) -> None:
    """Rules for rows know no products: not one of them takes the chain, and none but those for products is quoted."""
    for gpu in (H200, TARGETS["cuda:a100"], TARGETS["hip:mi300x"]):
        with pytest.raises(NoPlan, match="gemm") as refused:
            candidates(spec.graph, gpu).need()
        first, *reasons = str(refused.value).splitlines()
        assert first == f"no rule can plan {spec.name} on {gpu}"
        assert not any(
            rule in str(reasons) for rule in ("topk:", "topk_small_k:", "topk_large_k:", "rowwise:", "elementwise:")
        )


# ---------------------------------------------------------------- what is emitted


def test_the_text_depends_on_nothing_else() -> None:
    one, other = (render(plan_for(gemms.qkv, CUDA)).text for _ in range(2))
    assert one == other


@pytest.mark.parametrize("chosen", ["gemm 32x64x64 1x2 4", "gemm 64x32x64 1x1 4 slice_k=4 cluster=4 group=1"])
def test_no_address_shares_the_registers_of_a_policy(chosen: str) -> None:
    """A copy to [register + uniform register] has its policy in what lies behind the latter. ptxas mixes such copies
    with others that then find no policy: on an H200 the second candidate met an illegal instruction."""
    plans = gemm_plans(gemms.bias_gelu.at(M=64, N=4096, K=4096).graph, CUDA)
    (found,) = (p for p in plans if p.configuration == chosen)
    try:
        copies = re.findall(r"LDGSTS\S* \[(.*?)\]", disassemble(compiled(render(found))))
    except MissingError as missing:
        pytest.skip(str(missing))
    assert copies
    assert not [address for address in copies if "UR" in address]


@pytest.mark.pairwise("spec", "rows", "name")
@pytest.mark.parametrize("name", ["cuda:a100", "cuda:h200", "hip:gfx90a", "hip:mi300x", "hip:mi355x"])
@pytest.mark.parametrize("rows", [8, 64, 4096])
@pytest.mark.parametrize(
    "spec", [gemms.bias_gelu, gemms.norm_swiglu, gemms.qkv, gemms.tf32, gemms.tf32_norm_swiglu], ids=lambda s: s.name
)
def test_the_first_candidates_compile_without_spills(
    spec: Chain, rows: int, name: str, request: pytest.FixtureRequest
) -> None:
    """The first alone without --all."""
    count = 2 if request.config.getoption("--all") else 1
    for p in gemm_plans(spec.at(M=rows, N=4096, K=4096).graph, name)[:count]:
        try:
            made = compiled(render(p))
        except MissingError as missing:
            pytest.skip(str(missing))
        assert not gate(made.resources), f"{p.configuration}: {gate(made.resources)}"
