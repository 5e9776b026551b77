"""Grouped products through the planner, the template and the emulator: every kind of tile, whatever the ends are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.smaller import needs_smaller, smaller
from fusegen.runtime import Kernel, finding
from fusegen.targets import Target, target
from fusegen.validation import Report, validate
from fusegen.validation.few_parts import no_variant
from fusegen.validation.report import Case
from tests import grouped
from tests.gemms import (
    FEW,
    Fits,
    any_plan,
    banded,
    clustered,
    clustered_tiles,
    kernel,
    of_96,
    persistent,
    plan_for,
    streamed,
    streamed_waves,
    tiled,
)
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

T, N, K, E = dims("T N K E")
CUDA, AMD = "cuda:a100", "hip:mi300x"
H200 = "cuda:h200"


@pytest.mark.parametrize("name", [CUDA, AMD])
@pytest.mark.parametrize("spec", grouped.ALL, ids=lambda spec: spec.name)
def test_every_chain_is_right_on_every_vendor(spec: Chain, name: str) -> None:
    report = validate(kernel(spec, name), quick=True)
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("name", [H200, CUDA, AMD])
def test_rows_next_to_each_other_begin_anywhere(name: str) -> None:
    """Of an x of columns behind each other, groups begin between vectors, even where columns are whole vectors."""
    made = kernel(grouped.plain, name, T=136, N=64, K=64)
    checked = Kernel(made.source, None, finding.find(target(name), "emulator", check=True), made.make_variant)
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (64, 136)).astype(bf16.numpy).T
    w = rng.integers(-4, 5, (5, 64, 64)).astype(bf16.numpy)
    ends = np.array([13, 50, 50, 51, 136], np.int32)
    places = np.repeat(np.arange(5), np.diff(ends, prepend=0))
    want = np.einsum("tk,tnk->tn", x.astype(np.float64), w.astype(np.float64)[places])
    assert np.array_equal(checked(x, w, ends), want.astype(bf16.numpy))


ODD = (
    {"T": 1, "N": 1, "K": 1, "E": 1},
    {"T": 9, "N": 7, "K": 65, "E": 3},
    {"T": 65, "N": 129, "K": 7, "E": 17},
    {"T": 33, "N": 36, "K": 34, "E": 2},
)


@pytest.mark.pairwise("spec", "sizes", "name")
@pytest.mark.parametrize("name", [H200, AMD])
@pytest.mark.parametrize("sizes", ODD, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize("spec", [grouped.plain, grouped.across, grouped.gated, grouped.weighed], ids=lambda s: s.name)
def test_any_size(spec: Chain, sizes: dict[str, int], name: str) -> None:
    report = validate(kernel(spec, name, any_plan, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


KINDS = (
    (H200, tiled, {"T": 300, "N": 320, "K": 264, "E": 3}),
    (H200, of_96, {"T": 300, "N": 320, "K": 264, "E": 3}),
    (H200, streamed, {"T": 40, "N": 96, "K": 1032, "E": 5}),
    (H200, clustered, {"T": 40, "N": 96, "K": 1032, "E": 5}),
    (H200, clustered_tiles, {"T": 96, "N": 96, "K": 520, "E": 3}),
    (AMD, banded, {"T": 300, "N": 320, "K": 104, "E": 3}),
    (AMD, streamed_waves, {"T": 40, "N": 96, "K": 1032, "E": 5}),
)


@pytest.mark.by_values("spec", "sizes")
@pytest.mark.parametrize(("name", "fits", "sizes"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("spec", [grouped.plain, grouped.biased, grouped.gated, grouped.normed], ids=lambda s: s.name)
def test_every_kind_of_tile(spec: Chain, name: str, fits: Fits, sizes: dict[str, int]) -> None:
    report = validate(kernel(spec, name, fits, **sizes), quick=True)
    assert report.ok, str(report)[:2000]


def test_persistent_blocks_take_tiles_of_several_groups() -> None:
    report = validate(kernel(grouped.biased, FEW, persistent, T=300, N=512, K=512, E=4), cases=("normal", "rows"))
    assert report.ok, str(report)[:2000]


PERSISTENT = (FEW, persistent, {"T": 500, "N": 256, "K": 256, "E": 5})
STREAMED = (H200, streamed, {"T": 40, "N": 32, "K": 512, "E": 5})
WAVES = (AMD, any_plan, {"T": 300, "N": 64, "K": 64, "E": 5})


@settings(max_examples=25, derandomize=True)
@given(data=st.data(), of=st.sampled_from([PERSISTENT, STREAMED, WAVES]))
def test_any_ends(of: tuple[str | Target, Fits, dict[str, int]], data: st.DataObject) -> None:
    """Whatever they are: a row belongs to the first group whose end lies behind it, by which it is judged here."""
    on, fits, sizes = of
    rows = data.draw(st.integers(1, sizes["T"]))
    near = st.integers(-2, rows + 2)
    ends = data.draw(st.lists(near | st.sampled_from([-(2**31), 2**31 - 1]), min_size=5, max_size=5))
    ends = sorted(ends) if data.draw(st.booleans()) else ends
    made = kernel(grouped.plain, on, fits, **sizes)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in
            ((rows, sizes["K"]), (5, sizes["N"], sizes["K"])))  # fmt: skip
    found = made(x, w, np.array(ends, np.int32))
    want = grouped.by_definition(x, w.swapaxes(1, 2), np.array(ends)).astype(bf16.numpy)
    assert np.array_equal(found, want)
    w[:] = np.nan  # of which rows of no group have nothing
    alone = made(x, w, np.array(ends, np.int32))
    none = grouped.group_of(rows, np.array(ends)) < 0
    assert (alone[none] == 0).all()
    assert np.isnan(alone[~none].astype(float)).all()


@pytest.mark.parametrize(("name", "groups"), [
    (CUDA, 1), (CUDA, 32), (CUDA, 33), (CUDA, 512), (CUDA, 513), (AMD, 64), (AMD, 65), (AMD, 1025),
])  # fmt: skip
def test_lanes_find_any_group(name: str, groups: int) -> None:
    """One or more groups a lane: ends that ascend, with empty groups, and any."""
    plan = plan_for(grouped.plain, name, T=200, N=8, K=16, E=groups)
    assert isinstance(plan, GemmPlan)
    assert plan.groups_a_lane == -(-groups // target(name).warp)
    made = kernel(grouped.plain, name, T=200, N=8, K=16, E=groups)
    rng = np.random.default_rng(groups)
    x = rng.integers(-2, 3, (200, 16)).astype(bf16.numpy)
    w = rng.integers(-2, 3, (groups, 8, 16)).astype(bf16.numpy)
    anywhere = rng.integers(-9, 240, groups)
    for ends in (np.sort(rng.integers(0, 201, groups)), np.sort(anywhere), anywhere, anywhere[::-1] * 10000000):
        want = grouped.by_definition(x, w.swapaxes(1, 2), ends.astype(np.int32)).astype(bf16.numpy)
        assert np.array_equal(made(x, w, ends.astype(np.int32)), want)


@pytest.mark.parametrize("name", [CUDA, AMD])
def test_biases_are_those_of_each_rows_group(name: str) -> None:
    grouped.check_biases(kernel(grouped.biased, name, T=300, N=64, K=64))


BIASES = {
    "those of the first group": ("segment * bias_group", "0 * bias_group"),
    "rows of no group have one": ("const float bias = of_group ?", "const float bias = true ?"),
}


@pytest.mark.parametrize("what", BIASES)
def test_wrong_biases_are_caught(what: str) -> None:
    old, new = BIASES[what]
    source = render(plan_for(grouped.biased, CUDA))
    assert old in source.text
    broken = replace(source, text=source.text.replace(old, new))
    made = Kernel(broken, None, finding.find(target(CUDA), "emulator", check=True), no_variant)
    assert not validate(made, cases=("normal", "rows", "malice")).ok


@chain(T=70, N=48, K=64, E=5)
def halves(x: bf16[T, K], w: bf16[E, 2 * N, K], ends: i32[E], bias: bf16[E, 2 * N]) -> bf16[T, N]:
    (gate, up), (one, other) = F.split(w, 2, axis=1), F.split(bias, 2, axis=1)
    return F.silu(F.grouped_matmul(x, gate.mT, ends, one)) * F.grouped_matmul(x, up.mT, ends, other)


@chain(T=70, N=48, K=64, E=5)
def layer(
    x: bf16[T, K], up: bf16[E, N, K], down: bf16[E, K, N], ends: i32[E], one: bf16[E, N], other: f32[E, K]
) -> f32[T, 1]:
    return F.sum(F.grouped_matmul(F.grouped_matmul(x, up.mT, ends, one), down.mT, ends, other))


@pytest.mark.parametrize(
    ("spec", "kernels"), [(halves, 1), (layer, 3)], ids=lambda value: getattr(value, "name", value)
)
def test_biases_stay_with_their_products_in_programs(spec: Chain, kernels: int) -> None:
    program: Any = fusegen.compile(spec, CUDA, on="emulator", tuned=False)
    assert program.report.ok
    assert len(program.plan.steps) == kernels


LARGE: dict[str, Any] = {"E": 260, "N": 2048, "K": 7168}


def test_many_large_experts_are_validated_as_few_small_ones() -> None:
    """As they are they would take an hour: as many weights as 256 experts have are a reference's work for minutes."""
    plan = plan_for(SHIPPED["grouped_gemm"], "cuda:h200", any_plan, **LARGE)
    assert needs_smaller(plan)
    small = smaller(plan)
    assert {name: small.graph.sizes[name] for name in "NKE"} == {"N": 512, "K": 512, "E": 68}
    assert small.configuration == plan.configuration
    assert not needs_smaller(small)
    compiled = fusegen.compile(SHIPPED["grouped_gemm"].at(**LARGE), target="cuda:h200", on="emulator")
    assert compiled.report is not None
    assert compiled.report.ok


def test_a_configuration_that_fails_small_is_not_handed_out_large(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def first_is_wrong(kernel: Kernel) -> Report:
        judged.append(kernel.plan.configuration)
        case = Case("normal", "", "", problem="wrong" if len(judged) == 1 else "")
        return Report(kernel.name, str(kernel.device), 0, (case,))

    monkeypatch.setattr("fusegen.pipeline.proven", first_is_wrong)
    compiled = fusegen.compile(SHIPPED["grouped_gemm"].at(**LARGE), target="cuda:h200", on="emulator")
    assert compiled.plan.configuration == judged[1] != judged[0]
